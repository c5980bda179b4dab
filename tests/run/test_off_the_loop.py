"""A step's work with large data happens in threads: each of these asks for ticks of the loop from inside."""

import asyncio
import contextlib
import errno
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.config import TrainConfig
from agentrl.data.trajectory import Group
from agentrl.rollout.group_ledger import GroupLedger
from agentrl.run import loop
from agentrl.run import session as checkpoint
from agentrl.run.folder import RunFolder
from agentrl.run.run_log import RunLog, Writes
from tests.config.observed import Course
from tests.run.made_folders import episode
from tests.waits import until


class Pulse:
    """Ticks of the loop, and whether they go on while a function runs."""

    def __init__(self) -> None:
        self.ticks = 0
        self.alive: list[bool] = []

    async def beat(self) -> None:
        while True:
            self.ticks += 1
            await asyncio.sleep(0.001)

    def inside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function; before it there is True in `alive` if the loop ticks three times more within five seconds."""

        def checked(*args: Any, **kwargs: Any) -> Any:
            seen = self.ticks
            self.alive.append(until(lambda: self.ticks >= seen + 3, 5))
            return function(*args, **kwargs)

        return checked


@contextlib.asynccontextmanager
async def beating() -> AsyncIterator[Pulse]:
    pulse = Pulse()
    task = asyncio.create_task(pulse.beat())
    try:
        yield pulse
    finally:
        task.cancel()


def course_of(tmp_path: Path, steps: int) -> Course:
    """A session without models, in whose folder a run writes."""
    config = TrainConfig.model_validate({
        "name": "x", "out": str(tmp_path), "env": {"id": "key_value"}, "steps": steps, "trajectories_every": 1,
        "eval": {"every": 0}, "checkpoint": {"every": steps},
    })  # fmt: skip
    course = Course(config, tmp_path)
    course.session.folder = RunFolder.create(config)
    return course


def train(course: Course, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "EngineMeter", lambda engine: SimpleNamespace(read=course.waited("read", {})))
    with RunLog(course.session.folder, course.session.display, []) as run_log:
        asyncio.run(loop.train_loop(course.session, run_log, course.interrupt))


def test_the_loop_answers_while_a_step_collates_and_writes_its_trajectories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    course, pulse = course_of(tmp_path, 3), Pulse()
    session, beats, found = course.session, list[Any](), list[str]()

    async def collect() -> list[Group]:
        if not beats:
            beats.append(asyncio.create_task(pulse.beat()))
        return [Group(0, 0, [episode(), episode(member=1, reward=0.0)])]

    async def save(_: Any = None) -> None:
        found.extend(sorted(path.name for path in session.folder.trajectories.glob("*.jsonl")))

    session.collector.collect, session.saver.save = collect, save
    monkeypatch.setattr(loop, "make_batch", pulse.inside(loop.make_batch))
    monkeypatch.setattr(session.folder, "write_trajectories", pulse.inside(session.folder.write_trajectories))
    train(course, monkeypatch)
    assert pulse.alive == [True] * 6
    assert found == ["step_000001.jsonl", "step_000002.jsonl", "step_000003.jsonl"], "all there before the checkpoint"


def test_a_disk_that_is_full_ends_the_run_with_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    course = course_of(tmp_path, 50)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(course.session.folder, "write_trajectories", full)
    with pytest.raises(OSError, match="No space left") as caught:
        train(course, monkeypatch)
    assert caught.value.errno == errno.ENOSPC
    assert course.session.collector.ledger.version <= 3, "told at the next step, not at the end"


def test_writes_are_in_order_one_at_a_time_and_an_error_is_told_once() -> None:
    async def body() -> None:
        writes, log = Writes(), list[str]()

        def write(name: str, seconds: float) -> None:
            log.append(f"{name} begins")
            time.sleep(seconds)
            log.append(f"{name} ends")

        await writes.begin(write, "a", 0.05)
        await writes.begin(write, "b", 0.0)
        await writes.wait()
        assert log == ["a begins", "a ends", "b begins", "b ends"]

        def broken() -> None:
            raise OSError(errno.ENOSPC, "full")

        await writes.begin(broken)
        with pytest.raises(OSError, match="full"):
            while True:
                await writes.check()
                await asyncio.sleep(0.001)
        await writes.wait()
        await writes.begin(write, "c", 0.0)
        await writes.wait()
        assert log[-1] == "c ends"

    asyncio.run(body())


def test_trajectory_files_are_written_row_by_row(tmp_path: Path) -> None:
    """One string for all rows was 7 GiB at 268 million tokens."""
    folder = RunFolder(tmp_path)
    folder.trajectories.mkdir()
    (folder.trajectories / "x.jsonl").write_text("old")
    sizes: list[int] = []

    def rows() -> Any:
        for number in range(40):
            aside = list(folder.trajectories.glob(".x.jsonl.*"))
            sizes.append(aside[0].stat().st_size if aside else 0)
            assert (folder.trajectories / "x.jsonl").read_text() == "old"
            yield episode(member=number, tokens=20_000)

    folder.write_trajectories("x", rows())
    whole = (folder.trajectories / "x.jsonl").stat().st_size
    assert sizes[-1] > 0.9 * whole, "all rows but the last ones were on disk before the last was made"
    assert [path.name for path in folder.trajectories.iterdir()] == ["x.jsonl"]


def test_the_loop_answers_while_a_checkpoint_writes_its_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        ledger = GroupLedger(2, 0)
        ledger.admit(), ledger.admit()
        group = Group(1, 7, [episode(), episode(member=1)], episode(member=2))
        ledger.complete(group)

        async def saved(*_: Any) -> bool:
            return True

        config = TrainConfig.model_validate({"name": "x", "out": str(tmp_path), "env": {"id": "key_value"}})
        learner: Any = SimpleNamespace(begin_save=saved, is_saved=saved, check_saved=saved, load=saved, hooks={})
        collector: Any = SimpleNamespace(version=0, ledger=ledger, to_json=ledger.to_json, load_json=ledger.load_json)
        saver = checkpoint.Saver(config.checkpoint, {}, RunFolder.create(config), learner, collector, print, 60.0)
        async with beating() as pulse:
            monkeypatch.setattr(checkpoint, "_write_driver", pulse.inside(checkpoint._write_driver))
            await saver.save()
            await saver.wait()
        assert pulse.alive == [True]
        collector.load_json({**ledger.to_json(), "complete": []})
        assert ledger.complete_groups() == [] and await saver.load() and ledger.complete_groups() == [group]

    asyncio.run(body())

"""What a step does with large data happens in threads: the event loop answers meanwhile.

Each of these asks for ticks of the loop from inside the work. On the loop's own thread none would ever come.
"""

import asyncio
import contextlib
import errno
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agentrl.config import Choice, TrainConfig
from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import Group, Task, Trajectory
from agentrl.rollout.deadlines import Watch
from agentrl.rollout.group_ledger import GroupLedger
from agentrl.run import loop
from agentrl.run import session as checkpoint
from agentrl.run.display import Display
from agentrl.run.folder import RunFolder
from agentrl.run.run_log import RunLog, Writes
from agentrl.utils.event_loop import LoopWatchdog


class Pulse:
    """Ticks of the loop, and whether they go on while a function runs."""

    def __init__(self) -> None:
        self.ticks = 0
        self.alive: list[bool] = []

    def check(self, *_: Any, **__: Any) -> None:
        """Called in the work: True if the loop ticks three times more within five seconds."""
        seen, end = self.ticks, time.monotonic() + 5
        while self.ticks < seen + 3 and time.monotonic() < end:
            time.sleep(0.002)
        self.alive.append(self.ticks >= seen + 3)

    def inside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*args: Any, **kwargs: Any) -> Any:
            self.check()
            return function(*args, **kwargs)

        return checked


@contextlib.asynccontextmanager
async def beating() -> AsyncIterator[Pulse]:
    pulse = Pulse()

    async def beat() -> None:
        while True:
            pulse.ticks += 1
            await asyncio.sleep(0.001)

    task = asyncio.create_task(beat())
    try:
        yield pulse
    finally:
        task.cancel()


def episode(tokens: int, reward: float = 1.0, member: int = 0) -> Trajectory:
    ledger = TokenLedger()
    ledger.append_context(np.arange(tokens // 2) % 1000, 0)
    half = tokens - tokens // 2
    ledger.append_sampled(np.arange(half) % 1000, np.full(half, -0.5), np.zeros(half, dtype=np.int32), 0)
    return Trajectory("x", Task("t", 0), member=member, ledgers=[ledger], reward=reward)


class Steps:
    """In the collector's place: the same groups in every step."""

    def __init__(self, groups: list[Group]) -> None:
        self.groups, self.ledger, self.watch = groups, GroupLedger(len(groups), 0), Watch()

    def ahead(self) -> str:
        return ""

    async def collect(self) -> list[Group]:
        return self.groups

    def trained(self, groups: list[Group]) -> None:
        self.ledger.version += 1

    def metrics(self) -> dict[str, float]:
        return {"tokens_sampled": 0.0}


class Saver:
    """In the saver's place: which trajectory files are there when a checkpoint begins."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self.found = folder, list[list[str]]()

    async def save(self, _: Any = None) -> None:
        self.found.append(sorted(path.name for path in self.folder.trajectories.glob("*.jsonl")))

    async def check(self) -> None:
        pass

    wait = check

    def deserves(self, _: Any) -> bool:
        return False


async def nothing(*_: Any) -> dict[str, float]:
    return {}


def session(tmp_path: Path, steps: int) -> Any:
    config = TrainConfig.model_validate({
        "name": "x", "out": str(tmp_path), "env": {"id": "key_value"}, "steps": steps, "trajectories_every": 1,
        "eval": {"every": 0}, "checkpoint": {"every": steps},
    })  # fmt: skip
    folder = RunFolder.create(config)
    display = Display()
    groups = [Group(0, 0, [episode(20), episode(20, 0.0, 1)])]
    return SimpleNamespace(
        config=config, envs=(), folder=folder, display=display, collector=Steps(groups), saver=Saver(folder), publish=nothing,
        engine=SimpleNamespace(stats=nothing), learner=SimpleNamespace(step=nothing, tokens=None, hooks={}),
        player=SimpleNamespace(metrics=dict), services={},
        watchdog=LoopWatchdog(0.0), callbacks=SimpleNamespace(call=nothing),
        tracing=None,
    )  # fmt: skip


def train(course: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "EngineMeter", lambda engine: SimpleNamespace(read=nothing))
    interrupt: Any = SimpleNamespace(requested=False, in_step=False)
    with RunLog(course.folder, course.display, []) as run_log:
        asyncio.run(loop.train_loop(course, run_log, interrupt))


def test_the_loop_answers_while_a_step_collates_and_writes_its_trajectories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    course = session(tmp_path, 3)
    collates, writes = Pulse(), Pulse()

    async def collect() -> list[Group]:
        async def beat() -> None:
            while True:
                collates.ticks += 1
                writes.ticks += 1
                await asyncio.sleep(0.001)

        if not hasattr(course, "beat"):
            course.beat = asyncio.create_task(beat())
        return course.collector.groups

    course.collector.collect = collect
    monkeypatch.setattr(loop, "make_batch", collates.inside(loop.make_batch))
    monkeypatch.setattr(course.folder, "write_trajectories", writes.inside(course.folder.write_trajectories))
    train(course, monkeypatch)
    assert collates.alive == [True] * 3 and writes.alive == [True] * 3
    [found] = course.saver.found
    assert found == ["step_000001.jsonl", "step_000002.jsonl", "step_000003.jsonl"], "all there before the checkpoint"


def test_a_disk_that_is_full_ends_the_run_with_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    course = session(tmp_path, 50)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(course.folder, "write_trajectories", full)
    with pytest.raises(OSError, match="No space left") as caught:
        train(course, monkeypatch)
    assert caught.value.errno == errno.ENOSPC
    assert course.collector.ledger.version <= 3, "told at the next step, not at the end"


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
            yield episode(20_000, member=number)

    folder.write_trajectories("x", rows())
    whole = (folder.trajectories / "x.jsonl").stat().st_size
    assert sizes[-1] > 0.9 * whole, "all rows but the last ones were on disk before the last was made"
    assert [path.name for path in folder.trajectories.iterdir()] == ["x.jsonl"]


def test_the_loop_answers_while_a_checkpoint_writes_its_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        ledger = GroupLedger(2, 0)
        ledger.admit(), ledger.admit()
        group = Group(1, 7, [episode(20), episode(30)], episode(10))
        ledger.complete(group)

        async def saved(*_: Any) -> bool:
            return True

        config = TrainConfig.model_validate({"name": "x", "out": str(tmp_path), "env": {"id": "key_value"}})
        learner: Any = SimpleNamespace(begin_save=saved, is_saved=saved, check_saved=saved, load=saved, hooks={})
        collector: Any = SimpleNamespace(version=0, ledger=ledger, to_json=ledger.to_json, load_json=ledger.load_json)
        saver = checkpoint.Saver(config, RunFolder.create(config), learner, collector, print)
        async with beating() as pulse:
            monkeypatch.setattr(checkpoint, "_write_driver", pulse.inside(checkpoint._write_driver))
            await saver.save()
            await saver.wait()
        assert pulse.alive == [True]
        collector.load_json({**ledger.to_json(contents=False), "complete": []})
        assert ledger.complete_groups() == [] and await saver.load() and ledger.complete_groups() == [group]

    asyncio.run(body())


def test_the_loop_answers_while_a_batch_of_200_mb_is_collated() -> None:
    """8 million tokens, 512 rows. On the loop's thread it ticked not once."""
    members = [episode(15_625, float(member % 2), member) for member in range(512)]
    groups = [Group(index, 0, members[16 * index : 16 * index + 16]) for index in range(32)]

    async def body() -> None:
        from agentrl.utils.threads import in_thread

        async with beating() as pulse:
            await asyncio.sleep(0.01)
            before = pulse.ticks
            batch = await in_thread("batch", loop.make_batch, groups, Choice(name="grpo"))
            assert len(batch) == 512 and pulse.ticks - before >= 5

    asyncio.run(body())

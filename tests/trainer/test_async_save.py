"""Saves in the background: what is written is the state of the moment; a failure is told and costs one checkpoint."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.cluster import group as shared_folder
from agentrl.config.schema import AlgorithmConfig, CheckpointConfig, ClusterConfig, EnvConfig, TrainConfig
from agentrl.rollout.group_ledger import GroupLedger
from agentrl.rollout.player import Evaluation
from agentrl.run.folder import RunFolder
from agentrl.run.session import Saver
from agentrl.trainer import train_state
from agentrl.trainer.actor import Actor
from agentrl.trainer.checkpoint import MANIFEST
from agentrl.trainer.learner import Learner
from agentrl.utils.errors import CheckpointError, ResourceError
from tests.publishing import flat
from tests.trainer.learners import start
from tests.trainer.train_batches import make_batch, train_batch

ALGORITHM = AlgorithmConfig(minibatch=8)


def test_training_goes_on_and_the_save_holds_the_moment(tiny: str, tmp_path: Path) -> None:
    group = start(tiny)
    train_batch(group, Actor.update, make_batch(8), ALGORITHM)
    before = flat(group)
    group.run(Actor.begin_save, str(tmp_path / "c"))
    for step in range(1, 4):
        train_batch(group, Actor.update, make_batch(8, seed=step), ALGORITHM, step=step)
    while not group.run(Actor.is_saved):
        pass
    resumed = start(tiny)
    resumed.run(Actor.load, str(tmp_path / "c"))
    assert torch.equal(flat(resumed), before) and not torch.equal(flat(group), before)
    for step in range(1, 4):
        train_batch(resumed, Actor.update, make_batch(8, seed=step), ALGORITHM, step=step)
    assert torch.equal(flat(resumed), flat(group))  # optimizer and schedule are those of the moment, too


class SlowLearner(Learner):
    """Its writers need some time more than it takes to write."""

    slow = 0

    async def is_saved(self) -> bool:
        self.slow -= 1
        return await super().is_saved() and self.slow < 0


class Ledger(GroupLedger):
    """In a collector's place: its version, and what a checkpoint holds of it."""

    def __init__(self) -> None:
        super().__init__(1, 0)
        self.ledger = self


class Bench:
    """A run without a loop: a learner, a ledger and a saver."""

    def __init__(self, tiny: str, root: Path, call_timeout: float = 60.0, **checkpoint: Any) -> None:
        self.config = TrainConfig(
            env=EnvConfig(id="none"),
            name="run",
            cluster=ClusterConfig(backend="inline", call_timeout=call_timeout),
            out=str(root),
            checkpoint=CheckpointConfig(**checkpoint),
        )
        path = root / "run"
        self.folder = RunFolder(path) if path.exists() else RunFolder.create(self.config)
        self.learner = SlowLearner(self.config, start(tiny))
        self.ledger = Ledger()
        self.said: list[str] = []
        parts = (self.folder, self.learner, self.ledger, self.said.append, call_timeout)
        self.saver = Saver(self.config.checkpoint, {}, *parts)  # type: ignore[arg-type]

    async def save(self, step: int, success: float | None = None, reward: float | None = None, wait: bool = False) -> None:
        self.ledger.version = step
        found = Evaluation(success, reward, 1, 0, []) if success is not None else None
        await self.saver.save(found)
        if wait:
            await self.saver.wait()

    def steps(self) -> list[int]:
        return sorted(int(p.parent.name[5:]) for p in self.folder.checkpoints.glob(f"step_*/{MANIFEST}"))


@pytest.mark.parametrize("asynchronous", [True, False])
async def test_save_returns_before_the_checkpoint_is_whole_only_when_asynchronous(
    tiny: str, tmp_path: Path, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tiny, tmp_path, asynchronous=asynchronous)
    if not asynchronous:  # there is no room for a copy
        monkeypatch.delattr(train_state, "async_save")
    bench.learner.slow = 5
    await bench.save(1)
    assert bench.steps() == ([] if asynchronous else [1])
    bench.learner.slow = 0
    await bench.save(2)  # waits for the one before
    assert 1 in bench.steps()
    await bench.saver.wait()
    assert bench.steps() == [1, 2]


async def test_a_save_that_never_ends_is_given_up_by_name(tiny: str, tmp_path: Path) -> None:
    bench = Bench(tiny, tmp_path, call_timeout=0.3)
    bench.learner.slow = 10**9
    await bench.save(1)
    with pytest.raises(CheckpointError, match=r"checkpoint 1 was not written within 0.3 s \(cluster.call_timeout\)"):
        await asyncio.wait_for(bench.saver.wait(), 20)
    assert bench.steps() == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("how", ["check", "next save"])
async def test_a_disk_that_fills_up_in_the_background(tiny: str, tmp_path: Path, how: str) -> None:
    bench = Bench(tiny, tmp_path)
    await bench.save(1, wait=True)
    begin = bench.saver._checkpoints.begin

    def full(step: int) -> Path:
        aside = begin(step)
        (aside / "actor").mkdir()
        (aside / "actor" / "__0_0.distcp").symlink_to("/dev/full")
        return aside

    bench.saver._checkpoints.begin = full  # type: ignore[method-assign]
    await bench.save(2)
    with pytest.raises(ResourceError, match=r"disk is full.*: checkpoint 2 was not written, older ones are intact"):
        if how == "next save":
            await bench.save(3)
        while True:
            await asyncio.sleep(0.01)
            await bench.saver.check()
    assert bench.steps() == [1]
    assert [path.name for path in bench.folder.checkpoints.iterdir()] == ["step_000001"]
    assert await bench.saver.load() and bench.ledger.version == 1


@pytest.mark.parametrize("asynchronous", [True, False])
async def test_a_part_that_a_rank_wrote_to_a_disk_of_its_own_is_no_checkpoint(
    tiny: str, tmp_path: Path, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_folder, "PATIENCE", 0.1)

    bench = Bench(tiny, tmp_path, asynchronous=asynchronous)
    own = {"rng_1.pt": 5, "__1_0.distcp": 7}

    async def seen(function: Any, folder: str) -> list[Any]:  # of two ranks, the second on a machine of its own
        here = function(folder)
        assert Path(folder).is_absolute() and {"rng_0.pt", "meta.json", ".metadata"} < set(here[1])
        return [here, ("node-b (10.0.0.2)", own)]

    bench.learner.actors.in_processes = seen
    with pytest.raises(CheckpointError, match=r"the actor's checkpoint: __1_0.distcp \(2 of 2 files\), which rank 1 .*node-b"):
        await bench.save(1, wait=True)
    assert bench.steps() == [] and not [*bench.folder.checkpoints.iterdir()]
    own.clear()
    await bench.save(1, wait=True)
    assert bench.steps() == [1]


async def test_a_run_that_ended_while_it_saved_says_so(tiny: str, tmp_path: Path) -> None:
    bench = Bench(tiny, tmp_path)
    await bench.save(3, wait=True)
    bench.learner.slow = 10**9
    await bench.save(7)
    while not await Learner.is_saved(bench.learner):  # the writer of a run that ended does not write on
        await asyncio.sleep(0.01)
    await bench.saver.close()
    later = Bench(tiny, tmp_path)
    assert await later.saver.load() and later.ledger.version == 3
    [text] = later.said
    assert "checkpoint 7 was being written" in text and "continuing from step_000003" in text
    again = Bench(tiny, tmp_path)
    assert await again.saver.load() and again.said == []


@pytest.mark.parametrize(
    ("moment", "stops", "left"), [("begun", 1, [1]), ("begun", 2, []), ("written", 1, [1]), ("written", 2, []), ("fails", 1, [])]
)
async def test_a_checkpoint_that_is_being_written_outlives_one_stop(
    tiny: str, tmp_path: Path, moment: str, stops: int, left: list[int]
) -> None:
    bench, there = Bench(tiny, tmp_path), asyncio.Event()
    bench.learner.slow = 10 if stops == 1 else 10**9
    begin = bench.learner.begin_save

    async def slow(folder: Path) -> None:
        if moment != "written":
            there.set()
            await asyncio.sleep(0.3 if stops == 1 else 60)
        if moment == "fails":
            raise OSError("no room")
        await begin(folder)
        there.set()

    bench.learner.begin_save = slow  # type: ignore[method-assign]

    async def run() -> None:
        try:
            await bench.save(1)
            await asyncio.sleep(60)
        finally:
            await bench.saver.close()

    running = asyncio.create_task(run())
    await there.wait()
    for _ in range(stops):
        await asyncio.sleep(0.1)
        running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(running, 20)
    assert bench.steps() == left and "waiting for the checkpoint" in bench.said[0]
    assert ("the checkpoint was not written" in bench.said[-1] and "no room" in bench.said[-1]) == (moment == "fails")


async def test_the_best_stays(tiny: str, tmp_path: Path) -> None:
    bench = Bench(tiny, tmp_path, keep=1, keep_best=1)
    for step, success in [(0, 0.2), (1, 0.9), (2, 0.5), (3, None), (4, 0.6)]:
        await bench.save(step, success, 0.0)
    await bench.saver.wait()
    assert bench.steps() == [1, 4]
    manifest = json.loads((bench.folder.checkpoints / "step_000001" / MANIFEST).read_text())
    assert manifest["score"] == 0.9
    assert bench.saver.is_new_best(Evaluation(0.95, 0, 1, 0, []))
    assert not bench.saver.is_new_best(Evaluation(0.9, 0, 1, 0, []))
    resumed = Bench(tiny, tmp_path, keep=1, keep_best=1)
    assert await resumed.saver.load() and resumed.ledger.version == 4
    await resumed.save(5, wait=True)
    assert resumed.steps() == [1, 5]
    await resumed.saver.rate(Evaluation(1.0, 0.0, 1, 0, []))  # the evaluation came after the save
    assert resumed.steps() == [5]


@pytest.mark.parametrize(("keys", "left"), [
    ({"keep_best": 0}, [4]), ({"keep_best": 1}, [1, 4]), ({"keep_best": 2}, [1, 3, 4]),
    ({"keep_best": 1, "best": "reward"}, [2, 4]), ({"keep_best": 0, "keep": 2}, [3, 4]),
])  # fmt: skip
async def test_every_key_of_keeping_changes_what_is_left(
    tiny: str, tmp_path: Path, keys: dict[str, Any], left: list[int]
) -> None:
    bench = Bench(tiny, tmp_path, **{"keep": 1, **keys})
    for step, success, reward in [(1, 0.9, 0.1), (2, 0.1, 0.9), (3, 0.5, 0.0), (4, 0.4, 0.2)]:
        await bench.save(step, success, reward)
    await bench.saver.wait()
    assert bench.steps() == left

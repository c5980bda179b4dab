"""Measure the driver's work on the data of one training step at the size of a real run: seconds and memory per phase.

    python benchmarks/scale.py                     512 groups x 16 members x 32,768 tokens
    python benchmarks/scale.py --groups 32         a sixteenth of it
    python benchmarks/scale.py --no-ray            without the object store

No model runs: ledgers are filled with random turns (a third of the tokens sampled), then go through the phases of a
step: the group ledger, collating, advantages, minibatches and ranks, columns into Ray's object store (for a
forward pass, then for the update), the trajectory file and the groups of a checkpoint. `s` is wall-clock time, `cpu_s`
processor time of this process; generating the tokens is not counted. Memory is that of this process (RssAnon, GiB, peak
of a phase), without the object store, which is reported separately. `gap_s` is the longest blocking of the event loop.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tensordict import TensorDict

from agentrl.cluster.ray_group import COLUMNS
from agentrl.cluster.worker import Mesh
from agentrl.config.schema import AlgorithmConfig, Choice
from agentrl.data.rows import Ragged
from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import Group, Message, Task, Trajectory, Turn
from agentrl.rollout.group_ledger import GroupLedger
from agentrl.run.folder import RunFolder
from agentrl.run.loop import make_batch
from agentrl.run.session import _write_driver
from agentrl.trainer.actor import Actor
from agentrl.trainer.estimator_inputs import with_advantages
from agentrl.trainer.minibatch import broken_rows, cut_update
from agentrl.utils.threads import in_thread

GIB = 2**30


def own_memory(field: str = "RssAnon") -> float:
    """Return a memory field of this process in GiB; RssShmem has the mapped pages of the object store."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024 / GIB


class Meter:
    """Seconds, peak memory and the longest blocking of the event loop, by phase."""

    def __init__(self) -> None:
        self.phases: dict[str, dict[str, float]] = {}
        self.peak = self.gap = 0.0
        self.last = time.perf_counter()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self.peak = max(self.peak, own_memory())
            time.sleep(0.02)

    async def beat(self) -> None:
        """Run concurrently with the phases, on their event loop."""
        while True:
            await asyncio.sleep(0.001)
            self.beaten()

    def beaten(self) -> None:
        """Record that the loop is not blocked now."""
        now = time.perf_counter()
        self.gap, self.last = max(self.gap, now - self.last), now

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.peak, self.gap, start, cpu_start = own_memory(), 0.0, time.perf_counter(), time.process_time()
        self.last = start
        yield
        self.beaten()  # a phase on the loop's thread blocked it all the time
        self.phases[name] = {
            "s": round(time.perf_counter() - start, 3),
            "cpu_s": round(time.process_time() - cpu_start, 3),
            "gib": round(max(self.peak, own_memory()), 2),
            "gap_s": round(self.gap, 3),
        }
        print(name, self.phases[name], flush=True)


class Maker:
    """Makes episodes of `tokens` tokens: the prompt of the group, then `turns` turns."""

    def __init__(self, tokens: int, turns: int) -> None:
        self.tokens, self.turns, self.appending, self.worked = tokens, turns, 0.0, 0.0
        self.rng = np.random.default_rng(0)

    def episode(self, index: int, member: int, prompt: list[int]) -> Trajectory:
        each = (self.tokens - len(prompt)) // self.turns
        sampled, ledger, turns = each // 3, TokenLedger(), []
        for turn in range(self.turns):
            ids = self.rng.integers(0, 150_000, each).tolist()
            logprobs = (-self.rng.random(sampled)).tolist()
            versions = [0] * sampled
            start, cpu_start = time.perf_counter(), time.process_time()
            ledger.append_context(prompt if turn == 0 else ids[sampled:], turn)
            ledger.append_sampled(ids[:sampled], logprobs, versions, turn)
            self.appending += time.perf_counter() - start
            self.worked += time.process_time() - cpu_start
            turns.append(Turn(turn, Message("assistant", "made up"), ledger=0, end=len(ledger) - 1))
        reward = float(self.rng.integers(0, 2))
        return Trajectory("made/Up-v0", Task(f"t{index}", index), member=member, turns=turns, ledgers=[ledger], reward=reward)

    def group(self, index: int, members: int) -> Group:
        prompt = self.rng.integers(0, 150_000, min(2048, self.tokens // 4)).tolist()
        return Group(index, index, [self.episode(index, member, prompt) for member in range(members)])


def complete_update(ledger: GroupLedger, groups: list[Group]) -> list[Group]:
    """Call the group ledger as a collector does until an update is complete; return the update's groups."""
    while ledger.admit() is not None:
        pass
    ready = None
    for group in groups:
        ledger.complete(group)
        ledger.too_old()
        ledger.admit()
        ready = ledger.ready()
    assert ready is not None
    return ready


def store_columns(method: Callable[..., Any], batch: TensorDict, ranks: int, ray: bool) -> list[Any]:
    """Split a call over `ranks` workers, and store its columns for them. Returns references that keep the columns stored."""
    strategy = Actor.dispatch_table[method.__name__]
    mesh = Mesh.of({"dp": ranks, "sp": 1}, ranks)
    shipment = strategy.scatter("benchmark", (batch,), {}, mesh)
    assert isinstance(shipment.batch, TensorDict)
    return COLUMNS.put(shipment.batch) if ray else [shipment]


def store_update(batch: TensorDict, algorithm: AlgorithmConfig, ranks: int, ray: bool) -> list[Any]:
    return store_columns(Actor.update, cut_update(batch, algorithm, ranks), ranks, ray)


async def measure(args: argparse.Namespace, out: Path) -> dict[str, Any]:
    meter, made = Meter(), Maker(args.tokens, args.turns)
    beat = asyncio.create_task(meter.beat())
    with meter.phase("made_up"):
        groups = [made.group(index, args.members) for index in range(args.groups)]
        tokens = sum(member.tokens for group in groups for member in group.trajectories)
    meter.phases["ledgers"] = {
        **meter.phases.pop("made_up"),
        "s": round(made.appending, 3),
        "cpu_s": round(made.worked, 3),
        "gap_s": 0.0,
    }
    ledger = GroupLedger(args.groups, 0)
    with meter.phase("group_ledger"):
        groups = complete_update(ledger, groups)
    with meter.phase("collate"):
        batch = await in_thread("batch", make_batch, groups, Choice(name="grpo"))
    algorithm = AlgorithmConfig(minibatch=args.groups * args.members // 4)
    with meter.phase("advantages"):
        view = Ragged.of(batch)
        assert not await in_thread("batch", broken_rows, view)
        view, _ = await in_thread("batch", with_advantages, view, algorithm, 0.0)
        assert not await in_thread("batch", broken_rows, view)
        batch = view.batch
    with meter.phase("dispatch_forward"):
        first = await in_thread("batch", store_columns, Actor.compute_logprob, batch, args.ranks, args.ray)
    with meter.phase("dispatch_update"):
        second = await in_thread("batch", store_update, batch, algorithm, args.ranks, args.ray)
    stored = own_memory("RssShmem")
    del batch, first, second
    await asyncio.sleep(0.05)  # the loop keeps a reference to a thread's result for one more iteration
    folder = RunFolder(out)
    folder.trajectories.mkdir()
    with meter.phase("trajectory_file"):
        members = [member for group in groups for member in group.trajectories]
        await in_thread("files", folder.write_trajectories, "step_000001", members)
    written = (folder.trajectories / "step_000001.jsonl").stat().st_size
    shutil.rmtree(folder.trajectories)
    with meter.phase("checkpoint_groups"):
        state, complete = ledger.to_json(), ledger.complete_groups()
        await in_thread("files", _write_driver, out, state, complete)
    beat.cancel()
    return {
        "tokens": tokens,
        "phases": meter.phases,
        "ledger_bytes_a_token": round(sum(x.nbytes for m in members for x in m.ledgers) / tokens, 2),
        "file_bytes_a_token": round(written / tokens, 2),
        "object_store_gib": round(stored, 2),
        "seconds": round(sum(phase["s"] for phase in meter.phases.values()), 2),
        "cpu_seconds": round(sum(phase["cpu_s"] for phase in meter.phases.values()), 2),
        "peak_gib": max(phase["gib"] for phase in meter.phases.values()),
        "longest_gap_s": max(phase["gap_s"] for name, phase in meter.phases.items()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("groups", 512), ("members", 16), ("tokens", 32_768), ("turns", 16), ("ranks", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--no-ray", dest="ray", action="store_false", help="without the object store")
    parser.add_argument("--out", help="folder of the files (default: the system's temporary folder)")
    args = parser.parse_args()
    size = args.groups * args.members * args.tokens
    if args.ray:
        from agentrl.cluster.ray_cluster import start_ray
        from agentrl.config.schema import ClusterConfig

        start_ray(ClusterConfig(), object_store_bytes=max(256 << 20, 32 * size))
    with tempfile.TemporaryDirectory(dir=args.out) as out:
        results = asyncio.run(measure(args, Path(out)))
    print(json.dumps({"benchmark": "scale", "groups": args.groups, "members": args.members, **results}))


if __name__ == "__main__":
    main()

"""Measure worker groups: dispatch of a large batch, fan-out latency, controller time, prefix-shared updates.

All ratios are measured in one run. The last line is one JSON object. `--only` selects parts; 64 workers
take about 7 GiB (with the bare actors) and minutes to start, so fan-out stops at 8 without `--workers 64`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

sys.path.insert(0, str(Path(__file__).parent / "parts"))
os.environ["PYTHONPATH"] = os.pathsep.join([sys.path[0], os.environ.get("PYTHONPATH", "")])

from bench_workers import Taker
from light_workers import Bare, Idle

from agentrl.cluster.group import Backend, Pending, WorkerGroup
from agentrl.cluster.launch import launch
from agentrl.cluster.ray_cluster import start_ray, stop_ray
from agentrl.cluster.worker import Mesh, Shipment
from agentrl.config.schema import AlgorithmConfig, ClusterConfig, InitModelConfig, ModelConfig, OptimConfig
from agentrl.data.rows import Ragged, build, nested_tensor, select
from agentrl.data.schedule import Mode, with_trees
from agentrl.trainer.actor import Actor
from agentrl.trainer.minibatch import cut_update
from agentrl.trainer.pretrained import init_model

MIB = 1 << 20
SETTLED_S = 4.0
"""Seconds until freed memory is back at the host; the kernel of a virtual machine reports it after two."""
TOKEN_BYTES = 8 + 1 + 4 + 4 + 4 + 4
MODES: tuple[Mode, ...] = ("off", "auto", "on")
PREFIXES = ((1024, 8, 256), (256, 8, 256), (64, 8, 256), (24, 8, 256), (16, 2, 512))
"""Prompts, members and responses of the groups whose updates are compared."""


def best(call: Callable[[], Any], times: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the shortest of several runs, in seconds of `clock`."""
    taken = []
    for _ in range(times):
        start = clock()
        call()
        taken.append(clock() - start)
    return min(taken)


def make_batch(rows: int, tokens_per_row: int) -> TensorDict:
    """Make a batch with the columns of a rollout, 25 bytes per token."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(tokens_per_row // 2, tokens_per_row * 3 // 2, rows)
    offsets = torch.zeros(rows + 1, dtype=torch.int64)
    torch.cumsum(torch.from_numpy(sizes), 0, out=offsets[1:])
    total = int(offsets[-1])
    kinds = {
        "token_ids": torch.int64,
        "sampled": torch.bool,
        "logprobs": torch.float32,
        "versions": torch.int32,
        "turns": torch.int32,
        "rewards": torch.float32,
    }
    columns: dict[str, Any] = {name: nested_tensor(torch.ones(total, dtype=kind), offsets) for name, kind in kinds.items()}
    return build({**columns, "group": torch.arange(rows)}, rows)


class Memory:
    """Peak of this process's private memory inside the block, in bytes above the start."""

    # RssAnon excludes shared memory, and so the object store's pages, which are not copies of the driver.

    def __enter__(self) -> Memory:
        self.start = self.peak = self._now()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.peak = max(self.peak, self._now())

    @staticmethod
    def _now() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) * 1024


def dispatch(megabytes: int, workers: int) -> dict[str, float]:
    """Compare dispatch to `workers` workers, balanced by tokens, with a copy of the batch in this process: the first of a run,
    into untouched pages; the next, which Ray stores in the place of the first; and a repeated one, whose columns are already
    stored."""
    rows = max(64, megabytes * 8)
    batch = make_batch(rows, megabytes * MIB // TOKEN_BYTES // rows)
    size = int(batch["token_ids"].values().numel()) * TOKEN_BYTES
    time.sleep(SETTLED_S)
    first_copy = best(lambda: select(batch, np.arange(len(batch))), 1)
    copy = best(lambda: select(batch, np.arange(len(batch))), 3)
    fresh, used = shared_memory_copy_seconds(size)
    with started_takers(megabytes, workers, batch) as group:
        with Memory() as memory:
            first = best(lambda: group.run(Taker.take, batch), 1)
        after = []
        for _ in range(2):
            del batch  # this removes its columns from the store
            batch = make_batch(rows, megabytes * MIB // TOKEN_BYTES // rows)
            after.append(best(partial(group.run, Taker.take, batch), 1))
        warm = best(lambda: group.run(Taker.take, batch), 3)
    out = copy / min(workers, os.cpu_count() or 1)  # ideal: all cores at once, without other work
    return {
        "batch_mib": size / MIB,
        "memcpy_s": copy,
        "first_copy_s": first_copy,
        "fresh_s": fresh,
        "used_s": used,
        "dispatch_first_s": first,
        "dispatch_next_s": min(after),
        "dispatch_s": warm,
        "first_over_memcpy": first / copy,
        "first_over_first_copy": first / first_copy,
        "first_least_over_memcpy": (fresh + out) / copy,
        "next_over_memcpy": min(after) / copy,
        "next_least_over_memcpy": (used + out) / copy,
        "dispatch_over_memcpy": warm / copy,
        "driver_peak_over_batch": (memory.peak - memory.start + size) / size,
    }


@contextmanager
def started_takers(megabytes: int, workers: int, batch: TensorDict) -> Iterator[WorkerGroup[Taker]]:
    """Start workers with their imports done, in a Ray with an untouched store. Waits until memory freed earlier is back at the
    kernel, and in a virtual machine at the host."""
    time.sleep(SETTLED_S)
    start_ray(ClusterConfig(), object_store_bytes=(3 * megabytes + 512) * MIB)
    try:
        with launch(Taker, world_size=workers, num_cpus=0.05, name=f"take{workers}") as group:
            group.run(Taker.nothing)
            group.run(Taker.take, select(batch, range(8)))
            yield group
    finally:
        stop_ray()


def shared_memory_copy_seconds(size: int) -> tuple[float, float]:
    """Measure the seconds of a copy of `size` bytes into shared memory, the lower bound of a dispatch: into new pages, which the
    kernel clears at the first access, and again into the same pages."""
    source = torch.ones(size, dtype=torch.uint8)
    times = []
    for _ in range(3):
        with tempfile.NamedTemporaryFile(prefix="agentrl-bench-", dir="/dev/shm") as file:
            place = torch.from_file(file.name, shared=True, size=size, dtype=torch.uint8)
            times.append([best(partial(place.copy_, source), 1) for _ in range(2)])
    new, again = (min(pair[side] for pair in times) for side in (0, 1))
    return new, again


def fan_out(counts: list[int]) -> dict[str, float]:
    """Compare an empty call to n workers with one to bare Ray actors: medians of 50, in milliseconds.

    The two alternate in one loop, so that other load affects both alike. Neither imports torch.
    """
    import ray

    out: dict[str, float] = {}
    for count in counts:
        actors: list[Any] = []
        while len(actors) < count:  # in steps of 8, because processes that start together compete for the cores
            actors += [ray.remote(Bare).options(num_cpus=0.01).remote() for _ in range(min(8, count - len(actors)))]
            ray.get([actor.nothing.remote() for actor in actors])
        with launch(Idle, world_size=count, num_cpus=0.01, name=f"fan{count}", startup_timeout=900) as group:

            def bare(actors: list[Any] = actors) -> None:
                ray.get([actor.nothing.remote() for actor in actors])

            times: dict[str, list[float]] = {"bare": [], "group": []}
            for _ in range(60):
                times["bare"].append(best(bare, 1))
                times["group"].append(best(partial(group.run, Idle.nothing), 1))
        for actor in actors:
            ray.kill(actor)
        middle = {name: statistics.median(values[10:]) * 1e3 for name, values in times.items()}
        out |= {f"{name}_ms_{count}": value for name, value in middle.items()}
        out[f"group_over_bare_{count}"] = middle["group"] / middle["bare"]
        print(f"fan_out {count}", middle, flush=True)
    return out


class Simulated(Backend):
    """Backend whose workers answer at once, so that only the controller is measured."""

    def submit(self, method: str, shipment: Shipment) -> Pending:
        return _Done({rank: {"tokens": float(len(shipment.rows[rank]))} for rank in shipment.ranks})

    def restart(self) -> None: ...

    def close(self) -> None: ...


class _Done(Pending):
    def __init__(self, values: dict[int, Any]) -> None:
        self._values = values

    def wait(self) -> dict[int, Any]:
        return self._values

    async def await_(self) -> dict[int, Any]:
        return self._values


def scale(rows: int) -> dict[str, float]:
    """Measure controller CPU time of one step's calls for 8 to 1024 simulated workers: a pass over all rows, and an
    update of four minibatches (shuffled, each balanced over the ranks), in groups of 8 with a common prefix."""
    batch = make_batch(rows, 20)
    sampled = batch["sampled"]
    batch["group"], batch["member"] = torch.arange(rows) // 8, torch.arange(rows) % 8
    batch["advantages"] = nested_tensor(torch.ones(len(sampled.values())), sampled.offsets())
    algorithm = AlgorithmConfig(minibatch=-(-rows // 4))
    out: dict[str, float] = {}
    for workers in (8, 32, 128, 512, 1024):
        passes = WorkerGroup(Taker, "simulated", Mesh.of(None, workers), Simulated())
        updates = WorkerGroup(Actor, "simulated", Mesh.of(None, workers), Simulated())
        start = time.process_time()
        passes.run(Taker.take, batch)
        updates.run(Actor.update, cut_update(with_trees(Ragged.of(batch), "auto").batch, algorithm, workers), algorithm)
        out[f"controller_s_{workers}"] = time.process_time() - start
    out["growth_8_to_1024"] = out["controller_s_1024"] / out["controller_s_8"]
    return out


def _updated(actor: WorkerGroup[Actor], batch: TensorDict, algorithm: AlgorithmConfig) -> None:
    actor.run(Actor.update, cut_update(batch, algorithm, 1), algorithm)


def prefix(prompt: int, members: int, response: int, times: int) -> dict[str, float]:
    """Measure an update on one group (forward, backward, optimizer step) in each mode of `optim.prefix_sharing`: CPU seconds of
    one thread, alternating, best of `times` rounds; and the largest difference of the logprobs."""
    batch = group_batch(prompt, members, response)
    ways = {mode: with_trees(Ragged.of(batch), mode).batch for mode in MODES}
    model = InitModelConfig(layers=4, hidden=256, mlp=768, heads=8, kv_heads=4, head_dim=32, init_std=0.2)
    with tempfile.TemporaryDirectory() as folder:
        actor = launch(Actor, backend="inline")
        path = str(init_model(model, Path(folder) / "model", seed=0))
        actor.run(Actor.init_model, path, ModelConfig(), OptimConfig(lr=1e-6, micro_tokens=1 << 16))
    logprobs = [actor.run(Actor.compute_logprob, ways[mode])["logprobs"].values() for mode in ("off", "on")]
    algorithm = AlgorithmConfig(minibatch=members)
    ratio = actor.run(Actor.update, cut_update(ways["on"], algorithm, 1), algorithm)["prefix_ratio"]
    seconds = {mode: float("inf") for mode in MODES}
    # Rotate the order: the mode after "off" has to fault in its memory again.
    for first in range(times):
        for mode in (*MODES[first % 3 :], *MODES[: first % 3]):
            call = partial(_updated, actor, ways[mode], algorithm)
            seconds[mode] = min(seconds[mode], best(call, 1, time.process_time))
    return {
        **{f"{mode}_s": value for mode, value in seconds.items()},
        "off_over_on": seconds["off"] / seconds["on"],
        "better_over_auto": min(seconds["off"], seconds["on"]) / seconds["auto"],
        "token_ratio": ratio,
        "logprob_difference": float((logprobs[0] - logprobs[1]).abs().max()),
    }


def group_batch(prompt: int, members: int, response: int) -> TensorDict:
    """Make one group with a prompt of that length and responses of 0.5 to 1.5 times `response` tokens."""
    rng = np.random.default_rng(1)
    head = rng.integers(7, 390, prompt)
    sizes = np.linspace(response // 2, response * 3 // 2, members).astype(int)
    texts = [np.concatenate((head, rng.integers(7, 390, size))) for size in sizes]
    offsets = torch.from_numpy(np.cumsum([0, *(len(text) for text in texts)]))
    sampled = torch.from_numpy(np.concatenate([np.arange(len(text)) >= prompt for text in texts]))
    columns = {"sampled": sampled, "logprobs": -6.0 * sampled, "advantages": 1.0 * sampled}
    return build(
        {
            "token_ids": nested_tensor(torch.from_numpy(np.concatenate(texts)), offsets),
            **{name: nested_tensor(values, offsets) for name, values in columns.items()},
            "group": torch.zeros(members, dtype=torch.int64),
            "member": torch.arange(members),
        },
        members,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("dispatch", "fan_out", "scale", "prefix"), action="append")
    parser.add_argument("--mib", type=int, default=1024, help="size of the dispatched batch")
    parser.add_argument("--rows", type=int, default=100_000, help="rows of the batch of `scale`")
    parser.add_argument("--workers", type=int, default=8, help="largest number of workers of the fan-out, up to 64")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each mode in `prefix`")
    args = parser.parse_args()
    torch.set_num_threads(1)
    parts = args.only or ["scale", "prefix", "dispatch", "fan_out"]
    results: dict[str, dict[str, float]] = {}
    if "scale" in parts:
        results["scale"] = scale(args.rows)
        print("scale", results["scale"], flush=True)
    if "prefix" in parts:
        for prompt, members, response in PREFIXES:
            name = f"prefix_{prompt}_{members}_{response}"
            results[name] = prefix(prompt, members, response, args.rounds)
            print(name, {key: round(value, 4) for key, value in results[name].items()}, flush=True)
    if "dispatch" in parts:
        results["dispatch"] = dispatch(args.mib, 8)
        print("dispatch", results["dispatch"], flush=True)
    if "fan_out" in parts:
        start_ray(ClusterConfig())
        results["fan_out"] = fan_out([count for count in (2, 8, 64) if count <= args.workers])
        print("fan_out", results["fan_out"], flush=True)
        stop_ray()
    ratios = {
        f"{part}.{name}": round(value, 4)
        for part, row in results.items()
        for name, value in row.items()
        if "_over_" in name or name.startswith("growth")
    }
    print(
        json.dumps(
            {
                "benchmark": "cluster",
                "ratios": ratios,
                **{part: {k: round(v, 6) for k, v in row.items()} for part, row in results.items()},
            }
        )
    )


if __name__ == "__main__":
    main()

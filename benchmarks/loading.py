"""Measure each rank's host memory while a model is loaded, exported, saved and resumed, with real CPU processes over gloo.

    python benchmarks/loading.py [--ranks 2 --ranks 4] [--layers 12] [--out FILE]

The model has random weights in bfloat16, like published ones, and is trained in float32. The measure is the anonymous memory of
a rank's process (RssAnon of /proc/PID/status, read about every millisecond by the parent): pages of mapped files belong to the
page cache, which all processes of a node share. Before the measurement, each rank loads, exports and saves a tiny model, so that
the constant part of the process (imports, thread pools) is in `constant_mib`. The peak of `load` is above that constant, the
peak of every other phase above the rank's memory at its start. `shard` is the rank's share of the parameters, `layer` the
largest part that FSDP gathers at once. Aim for every phase: 1.3 x shard + layer; a background save copies its data, so its shard
includes the optimizer. `curve` is the memory above the constant at some moments, as [phase, MiB]. `ways` are seconds, best of
five, of reading the weights into allocated memory: each rank reads its rows, or one rank reads all and sends the others theirs.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import json
import mmap
import os
import platform
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from agentrl.config import to_toml
from agentrl.config.schema import EnvConfig, InitModelConfig, ModelConfig, OptimConfig, TrainConfig
from agentrl.trainer.checkpoint import Checkpoints
from agentrl.trainer.fsdp import FsdpEngine
from agentrl.trainer.model_folder import export_run, region_of
from agentrl.trainer.optim import local
from agentrl.trainer.pretrained import init_model, packaged_tokenizer
from agentrl.trainer.train_state import BackgroundSave, load_state, save_state
from agentrl.trainer.weight_files import WeightFiles

PHASES = ("start", "load", "adam", "export", "save", "background save", "resume", "end")
MIB = 1 << 20
REPEATS = 5
TINY = InitModelConfig(layers=2, hidden=32, mlp=64, heads=4, kv_heads=2, head_dim=8, context=512)


def build(folder: Path, layers: int) -> str:
    """Build a Qwen3 model with 50 MiB (float32) per layer and for tied embeddings, in files of at most 128 MiB."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=12_800,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="128MB")
    packaged_tokenizer(512).save_pretrained(folder)
    return str(folder)


def settle() -> None:
    """Return freed memory to the kernel, so that it does not hide the use of the next phase."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def anonymous_bytes(pid: int | str = "self") -> int:
    """Return the bytes of anonymous memory of a process."""
    text = Path(f"/proc/{pid}/status").read_bytes()
    return int(text.split(b"RssAnon:")[1].split()[0]) * 1024


def engine_of(path: str) -> FsdpEngine:
    engine = FsdpEngine(path, ModelConfig(), 1.0)
    engine.use_optimizer(OptimConfig(lr=1e-6))
    return engine


def sizes(engine: FsdpEngine) -> dict[str, int]:
    """Return the bytes of this rank's parameters, of the largest gathered part, and of all parameters."""

    def total(module: torch.nn.Module, local: bool) -> int:
        found = (p.to_local() if local and isinstance(p, DTensor) else p for p in module.parameters())
        return sum(p.numel() * p.element_size() for p in found)

    parts = [part for part in engine.module.modules() if isinstance(part, FSDPModule)]
    inner = [total(part, False) for part in parts if part is not engine.module]
    whole = total(engine.module, False)
    return {"shard": total(engine.module, True), "layer": max(*inner, whole - sum(inner)), "model": whole}


def timed(way: Callable[[str, FsdpEngine], None], path: str, engine: FsdpEngine) -> float:
    dist.barrier()
    began = time.perf_counter()
    way(path, engine)
    dist.barrier()
    return round(time.perf_counter() - began, 3)


@torch.no_grad()
def read_own_rows(path: str, engine: FsdpEngine) -> None:
    """Read each rank's rows, as in loading, but into allocated memory."""
    with WeightFiles(path) as files:
        for name, parameter in engine.named_weights():
            local(parameter).copy_(files.read(name, region_of(parameter)))


@torch.no_grad()
def scatter_rows(path: str, engine: FsdpEngine) -> None:
    """Read every tensor on rank 0, and send each rank its rows."""
    rank, world = dist.get_rank(), dist.get_world_size()
    with WeightFiles(path) as files:
        for name, parameter in engine.named_weights():
            mine = local(parameter)
            rows = -(-len(parameter) // world)
            part = torch.empty(rows, *parameter.shape[1:])
            parts = None
            if rank == 0:
                whole = files.read(name).float()
                full = torch.zeros(rows * world, *whole.shape[1:])
                full[: len(whole)] = whole
                parts = list(full.chunk(world))
            dist.scatter(part, parts, src=0)
            mine.copy_(part[: len(mine)])


def await_background_save(save: BackgroundSave) -> None:
    done = torch.tensor(0)
    while not done:
        done = torch.tensor(int(save.done()))
        dist.all_reduce(done, dist.ReduceOp.MIN)
        time.sleep(0.005)


def rank_body(path: str, tiny: str, out: Path, enter: Callable[[str], None]) -> dict[str, Any]:
    """Run one rank; `enter` announces the next phase to the sampler."""
    save = BackgroundSave()
    work(tiny, out / "warm", save, lambda _: None)
    return work(path, out / "full", save, enter)


def work(path: str, folder: Path, save: BackgroundSave, enter: Callable[[str], None]) -> dict[str, Any]:
    """Run all phases in the order of PHASES; return sizes, and seconds by phase."""
    seconds: dict[str, float] = {}

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        settle()
        dist.barrier()
        enter(name)
        began = time.perf_counter()
        yield
        seconds[name] = round(time.perf_counter() - began, 2)

    with phase("load"):
        engine = engine_of(path)
    with phase("adam"):
        fill(engine)
    with phase("export"):
        engine.export(folder / "exported")
    with phase("save"):
        save_state(engine, folder / "saved", {})
    with phase("background save"):
        save.begin(engine, folder / "background", {})
        await_background_save(save)
    with phase("resume"):
        load_state(engine, folder / "saved")
    enter("end")
    ways = {"own slices": read_own_rows, "one reader": scatter_rows}
    best = {name: min(timed(way, path, engine) for _ in range(REPEATS)) for name, way in ways.items()}
    return {**sizes(engine), "seconds": seconds, "ways": best}


def fill(engine: FsdpEngine) -> None:
    """Fill Adam's state with numbers, since zeros that were never written take no memory."""
    for name, tensor in engine.state().items():
        if name.startswith("optimizer."):
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(1.0)


def fork_ranks(world: int, body: Callable[[Callable[[str], None]], dict[str, Any]], out: Path) -> tuple[list[int], mmap.mmap]:
    """Start the ranks; return their process ids, and one shared byte per rank with its phase."""
    marks = mmap.mmap(-1, world)
    children = []
    for rank in range(world):
        child = os.fork()
        if child:
            children.append(child)
            continue
        try:
            dist.init_process_group("gloo", init_method=f"file://{out / 'store'}", rank=rank, world_size=world)

            def enter(what: str, rank: int = rank) -> None:
                if what == PHASES[1]:
                    (out / f"constant_{rank}").write_text(str(anonymous_bytes()))
                (out / f"began_{rank}_{what}").write_text(str(anonymous_bytes()))
                marks[rank] = PHASES.index(what)

            found = body(enter)
            (out / f"rank_{rank}.json").write_text(json.dumps(found))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return children, marks


def sample_memory(children: list[int], marks: mmap.mmap) -> Iterator[tuple[float, int, int, int]]:
    """Yield (seconds, rank, phase, bytes) about every millisecond until all ranks have ended."""
    began, running = time.perf_counter(), dict(enumerate(children))
    while running:
        for rank, child in list(running.items()):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                running.pop(rank)
                if status:
                    for other in running.values():
                        os.kill(other, 9)
                    sys.exit(f"rank {rank} ended with status {status}")
                continue
            yield time.perf_counter() - began, rank, marks[rank], anonymous_bytes(child)
        time.sleep(0.001)


def measure(world: int, path: str, tiny: str, out: Path) -> dict[str, Any]:
    """Return the highest figures of all ranks, and the curve of rank 0 (which writes exports)."""
    out.mkdir()
    children, marks = fork_ranks(world, lambda enter: rank_body(path, tiny, out, enter), out)
    peaks: dict[tuple[int, int], int] = {}
    curve: list[tuple[float, str, int]] = []
    try:
        for moment, rank, phase, held in sample_memory(children, marks):
            peaks[rank, phase] = max(held, peaks.get((rank, phase), 0))
            if rank == 0 and phase >= 1:
                curve.append((moment, PHASES[phase], held))
    except (FileNotFoundError, ProcessLookupError, IndexError):  # the process ended between two samples
        for child in children:
            os.waitpid(child, 0)
    ranks = [json.loads((out / f"rank_{rank}.json").read_text()) for rank in range(world)]
    constants = [int((out / f"constant_{rank}").read_text()) for rank in range(world)]
    shard, layer = max(found["shard"] for found in ranks), ranks[0]["layer"]
    phases: dict[str, Any] = {}
    for number, name in enumerate(PHASES[1:-1], 1):
        began = [int((out / f"began_{rank}_{name}").read_text()) for rank in range(world)]
        own = max(peaks.get((rank, number), began[rank]) - began[rank] for rank in range(world))
        aim = (1.3 * shard * (3 if name == "background save" else 1)) + layer
        phases[name] = {"peak_mib": round(own / MIB, 1), "aim_mib": round(aim / MIB, 1), "seconds": ranks[0]["seconds"][name]}
        if name == "adam":
            phases.pop(name)
    return {
        "ranks": world,
        "model_mib": round(ranks[0]["model"] / MIB, 1),
        "shard_mib": round(shard / MIB, 1),
        "layer_mib": round(layer / MIB, 1),
        "constant_mib": round(max(constants) / MIB, 1),
        "ways": ranks[0]["ways"],
        "phases": phases,
        "curve": thin_curve(curve, constants[0]),
    }


def thin_curve(curve: list[tuple[float, str, int]], constant: int, points: int = 60) -> list[tuple[str, int]]:
    """Reduce a curve to the maximum in each of `points` equal time spans."""
    if not curve:
        return []
    first, last = curve[0][0], curve[-1][0]
    best: dict[int, tuple[str, int]] = {}
    for moment, phase, held in curve:
        span = int((moment - first) / max(last - first, 1e-9) * (points - 1))
        if span not in best or held > best[span][1]:
            best[span] = (phase, held)
    return [(phase, round((held - constant) / MIB)) for _, (phase, held) in sorted(best.items())]


def measure_export_run(path: str, tiny: str, saved: Path, out: Path) -> dict[str, Any]:
    """Measure the peak of `agentrl export`, one process, from the checkpoint that all ranks wrote."""
    for name, state in ((tiny, saved / "warm" / "saved"), (path, saved / "full" / "saved")):
        run = out / f"run_{name == tiny}"
        checkpoints = Checkpoints(run / "checkpoints", keep=1)
        shutil.copytree(state, checkpoints.begin(1) / "actor")
        checkpoints.commit(1)
        (run / "config.toml").write_text(to_toml(TrainConfig(env=EnvConfig(id="none"), model=ModelConfig(path=name))))
    child = os.fork()
    if not child:
        try:
            export_run(out / "run_True", out / "warm")
            settle()
            (out / "constant").write_text(str(anonymous_bytes()))
            export_run(out / "run_False", out / "exported")
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    peak = 0
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if (out / "constant").exists():
            try:
                peak = max(peak, anonymous_bytes(child))
            except (FileNotFoundError, ProcessLookupError, IndexError):
                continue
        time.sleep(0.001)
    if ended[1]:
        sys.exit(f"the export ended with status {ended[1]}")
    return {"peak_mib": round((peak - int((out / "constant").read_text())) / MIB, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, action="append")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--out", type=Path, help="write the JSON object here too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")  # FSDP2 imports it for the first sharding: once here instead of once per rank

    found: dict[str, Any] = {"benchmark": "loading", "layers": args.layers, "runs": []}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        tiny, path = str(init_model(TINY, folder / "tiny", 0)), build(folder / "model", args.layers)
        for world in args.ranks or [2, 4]:
            run = measure(world, path, tiny, folder / f"ranks_{world}")
            found["runs"].append(run)
            print(f"{world} ranks  {run['ways']}", flush=True)
            for name, phase in run["phases"].items():
                print(
                    f"{world} ranks  {name:16s} {phase['peak_mib']:8.1f} MiB of {phase['aim_mib']:.1f}, {phase['seconds']} s",
                    flush=True,
                )
        last = folder / f"ranks_{world}"
        (folder / "single").mkdir()
        found["export_run"] = measure_export_run(path, tiny, last, folder / "single")
        print(f"agentrl export {found['export_run']['peak_mib']} MiB", flush=True)
    found |= {"machine": {"cpus": os.cpu_count(), "arch": platform.machine()}, "torch": torch.__version__}
    text = json.dumps(found)
    if args.out is not None:
        args.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()

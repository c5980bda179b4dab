"""Usable cores and memory of this process, and threads and number type for computing a model on the CPU."""

from __future__ import annotations

import gc
import json
import math
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

TINY = 5_000_000
"""Parameters up to which a model is computed by one thread in float32: for such small products, threads wait for each other
longer than they compute (table in docs/engines.md)."""
THREADS_VARIABLE = "OMP_NUM_THREADS"
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Environment of processes that compute: idle threads sleep. By default they spin, and take CPU time from other programs."""


def usable_cpus() -> int:
    """Return the cores that this process may use, by its CPU affinity and cgroup quotas."""
    cores: float = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in control_groups("cpu"):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):  # cgroup version 2, version 1
            with suppress(OSError, ValueError):
                most, period = " ".join((group / name).read_text() for name in names).split()
                if most not in ("max", "-1"):
                    cores = min(cores, int(most) / int(period))
                break
    return max(1, int(cores))


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Total and free (or reclaimable) bytes of memory, of this machine or its smallest enclosing control group."""

    total: int
    free: int


def usable_memory() -> HostMemory:
    """Return the memory left to this process by the machine and its control groups."""
    import psutil  # deferred: every command imports this module

    machine = psutil.virtual_memory()
    found = [(machine.total, machine.available), *filter(None, map(_memory, control_groups("memory")))]
    total = min(total for total, _ in found)
    return HostMemory(total, max(0, min(free for _, free in found)))


def control_groups(controller: str, root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[Path]:
    """Return the folders of the cgroups that limit this process, innermost first: of version 2, and of `controller` in version 1.

    Each limits everything below it. A container may see its own group as the root, while `own` names it as the host does.
    """
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return []
    found: list[Path] = []
    for _, controllers, path in lines:
        if controllers and controller not in controllers.split(","):
            continue
        mounts = [root / controllers, root / controller] if controllers else [root, root / "unified"]
        for mount in filter(Path.is_dir, mounts):
            inside = mount / path.strip("/")
            found += [one for one in (inside, *inside.parents) if one.is_relative_to(mount) and one.is_dir()]
    return list(dict.fromkeys(found))


def _memory(group: Path) -> tuple[int, int] | None:
    """Return (limit, free bytes) of a control group; None without a limit."""
    for limits, used, key in (
        (("memory.max", "memory.high"), "memory.current", "inactive_file"),
        (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
    ):
        with suppress(OSError, ValueError):
            said = [(group / name).read_text().strip() for name in limits if (group / name).exists()]
            limit = min(int(text) for text in said if text != "max")
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            return limit, limit - int((group / used).read_text()) + int(stat.get(key, 0))
    return None


@cache
def prefers_bfloat16() -> bool:
    """Return True if the CPU computes faster in bfloat16 than in float32: Intel with AMX, AMD with AVX512_BF16. Intel CPUs with
    only the latter are slower in it."""
    try:
        said = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "amx_bf16" in said or ("AuthenticAMD" in said and "avx512_bf16" in said)


def requested_threads() -> int | None:
    """Return the threads that OMP_NUM_THREADS requests, or None."""
    said = os.environ.get(THREADS_VARIABLE, "")
    return int(said) if said.isdecimal() and int(said) else None


def threads_for(parameters: float, cores: int | None = None, processes: int = 1) -> int:
    """Return the CPU threads to compute a model of that many parameters, per process: OMP_NUM_THREADS if set, else one for a tiny
    model, else all `cores` (default: this process's) divided by `processes`."""
    if (said := requested_threads()) is not None:
        return said
    return 1 if parameters <= TINY else max(1, (usable_cpus() if cores is None else cores) // processes)


def set_cpu_threads(count: int | None = None) -> None:
    """Set torch's CPU threads for the calling thread; default OMP_NUM_THREADS or one.

    torch's thread count applies to the thread that sets it. Other threads multiply matrices on all cores, which for small ones
    takes twice the time, because waiting threads spin.
    """
    torch = sys.modules.get("torch")
    if torch is not None and not torch.cuda.is_available():
        torch.set_num_threads(count or requested_threads() or 1)


def size_of_shape(shape: Mapping[str, Any]) -> float:
    """Estimate the parameters of a model from its config.json; infinite if that lacks the sizes."""
    text = shape.get("text_config") or shape
    layers, width = text.get("num_hidden_layers"), text.get("hidden_size")
    if not layers or not width:
        return math.inf
    experts = text.get("num_experts") or text.get("num_local_experts") or text.get("n_routed_experts") or 1
    inner = text.get("moe_intermediate_size") or text.get("intermediate_size") or 4 * width
    return float(layers * (4 * width * width + 3 * experts * width * inner) + text.get("vocab_size", 0) * width)


def size_of_folder(path: str) -> float:
    """Estimate the parameters of the model in a folder; infinite for a hub name, where no tiny model is trained."""
    try:
        return size_of_shape(json.loads((Path(path).expanduser() / "config.json").read_text()))
    except (OSError, ValueError, TypeError, AttributeError):  # refused elsewhere
        return math.inf


YOUNG_OBJECTS = 20_000


def raise_gc_threshold() -> None:
    """Run the garbage collector per 20,000 new objects instead of 700; a higher threshold of the user stays.

    Rollouts keep what they allocate (messages, turns, ledgers), so a collection finds almost nothing, but with Python's default
    collections took over a third of the time of a turn (benchmarks/rollout.py).
    """
    young, *older = gc.get_threshold()
    if 0 < young < YOUNG_OBJECTS:  # 0: the user turned it off
        gc.set_threshold(YOUNG_OBJECTS, *older)

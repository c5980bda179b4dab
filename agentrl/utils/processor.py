"""Cores and memory that a process may use, and threads and number type with which a model is computed on them."""

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
"""Parameters up to which a model is computed by one thread, in float32: for such small products threads wait for each other
longer than they compute (docs/engines.md has the table)."""
SAID = "OMP_NUM_THREADS"
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}
"""For processes that compute: threads without work sleep. By default they spin, and take the time of whatever else runs here."""


def usable_cpus() -> int:
    """Cores that this process may use: those that it may run on, or fewer if a control group has less of their time."""
    cores: float = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in control_groups("cpu"):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):  # of either version of the kernel's interface
            with suppress(OSError, ValueError):
                most, period = " ".join((group / name).read_text() for name in names).split()
                if most not in ("max", "-1"):
                    cores = min(cores, int(most) / int(period))
                break
    return max(1, int(cores))


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of memory that this process may use, of this machine or of the smallest control group that it is in: all of them, and
    those that are free or can be made so."""

    total: int
    free: int


def usable_memory() -> HostMemory:
    """Memory left to this process, by the machine and by each control group that it is in."""
    import psutil  # only now: every command imports this module

    machine = psutil.virtual_memory()
    found = [(machine.total, machine.available), *filter(None, map(_memory, control_groups("memory")))]
    total = min(total for total, _ in found)
    return HostMemory(total, max(0, min(free for _, free in found)))


def control_groups(controller: str, root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[Path]:
    """Folders of the control groups that limit this process, the innermost first: of version 2, and of `controller` in version 1.

    Each limits all below it. A container may see its own group as the root, while `own` names it as the host does.
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
    """Bytes that a control group may have, and what of them is free; None if it has no limit."""
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
    """Return True if the processor computes faster in bfloat16 than in float32: Intel's with AMX, AMD's with AVX512_BF16.
    Intel's with the latter alone are slower in it."""
    try:
        said = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "amx_bf16" in said or ("AuthenticAMD" in said and "avx512_bf16" in said)


def said_threads() -> int | None:
    """The threads that the user asks for by OMP_NUM_THREADS."""
    said = os.environ.get(SAID, "")
    return int(said) if said.isdecimal() and int(said) else None


def threads_for(parameters: float, cores: int | None = None, processes: int = 1) -> int:
    """Threads that compute a model of that size on a CPU, in each of `processes` that do so at the same time and share `cores`
    (by default this process's): what the user says, else one for a tiny model, and all for any other."""
    if (said := said_threads()) is not None:
        return said
    return 1 if parameters <= TINY else max(1, (usable_cpus() if cores is None else cores) // processes)


def own_threads(count: int | None = None) -> None:
    """On a CPU: what the calling thread computes, it computes with `count` threads; by default with OMP_NUM_THREADS, or alone.

    torch's number of threads is that of the thread which sets it. Another one multiplies matrices on all cores, and small ones
    then cost twice as much: threads that wait for each other spin.
    """
    torch = sys.modules.get("torch")
    if torch is not None and not torch.cuda.is_available():
        torch.set_num_threads(count or said_threads() or 1)


def size_of_shape(shape: Mapping[str, Any]) -> float:
    """Parameters of a model, roughly, by its config.json; infinite if that does not say it."""
    text = shape.get("text_config") or shape
    layers, width = text.get("num_hidden_layers"), text.get("hidden_size")
    if not layers or not width:
        return math.inf
    experts = text.get("num_experts") or text.get("num_local_experts") or text.get("n_routed_experts") or 1
    inner = text.get("moe_intermediate_size") or text.get("intermediate_size") or 4 * width
    return float(layers * (4 * width * width + 3 * experts * width * inner) + text.get("vocab_size", 0) * width)


def size_of_folder(path: str) -> float:
    """Parameters of the model in a folder, roughly; infinite for a name of a hub, where no tiny model is trained."""
    try:
        return size_of_shape(json.loads((Path(path).expanduser() / "config.json").read_text()))
    except (OSError, ValueError, TypeError, AttributeError):  # it is refused elsewhere
        return math.inf


YOUNG_OBJECTS = 20_000


def raise_gc_threshold() -> None:
    """Collect once per 20,000 new objects instead of once per 700; a higher threshold set by the user stays.

    Rollouts keep what they allocate (messages, turns, ledgers), so a collection finds almost nothing, and with Python's
    default the collections took over a third of the time of a turn (benchmarks/rollout.py).
    """
    young, *older = gc.get_threshold()
    if 0 < young < YOUNG_OBJECTS:  # 0: the user turned collection off
        gc.set_threshold(YOUNG_OBJECTS, *older)

"""What the processors of this machine offer a process, and with how many threads and in which type a model is computed there."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
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
    """Cores that this process may use: those that it may run on, or fewer if its container has less of their time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(cores, _quota(Path("/sys/fs/cgroup")))))


def _quota(root: Path) -> float:
    """Cores' worth of time that the control group gets, as either version of the kernel's interface says it."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            most, period = " ".join((root / name).read_text() for name in names).split()
        except (OSError, ValueError):
            continue
        return math.inf if most in ("max", "-1") else int(most) / int(period)
    return math.inf


@cache
def prefers_bfloat16() -> bool:
    """Whether the processor computes faster in bfloat16 than in float32: Intel's with AMX, AMD's with AVX512_BF16. Intel's with
    the latter alone are slower in it."""
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

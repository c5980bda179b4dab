"""Checks before anything starts: a run that cannot fit fails now, with a sentence, and not at 2 a.m."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import psutil

from agentrl.config import TrainConfig
from agentrl.errors import ResourceError

MIN_DISK_MIB = 200
MIN_MEMORY_MIB = 1500
MEMORY_PER_PROCESS_MIB = 700


def preflight(config: TrainConfig) -> None:
    """Raise ResourceError where disk, memory or cores are too few for what the config asks."""
    _check_disk(Path(config.out))
    _check_memory(config)
    _check_cores(config)


def _check_disk(out: Path) -> None:
    place = out.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free >> 20
    if free < MIN_DISK_MIB:
        raise ResourceError(f"{out}: {free} MiB of disk are free, {MIN_DISK_MIB} MiB are needed; free some or set out=DIR")
    if not os.access(place, os.W_OK):
        raise ResourceError(f"{place}: no permission to write; set out=DIR")


def _check_memory(config: TrainConfig) -> None:
    need = MIN_MEMORY_MIB
    if config.cluster.backend == "ray":
        need += MEMORY_PER_PROCESS_MIB * config.cluster.actors
    if config.engine == "vllm":
        need += config.vllm.replicas * (config.vllm.kv_cache_mib + 2 * MEMORY_PER_PROCESS_MIB)
    free = psutil.virtual_memory().available >> 20
    if free < need:
        raise ResourceError(
            f"{free} MiB of memory are free, about {need} MiB are needed for {config.cluster.actors} actor(s) and the "
            f"{config.engine} engine; lower cluster.actors, vllm.replicas or vllm.kv_cache_mib = {config.vllm.kv_cache_mib}, "
            "or use cluster.backend=inline"
        )


def _check_cores(config: TrainConfig) -> None:
    if config.cluster.backend != "ray" or config.cluster.address is not None:
        return
    cores = os.cpu_count() or 1
    need = config.cluster.actors + (config.vllm.replicas if config.engine == "vllm" else 0)
    # The driver sleeps while actors work, so as many workers as cores still make progress; twice as many do not.
    if need > 2 * cores:
        raise ResourceError(
            f"{cores} cores cannot carry {need} worker processes (cluster.actors={config.cluster.actors}"
            f"{f', vllm.replicas={config.vllm.replicas}' if config.engine == 'vllm' else ''}); at most {2 * cores} fit"
        )

"""Checks before anything starts: a run that does not fit on the machine fails now, with a clear message."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import psutil

from agentrl.config import TrainConfig
from agentrl.errors import ResourceError
from agentrl.rollout.engine_maker import PROCESS_MIB, Processes
from agentrl.run.engines import engine_name, maker_of

MIN_DISK_MIB = 200
MIN_MEMORY_MIB = 1500
MEMORY_PER_PROCESS_MIB = PROCESS_MIB


def check_capacity(config: TrainConfig) -> None:
    """Raise ResourceError if disk, memory or cores do not suffice for the config.

    Reads: out, engine, engine_args, model.path, cluster.backend, cluster.address, cluster.actors, vllm.
    """
    _check_disk(Path(config.out))
    _check_memory(config)
    _check_cores(config)


def _check_disk(out: Path) -> None:
    folder = out.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free >> 20
    if free < MIN_DISK_MIB:
        raise ResourceError(f"{out}: {free} MiB of disk are free, {MIN_DISK_MIB} MiB are needed; free some space or set out=DIR")
    if not os.access(folder, os.W_OK):
        raise ResourceError(f"{folder}: no permission to write; set out=DIR")


def _check_memory(config: TrainConfig) -> None:
    need = MIN_MEMORY_MIB
    if config.cluster.backend == "ray":
        need += MEMORY_PER_PROCESS_MIB * config.cluster.actors
    engine = _engine(config)
    if engine is not None:
        need += engine.count * engine.mib
    free = psutil.virtual_memory().available >> 20
    if free < need:
        raise ResourceError(
            f"{free} MiB of memory are free, about {need} MiB are needed for {config.cluster.actors} actor(s) and the "
            f"{config.engine} engine; lower {' or '.join(['cluster.actors', *(engine.lower if engine is not None else ())])}, "
            "or use cluster.backend=inline"
        )


def _check_cores(config: TrainConfig) -> None:
    if config.cluster.backend != "ray" or config.cluster.address is not None:
        return
    cores = os.cpu_count() or 1
    engine = _engine(config)
    need = config.cluster.actors + (engine.count if engine is not None else 0)
    # Driver, actors and engine wait for each other much of the time, so up to two processes per core make progress.
    if need > 2 * cores:
        raise ResourceError(
            f"{cores} cores cannot run {need} worker processes (cluster.actors={config.cluster.actors}"
            f"{f', {engine.count_key}={engine.count}' if engine is not None else ''}); at most {2 * cores} fit"
        )


def _engine(config: TrainConfig) -> Processes | None:
    return maker_of(engine_name(config), config).processes()

"""Checks before anything starts: a run that does not fit on the machine fails now, with a clear message."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from agentrl.cluster.devices import joins, nodes_of
from agentrl.config import TrainConfig
from agentrl.errors import ResourceError
from agentrl.processor import usable_cpus, usable_memory
from agentrl.rollout.engine_maker import PROCESS_MIB, Processes
from agentrl.run.engines import engine_name, maker_of, workers_apart
from agentrl.run.judges import judge_processes
from agentrl.run.placement import check_room

MIN_DISK_MIB = 200
MIN_MEMORY_MIB = 1500
MEMORY_PER_PROCESS_MIB = PROCESS_MIB


def check_capacity(config: TrainConfig) -> None:
    """Raise ResourceError if disk, memory or cores do not suffice for the config.

    Reads: out, engine, engine_args, model.path, cluster, rollout.colocate, rollout.workers, vllm,
    reward.judge.engines.
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
    need, away = MIN_MEMORY_MIB, joins(config.cluster)  # processes on a cluster use the memory of its nodes
    if config.cluster.backend == "ray" and not away:
        need += MEMORY_PER_PROCESS_MIB * (config.cluster.actors + workers_apart(config))
    engine = _engine(config)
    if not away:
        need += sum(one.count * one.mib for one in ([] if engine is None else [engine]) + [*judge_processes(config).values()])
    free = usable_memory().free >> 20
    workers = ["rollout.workers"] if workers_apart(config) else []
    if free < need:
        raise ResourceError(
            f"{free} MiB of memory are free, about {need} MiB are needed for {config.cluster.actors} actor(s) and the "
            f"{config.engine} engine{f' and {config.rollout.workers} rollout workers' if config.rollout.workers else ''}; lower "
            f"{' or '.join(['cluster.actors', *workers, *(engine.lower if engine is not None else ())])}, "
            "or use cluster.backend=inline"
        )


def _check_cores(config: TrainConfig) -> None:
    if config.cluster.backend != "ray":
        return
    if not joins(config.cluster):
        _check_local_cores(config)
    check_room(config, engine_name(config))
    slots = sum(int(node.cpus) for node in nodes_of(config.cluster, "actor"))
    if "actor" not in config.cluster.roles and config.cluster.actors > slots:
        where = "the cluster" if joins(config.cluster) else "this machine"
        raise ResourceError(
            f"cluster.actors = {config.cluster.actors}: each takes a CPU slot of its own, and {where} has {slots} of them; lower "
            "cluster.actors, or place the actors in a pool whose `cpus` is less than 1"
        )


def _check_local_cores(config: TrainConfig) -> None:
    cores = usable_cpus()
    engine = _engine(config)
    judges = sum(one.count for one in judge_processes(config).values())
    need = config.cluster.actors + (engine.count if engine is not None else 0) + judges
    # Driver, actors and engine wait for each other much of the time, so up to two processes per core make progress.
    if need > 2 * cores:
        raise ResourceError(
            f"{cores} cores cannot run {need} worker processes (cluster.actors={config.cluster.actors}"
            f"{f', {engine.count_key}={engine.count}' if engine is not None else ''}"
            f"{f', judges: {judges}' if judges else ''}); at most {2 * cores} fit"
        )


def _engine(config: TrainConfig) -> Processes | None:
    return maker_of(engine_name(config), config).processes()

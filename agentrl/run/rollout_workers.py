"""Rollout workers of a run (`rollout.workers`): what each is built from, and the Ray actors that host them.

A worker makes its parts by the one assembler, as the driver does; only the engine is the driver's, over its connection. What
needs the state of the whole run stays in the driver: the group ledger, comparisons within a group, judges and their budget.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentrl.cluster.group import PATIENCE, seen_in_time, this_place
from agentrl.cluster.machine import reachable_address
from agentrl.cluster.placement import WORKER_CPUS, joins
from agentrl.config import TrainConfig
from agentrl.rollout.engine import Engine, EngineConnection
from agentrl.rollout.player import Job
from agentrl.rollout.workers.channel import Channel, Door
from agentrl.rollout.workers.rollout_worker import DriverEngine, WorkerCore
from agentrl.rollout.workers.worker_pool import Seat, Seats, WorkerPool
from agentrl.run.assembly import Assembly, Inputs, assemble, tokenizer_of
from agentrl.utils.errors import ConfigError
from agentrl.utils.processor import raise_gc_threshold
from agentrl.utils.redaction import guard_process
from agentrl.utils.search_path import pack_given, unpack, used_names
from agentrl.utils.threads import in_thread, share_the_lock

ENDED = "its process ended"


@dataclass(frozen=True, slots=True)
class Recipe:
    """Recipe for a worker's parts, wherever it runs.

    `connection`: to the engine; None: through the driver. `reads`: the tokenizer is read again there. `rows`: a folder that all
    nodes share, for rows of trajectory files. `given`: what the config names of Python's, by value.
    """

    config: TrainConfig
    inputs: Inputs
    model: str
    temperature: float | None
    connection: EngineConnection | None
    reads: bool = False
    rows: Path | None = None
    given: bytes = b""

    async def build(self, channel: Channel) -> Assembly:
        """The parts. Raises what `assemble` raises, and ConfigError if the folder is not shared."""
        # In threads: loading a tokenizer and compiling a spec take seconds, in which the channel must be listened to.
        if self.rows is not None:
            await in_thread("files", check_seen, self.rows)
        unpack(self.given)
        return await in_thread("load", self._parts, channel)

    def _parts(self, channel: Channel) -> Assembly:
        inputs = replace(self.inputs, tokenizer=tokenizer_of(self.config.model, self.model)) if self.reads else self.inputs
        engine: Engine | None = None
        if inputs.tokenizer is not None:  # else an API model, of which each process is a client
            engine = DriverEngine(channel) if self.connection is None else self.connection.connect()
        return assemble(self.config, inputs, model=self.model, temperature=self.temperature, connected=engine, asks=False)


def recipe_of(
    config: TrainConfig,
    inputs: Inputs,
    model: str,
    temperature: float | None,
    connection: EngineConnection | None,
    rows: Path | None,
) -> Recipe:
    """A worker gets its share of the calls that may be made to API models at once."""
    # A tokenizer of a class that came with the model cannot be pickled, as no other process has that class.
    reads = config.model.trust_remote_code and inputs.tokenizer is not None
    share = config.api.model_copy(update={"concurrency": max(config.api.concurrency // max(config.rollout.workers, 1), 1)})
    return Recipe(
        config.model_copy(update={"api": share}),
        replace(inputs, tokenizer=None) if reads else inputs,
        model,
        temperature,
        connection,
        reads,
        rows,
        pack_given(used_names(config.model_dump(mode="json", exclude_none=True))),
    )


def check_seen(folder: Path) -> None:
    """Raise ConfigError if this process does not see the driver's folder, whose name no other machine has."""

    def seen() -> bool:
        try:
            return folder.name in {path.name for path in folder.parent.iterdir()}
        except OSError:  # not there, or not yet
            return False

    if not seen_in_time(seen, PATIENCE):
        raise ConfigError(
            f"out: a rollout worker on {this_place()} does not see the driver's folder {folder}; set out to a folder that all "
            "nodes mount at the same path"
        )


class RolloutWorker:
    """The actor: one process with one event loop, which runs a worker."""

    async def run(self, name: str, door: Door, recipe: Recipe, spool: str | None) -> str:
        """Play until the driver says that it is enough, or is gone."""
        guard_process(recipe.config.model_dump(mode="json", exclude_none=True))
        raise_gc_threshold()
        share_the_lock()
        rows, slow_loop = None if spool is None else Path(spool), recipe.config.rollout.slow_loop
        await WorkerCore(name, recipe.build, rows, slow_loop).run(door)
        return ENDED


class ActorSeat(Seat):
    """An actor's process."""

    def __init__(self, actor: Any, ended: Any) -> None:
        self._actor, self._ended = actor, ended

    async def over(self) -> str:
        from ray.exceptions import RayError

        try:
            return str(await self._ended)
        except RayError as problem:
            return " ".join(str(problem).split())[:400]

    def kill(self) -> None:
        import ray

        if ray.is_initialized():  # otherwise ray.kill would start a new Ray
            ray.kill(self._actor)


class ActorSeats(Seats):
    """Ray actors, spread over the nodes. `recipe` is asked once, at the first start: Ray is up then, and the engine started.
    `joined`: the cluster was there before, and may get more nodes."""

    def __init__(self, recipe: Callable[[], Recipe], joined: bool) -> None:
        self._make, self._joined = recipe, joined
        self._recipe: Any = None
        self._spool: str | None = None

    def host(self) -> str:
        import ray

        # Nodes that join later could not reach the address that is enough for those that are there.
        return str(ray.util.get_node_ip_address()) if self._joined else reachable_address()

    def begin(self, name: str, door: Door) -> Seat:
        import ray

        if self._recipe is None:
            recipe = self._make()
            # Put once: it holds a tokenizer, which is some megabytes.
            self._recipe, self._spool = ray.put(recipe), None if recipe.rows is None else str(recipe.rows)
        # Ray must not restart it by itself: its successor has another name at the door.
        options: dict[str, Any] = {
            "num_cpus": WORKER_CPUS,
            "scheduling_strategy": "SPREAD",
            "max_restarts": 0,
            "max_concurrency": 2,
        }
        actor = ray.remote(RolloutWorker).options(**options).remote()
        return ActorSeat(actor, actor.run.remote(name, door, self._recipe, self._spool))


def with_workers(
    config: TrainConfig,
    inputs: Inputs,
    parts: Assembly,
    model: str,
    *,
    temperature: float | None = None,
    rows: Path | None = None,
    wanted: Callable[[], int] = lambda: 0,
    say: Callable[[str], None] = lambda line: None,
) -> Assembly:
    """The driver's `parts`, with `rollout.workers` that play in its place. `rows`: a folder that all nodes share, for rows of
    trajectory files; `wanted`: updates done so far, which say whether the next are kept."""
    engine, rollout = parts.policy.engine, config.rollout
    own = None if rows is None else parts_folder(rows)

    def recipe(connection: EngineConnection | None) -> Recipe:
        return recipe_of(config, inputs, model, temperature, connection, own)

    inside = engine.seats(rollout.workers, recipe, reachable_address)

    def keeps(job: Job) -> bool:
        return job.spec.split != "train" or is_kept(config, wanted())

    pool = WorkerPool(
        parts.envs,
        inside or ActorSeats(lambda: recipe(engine.connection()), joins(config.cluster)),
        count=rollout.workers,
        engine=engine,
        timeout=rollout.worker_timeout,
        startup_timeout=config.cluster.startup_timeout,
        respawns=rollout.worker_respawns,
        rows=own,
        keeps=keeps,
        say=say,
    )
    return replace(parts, player=pool)


def is_kept(config: TrainConfig, version: int) -> bool:
    """Return True if an episode that starts after this many updates may be trained in one whose trajectories are kept."""
    steps = range(version + 1, version + 2 + config.rollout.max_staleness)
    return any(step % config.trajectories_every == 0 or step == config.steps for step in steps)


def parts_folder(folder: Path) -> Path:
    """A new folder in `folder`, without those that earlier processes left there."""
    mine = f"{os.getpid()}-"
    for left in folder.glob("*"):
        if not left.name.startswith(mine):  # of this process: what an attempt wrote that has just ended may still be copied
            shutil.rmtree(left, ignore_errors=True)
    own = folder / (mine + secrets.token_hex(8))
    own.mkdir(parents=True)
    return own

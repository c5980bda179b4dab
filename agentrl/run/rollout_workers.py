"""Rollout workers of a run (`rollout.workers`): the recipe of their parts, and the Ray actors that host them.

A worker assembles its parts as the driver does, except the engine, which it reaches over a connection. Everything that needs the
state of the whole run stays in the driver: the group ledger, comparisons within a group, judges and their budget.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from agentrl.cluster.machine import reachable_address
from agentrl.cluster.placement import WORKER_CPUS, joins
from agentrl.rollout.engine import Engine, EngineConnection
from agentrl.rollout.workers.channel import Channel, DriverAddress
from agentrl.rollout.workers.rollout_worker import DriverEngine, WorkerCore
from agentrl.rollout.workers.worker_pool import WorkerPool, WorkerProcess, WorkerProcesses
from agentrl.run.assembly import Assembly, Inputs, tokenizer_of
from agentrl.utils.event_loop import SLOW_LOOP
from agentrl.utils.processor import raise_gc_threshold
from agentrl.utils.redaction import guard_process
from agentrl.utils.search_path import pack_given, unpack, used_names
from agentrl.utils.threads import in_thread, share_the_lock

ENDED = "its process ended"
SILENCE_S, RESPAWNS = 60.0, 8
"""Seconds of silence after which a worker counts as dead, and the maximum number of replaced workers in a run."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Recipe for a worker's parts, in any process.

    `connection`: to the engine; None: through the driver. `reads`: the worker loads the tokenizer itself. `given`: pickled Python
    objects that the config names.
    """

    inputs: Inputs
    connection: EngineConnection | None
    reads: bool = False
    given: bytes = b""

    async def build(self, channel: Channel) -> Assembly:
        """Make the parts. Raises as `Inputs.assemble`."""
        unpack(self.given)
        # In a thread: loading a tokenizer and compiling a spec take seconds, during which the channel must be served.
        return await in_thread("load", self._parts, channel)

    def _parts(self, channel: Channel) -> Assembly:
        inputs = self.inputs
        if self.reads:
            inputs = replace(inputs, tokenizer=tokenizer_of(inputs.config.model, inputs.model))
        engine: Engine | None = None
        if inputs.tokenizer is not None:  # else an API model, which each process calls itself
            engine = DriverEngine(channel) if self.connection is None else self.connection.connect()
        return inputs.assemble(connected=engine, asks=False)


def recipe_of(inputs: Inputs, connection: EngineConnection | None) -> Recipe:
    """Make the recipe of a worker, with its share of the concurrent calls to API models (`api.concurrency`)."""
    config = inputs.config
    # A tokenizer whose class came with the model cannot be pickled, because no other process has that class.
    reads = config.model.trust_remote_code and inputs.tokenizer is not None
    share = config.api.model_copy(update={"concurrency": max(config.api.concurrency // max(config.rollout.workers, 1), 1)})
    given = pack_given(used_names(config.model_dump(mode="json", exclude_none=True)))
    inputs = replace(inputs, config=config.model_copy(update={"api": share}), tokenizer=None if reads else inputs.tokenizer)
    return Recipe(inputs, connection, reads, given)


class RolloutWorker:
    """Ray actor: one process with one event loop, which runs a worker."""

    async def run(self, name: str, endpoint: DriverAddress, recipe: Recipe) -> str:
        """Play until the driver ends the worker or the connection is lost."""
        guard_process(recipe.inputs.config.model_dump(mode="json", exclude_none=True))
        raise_gc_threshold()
        share_the_lock()
        await WorkerCore(name, recipe.build, SLOW_LOOP).run(endpoint)
        return ENDED


class ActorProcess(WorkerProcess):
    """Process of a Ray actor that hosts a worker."""

    def __init__(self, actor: Any, ended: Any) -> None:
        self._actor, self._ended = actor, ended

    async def wait(self) -> str:
        from ray.exceptions import RayError

        try:
            return str(await self._ended)
        except RayError as problem:
            return " ".join(str(problem).split())[:400]

    def kill(self) -> None:
        import ray

        if ray.is_initialized():  # otherwise `ray.kill` would start a new Ray
            ray.kill(self._actor)


class ActorProcesses(WorkerProcesses):
    """Ray actors, spread over the nodes. Calls `recipe` once, at the first start, when Ray and the engine are running.
    `joined`: the cluster existed before the run, and more nodes may join it."""

    def __init__(self, recipe: Callable[[], Recipe], joined: bool) -> None:
        self._make, self._joined = recipe, joined
        self._recipe: Any = None

    def host(self) -> str:
        import ray

        # Nodes that join later may not reach an address that suffices for the present nodes.
        return str(ray.util.get_node_ip_address()) if self._joined else reachable_address()

    def begin(self, name: str, endpoint: DriverAddress) -> WorkerProcess:
        import ray

        if self._recipe is None:
            self._recipe = ray.put(self._make())  # once, because its tokenizer takes some megabytes
        # Ray must not restart the actor: a replacement worker connects under another name.
        options: dict[str, Any] = {"num_cpus": WORKER_CPUS, "scheduling_strategy": "SPREAD", "max_concurrency": 2}
        actor = ray.remote(RolloutWorker).options(max_restarts=0, **options).remote()
        return ActorProcess(actor, actor.run.remote(name, endpoint, self._recipe))


def with_workers(inputs: Inputs, parts: Assembly, say: Callable[[str], None] = lambda line: None) -> Assembly:
    """Return the driver's `parts` with `rollout.workers` as the player."""
    engine, rollout, cluster = parts.policy.engine, inputs.config.rollout, inputs.config.cluster
    inside = engine.seats(rollout.workers, partial(recipe_of, inputs), reachable_address)
    pool = WorkerPool(
        parts.envs,
        inside or ActorProcesses(lambda: recipe_of(inputs, engine.connection()), joins(cluster)),
        count=rollout.workers,
        engine=engine,
        timeout=SILENCE_S,
        startup_timeout=cluster.startup_timeout,
        respawns=RESPAWNS,
        say=say,
    )
    return replace(parts, player=pool)

"""Rollout workers of a run (`rollout.workers`): what each is built from, and the Ray actors that host them.

A worker makes its parts by the one assembler, as the driver does; only the engine is the driver's, over its connection. What
needs the state of the whole run stays in the driver: the group ledger, comparisons within a group, judges and their budget.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from agentrl.cluster.machine import reachable_address
from agentrl.cluster.placement import WORKER_CPUS, joins
from agentrl.rollout.engine import Engine, EngineConnection
from agentrl.rollout.workers.channel import Channel, Endpoint
from agentrl.rollout.workers.rollout_worker import DriverEngine, WorkerCore
from agentrl.rollout.workers.worker_pool import WorkerPool, WorkerProcess, WorkerProcesses
from agentrl.run.assembly import Assembly, Inputs, tokenizer_of
from agentrl.utils.event_loop import SLOW_LOOP
from agentrl.utils.processor import raise_gc_threshold
from agentrl.utils.redaction import guard_process
from agentrl.utils.search_path import pack_given, unpack, used_names
from agentrl.utils.threads import in_thread, share_the_lock

ENDED = "its process ended"
HEARD_S, RESPAWNS = 60.0, 8
"""Seconds without a word after which a worker counts as dead, and how many dead ones are replaced in a run."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Recipe for a worker's parts, wherever it runs.

    `connection`: to the engine; None: through the driver. `reads`: the tokenizer is read again there. `given`: what the config
    names of Python's, by value.
    """

    inputs: Inputs
    connection: EngineConnection | None
    reads: bool = False
    given: bytes = b""

    async def build(self, channel: Channel) -> Assembly:
        """The parts. Raises what `Inputs.assemble` raises."""
        unpack(self.given)
        # In a thread: loading a tokenizer and compiling a spec take seconds, in which the channel must be listened to.
        return await in_thread("load", self._parts, channel)

    def _parts(self, channel: Channel) -> Assembly:
        inputs = self.inputs
        if self.reads:
            inputs = replace(inputs, tokenizer=tokenizer_of(inputs.config.model, inputs.model))
        engine: Engine | None = None
        if inputs.tokenizer is not None:  # else an API model, of which each process is a client
            engine = DriverEngine(channel) if self.connection is None else self.connection.connect()
        return inputs.assemble(connected=engine, asks=False)


def recipe_of(inputs: Inputs, connection: EngineConnection | None) -> Recipe:
    """A worker gets its share of the calls that may be made to API models at once."""
    config = inputs.config
    # A tokenizer of a class that came with the model cannot be pickled, as no other process has that class.
    reads = config.model.trust_remote_code and inputs.tokenizer is not None
    share = config.api.model_copy(update={"concurrency": max(config.api.concurrency // max(config.rollout.workers, 1), 1)})
    given = pack_given(used_names(config.model_dump(mode="json", exclude_none=True)))
    inputs = replace(inputs, config=config.model_copy(update={"api": share}), tokenizer=None if reads else inputs.tokenizer)
    return Recipe(inputs, connection, reads, given)


class RolloutWorker:
    """The actor: one process with one event loop, which runs a worker."""

    async def run(self, name: str, endpoint: Endpoint, recipe: Recipe) -> str:
        """Play until the driver says that it is enough, or is gone."""
        guard_process(recipe.inputs.config.model_dump(mode="json", exclude_none=True))
        raise_gc_threshold()
        share_the_lock()
        await WorkerCore(name, recipe.build, SLOW_LOOP).run(endpoint)
        return ENDED


class ActorProcess(WorkerProcess):
    """An actor's process."""

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

        if ray.is_initialized():  # otherwise ray.kill would start a new Ray
            ray.kill(self._actor)


class ActorProcesses(WorkerProcesses):
    """Ray actors, spread over the nodes. `recipe` is asked once, at the first start: Ray is up then, and the engine started.
    `joined`: the cluster was there before, and may get more nodes."""

    def __init__(self, recipe: Callable[[], Recipe], joined: bool) -> None:
        self._make, self._joined = recipe, joined
        self._recipe: Any = None

    def host(self) -> str:
        import ray

        # Nodes that join later could not reach the address that is enough for those that are there.
        return str(ray.util.get_node_ip_address()) if self._joined else reachable_address()

    def begin(self, name: str, endpoint: Endpoint) -> WorkerProcess:
        import ray

        if self._recipe is None:
            self._recipe = ray.put(self._make())  # once: it holds a tokenizer, which is some megabytes
        # Ray must not restart it by itself: its successor connects under another name.
        options: dict[str, Any] = {
            "num_cpus": WORKER_CPUS,
            "scheduling_strategy": "SPREAD",
            "max_restarts": 0,
            "max_concurrency": 2,
        }
        actor = ray.remote(RolloutWorker).options(**options).remote()
        return ActorProcess(actor, actor.run.remote(name, endpoint, self._recipe))


def with_workers(inputs: Inputs, parts: Assembly, say: Callable[[str], None] = lambda line: None) -> Assembly:
    """The driver's `parts`, with `rollout.workers` that play in its place."""
    engine, rollout, cluster = parts.policy.engine, inputs.config.rollout, inputs.config.cluster
    inside = engine.seats(rollout.workers, partial(recipe_of, inputs), reachable_address)
    pool = WorkerPool(
        parts.envs,
        inside or ActorProcesses(lambda: recipe_of(inputs, engine.connection()), joins(cluster)),
        count=rollout.workers,
        engine=engine,
        timeout=HEARD_S,
        startup_timeout=cluster.startup_timeout,
        respawns=RESPAWNS,
        say=say,
    )
    return replace(parts, player=pool)

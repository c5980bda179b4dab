"""Stand-ins for the actors of vLLM's replicas, each of which can die at a chosen call."""

import asyncio
import contextvars

import numpy as np
from ray.exceptions import RayActorError

from agentrl.engines.vllm.replica_calls import answer_batches
from agentrl.rollout.engine import EngineStats, Generation
from agentrl.rollout.workers.rollout_worker import WorkerCore

HOST = contextvars.ContextVar("host")
"""What a worker in a replica's process finds there."""


class Actor:
    """One replica's process: a log of calls, the weights it has, and where it dies."""

    def __init__(self, number, die_at=None):
        self.number, self.die_at, self.hang_at = number, die_at, None
        self.calls, self.version, self.loaded, self.dead = [], 0, [], False
        self.open = asyncio.Event()
        self.open.set()
        self.hold, self.paced, self.slow, self.free = None, {}, 0.0, asyncio.Event()
        self.lingers = 0  # seconds for which a stream stays open after its last answer

    def __getattr__(self, name):
        return Method(self, name)

    async def hosted(self, name, endpoint, recipe):
        """Host a worker, as VllmActor does."""
        HOST.set(Inside(self))
        core = WorkerCore(name, recipe.build)
        task = asyncio.create_task(core.run(endpoint))
        while not task.done() and not self.dead:
            await asyncio.sleep(0.001)
        if self.dead:
            core.abandon()
            raise RayActorError()
        return core.dismissed

    async def call(self, name, *args):
        await asyncio.sleep(0)
        if self.dead or self.die_at == name:
            self.dead = True
            raise RayActorError()
        if name == "stage":
            return "import of vLLM"
        self.calls.append((name, *args) if name in ("sleep", "wake") else name)
        if name == self.hang_at:
            await self.free.wait()
        if name == "start" and self.hold is not None:
            await self.hold.wait()
        elif name == "pause":
            self.open.clear()
        elif name == "resume":
            self.open.set()
        elif name in ("receive", "load"):
            assert not self.open.is_set(), "a step in the middle of an update"
            self.loaded += [entry.name for entry in args[-1].entries]
        elif name == "attach":
            return ""
        elif name == "end_update" and args[0] is not None:
            self.version = args[0]
        elif name == "generate":
            await asyncio.sleep(0.01)
            while not self.open.is_set() and not self.dead:
                await asyncio.sleep(0.001)
            if self.dead:
                raise RayActorError()
            token_ids, sampling = args[:2]
            drawn = [1, 2]
            if sampling.seed is not None:  # of prompt and seed alone, as an engine draws
                drawn = np.random.default_rng([sampling.seed, *token_ids]).integers(0, 60, sampling.max_tokens).tolist()
            return Generation(drawn, [-1.0] * len(drawn), [self.version] * len(drawn), "length")
        elif name == "play":
            return await self.hosted(*args)
        elif name == "progress":
            found = self.paced
            await asyncio.sleep(self.slow)
            return found
        elif name == "stats":
            return EngineStats(sampled_tokens=2 * self.calls.count("generate"))
        return 1000 + self.number


class Method:
    def __init__(self, actor, name):
        self.actor, self.name = actor, name

    def options(self, **given):
        assert (self.name, given) in (("generate_many", {"num_returns": "streaming"}), ("stage", {"concurrency_group": "stage"}))
        return self

    def remote(self, *args):
        return self.answers(*args) if self.name == "generate_many" else self.actor.call(self.name, *args)

    async def answers(self, requests, live):
        """A stream of references, each to answers; those that are told hear of one token before."""

        async def generate(*request):
            *request, told = request if callable(request[-1]) else (*request, None)
            if told is not None and not self.actor.dead:
                told([1], [-1.0])
                await asyncio.sleep(0.001)  # it is on its way
            return await self.actor.call("generate", *request)

        async for part in answer_batches(generate, requests, live):
            yield asyncio.sleep(0, part)
        await asyncio.sleep(self.actor.lingers)


class Inside:
    """A stand-in's replica for code in its process, such as `LocalEngine`."""

    context, unfit = 2048, ""

    def __init__(self, actor):
        self.actor = actor

    async def generate(self, *request):
        *request, told = request
        assert told is None
        try:
            return await self.actor.call("generate", *request)
        except RayActorError:
            return await asyncio.Event().wait()  # the caller is in the process that died

"""An engine that lives in the driver, used from a worker: turns over the worker's channel.

For every engine that gives no `connection` of its own: the one that computes in the driver, and clients of servers whose state
(which server is alive, whose weights are whole) is the driver's.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Sequence
from dataclasses import asdict
from typing import Any

from agentrl.errors import EngineError
from agentrl.executors import in_thread
from agentrl.rollout.engine import Engine, EngineStats, Generation, Sampling, Told
from agentrl.rollout.workers.channel import Channel, Fields
from agentrl.rollout.workers.wire import (
    fault_fields,
    fault_of,
    generation_frame,
    generation_of,
    prompt_bytes,
    prompt_of,
    sampling_of,
)

LOOK_S = 0.5
"""How old the progress of a request that a worker knows may be."""


ASKED: dict[str, dict[str, Any]] = {"stop": {"stop": ("a",)}, "grammar": {"grammar": 'start: "a"'}}
"""What an engine may refuse, and a sampling that asks for it."""


class EngineService:
    """The driver's side, one for each worker. Requests end with the channel.

    `owner` is added to request keys: an episode that is played again, after its worker died, is another one to the engine.
    """

    def __init__(self, channel: Channel, engine: Engine, owner: str) -> None:
        self._channel, self._engine, self._owner = channel, engine, owner
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._keys: dict[int, str] = {}
        self._calls: set[asyncio.Task[None]] = set()
        channel.on |= {
            "engine.ask": self._ask,
            "engine.drop": self._drop,
            "engine.abort": self._abort,
            "engine.stats": self._stats,
            "engine.can": self._can,
            "engine.look": self._look,
        }

    def close(self) -> None:
        """Cancel what the worker asked for, which frees it at the engine."""
        for task in [*self._tasks.values(), *self._calls]:
            task.cancel()

    def _key(self, key: str) -> str:
        return f"{key}@{self._owner}"

    def _ask(self, fields: Fields, blob: memoryview) -> None:
        number, key = fields["id"], fields["key"]
        work = self._answer(number, prompt_of(blob), fields["sampling"], self._key(key), fields["streams"])
        self._tasks[number], self._keys[number] = asyncio.create_task(work, name=f"turn of {key}"), key

    async def _answer(self, number: int, token_ids: list[int], asked: Fields, key: str, streams: bool) -> None:
        def tell(ids: Sequence[int], logprobs: Sequence[float]) -> None:
            self._channel.send("engine.part", id=number, ids=list(ids), logprobs=list(logprobs))

        try:
            sampling = sampling_of(asked)
            if streams:
                generation = await self._engine.stream(token_ids, sampling, key, tell)
            else:
                generation = await self._engine.generate(token_ids, sampling, key)
            head, blob = generation_frame(generation)
            self._channel.send("engine.answer", blob, id=number, **head)
        except Exception as problem:  # of any kind: a worker that is not told waits forever
            self._channel.send("engine.fault", id=number, **fault_fields(problem))
        finally:
            self._tasks.pop(number, None)
            self._keys.pop(number, None)

    def _drop(self, fields: Fields, _: memoryview) -> None:
        task = self._tasks.get(fields["id"])
        if task is not None:
            task.cancel()

    def _abort(self, fields: Fields, _: memoryview) -> None:
        async def abort() -> None:
            try:
                await self._engine.abort(self._key(fields["key"]))
                self._channel.send("engine.answer", id=fields["id"], done=True)
            except Exception as problem:
                self._channel.send("engine.fault", id=fields["id"], **fault_fields(problem))

        self._call(abort())

    def _stats(self, fields: Fields, _: memoryview) -> None:
        async def stats() -> None:
            try:
                self._channel.send("engine.answer", id=fields["id"], stats=asdict(await self._engine.stats()))
            except Exception as problem:
                self._channel.send("engine.fault", id=fields["id"], **fault_fields(problem))

        self._call(stats())

    def _can(self, fields: Fields, _: memoryview) -> None:
        async def can() -> None:
            # In a thread: an engine that knows the text of its tokens reads a tokenizer at the first question.
            asked = {name: Sampling(1, **more) for name, more in ASKED.items()}
            refused = {name: await in_thread("load", self._engine.refusal, one) for name, one in asked.items()}
            self._channel.send("engine.answer", id=fields["id"], refused=refused)

        self._call(can())

    def _call(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work, name="a worker's call of the engine")
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    def _look(self, fields: Fields, _: memoryview) -> None:
        told = {key: self._engine.progress(self._key(key)) for key in set(self._keys.values())}
        self._channel.send("engine.progress", known={key: tokens for key, tokens in told.items() if tokens is not None})


class DriverEngine(Engine):
    """The worker's side: the driver's engine, with requests of this worker alone."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Generation | Fields]] = {}
        self._under_way: dict[str, int] = {}
        self._told_of: dict[int, Told] = {}
        self._known: dict[str, int] = {}
        self._looking: asyncio.Task[None] | None = None
        self._refused: dict[str, str] = {}
        channel.on |= {
            "engine.answer": self._answered,
            "engine.fault": self._failed,
            "engine.part": self._part,
            "engine.progress": self._progress,
        }

    async def start(self) -> None:
        """The driver has started it; here it is asked what it cannot do."""
        self._refused = (await self._asked("engine.can"))["refused"]

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_key: str) -> Generation:
        return await self._turn(token_ids, sampling, request_key, None)

    async def stream(self, token_ids: Sequence[int], sampling: Sampling, request_key: str, told: Told) -> Generation:
        return await self._turn(token_ids, sampling, request_key, told)

    async def _turn(self, token_ids: Sequence[int], sampling: Sampling, request_key: str, told: Told | None) -> Generation:
        try:
            prompt = prompt_bytes(token_ids)
        except ValueError as problem:
            raise EngineError(f"the prompt: {problem}") from None
        number, answer = self._expect()
        self._under_way[request_key] = number
        if told is not None:
            self._told_of[number] = told
        streams = told is not None
        self._channel.send("engine.ask", prompt, id=number, key=request_key, sampling=asdict(sampling), streams=streams)
        try:
            found = await answer
        except asyncio.CancelledError:
            self._channel.send("engine.drop", id=number)
            raise
        finally:
            del self._waiting[number]
            self._told_of.pop(number, None)
            if self._under_way.get(request_key) == number:
                del self._under_way[request_key]
                self._known.pop(request_key, None)
        assert isinstance(found, Generation)
        return found

    def refusal(self, sampling: Sampling) -> str:
        """What no sampling can ask of the driver's engine; a grammar that is wrong shows when it is sampled with."""
        return next((self._refused[name] for name in ASKED if getattr(sampling, name)), "")

    def progress(self, request_key: str) -> int | None:
        """As old as LOOK_S. None until the driver has told it, and always if its engine never tells."""
        if request_key not in self._under_way:
            return None
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(), name="progress of turns")
        return self._known.get(request_key)

    async def abort(self, request_key: str) -> None:
        await self._asked("engine.abort", request_key)

    async def stats(self) -> EngineStats:
        """Of the whole engine, not of this worker's requests."""
        return EngineStats(**(await self._asked("engine.stats"))["stats"])

    async def close(self) -> None:
        """The driver's engine goes on."""
        if self._looking is not None:
            self._looking.cancel()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(EngineError("the engine was closed"))

    async def _asked(self, kind: str, key: str = "") -> Fields:
        number, answer = self._expect()
        self._channel.send(kind, id=number, key=key)
        try:
            found = await answer
        finally:
            del self._waiting[number]
        assert isinstance(found, dict)
        return found

    def _expect(self) -> tuple[int, asyncio.Future[Generation | Fields]]:
        number = next(self._numbers)
        answer: asyncio.Future[Generation | Fields] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        return number, answer

    def _answered(self, fields: Fields, blob: memoryview) -> None:
        answer = self._waiting.get(fields["id"])
        if answer is not None and not answer.done():
            answer.set_result(generation_of(fields, blob) if "finish" in fields else fields)

    def _failed(self, fields: Fields, _: memoryview) -> None:
        answer = self._waiting.get(fields["id"])
        if answer is not None and not answer.done():
            answer.set_exception(fault_of(fields, "the engine, in the driver"))

    def _part(self, fields: Fields, _: memoryview) -> None:
        told = self._told_of.get(fields["id"])
        if told is not None:
            told(fields["ids"], fields["logprobs"])

    def _progress(self, fields: Fields, _: memoryview) -> None:
        self._known = {key: tokens for key, tokens in fields["known"].items() if key in self._under_way}

    async def _look(self) -> None:
        # Ends with the last request, so that an idle engine is not asked; `progress` begins again.
        while self._under_way:
            self._channel.send("engine.look")
            await asyncio.sleep(LOOK_S)

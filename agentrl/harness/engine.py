"""The policy's engine as one episode may use it: the endpoint asks, the episode allows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol

from agentrl.rollout.engine import Engine, EngineStats, Generation, Sampling, Told

Ask = Callable[[Sampling], Awaitable[Generation]]


class Samples(Protocol):
    """An episode, as its engine sees it."""

    async def sample(self, ask: Ask, token_ids: Sequence[int], sampling: Sampling, key: str) -> Generation: ...


class EpisodeEngine(Engine):
    """Every turn is asked through the episode, which bounds it, gives it its seed, and notes what becomes of it."""

    def __init__(self, engine: Engine, episode: Samples) -> None:
        self._engine, self._episode = engine, episode

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_key: str) -> Generation:
        ids = list(token_ids)
        return await self._episode.sample(lambda s: self._engine.generate(ids, s, request_key), ids, sampling, request_key)

    async def stream(self, token_ids: Sequence[int], sampling: Sampling, request_key: str, told: Told) -> Generation:
        ids = list(token_ids)
        ask = partial(self._streamed, ids, request_key, told)
        return await self._episode.sample(ask, ids, sampling, request_key)

    async def _streamed(self, ids: Sequence[int], key: str, told: Told, sampling: Sampling) -> Generation:
        return await self._engine.stream(ids, sampling, key, told)

    def refusal(self, sampling: Sampling) -> str:
        return self._engine.refusal(sampling)

    def progress(self, request_key: str) -> int | None:
        return self._engine.progress(request_key)

    async def abort(self, request_key: str) -> None:
        await self._engine.abort(request_key)

    async def stats(self) -> EngineStats:
        return await self._engine.stats()

    async def start(self) -> None:
        """Nothing: the engine is started and closed by the run."""

    async def close(self) -> None:
        """Nothing, as `start`."""

"""The replica of this process as an engine, for a rollout worker that lives in it: a turn is no remote call.

The driver's engine brings weights, counts and replaces replicas as ever; what it decides about requests is decided here from the
same facts, which each replica is told: while weights arrive requests wait in vLLM, after an update that failed they are refused.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from typing import Any

from agentrl.backends.vllm.pace import Paced
from agentrl.errors import EngineError, PromptTooLongError
from agentrl.rollout.engine import Engine, EngineConnection, EngineStats, Generation, Sampling, Told

LOOK = 0.1
"""Seconds for which what was read of all requests is used again."""

_HERE: list[Any] = []
"""The VllmActor of this process, once it has started."""


class ReplicaDeadError(EngineError):
    """The engine inside the replica is dead; another replica may serve the request."""


def settle(actor: Any) -> None:
    """This process is the replica `actor` from now on."""
    _HERE[:] = [actor]


def check_request(token_ids: Sequence[int], sampling: Sampling, context: int, vocab: int) -> None:
    """Raise EngineError for a request that vLLM could not serve; `context`: tokens of a prompt and its turn."""
    if not token_ids:
        raise EngineError("the prompt is empty")
    if len(token_ids) >= context:
        raise PromptTooLongError(f"a prompt of {len(token_ids)} tokens leaves no room in a context of {context}")
    if min(token_ids) < 0 or max(token_ids) >= vocab:
        raise EngineError(f"the prompt has token ids outside [0, {vocab})")
    if sampling.max_tokens < 1:
        raise EngineError(f"max_tokens must be at least 1, got {sampling.max_tokens}")


class InReplica(EngineConnection):
    """From inside a replica's process to that replica."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab

    def connect(self) -> Engine:
        """Raises EngineError in a process that is no started replica."""
        if not _HERE:
            raise EngineError("this process is no vLLM replica")
        return LocalEngine(_HERE[0], self._vocab)


class LocalEngine(Engine):
    """See the file's docstring. An episode whose engine has died here does not go on: its worker ends with the replica, and the
    episode is played again elsewhere."""

    def __init__(self, actor: Any, vocab: int) -> None:
        """`actor`: a started VllmActor."""
        self._actor, self._vocab = actor, vocab
        self._numbers = itertools.count()
        self._ids: dict[str, str] = {}
        self._told: Paced = {}
        self._looked = -LOOK

    async def start(self) -> None:
        """It has started."""

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_key: str) -> Generation:
        return await self._answer(token_ids, sampling, request_key, None)

    async def stream(self, token_ids: Sequence[int], sampling: Sampling, request_key: str, told: Told) -> Generation:
        return await self._answer(token_ids, sampling, request_key, told)

    def refusal(self, sampling: Sampling) -> str:
        return str(self._actor.refusal(sampling))

    async def _answer(self, token_ids: Sequence[int], sampling: Sampling, request_key: str, told: Told | None) -> Generation:
        check_request(token_ids, sampling, self._actor.context, self._vocab)
        self._actor.check_fit()
        request_id = f"{request_key}@{next(self._numbers)}"
        self._ids[request_key] = request_id
        try:
            answer: Generation = await self._actor.generate(token_ids, sampling, request_key, request_id, told)
            return answer
        except ReplicaDeadError as problem:
            self._actor.died(str(problem))
            # An answer of any kind would go on with the episode, which is neither done nor at fault.
            await asyncio.Event().wait()
            raise
        finally:
            # The episode may have begun its next request, which must not lose its progress to the end of the old one.
            if self._ids.get(request_key) == request_id:
                del self._ids[request_key]

    def progress(self, request_key: str) -> int | None:
        """As `VllmEngine.progress`, at most LOOK seconds old."""
        request_id = self._ids.get(request_key)
        if request_id is None:
            return None
        if (now := time.monotonic()) - self._looked >= LOOK:  # each look goes over all requests
            self._looked, self._told = now, self._actor.told()
        return self._told.get(request_id, 0)

    async def abort(self, request_key: str) -> None:
        await self._actor.abort(request_key)

    async def stats(self) -> EngineStats:
        """Of this replica."""
        found: EngineStats = await self._actor.stats()
        return found

    async def close(self) -> None:
        """The replica goes on."""

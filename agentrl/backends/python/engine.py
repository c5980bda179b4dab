"""A function of messages and tools as an engine: `policy(messages, tools)` returns the next message.

Episodes are played by the same loop as a model's, with numbers of messages in place of token ids, as with API models
(backends/api/engine.py). Nothing can be trained on them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from agentrl.backends.api.engine import Transcript, row_of
from agentrl.backends.calls import Calls
from agentrl.backends.endpoint.ask import numbered
from agentrl.backends.endpoint.errors import RequestError
from agentrl.backends.endpoint.messages import read_messages
from agentrl.errors import EngineError
from agentrl.executors import DaemonThreads
from agentrl.rollout.engine import Engine, EngineStats, Generation, Sampling
from agentrl.trajectory import Message

CALLS = DaemonThreads("policy", 64)
PolicyFunction = Callable[[list[dict[str, Any]], list[dict[str, Any]]], Any]


class FunctionEngine(Engine):
    """Calls the policy. `failed`: what it raised first, if it did; the episode is then unscored."""

    untrainable = "a Python policy has no weights; it can be evaluated: agentrl.evaluate(policy, env)"

    def __init__(self, name: str, policy: PolicyFunction, transcript: Transcript) -> None:
        self._name, self._policy, self._transcript = name, policy, transcript
        self.calls, self._asked = Calls(), 0

    async def start(self) -> None:
        return None

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_key: str) -> Generation:
        """One id: the answer's message. Raises EngineError if the policy raises, or returns no message."""
        entries = [self._transcript.get(number) for number in token_ids]
        messages = [dict(entry["message"]) for entry in entries if "message" in entry]
        tools: list[dict[str, Any]] = next((entry["tools"] for entry in reversed(entries) if "tools" in entry), [])
        answer = await self.calls.run(request_key, self._ask(messages, tools))
        if answer is None:
            return Generation([], [], [], "abort")
        message = numbered(answer, sum(row["role"] == "assistant" for row in messages))
        entry = {"message": row_of(message), "turn": asdict(message)}
        return Generation([self._transcript.add(entry)], [0.0], [0], "stop")

    async def _ask(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Message:
        self._asked += 1
        try:
            if inspect.iscoroutinefunction(inspect.unwrap(self._policy)):
                answer = await self._policy(messages, tools)
            else:  # in a thread: it may call a server, or think
                async with CALLS.slot():
                    answer = await CALLS.call(self._name, self._policy, messages, tools)
                answer = await answer if inspect.isawaitable(answer) else answer
            return _message(answer)
        except RequestError as problem:
            raise EngineError(f"policy {self._name}: it returned no message: {problem}") from problem
        except Exception as problem:  # the user's own code may raise anything
            raise EngineError(f"policy {self._name} raised {type(problem).__name__}: {problem}") from problem

    async def abort(self, request_key: str) -> None:
        self.calls.abort(request_key)

    async def stats(self) -> EngineStats:
        return EngineStats(running=len(self.calls), extra={"calls": self._asked})

    async def close(self) -> None:
        self.calls.abort_all()


def _message(answer: Any) -> Message:
    """A text, a `Message`, or an assistant's message in OpenAI's form. Raises RequestError for anything else."""
    if isinstance(answer, Message):
        return answer
    if isinstance(answer, str):
        return Message("assistant", answer)
    if not isinstance(answer, Mapping):
        raise RequestError(f"expected a text, a Message or a dict, got {type(answer).__name__}")
    return read_messages([{"role": "assistant", **answer}])[0]

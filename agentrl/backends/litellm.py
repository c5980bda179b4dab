"""Any API model through litellm, for evaluation only.

An API takes and gives messages, not token ids. To run in the same episode loop, `ApiRenderer` gives every
message a number and `LiteLlmEngine` reads the conversation back from the numbers: one id stands for one
message, nothing else. Such ledgers hold no tokens and no probabilities, so nothing can be trained on them:
`publish` refuses. Budgets in tokens count messages here; bound such runs by turns.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from agentrl.backends.openai_chat import unique_ids, write_message
from agentrl.errors import DependencyError, EngineError, RenderError, UserError
from agentrl.render.base import Renderer
from agentrl.render.toolcalls import call_from_json, malformed, strict_json
from agentrl.rollout.engine import Engine, EngineStats, Generation, Sampling, WeightBuckets
from agentrl.trajectory import Json, Message, ToolCall


class Transcript:
    """Numbers for messages: what the renderer and the engine of one API model share."""

    def __init__(self) -> None:
        self._entries: list[dict[str, Json]] = []

    def add(self, entry: dict[str, Json]) -> int:
        self._entries.append(entry)
        return len(self._entries) - 1

    def get(self, number: int) -> dict[str, Json]:
        """Raises EngineError for an id that this transcript did not give."""
        if not 0 <= number < len(self._entries):
            raise EngineError(f"{number} is no message of this API model's transcript")
        return self._entries[number]


class ApiRenderer(Renderer):
    """One id a message; see the module."""

    def __init__(self, transcript: Transcript) -> None:
        self._transcript = transcript

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return ()

    def start(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        head = self._transcript.add({"tools": [dict(tool) for tool in tools]})
        return [head, *(self._transcript.add({"message": _row(message)}) for message in messages)]

    def extend(self, finish: str, messages: Sequence[Message]) -> list[int]:
        if any(message.role == "assistant" for message in messages):
            raise RenderError("an assistant turn is sampled, never appended as a message")
        return [self._transcript.add({"message": _row(message)}) for message in messages]

    def parse(self, token_ids: Sequence[int], finish: str) -> Message:
        if not token_ids:
            return Message("assistant")
        row = self._transcript.get(token_ids[-1])["turn"]
        return Message(**{**row, "tool_calls": tuple(ToolCall(**call) for call in row["tool_calls"])})

    def assistant(self, message: Message) -> list[int]:
        raise UserError("an API model has no token ids: scripted turns cannot be trained on it")


class LiteLlmEngine(Engine):
    """Asks an API model; `renderer` is the one to run it with."""

    def __init__(
        self,
        model: str,
        *,
        concurrency: int = 32,
        timeout: float = 120.0,
        retries: int = 3,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """`model` in litellm's form, such as `openai/gpt-5-mini`. `timeout` in seconds a call; `options` go
        to litellm as they are (`api_base`, `api_key`, ...). Raises DependencyError without the extra."""
        if importlib.util.find_spec("litellm") is None:
            raise DependencyError("API models need litellm: pip install 'agentrl[litellm]'")
        self._model, self._options = model, dict(options or {})
        self._timeout, self._retries = timeout, retries
        self._gate = asyncio.Semaphore(concurrency)
        self._transcript = Transcript()
        self._running: dict[str, set[asyncio.Task[Any]]] = {}
        self._prompt_tokens = self._sampled_tokens = 0
        self.renderer = ApiRenderer(self._transcript)

    async def start(self) -> None:
        import litellm

        litellm.suppress_debug_info = True
        litellm.telemetry = False

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_key: str) -> Generation:
        """One id: the answer's message. Raises EngineError where the API fails after its retries."""
        if sampling.top_k:
            raise EngineError("API models take no top_k")
        messages: list[dict[str, Json]] = []
        tools: list[dict[str, Json]] = []
        for number in token_ids:
            entry = self._transcript.get(number)
            tools = entry.get("tools", tools)
            if "message" in entry:
                messages.append(entry["message"])
        task = asyncio.ensure_future(self._ask(messages, tools, sampling))
        self._running.setdefault(request_key, set()).add(task)
        try:
            answer = await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                task.cancel()
                raise
            return Generation([], [], [], "abort")
        finally:
            self._running[request_key].discard(task)
        return self._read(answer, sum(1 for row in messages if row["role"] == "assistant"))

    async def pause(self) -> None:
        raise UserError("an API model has no weights to update, so it cannot be trained")

    async def resume(self) -> None:
        raise UserError("an API model has no weights to update, so it cannot be trained")

    async def publish(self, version: int, weights: WeightBuckets) -> None:
        raise UserError("an API model has no weights to update, so it cannot be trained")

    async def abort(self, request_key: str) -> None:
        for task in self._running.pop(request_key, set()):
            task.cancel()

    async def stats(self) -> EngineStats:
        running = sum(len(tasks) for tasks in self._running.values())
        return EngineStats(
            running=running, prompt_tokens=self._prompt_tokens, sampled_tokens=self._sampled_tokens
        )

    async def close(self) -> None:
        for key in list(self._running):
            await self.abort(key)

    async def _ask(
        self, messages: list[dict[str, Json]], tools: list[dict[str, Json]], sampling: Sampling
    ) -> Any:
        import litellm

        options = {**self._options, **({"tools": tools} if tools else {})}
        if sampling.top_p < 1:
            options["top_p"] = sampling.top_p
        async with self._gate:
            try:
                return await litellm.acompletion(
                    model=self._model,
                    messages=messages,
                    temperature=sampling.temperature,
                    max_tokens=sampling.max_tokens,
                    timeout=self._timeout,
                    num_retries=self._retries,
                    **options,
                )
            except Exception as problem:  # litellm's errors have no common base of their own
                raise EngineError(f"{self._model}: {type(problem).__name__}: {problem}") from problem

    def _read(self, answer: Any, turn: int) -> Generation:
        choice = answer.choices[0]
        calls = tuple(_call(item, index) for index, item in enumerate(choice.message.tool_calls or []))
        message = unique_ids(Message("assistant", choice.message.content or "", calls), turn)
        number = self._transcript.add({"message": write_message(message), "turn": asdict(message)})
        self._prompt_tokens += answer.usage.prompt_tokens
        self._sampled_tokens += answer.usage.completion_tokens
        return Generation([number], [0.0], [0], "length" if choice.finish_reason == "length" else "stop")


def _call(item: Any, index: int) -> ToolCall:
    text = item.function.arguments or "{}"
    try:
        arguments, end = strict_json(text)
        if text[end:].strip():
            raise ValueError("text after the object")
    except ValueError as problem:
        return malformed(f"call_{index}", text, f"not valid JSON: {problem}", item.function.name or "")
    return call_from_json({"name": item.function.name, "arguments": arguments}, f"call_{index}", text)


def _row(message: Message) -> dict[str, Json]:
    if message.role == "assistant":
        return write_message(message)
    row: dict[str, Json] = {"role": message.role, "content": message.content}
    if message.role == "tool":
        row["tool_call_id"] = message.tool_call_id
    return row

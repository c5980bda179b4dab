"""Evaluation engines that answer with whole messages: API models through litellm, Python functions, scripted policies."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import random
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from typing import Any

import numpy as np

from agentrl.config.schema import ApiConfig
from agentrl.data.chat_forms import REASONING
from agentrl.data.trajectory import Json, Message, StopReason, ToolCall
from agentrl.engines.chat_format import RequestError, number_calls, read_messages, write_message
from agentrl.env import Observation, ToolEnv
from agentrl.env.check_tools import endless_turns
from agentrl.env.wrappers import GoldUser
from agentrl.render.base import Renderer
from agentrl.render.litellm_calls import (
    NO_RETRIES,
    answer_row,
    causes,
    choice_of,
    error_line,
    load_litellm,
    read_answer,
    refusal,
    request_of,
    retry_wait,
)
from agentrl.render.tool_calls import sendable
from agentrl.rollout.engine import Engine, EngineStats, Finish, Generation, Sampling, Usage
from agentrl.utils.errors import ConfigError, EngineError, RenderError, UserError, did_you_mean, need_package, raised_text
from agentrl.utils.event_loop import EPISODE, run_contained
from agentrl.utils.threads import DaemonThreads, in_thread

# Messages by number

log = logging.getLogger(__name__)


class Transcript:
    """Numbered messages, shared by renderer and engine; equal messages have the same number.

    An entry holds `tools`, or a `message` as it is sent; a sampled one also holds the `turn` as recorded in the episode.
    """

    def __init__(self) -> None:
        self._entries: list[dict[str, Json]] = []
        self._numbers: dict[str, int] = {}
        self._turns: dict[str, int] = {}

    def add(self, entry: dict[str, Json]) -> int:
        """Add an entry and return its number."""
        number = self._numbers.setdefault(_text(entry), len(self._entries))
        if number == len(self._entries):
            self._entries.append(entry)
        if "turn" in entry:
            self._turns[_text(entry["turn"])] = number
        return number

    def message(self, message: Message) -> int:
        """Return the number of a conversation's message; a sampled turn's entry holds it as the model returned it."""
        sampled = self._turns.get(_text(asdict(message))) if message.role == "assistant" else None
        return self.add({"message": row_of(message)}) if sampled is None else sampled

    def conversation(self, numbers: Sequence[int]) -> tuple[list[dict[str, Json]], list[dict[str, Json]]]:
        """Return the messages and the tools of these numbers. Tool answers get the call ids that the model gave."""
        messages: list[dict[str, Json]] = []
        tools: list[dict[str, Json]] = []
        ids: dict[Json, Json] = {}
        for entry in map(self.get, numbers):
            tools = entry.get("tools", tools)
            if (row := entry.get("message")) is None:
                continue
            for own, came in zip(entry.get("turn", {}).get("tool_calls", ()), row.get("tool_calls", ()), strict=False):
                ids[own["id"]] = came["id"]
            answered = row.get("tool_call_id")
            messages.append({**row, "tool_call_id": ids[answered]} if answered in ids else row)
        return messages, tools

    def get(self, number: int) -> dict[str, Json]:
        """Return an entry. Raises EngineError for a number that is not in this transcript."""
        if not 0 <= number < len(self._entries):
            raise EngineError(f"{number} is not a message of this API model's transcript")
        return self._entries[number]


def _text(entry: Json) -> str:
    return json.dumps(entry, sort_keys=True, ensure_ascii=False)


class ApiRenderer(Renderer):
    """Renderer with one id per message, its number in the transcript."""

    def __init__(self, transcript: Transcript) -> None:
        self._transcript = transcript

    def start(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        head = self._transcript.add({"tools": [dict(tool) for tool in tools]})
        return [head, *map(self._transcript.message, messages)]

    def extend(self, finish: str, messages: Sequence[Message], last: int | None = None) -> list[int]:
        if any(message.role == "assistant" for message in messages):
            raise RenderError("an assistant turn is sampled, never appended as a message")
        return list(map(self._transcript.message, messages))

    def parse(self, token_ids: Sequence[int], finish: str) -> Message:
        if not token_ids:
            return Message("assistant")
        row = self._transcript.get(token_ids[-1])["turn"]
        return Message(**{**row, "tool_calls": tuple(ToolCall(**call) for call in row["tool_calls"])})

    def assistant(self, message: Message) -> list[int]:
        raise UserError("an API model has no token ids: scripted turns cannot be trained on it")


class MessageEngine(Engine):
    """Base of engines whose ids are numbers of messages in a transcript; subclasses answer a conversation."""

    def __init__(self, transcript: Transcript) -> None:
        self._transcript = transcript
        self.under_way: dict[str, set[asyncio.Task[Generation]]] = {}
        """Request key -> its running requests."""

    @abstractmethod
    async def _answer(
        self, messages: list[dict[str, Json]], tools: list[dict[str, Json]], number: int, sampling: Sampling
    ) -> tuple[Message, dict[str, Json], Usage, Finish]:
        """Sample turn `number`. Returns the turn, with call ids that are unique in the session; its message as it is to be sent
        again; its usage; and why it ended."""

    async def start(self) -> None:
        return None

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_key: str) -> Generation:
        task = asyncio.ensure_future(self._sample(token_ids, sampling))
        self.under_way.setdefault(request_key, set()).add(task)
        try:
            return await task
        except asyncio.CancelledError:
            # `cancelling` is set if the cancellation came from outside (pass it on), not from `abort`.
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                task.cancel()
                raise
            return Generation([], [], [], "abort")
        finally:
            left = self.under_way.get(request_key, set())
            left.discard(task)
            if not left:
                self.under_way.pop(request_key, None)

    async def _sample(self, token_ids: Sequence[int], sampling: Sampling) -> Generation:
        messages, tools = self._transcript.conversation(token_ids)
        number = sum(row["role"] == "assistant" for row in messages)
        turn, row, usage, finish = await self._answer(messages, tools, number, sampling)
        return Generation([self._transcript.add({"message": row, "turn": asdict(turn)})], [0.0], [0], finish, usage)

    async def abort(self, request_key: str) -> None:
        for task in self.under_way.pop(request_key, set()):
            task.cancel()

    async def close(self) -> None:
        for key in list(self.under_way):
            await self.abort(key)


# API models


class LiteLlmEngine(MessageEngine):
    """Engine that calls an API model; use it with its `renderer`."""

    untrainable = "an API model returns no token ids and takes no weights; it can be evaluated: agentrl eval ENV --model api:NAME"

    def __init__(
        self,
        model: str,
        cfg: ApiConfig,
        *,
        backoff: float = 0.5,
        options: Mapping[str, Any] | None = None,
        transcript: Transcript | None = None,
    ) -> None:
        """`model`: in litellm's form, such as `openai/gpt-5-mini`. `options` are passed to litellm unchanged (`api_key`, ...).
        The wait between attempts is `backoff` seconds, doubled each time, or the server's Retry-After if longer; above
        a minute the call fails. Raises DependencyError without litellm."""
        need_package("litellm", "API models need litellm: pip install 'agentrl[litellm]'")
        super().__init__(transcript or Transcript())
        self._model, self._cfg, self._backoff = model, cfg, backoff
        self._options = dict(options or {})
        self.request([], [], Sampling(max_tokens=1))  # to reject an invalid address now
        self._gate = asyncio.Semaphore(cfg.concurrency)
        self._prompt_tokens = self._sampled_tokens = self._attempts = 0
        self._unheard = self._heard = False
        self.renderer = ApiRenderer(self._transcript)

    async def start(self) -> None:
        # In a thread, since litellm takes seconds to import, and other engines can start in that time.
        litellm = await in_thread("load", load_litellm)
        litellm.telemetry = False

    async def _answer(
        self, messages: list[dict[str, Json]], tools: list[dict[str, Json]], number: int, sampling: Sampling
    ) -> tuple[Message, dict[str, Json], Usage, Finish]:
        if sampling.top_k:
            raise EngineError("API models take no top_k")
        answer = await self._ask(self.request(messages, tools, sampling))
        self._heard = True
        try:
            choice = choice_of(answer)
        except LookupError as problem:
            raise EngineError(f"NoAnswer: {self._model}: {problem}") from None
        content, reasoning, calls = read_answer(choice.message)
        message = number_calls(Message("assistant", content, calls, reasoning=reasoning), number)
        used, usd = answer.usage, None  # None if the price is unknown or the provider reported no token counts
        if used.prompt_tokens and self._cfg.usd_per_million is not None:
            prompt, sampled = self._cfg.usd_per_million
            usd = float(used.prompt_tokens * prompt + used.completion_tokens * sampled) / 1e6
        elif used.prompt_tokens:
            litellm, names = load_litellm(), (self._model, self._model.partition("/")[2])
            known = next((name for name in names if "input_cost_per_token" in litellm.model_cost.get(name, {})), None)
            # litellm's calculation includes the lower price of cached prompt tokens.
            usd = None if known is None else float(litellm.completion_cost(answer, model=known))
        usage = Usage(used.prompt_tokens or 0, used.completion_tokens or 0, usd)
        self._prompt_tokens += usage.prompt_tokens
        self._sampled_tokens += usage.sampled_tokens
        row = answer_row(self._model, choice.message, message.tool_calls)
        return message, row, usage, "length" if choice.finish_reason == "length" else "stop"

    async def stats(self) -> EngineStats:
        return EngineStats(
            running=sum(map(len, self.under_way.values())),
            prompt_tokens=self._prompt_tokens,
            sampled_tokens=self._sampled_tokens,
            extra={"attempts": self._attempts},
        )

    def request(
        self, messages: Sequence[dict[str, Json]], tools: Sequence[dict[str, Json]], sampling: Sampling
    ) -> dict[str, Any]:
        """Return the keyword arguments of a litellm call."""
        own = {
            **self._options,
            **NO_RETRIES,
            "model": self._model,
            "messages": list(messages),
            "tools": list(tools),
            "timeout": self._cfg.timeout,
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_tokens,
        }
        if sampling.top_p < 1:
            own["top_p"] = sampling.top_p
        return request_of(own, self._cfg.args, self._cfg.base, args_key="api.args", base_key="api.base")

    async def _ask(self, request: dict[str, Any]) -> Any:
        """Call the API until it answers. Raises ConfigError for a refused key, account or model, else EngineError."""
        for attempt in range(self._cfg.retries + 1):
            try:
                async with self._gate:
                    self._attempts += 1
                    return await load_litellm().acompletion(**request)
            except Exception as problem:  # litellm's errors have no common base class
                refused = refusal(problem, request, self._cfg.base)
                # After a first answer, 403 and 404 may concern one request only: a filter, or one of a router's models.
                if refused is not None and not (self._heard and getattr(problem, "status_code", None) in (403, 404)):
                    raise ConfigError(f"API model {refused}") from problem
                least = self._backoff * 2**attempt * random.uniform(0.75, 1.25)
                wait = None if attempt == self._cfg.retries else retry_wait(problem, least)
                text = error_line(problem, request.get("api_base"))
                if any(isinstance(link, ConnectionRefusedError) for link in causes(problem)):  # nothing listens at the address
                    text = f"{self._cfg.base or 'its provider'} refuses the connection: no server listens there ({text})"
                    if not self._unheard:
                        log.warning("%s: %s; its calls are tried again up to %d times each", self._model, text, self._cfg.retries)
                    self._unheard = True
                if wait is None:
                    raise EngineError(f"{type(problem).__name__}: {self._model}: {text} ({attempt + 1} attempts)") from problem
                await asyncio.sleep(wait)
        raise AssertionError("the last attempt returns or raises")


def row_of(message: Message) -> dict[str, Json]:
    if message.role == "assistant":
        return write_message(replace(message, tool_calls=tuple(map(sendable, message.tool_calls))))
    row: dict[str, Json] = {"role": message.role, "content": message.content}
    if message.role == "tool":
        row["tool_call_id"] = message.tool_call_id
    return row


# Python functions

CALLS = DaemonThreads("policy", 64)
_KEYS = ("role", "content", "tool_calls", "name", "refusal", "function_call", *REASONING)
PolicyFunction = Callable[[list[dict[str, Any]], list[dict[str, Any]]], Any]


class FunctionEngine(MessageEngine):
    """Engine that calls a Python function as the policy."""

    untrainable = "a Python policy has no weights; it can be evaluated: agentrl.evaluate(policy, env)"

    def __init__(self, name: str, policy: PolicyFunction, transcript: Transcript) -> None:
        super().__init__(transcript)
        self._name, self._policy, self._asked = name, policy, 0

    async def _answer(
        self, messages: list[dict[str, Json]], tools: list[dict[str, Json]], number: int, sampling: Sampling
    ) -> tuple[Message, dict[str, Json], Usage, Finish]:
        said = await run_contained(self._ask([dict(row) for row in messages], tools), f"policy {self._name}", EngineError)
        message = number_calls(said, number)
        return message, row_of(message), Usage(0, 0), "stop"  # unknown: its ids are messages

    async def _ask(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Message:
        self._asked += 1
        try:
            if inspect.iscoroutinefunction(inspect.unwrap(self._policy)):
                answer = await self._policy(messages, tools)
            else:  # in a thread, since it may block
                async with CALLS.slot():
                    answer = await CALLS.call(self._name, self._policy, messages, tools)
                answer = await answer if inspect.isawaitable(answer) else answer
            if isinstance(answer, str):
                return Message("assistant", answer)
            if not isinstance(answer, Mapping | Message):
                raise RequestError(f"expected a text, a Message or a dict, got {type(answer).__name__}")
            for key in answer if isinstance(answer, Mapping) else ():
                if key not in _KEYS and (near := did_you_mean(key, _KEYS, like=0.8)):
                    raise RequestError(f"{key}: no key of a message; {near}")
            said = answer if isinstance(answer, Message) else read_messages([{"role": "assistant", **answer}])[0]
            if said.role != "assistant":
                raise RequestError(f"its role is {said.role!r}, expected 'assistant'")
            return said
        except RequestError as problem:
            raise EngineError(f"policy {self._name}: it returned no message: {problem}") from problem
        except Exception as problem:  # user code may raise anything
            raise EngineError(f"policy {self._name} {raised_text(problem, self._policy)}") from problem

    async def stats(self) -> EngineStats:
        return EngineStats(running=sum(map(len, self.under_way.values())), extra={"calls": self._asked})


# Scripted policies


class ScriptedEngine(FunctionEngine):
    """Engine that plays the script `name`; players pass it each episode's environment with `meet`."""

    untrainable = "a scripted policy has no weights; it can be evaluated: agentrl eval ENV --policy NAME"

    def __init__(self, name: str, transcript: Transcript) -> None:
        super().__init__(name, self._next, transcript)
        self.script = name
        self.lines: dict[str, Iterator[Message]] = {}
        """Request key -> remaining turns of a running episode."""

    def meet(self, env: ToolEnv, request_key: str) -> ToolEnv:
        return _ScriptedEnv(env, self, request_key)

    async def _next(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Message:
        return next(self.lines[EPISODE.get()])


class _ScriptedEnv(GoldUser):
    """Wrapper that starts the script at the environment's reset. The reset raises ConfigError if it has no such script."""

    def __init__(self, env: ToolEnv, engine: ScriptedEngine, key: str) -> None:
        super().__init__(env)
        self._engine, self._key = engine, key

    async def areset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        observation, info = await super().areset(seed=seed, options=options)
        script = self._engine.script
        lines = endless_turns(script, self.env, np.random.default_rng(self.env.task.seed))
        try:
            first = await in_thread("load", next, lines)  # a solution may take a search, or a call to a server
        except NotImplementedError as problem:
            raise ConfigError(f"--policy {script}: {problem}") from problem
        self._engine.lines[self._key] = chain([first], lines)
        return observation, info

    async def aend(self, stop: StopReason, error: str | None = None) -> float:
        self._engine.lines.pop(self._key, None)
        return await self.env.aend(stop, error)

    async def aclose(self) -> None:
        self._engine.lines.pop(self._key, None)
        await self.env.aclose()

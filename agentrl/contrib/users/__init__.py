"""Simulated users: by rules, or played by a language model."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import regex

from agentrl.data.trajectory import Message
from agentrl.env.users import AsksModel, Parting, UserModel
from agentrl.render.litellm_calls import address_arguments, answer_row, choice_of, error_line, load_litellm, read_answer, refusal
from agentrl.render.tool_calls import sendable, write_call
from agentrl.utils.errors import EnvError, need_package
from agentrl.utils.schemas import compile_pattern, within_seconds
from agentrl.utils.threads import by_size, in_thread

PATTERN_S = 1.0
"""Seconds for the search of a rule's pattern in the policy's turn."""

Complete = Callable[[Sequence[Mapping[str, Any]]], Awaitable["str | Message"]]


class RuleUser:
    """Answer by the first rule whose pattern is found in the policy's turn.

    `rules`: (regular expression, answer); the answer None ends the episode. `otherwise`: the answer if no rule matches. The
    user leaves after more than `patience` of these in a row.
    """

    def __init__(self, rules: Sequence[tuple[str, str | None]], *, otherwise: str = "I do not know.", patience: int = 3) -> None:
        self.rules = [(compile_pattern(pattern, regex.IGNORECASE), answer) for pattern, answer in rules]
        self.otherwise, self.patience = otherwise, patience
        self.lost = 0

    async def reply(self, conversation: Sequence[Message]) -> str | None:
        said = conversation[-1].content
        found = await by_size(len(said), self._first, said)
        if found is not None:
            self.lost = 0
            return self.rules[found][1]
        self.lost += 1
        return None if self.lost > self.patience else self.otherwise

    def _first(self, said: str) -> int | None:
        """Return the index of the first matching rule, or None; a search that exceeds `PATTERN_S` does not match."""
        for number, (pattern, _) in enumerate(self.rules):
            with contextlib.suppress(TimeoutError):
                if within_seconds(pattern.search, said, PATTERN_S):
                    return number
        return None


INSTRUCTIONS = """You play a user who talks to an assistant. Your goal and what you know:
{goal}
Say only what the user would say next, in one or two sentences. Reveal what you know only when asked. \
Do not help the assistant and do not invent facts. When your goal is reached, or cannot be, say {stop}."""


class ModelUser(AsksModel):
    """User played by a language model (through litellm: any provider, or a local server by `api_base`).

    The model sees the conversation with swapped roles, and its own calls with their results, but not those of the policy.
    """

    def __init__(
        self,
        goal: str = "",
        *,
        model: str = "",
        system: str | None = None,
        stop: str | Sequence[str] = "###STOP###",
        tools: Sequence[Mapping[str, Any]] = (),
        complete: Complete | None = None,
        timeout: float = 60.0,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        """`system`: the whole system prompt, in place of the one made from `goal`. `stop`: one or several texts; any of them
        ends the conversation, except in a message with calls. `tools`: schemas of the user's own tools
        (`env.user_toolbox.schemas()`). `complete` replaces litellm. `options` and `seed` are passed to `litellm.acompletion`;
        the default temperature is 0, and `drop_params` drops parameters that the model does not accept. Raises DependencyError
        if there is neither `complete` nor litellm, ValueError if `stop` has an empty text, which every message contains, or if
        it is empty but needed for the system prompt from `goal`."""
        if complete is None:
            need_package("litellm", "a model as user needs litellm: pip install 'agentrl[litellm]'")
        self.stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(self.stops) or (system is None and not self.stops):
            raise ValueError(f"stop = {stop!r}: expected a word with which the model ends the conversation, or several")
        self.system = INSTRUCTIONS.format(goal=goal, stop=self.stops[0]) if system is None else system
        self.goal, self.model, self.timeout = goal, model, timeout
        self.tools = [dict(schema) for schema in tools]
        self.options = {**({} if seed is None else {"seed": seed}), **options}
        address_arguments(options.get("api_base"), "api_base")  # refuse an invalid address now
        self.complete = complete
        self.came: dict[str, dict[str, Any]] = {}

    async def reply(self, conversation: Sequence[Message]) -> str | Message | Parting | None:
        """Return the user's next turn; after a stop word, a Parting with the rest of the message, or None. Raises EnvError if the
        model does not answer: the episode is then unscored."""
        answer = await self._complete(await self.shown(conversation))
        said = answer if isinstance(answer, Message) else Message("user", answer)
        if self.leaves(said):
            text = said.content
            for stop in self.stops:
                text = text.replace(stop, "")
            return Parting(text.strip()) if text.strip() else None
        if said.tool_calls:
            return said
        if not said.content.strip():
            raise EnvError(f"the model that plays the user ({self.model}) said nothing")
        return said.content.strip()

    async def shown(self, conversation: Sequence[Message]) -> list[dict[str, Any]]:
        """Return the conversation for the model, in OpenAI's format. A benchmark with another format overrides this method, and
        may set `tools`."""
        # The policy's messages have the role "user", the user's messages and calls "assistant", the results of the user's calls
        # "tool"; the policy's calls are left out.
        ids: dict[str | None, str] = {}
        found: list[dict[str, Any]] = []
        for message in conversation:
            if message.role == "assistant" and message.content and not message.tool_calls:
                found.append({"role": "user", "content": message.content})
            elif message.role == "user" and message.tool_calls:
                calls = [write_call(sendable(call)) for call in message.tool_calls]
                written: dict[str, Any] = {"role": "assistant", "content": message.content or None, "tool_calls": calls}
                row = self.came.get(_calls_key(message)) or written
                ids |= {call.id: item["id"] for call, item in zip(message.tool_calls, row["tool_calls"], strict=True)}
                found.append(dict(row))
            elif message.role == "user" and message.content:
                found.append({"role": "assistant", "content": message.content})
            elif message.role == "tool" and message.tool_call_id in ids:
                found.append({"role": "tool", "tool_call_id": ids[message.tool_call_id], "content": message.content})
        return [{"role": "system", "content": self.system}, *found]

    def leaves(self, said: Message) -> bool:
        """Return True if a message ends the conversation."""
        return not said.tool_calls and any(stop in said.content for stop in self.stops)

    async def _complete(self, messages: Sequence[Mapping[str, Any]]) -> str | Message:
        if self.complete is not None:
            return await self.complete(messages)
        litellm = await in_thread("load", load_litellm)
        request = UserModel(self.model, self.options).request(messages, self.timeout, self.tools)
        try:
            answer = await litellm.acompletion(**request)
        except Exception as fault:  # litellm's exceptions have no common base class
            why = refusal(fault, request, request.get("api_base")) or error_line(fault, request.get("api_base"))
            raise EnvError(f"the model that plays the user ({self.model}): {why}") from fault
        try:
            choice = choice_of(answer)
        except LookupError as problem:
            raise EnvError(f"the model that plays the user ({self.model}): {problem}") from None
        content, reasoning, calls = read_answer(choice.message)
        said = Message("user", content, calls, reasoning=reasoning)
        if calls:
            self.came[_calls_key(said)] = answer_row(self.model, choice.message, calls)
        return said


def _calls_key(message: Message) -> str:
    """Return a key of a message with calls that ignores the calls' IDs."""
    return json.dumps([message.content, [(call.name, call.raw) for call in message.tool_calls]])

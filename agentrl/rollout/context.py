"""Context policies: rewrite a conversation that outgrows the model's context before the next turn.

Interface and registry, then `compact`, `keep_recent` and `truncate`."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field

from agentrl.config import Choice
from agentrl.data.trajectory import Message
from agentrl.utils.registry import Registry

CONTEXTS: Registry[Callable[..., ContextPolicy]] = Registry(
    "rollout.context",
    "CONTEXTS",
    "agentrl.rollout.context",
    traits={"summarizes": "requests summaries, from `rollout.summary_model` if that is set"},
)

Ask = Callable[[Message, int], Awaitable[str | None]]


@dataclass(frozen=True, slots=True)
class Moment:
    """State of an episode before its next turn.

    `messages`: the conversation as the model would see it. It begins with the `opening` messages of the reset
    and ends with the newest answer, the `fresh` ones.
    `tokens`: length of that prompt. `turn_tokens`: maximum number of tokens of the next turn. `context`: maximum length of prompt
    and turn together. `ask(instruction, tokens)` returns the model's answer, of at most `tokens` tokens, to the conversation
    followed by the instruction (see `Compact`), or None if it does not fit in the context or the episode's budget. A policy
    that got an answer must rewrite.
    """

    messages: Sequence[Message]
    opening: int
    fresh: int
    tokens: int
    turn_tokens: int
    context: int
    ask: Ask

    def over(self, tokens: int | None, reserve: int = 0) -> bool:
        """Return True if a full next turn plus `reserve` tokens would exceed `tokens` (by default the context)."""
        # Checked a full turn ahead: once the context is full it is too late, and the turn is cut short.
        limit = self.context if tokens is None else min(tokens, self.context)
        return self.tokens + self.turn_tokens + reserve > limit


class ContextPolicy(ABC):
    """Rewrites conversations; stateless and shared by all episodes, so that it depends on the conversation only."""

    @abstractmethod
    async def rewrite(self, moment: Moment) -> list[Message] | None:
        """Return the conversation to continue with, or None to leave it unchanged."""


@CONTEXTS.register("stop")
class Stop(ContextPolicy):
    """Never rewrite: once the context is full, the episode ends as truncated (`context_full`)."""

    async def rewrite(self, moment: Moment) -> list[Message] | None:
        return None


def assistant_turns(messages: Sequence[Message], opening: int) -> list[int]:
    """Return the indices of the assistant's messages after the opening ones."""
    return [index for index, message in enumerate(messages) if message.role == "assistant" and index >= opening]


def make_context_policy(choice: Choice) -> ContextPolicy:
    """Build a context policy. Raises ConfigError for an unknown name or argument and suggests the nearest one."""
    context: ContextPolicy = CONTEXTS.build(choice.name, choice.args, kind=ContextPolicy)
    return context


# compact

HEAD = "Summary of the conversation so far:\n"
ASK = (
    "The conversation is getting too long to go on. Write down what is needed to finish the task without it: "
    "what was asked, what was found out, what was done, what is left to do. Answer with that text alone and call "
    "no tool."
)


@CONTEXTS.register("compact", traits={"summarizes"})
@dataclass(frozen=True, kw_only=True)
class Compact(ContextPolicy):
    """Replace old turns by a summary of at most `summary_tokens`, requested with the instruction `prompt`.

    Applies if a full next turn and a summary would not fit in `tokens` (by default the context). The episode continues with its
    opening messages, the summary, and the last `keep` turns with their answers. By default the policy writes the summary: its
    tokens are sampled like any others, end the old ledger, and are trained there. With `rollout.summary_model` an API model
    writes it, and it is not trained.
    """

    tokens: Annotated[int, Field(ge=1)] | None = None
    summary_tokens: Annotated[int, Field(ge=1)] = 256
    keep: Annotated[int, Field(ge=0)] = 1
    prompt: str = ASK

    async def rewrite(self, moment: Moment) -> list[Message] | None:
        messages, starts = list(moment.messages), assistant_turns(moment.messages, moment.opening)
        # The reserve is the summary plus its instruction, counted in characters, which overestimates the tokens.
        if not moment.over(self.tokens, self.summary_tokens + len(self.prompt)) or len(starts) <= self.keep:
            return None
        summary = await moment.ask(Message("user", self.prompt), self.summary_tokens)
        if summary is None:
            return None
        kept = messages[starts[-self.keep] :] if self.keep else []
        # The previous summary, after the opening, is left out, since this one also summarizes it.
        return [*messages[: moment.opening], Message("user", HEAD + summary), *kept]


# keep_recent

_NOTE = re.compile(r"\[(\d+) earlier turns were left out\]")


@CONTEXTS.register("keep_recent")
@dataclass(frozen=True, kw_only=True)
class KeepRecent(ContextPolicy):
    """Keep the last `turns` turns with their answers if a full next turn would not fit in `tokens` (default: the context).

    The episode continues with its opening messages, a note with the number of dropped turns, and these turns. If they contain
    no user message, the last user message before them stays too, since it is the request that they work on.
    """

    turns: Annotated[int, Field(ge=1)]
    tokens: Annotated[int, Field(ge=1)] | None = None

    async def rewrite(self, moment: Moment) -> list[Message] | None:
        if not moment.over(self.tokens) or len(assistant_turns(moment.messages, moment.opening)) <= self.turns:
            return None
        return recent(moment.messages, moment.opening, self.turns)


def recent(messages: Sequence[Message], opening: int, turns: int) -> list[Message]:
    """Return the opening, the note, the current request if it would be dropped, and the last `turns` turns of a conversation
    with more turns than that."""
    starts = assistant_turns(messages, opening)
    kept, said = messages[starts[-turns] :], [m for m in messages[opening : starts[-turns]] if m.role == "user"]
    # A conversation that was cut before has a note after its opening: the new note includes its count.
    noted = _NOTE.fullmatch(messages[opening].content) if messages[opening].role == "user" else None
    note = Message("user", f"[{int(noted[1] if noted else 0) + len(starts) - turns} earlier turns were left out]")
    said = said[1:] if noted else said
    request = [] if any(m.role == "user" for m in kept) else said[-1:]
    return [*messages[:opening], note, *request, *kept]


# truncate

MIN_FREED_SHARE = 0.25
"""Minimum share of the conversation that markers must free. Less would start a new ledger, whose whole prompt is recomputed,
every few turns, and finally free nothing."""


@CONTEXTS.register("truncate")
@dataclass(frozen=True, kw_only=True)
class Truncate(ContextPolicy):
    """Replace tool output before the last `keep` turns by markers if a full next turn would not fit in `tokens`.

    `tokens` defaults to the context. All of that output is replaced at once, so that it does not happen every turn. Calls and
    the policy's text stay unless they fill the context: if the markers free less than a quarter of the characters after the
    opening messages, the older half of the turns is dropped too, as by `keep_recent`, but never the last `keep`.
    """

    tokens: Annotated[int, Field(ge=1)] | None = None
    keep: Annotated[int, Field(ge=0)] = 2

    async def rewrite(self, moment: Moment) -> list[Message] | None:
        first, starts = moment.opening, assistant_turns(moment.messages, moment.opening)
        if not moment.over(self.tokens) or len(starts) <= self.keep:
            return None
        old = starts[-self.keep] if self.keep else len(moment.messages)
        messages = [*moment.messages[:first], *elide_outputs(moment.messages[first:old]), *moment.messages[old:]]
        before, after = _length(moment.messages[first:]), _length(messages[first:])
        turns = max(self.keep, len(starts) // 2, 1)
        if before - after < MIN_FREED_SHARE * before and turns < len(starts):
            messages = recent(messages, first, turns)
        # An unchanged conversation must not start a ledger: its whole prompt would be computed and stored a second time.
        return None if messages == list(moment.messages) else messages


def elide_outputs(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with each tool output replaced by a marker, if that is shorter."""
    marked = ((message, f"[{len(message.content)} characters left out]") for message in messages)
    return [replace(m, content=mark) if m.role == "tool" and len(mark) < len(m.content) else m for m, mark in marked]


def _length(messages: Sequence[Message]) -> int:
    """Count the characters of texts, reasoning and calls."""
    calls = [call for message in messages for call in message.tool_calls]
    texts = sum(len(message.content) + len(message.reasoning or "") for message in messages)
    return texts + sum(len(call.name) + len(call.raw or json.dumps(call.arguments)) for call in calls)

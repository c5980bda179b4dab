"""Context policies: rewrite a conversation that outgrows its context before the next turn.

The contract and its registry, then `keep_recent`, `truncate` and `compact`."""

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
    traits={"summarizes": "has summaries written, by `rollout.summary_model` if that is set"},
)

Ask = Callable[[Message, int], Awaitable[str | None]]


@dataclass(frozen=True, slots=True)
class Moment:
    """An episode before its next turn.

    `messages`: the conversation as the model would see it, including the environment's newest answer (the last `fresh`
    messages). `tokens`: the length of that prompt. `turn_tokens`: the most that the next turn may
    sample. `context`: the most that prompt and turn may take together. `ask(instruction, tokens)` returns the model's
    answer, of at most `tokens` tokens, to the conversation followed by the instruction (see `Compact`); None if the
    context or the episode's budget has no room for it. A policy that gets an answer must rewrite.
    """

    messages: Sequence[Message]
    fresh: int
    tokens: int
    turn_tokens: int
    context: int
    ask: Ask

    def over(self, tokens: int | None, reserve: int = 0) -> bool:
        """Return True if a full next turn plus `reserve` tokens would exceed `tokens` (by default the context)."""
        # Asked for a full turn ahead: once the context is full, it is too late, and the turn is cut short.
        limit = self.context if tokens is None else min(tokens, self.context)
        return self.tokens + self.turn_tokens + reserve > limit


class ContextPolicy(ABC):
    """Stateless and shared by all episodes: everything it needs to know is in the conversation."""

    @abstractmethod
    async def rewrite(self, moment: Moment) -> list[Message] | None:
        """The conversation to continue with, or None to leave it unchanged."""


@CONTEXTS.register("stop")
class Stop(ContextPolicy):
    """`stop`: never rewrite. If the context is full, the episode ends, truncated (`context_full`)."""

    async def rewrite(self, moment: Moment) -> list[Message] | None:
        return None


def assistant_turns(messages: Sequence[Message]) -> list[int]:
    """The indices of the assistant's turns in a conversation."""
    return [index for index, message in enumerate(messages) if message.role == "assistant"]


def make_context_policy(choice: Choice) -> ContextPolicy:
    """A context policy. Raises ConfigError for an unknown name or argument, naming the nearest."""
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
    """Compact the conversation: if a full next turn and a summary would no longer fit in `tokens` (by default the context), a
    summary of at most `summary_tokens` is requested with the instruction `prompt`. The episode continues with its opening
    messages, the summary, and the last `keep` turns with their answers.

    By default the policy itself writes the summary: its tokens are sampled like any others, are at the end of the
    old ledger, and are trained there. With `rollout.summary_model` an API model writes it, and none of it is trained.
    """

    tokens: Annotated[int, Field(ge=1)] | None = None
    summary_tokens: Annotated[int, Field(ge=1)] = 256
    keep: Annotated[int, Field(ge=0)] = 1
    prompt: str = ASK

    async def rewrite(self, moment: Moment) -> list[Message] | None:
        messages, starts = list(moment.messages), assistant_turns(moment.messages)
        # The reserve is the summary and the request for it, counted in characters, which overestimates its tokens.
        if not moment.over(self.tokens, self.summary_tokens + len(self.prompt)) or len(starts) <= self.keep:
            return None
        summary = await moment.ask(Message("user", self.prompt), self.summary_tokens)
        if summary is None:
            return None
        # The previous summary is left out, since this one also summarizes it.
        opening = [m for m in messages[: starts[0]] if not (m.role == "user" and m.content.startswith(HEAD))]
        kept = messages[starts[-self.keep] :] if self.keep else []
        return [*opening, Message("user", HEAD + summary), *kept]


# keep_recent

_NOTE = re.compile(r"\[(\d+) earlier turns were left out\]")


@CONTEXTS.register("keep_recent")
@dataclass(frozen=True, kw_only=True)
class KeepRecent(ContextPolicy):
    """Keep recent turns: if a full next turn would no longer fit in `tokens` (by default the context), the episode continues
    with its opening messages, a note that says how many turns were left out, and the last `turns` turns with their answers.
    If the user has said nothing since, what the user said last before them stays too: it is the request that they work on.
    """

    turns: Annotated[int, Field(ge=1)]
    tokens: Annotated[int, Field(ge=1)] | None = None

    async def rewrite(self, moment: Moment) -> list[Message] | None:
        if not moment.over(self.tokens) or len(assistant_turns(moment.messages)) <= self.turns:
            return None
        return recent(moment.messages, self.turns)


def recent(messages: Sequence[Message], turns: int) -> list[Message]:
    """The opening, the note, the request that is worked on if the cut would take it, and the last `turns` turns of a conversation
    that has more than that."""
    starts = assistant_turns(messages)
    kept = messages[starts[-turns] :]
    # A conversation that was cut before already has a note: its count is added to the new one, and the opening ends with it.
    notes = [(place, found) for place, m in enumerate(messages[: starts[0]]) if (found := _NOTE.fullmatch(m.content))]
    opening = notes[0][0] if notes else starts[0]
    before = sum(int(found[1]) for _, found in notes)
    note = Message("user", f"[{before + len(starts) - turns} earlier turns were left out]")
    said = [m for m in messages[opening + len(notes) : starts[-turns]] if m.role == "user"]
    request = [] if any(m.role == "user" for m in kept) else said[-1:]
    return [*messages[:opening], note, *request, *kept]


# truncate

WORTH = 0.25
"""The least share of the conversation that replacing old output must free; a smaller one would start a ledger, whose whole
prompt is computed again, every few turns, and in the end free nothing."""


@CONTEXTS.register("truncate")
@dataclass(frozen=True, kw_only=True)
class Truncate(ContextPolicy):
    """Truncate tool output: if a full next turn would no longer fit in `tokens` (by default the context), the tool output
    before the last `keep` turns is replaced by a marker, all of it at once, so that it does not happen every turn.

    Calls and the policy's own text stay, until they are what fills the context: if the markers free less than a quarter of what
    follows the opening messages (in characters), the older half of the turns go too, as under `keep_recent`, but never the last
    `keep`.
    """

    tokens: Annotated[int, Field(ge=1)] | None = None
    keep: Annotated[int, Field(ge=0)] = 2

    async def rewrite(self, moment: Moment) -> list[Message] | None:
        starts = assistant_turns(moment.messages)
        if not moment.over(self.tokens) or len(starts) <= self.keep:
            return None
        old = starts[-self.keep] if self.keep else len(moment.messages)
        messages = [*elide_outputs(moment.messages[:old]), *moment.messages[old:]]
        before, after = _length(moment.messages[starts[0] :]), _length(messages[starts[0] :])
        turns = max(self.keep, len(starts) // 2, 1)
        if before - after < WORTH * before and turns < len(starts):
            messages = recent(messages, turns)
        # An unchanged conversation must not start a ledger: the whole prompt would be computed, and kept, a second time.
        return None if messages == list(moment.messages) else messages


def elide_outputs(messages: Sequence[Message]) -> list[Message]:
    """The same messages with tool output replaced if the marker is shorter."""
    marked = ((message, f"[{len(message.content)} characters left out]") for message in messages)
    return [replace(m, content=mark) if m.role == "tool" and len(mark) < len(m.content) else m for m, mark in marked]


def _length(messages: Sequence[Message]) -> int:
    """Characters of texts, thoughts and calls."""
    calls = [call for message in messages for call in message.tool_calls]
    texts = sum(len(message.content) + len(message.reasoning or "") for message in messages)
    return texts + sum(len(call.name) + len(call.raw or json.dumps(call.arguments)) for call in calls)

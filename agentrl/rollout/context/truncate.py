"""`truncate`: old tool output is replaced by a short marker; once that frees too little, the oldest turns go."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field

from agentrl.rollout.context.base import CONTEXTS, ContextPolicy, Moment, assistant_turns
from agentrl.rollout.context.keep_recent import recent
from agentrl.trajectory import Message

WORTH = 0.25
"""The least share of the conversation that replacing old output must free; a smaller one would start a ledger, whose whole
prompt is computed again, every few turns, and in the end free nothing."""


@CONTEXTS.register("truncate")
@dataclass(frozen=True, kw_only=True)
class Truncate(ContextPolicy):
    """If a full next turn would no longer fit in `tokens` (by default the context), the tool output before
    the last `keep` turns is replaced by a marker, all of it at once, so that it does not happen every turn.

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
        messages = [*elided(moment.messages[:old]), *moment.messages[old:]]
        before, after = _length(moment.messages[starts[0] :]), _length(messages[starts[0] :])
        turns = max(self.keep, len(starts) // 2, 1)
        if before - after < WORTH * before and turns < len(starts):
            messages = recent(messages, turns)
        # An unchanged conversation must not start a ledger: the whole prompt would be computed, and kept, a second time.
        return None if messages == list(moment.messages) else messages


def elided(messages: Sequence[Message]) -> list[Message]:
    """The same messages with tool output replaced if the marker is shorter."""
    return [_elided(message) for message in messages]


def _elided(message: Message) -> Message:
    marker = f"[{len(message.content)} characters left out]"
    if message.role != "tool" or len(marker) >= len(message.content):
        return message
    return replace(message, content=marker)


def _length(messages: Sequence[Message]) -> int:
    """Characters of texts, thoughts and calls."""
    calls = [call for message in messages for call in message.tool_calls]
    texts = sum(len(message.content) + len(message.reasoning or "") for message in messages)
    return texts + sum(len(call.name) + len(call.raw or json.dumps(call.arguments)) for call in calls)

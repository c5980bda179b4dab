"""`truncate`: old tool output is replaced by a short marker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field

from agentrl.rollout.context.base import CONTEXTS, ContextPolicy, Moment, assistant_turns
from agentrl.trajectory import Message


@CONTEXTS.register("truncate")
@dataclass(frozen=True, kw_only=True)
class Truncate(ContextPolicy):
    """If a full next turn would no longer fit in `tokens` (by default the context), the tool output before
    the last `keep` turns is replaced by a marker, all of it at once, so that it does not happen every turn.

    Calls and the policy's own text stay. If nothing is left to replace, the episode continues until the
    context is full.
    """

    tokens: Annotated[int, Field(ge=1)] | None = None
    keep: Annotated[int, Field(ge=0)] = 2

    async def rewrite(self, moment: Moment) -> list[Message] | None:
        starts = assistant_turns(moment.messages)
        if not moment.over(self.tokens) or len(starts) <= self.keep:
            return None
        old = starts[-self.keep] if self.keep else len(moment.messages)
        messages = [*elided(moment.messages[:old]), *moment.messages[old:]]
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

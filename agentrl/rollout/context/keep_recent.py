"""`keep_recent`: the last turns stay, and a note says how many were left out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from agentrl.rollout.context.base import CONTEXTS, ContextPolicy, Moment, assistant_turns
from agentrl.trajectory import Message

_NOTE = re.compile(r"\[(\d+) earlier turns were left out\]")


@CONTEXTS.register("keep_recent")
@dataclass(frozen=True, kw_only=True)
class KeepRecent(ContextPolicy):
    """If a full next turn would no longer fit in `tokens` (by default the context), the episode continues with its opening
    messages, a note that says how many turns were left out, and the last `turns` turns with their answers. If the user has said
    nothing since, what the user said last before them stays too: it is the request that they work on.
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

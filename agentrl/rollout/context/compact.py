"""`compact`: a summary replaces the conversation so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from agentrl.rollout.context.base import CONTEXTS, ContextPolicy, Moment, assistant_turns
from agentrl.trajectory import Message

HEAD = "Summary of the conversation so far:\n"
ASK = (
    "The conversation is getting too long to go on. Write down what is needed to finish the task without it: "
    "what was asked, what was found out, what was done, what is left to do. Answer with that text alone and call "
    "no tool."
)


@CONTEXTS.register("compact", traits={"summarizes"})
@dataclass(frozen=True, kw_only=True)
class Compact(ContextPolicy):
    """If a full next turn and a summary would no longer fit in `tokens` (by default the context), a
    summary of at most `summary_tokens` is requested with the instruction `prompt`. The episode continues with
    its opening messages, the summary, and the last `keep` turns with their answers.

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

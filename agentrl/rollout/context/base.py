"""The contract of context policies: whether, and how, a conversation is rewritten before the next turn.

A rewritten conversation starts a new ledger, as its context; what was sampled before stays in the old
ledger and is trained there, once. A policy never changes the record that the environment and the reward see.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from agentrl.config import Choice
from agentrl.registry import Registry
from agentrl.trajectory import Message

CONTEXTS: Registry[Callable[..., ContextPolicy]] = Registry(
    "rollout.context",
    "CONTEXTS",
    "agentrl.rollout.context",
    traits={
        "summarizes": "has summaries written, by `rollout.summary_model` if that is set",
    },
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
        """Whether a full next turn plus `reserve` tokens would exceed `tokens` (by default the context)."""
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
    context: ContextPolicy = CONTEXTS.bind(choice.name, choice.args)()
    return context

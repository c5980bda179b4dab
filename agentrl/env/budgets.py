"""Wrappers that truncate an episode: by turns, by tokens, by time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from agentrl.env.base import StepResult, ToolEnv
from agentrl.env.spaces import Action, Observation
from agentrl.env.wrapper import WRAPPERS, ToolWrapper, text_size
from agentrl.tool import CountTokens, estimate_tokens
from agentrl.trajectory import StopReason


@WRAPPERS.register("turn_limit")
class TurnLimit(ToolWrapper):
    """At most `turns` turns by the policy; the last one is still answered. Stops with `max_turns`."""

    def __init__(self, env: ToolEnv, turns: int) -> None:
        """Raises ValueError for less than one turn."""
        super().__init__(env)
        if turns < 1:
            raise ValueError(f"TurnLimit: turns = {turns}; expected at least 1")
        self.turns = turns

    async def astep(self, action: Action) -> StepResult:
        result = await self.env.astep(action)
        if result[2] or result[3] or len(self.trajectory.turns) < self.turns:
            return result
        return await self._truncate(result, StopReason.MAX_TURNS)


@WRAPPERS.register("token_limit")
class TokenLimit(ToolWrapper):
    """At most `tokens` tokens of text in the whole conversation, by `count`. Stops with `max_tokens`.

    This counts message text. A rollout's own budget counts the exact ledger; this one is for policies
    without token ids.
    """

    def __init__(self, env: ToolEnv, tokens: int, count: CountTokens = estimate_tokens) -> None:
        super().__init__(env)
        self.tokens = tokens
        self.count = count
        self.used = 0

    async def areset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        observation, info = await self.env.areset(seed=seed, options=options)
        self.used = sum(text_size(message, self.count) for message in observation)
        return observation, info

    async def astep(self, action: Action) -> StepResult:
        result = await self.env.astep(action)
        turn = self.trajectory.turns[-1].message
        self.used += sum(text_size(message, self.count) for message in [turn, *result[0]])
        if result[2] or result[3] or self.used < self.tokens:
            return result
        return await self._truncate(result, StopReason.MAX_TOKENS)


@WRAPPERS.register("time_budget", traits={"wall_clock"})
class TimeBudget(ToolWrapper):
    """At most `seconds` of wall time since reset, tools and sampling together. Stops with `episode_timeout`.

    Wall time depends more on the machine than on the policy, so such an episode is truncated and unscored.
    A turn in progress when the time is up is cancelled.
    """

    def __init__(self, env: ToolEnv, seconds: float) -> None:
        super().__init__(env)
        self.seconds = seconds
        self.deadline = 0.0

    async def areset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        self.deadline = time.monotonic() + self.seconds
        return await self.env.areset(seed=seed, options=options)

    async def astep(self, action: Action) -> StepResult:
        try:
            async with asyncio.timeout(self.deadline - time.monotonic()) as clock:
                result = await self.env.astep(action)
        except TimeoutError:
            if not clock.expired():  # a TimeoutError of the environment's own, not ours
                raise
            return await self._truncate(([], 0.0, False, True, {}), StopReason.EPISODE_TIMEOUT)
        if not (result[2] or result[3]) and time.monotonic() >= self.deadline:
            return await self._truncate(result, StopReason.EPISODE_TIMEOUT)
        return result

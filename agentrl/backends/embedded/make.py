"""The embedded engine, as a run asks for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.rollout.engine import Engine
from agentrl.rollout.engine_maker import ENGINES, EngineMaker


@ENGINES.register("embedded", traits={"sleeps"})
class EmbeddedMaker(EngineMaker):
    """In the driver's own process; suits every machine."""

    @classmethod
    def engine(cls) -> type[Engine]:
        from agentrl.backends.embedded.engine import EmbeddedEngine

        return EmbeddedEngine

    @classmethod
    def suits(cls) -> int:
        return 1

    def make(self, model: str, positions: int, ray_options: Sequence[Mapping[str, Any]] = ()) -> Engine:
        from agentrl.backends.embedded.engine import EmbeddedEngine

        rollout = self.config.rollout
        # One slot an episode: its cache stays for its next turn. An episode whose conversation is rewritten may hold
        # more tokens in all than any one prompt of it.
        return EmbeddedEngine(
            model,
            dtype=self.config.model.dtype,
            max_slots=rollout.max_episodes,
            max_context=min(rollout.max_episode_tokens, positions),
        )

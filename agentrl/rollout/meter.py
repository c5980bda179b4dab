"""What the engine did since the last reading, as metrics of a step."""

from __future__ import annotations

import time

from agentrl.rollout.engine import Engine, EngineStats


class EngineMeter:
    """Differences between two readings of an engine's counters."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._last = EngineStats()
        self._when: float | None = None

    async def read(self) -> dict[str, float | None]:
        """`throughput/sampled_tokens_per_s`: sampled tokens per second of wall time since the last reading (None at the first).
        `engine/cache_hit`: share of the prompt tokens since then that came from a prefix cache (None if there were no prompts).
        `engine/running`, `engine/waiting`: requests at this moment; `engine/kv_used` as in `EngineStats`, if it is known. The
        engine's own numbers (`EngineStats.extra`) under their names."""
        now, stats = time.monotonic(), await self._engine.stats()
        last, self._last = self._last, stats
        seconds = 0.0 if self._when is None else now - self._when
        self._when = now
        prompts = stats.prompt_tokens - last.prompt_tokens
        return {
            "throughput/sampled_tokens_per_s": (stats.sampled_tokens - last.sampled_tokens) / seconds if seconds else None,
            "engine/cache_hit": (stats.cached_tokens - last.cached_tokens) / prompts if prompts else None,
            "engine/running": stats.running,
            "engine/waiting": stats.waiting,
            **({} if stats.kv_used is None else {"engine/kv_used": stats.kv_used}),
            **{f"engine/{name}": value for name, value in stats.extra.items()},
        }

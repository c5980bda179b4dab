"""The judge's budget: limits on calls and on money, checked before each call."""

from __future__ import annotations

import threading

from agentrl.executors import fork_safe


class Budget:
    """Counts calls and dollars over all threads. A call reserves its maximum cost and returns what it did
    not use, so that concurrent calls cannot overspend together."""

    def __init__(self, calls: int | None, usd: float | None) -> None:
        self.limit_calls, self.limit_usd = calls, usd
        self.calls = 0
        self.usd = 0.0
        self._reserved = 0.0
        self._lock = fork_safe(threading.Lock())

    def reserve(self, usd: float | None) -> str | None:
        """Reserve one call that costs at most `usd` (None: not known). Returns why it may not be made, or None."""
        with self._lock:
            if self.limit_calls is not None and self.calls >= self.limit_calls:
                return f"the budget of {self.limit_calls} judge calls is spent; raise reward.judge.calls"
            if self.limit_usd is not None:
                if usd is None:
                    return (
                        "reward.judge.usd: the model's price is not known, so a budget in USD cannot be enforced; set "
                        "reward.judge.usd_per_million"
                    )
                if self.usd + self._reserved + usd > self.limit_usd + 1e-12:
                    return (
                        f"the budget of {self.limit_usd} USD for judging is spent ({self.usd:.6f} used); raise reward.judge.usd"
                    )
            self.calls += 1
            self._reserved += usd or 0.0
            return None

    def settle(self, reserved: float | None, used: float) -> None:
        """Release a reservation and count the actual cost."""
        with self._lock:
            self._reserved -= reserved or 0.0
            self.usd += used

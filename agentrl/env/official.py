"""pass@k with confidence intervals, and the interface of benchmarks with official metrics."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from agentrl.data.trajectory import Json, StopReason, Trajectory
from agentrl.env.base import ToolEnv

# pass@k


def pass_at_k(n: int, c: int, k: int) -> float:
    """Estimate the probability that at least one of k samples is correct, given c correct of n.

    1 - C(n - c, k) / C(n, k): the unbiased estimator of Chen et al. 2021 (arXiv 2107.03374), eq. 1.
    Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    _check(n, c, k)
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def pass_hat_k(n: int, c: int, k: int) -> float:
    """Estimate the probability that all of k samples are correct, given c correct of n: C(c, k) / C(n, k).

    pass^k of tau-bench (Yao et al. 2024, arXiv 2406.12045, section 4); it measures reliability, pass@k the best case. Raises
    ValueError as `pass_at_k`.
    """
    _check(n, c, k)
    return math.comb(c, k) / math.comb(n, k)


def success_rates(counts: Sequence[tuple[int, int]], samples: int) -> dict[str, dict[str, float] | None]:
    """Compute pass@k and pass^k for k up to `samples`, with 95 % intervals over tasks.

    `counts`: (scored, solved) episodes per task. A task with fewer than k scored episodes is left out for that k; None if no
    task is left.
    """
    rates: dict[str, dict[str, float] | None] = {}
    for k in range(1, samples + 1):
        usable = [(n, c) for n, c in counts if n >= k]
        for name, rate in (("pass@", pass_at_k), ("pass^", pass_hat_k)):
            rates[f"{name}{k}"] = rate_of([rate(n, c, k) for n, c in usable])
    return rates


def rate_of(values: Sequence[float], least: float = 0.0) -> dict[str, float] | None:
    """Return mean, low and high of a 95 % normal interval over tasks, clipped to [`least`, 1]; None without values.

    Use `least` = -1 for paired differences per task, whose spread, not that of the two rates, gives the interval. If all values
    are equal, for which the approximation has width 0, the half-width is 3 / tasks (rule of three).
    """
    if not (n := len(values)):
        return None
    mean = sum(values) / n
    spread = 1.96 * math.sqrt(sum((value - mean) ** 2 for value in values) / max(1, n - 1) / n)
    width = 3.0 / n if len(set(values)) == 1 else spread
    return {"mean": mean, "low": max(least, mean - width), "high": min(1.0, mean + width)}


def _check(n: int, c: int, k: int) -> None:
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"need 0 <= c <= n and 1 <= k <= n, got n={n}, c={c}, k={k}")


# Benchmarks

WHOLE = "all"
"""The split with every task, to evaluate a benchmark as a whole; it is in no `splits`, and nothing trains on it."""


@dataclass(frozen=True, slots=True)
class Played:
    """An episode as input of official metrics. `sample`: its index among its task's episodes, 0 to k - 1; `unscored`: the reason
    for a missing score (such as an outage), or None."""

    task_id: str
    family: str
    data: Mapping[str, Json] = field(repr=False)
    sample: int
    value: float | None
    success: bool | None
    stop: StopReason
    turns: int
    calls: int
    unscored: str | None = None


@dataclass(frozen=True, slots=True)
class OfficialRow:
    """A row of a benchmark's official table: `value` is a mean over `n` episodes or tasks (None if none was scored), `weight` its
    share of the overall value (None: not part of it)."""

    name: str
    value: float | None
    n: int
    weight: float | None = None
    note: str = ""


class Benchmark(ToolEnv):
    """An environment with published tasks in finite splits, data files and official metrics.

    `suite`: the benchmark's name, which several environments may share. `version`: of its files. `holdout`: the unit in which
    tasks are held out if the benchmark has no split of its own, for reports.
    """

    suite: ClassVar[str] = ""
    version: str = ""
    holdout: str = "families"

    @classmethod
    def official(cls, episodes: Sequence[Played]) -> Sequence[OfficialRow]:
        """Compute the benchmark's metrics with its weights; by default none. No mean includes unscored episodes (`success` None),
        and `n` is the number of scored ones."""
        return ()

    @abstractmethod
    def task_count(self, split: str) -> int:
        """Return the number of tasks in a split."""

    @abstractmethod
    def spread(self, split: str, count: int, seed: int = 0) -> tuple[int, ...]:
        """Select the indices of `count` representative tasks of a split: the same per seed; a smaller count's are a subset
        of a larger one's."""

    @abstractmethod
    def split_sizes(self) -> dict[str, dict[str, Any]]:
        """Return per split the number of tasks, in total and per kind, and the sorted ids' sha256."""

    @abstractmethod
    def source_digest(self) -> str:
        """Return a digest of the files of tasks and checkers."""

    @abstractmethod
    def source_notes(self) -> Sequence[str]:
        """Return notes for a run about these files, such as files changed since installation."""


def played_of(env: Benchmark, episode: Trajectory) -> Played:
    """Convert an episode to the input of official metrics."""
    lost = episode.success is None and episode.reward is None
    return Played(
        task_id=episode.task.id,
        family=env.family(episode.task),
        data=episode.task.data,
        sample=episode.member,
        value=episode.reward,
        success=episode.success,
        stop=episode.stop,
        turns=len(episode.turns),
        calls=sum(len(turn.message.tool_calls) for turn in episode.turns),
        unscored=(episode.error or episode.stop.value) if lost else None,
    )

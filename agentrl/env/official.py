"""pass@k with confidence intervals, and the contract of a benchmark with metrics of its own."""

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
    """Probability that at least one of k samples is correct, drawn without replacement from n with c correct ones.

    1 - C(n - c, k) / C(n, k): the unbiased estimator of Chen et al. 2021 (arXiv 2107.03374), eq. 1.
    Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    _check(n, c, k)
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def pass_hat_k(n: int, c: int, k: int) -> float:
    """Probability that all of k samples drawn without replacement are correct: C(c, k) / C(n, k).

    The pass^k of tau-bench (Yao et al. 2024, arXiv 2406.12045, section 4). It measures reliability, pass@k the best case.
    """
    _check(n, c, k)
    return math.comb(c, k) / math.comb(n, k)


def success_rates(counts: Sequence[tuple[int, int]], samples: int) -> dict[str, dict[str, float] | None]:
    """pass@k and pass^k for k up to `samples`, with 95 % intervals over tasks, of (scored, solved) episodes per task.

    A task with fewer than k scored episodes is left out of that k; None without a task.
    """
    rates: dict[str, dict[str, float] | None] = {}
    for k in range(1, samples + 1):
        usable = [(n, c) for n, c in counts if n >= k]
        for name, rate in (("pass@", pass_at_k), ("pass^", pass_hat_k)):
            rates[f"{name}{k}"] = rate_of([rate(n, c, k) for n, c in usable])
    return rates


def rate_of(values: Sequence[float], least: float = 0.0) -> dict[str, float] | None:
    """Mean over tasks, and low and high of its normal-approximation 95 % interval, clipped to [`least`, 1]; None without values.

    `least` -1: of paired differences, one for each task, whose spread, and not that of the two rates, says how sure the mean is.
    If all values are equal, for which the approximation gives a width of 0, the half-width is 3 / tasks (rule of
    three).
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
"""The split that has every task: to evaluate a benchmark as a whole. It is in no `splits`, and nothing trains on it."""


@dataclass(frozen=True, slots=True)
class Played:
    """An episode as the official metrics see it. `sample`: its number among those of its task, 0 to k - 1; `unscored`: why it has
    no score (an outage, say), or None."""

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
    """A row of a benchmark's official table: `n` is what the value is a mean of, `weight` its part in the overall value (None:
    none); `value` is None if nothing of it was scored."""

    name: str
    value: float | None
    n: int
    weight: float | None = None
    note: str = ""


class Benchmark(ToolEnv):
    """An environment with published tasks, each in a finite split, with files of its own and official metrics.

    `suite`: the name of the benchmark; several environments may share one. `version`: that of its files. `holdout`: the unit in
    which tasks without a split of the benchmark are held out, for reports.
    """

    suite: ClassVar[str] = ""
    version: str = ""
    holdout: str = "families"

    @classmethod
    def official(cls, episodes: Sequence[Played]) -> Sequence[OfficialRow]:
        """The benchmark's own metrics with its own weights; by default none. Unscored episodes (`success` None) are counted by
        no mean, and `n` says how many were."""
        return ()

    @abstractmethod
    def task_count(self, split: str) -> int:
        """The number of tasks in a split."""

    @abstractmethod
    def spread(self, split: str, count: int, seed: int = 0) -> tuple[int, ...]:
        """The numbers of `count` tasks that stand for a split: the same for the same seed, and those of a smaller count are among
        those of a larger one."""

    @abstractmethod
    def split_sizes(self) -> dict[str, dict[str, Any]]:
        """Each split: the number of tasks, of tasks per kind, and a sha256 of the sorted ids."""

    @abstractmethod
    def source_digest(self) -> str:
        """One digest of the files that tasks and checkers come from."""

    @abstractmethod
    def source_notes(self) -> Sequence[str]:
        """Notes for a run about these files: those that changed since they were installed, by name."""


def played_of(env: Benchmark, episode: Trajectory) -> Played:
    """An episode in the form of official metrics."""
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

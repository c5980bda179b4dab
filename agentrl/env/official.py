"""Official tables of a benchmark, and pass@k with confidence intervals."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from agentrl.data.trajectory import Trajectory
from agentrl.env.suites import OfficialRow, Played, SuiteEnv

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
            found = mean_with_interval([rate(n, c, k) for n, c in usable]) if usable else None
            rates[f"{name}{k}"] = None if found is None else dict(zip(("mean", "low", "high"), found, strict=True))
    return rates


def mean_with_interval(values: Sequence[float], z: float = 1.96) -> tuple[float, float, float]:
    """Mean over tasks and its normal-approximation interval (mean, low, high), clipped to [0, 1].

    If all values are equal, for which the approximation gives a width of 0, the half-width is 3 / tasks (rule of
    three). Raises ValueError without values.
    """
    mean, width = _mean_and_width(values, z)
    return mean, max(0.0, mean - width), min(1.0, mean + width)


def difference_with_interval(values: Sequence[float], z: float = 1.96) -> tuple[float, float, float]:
    """The same of paired differences, one for each task, clipped to [-1, 1]: their spread, and not that of the two rates, says
    how sure the mean is. Raises ValueError without values."""
    mean, width = _mean_and_width(values, z)
    return mean, max(-1.0, mean - width), min(1.0, mean + width)


def _mean_and_width(values: Sequence[float], z: float) -> tuple[float, float]:
    n = len(values)
    if not n:
        raise ValueError("no values to average")
    mean = sum(values) / n
    if n == 1 or len(set(values)) == 1:
        return mean, 3.0 / n
    return mean, z * math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1) / n)


def _check(n: int, c: int, k: int) -> None:
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"need 0 <= c <= n and 1 <= k <= n, got n={n}, c={c}, k={k}")


# Episodes as official metrics see them, and rows of a benchmark's official table, for `SuiteEnv.official`.
#
# A task counts once, whatever the number of its samples. What is unscored (an outage, say) is in no mean, and the row's note says
# how many episodes that are: official tools differ there, and count what did not run as wrong or not at all.


def played_of(env: SuiteEnv, episode: Trajectory) -> Played:
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


def mean_row(
    name: str,
    episodes: Sequence[Played],
    weight: float | None = None,
    *,
    value: Callable[[Played], float | None] = lambda one: None if one.success is None else float(one.success),
) -> OfficialRow:
    """The mean over tasks of an episode's value, by default its success (0 or 1); of a task with several samples, of their mean.
    `n`: the tasks with a scored episode."""
    found: dict[str, list[float]] = defaultdict(list)
    for one in episodes:
        if (known := value(one)) is not None:
            found[one.task_id].append(known)
    mean = statistics.fmean(statistics.fmean(values) for values in found.values()) if found else None
    return OfficialRow(name, mean, len(found), weight, left_out(episodes, sum(map(len, found.values()))))


def weighted_row(name: str, rows: Iterable[OfficialRow], weight: float | None = None, *, absent: str = "skip") -> OfficialRow:
    """The mean of rows by their weights (a row without one is in none). `absent`: what a row without a value does: "skip" (the
    others' weights are scaled up, which the note says) or "unknown" (the mean is unknown, too). Raises ValueError for another."""
    if absent not in ("skip", "unknown"):
        raise ValueError(f"absent = {absent!r}; expected 'skip' or 'unknown'")
    counted = [row for row in rows if row.weight]
    known = [(row.value, row.weight or 0.0, row.n) for row in counted if row.value is not None]
    lacking = [row.name for row in counted if row.value is None]
    total = sum(share for _, share, _ in known)
    value = sum(one * share for one, share, _ in known) / total if total and not (lacking and absent == "unknown") else None
    note = f"without {', '.join(lacking)}" if lacking else ""
    return OfficialRow(name, value, sum(n for _, _, n in known), weight, note)


def pass_hat_rows(episodes: Sequence[Played], prefix: str = "") -> list[OfficialRow]:
    """pass^k for each k up to the least number of scored samples of a task (a task with none is left out), as tau2 computes it:
    the mean over tasks of C(c, k) / C(n, k), c of n samples being successes."""
    found: dict[str, list[bool]] = defaultdict(list)
    for one in episodes:
        if one.success is not None:
            found[one.task_id].append(one.success)
    note = left_out(episodes, sum(map(len, found.values())))
    rows = []
    for k in range(1, min(map(len, found.values()), default=0) + 1):
        mean = statistics.fmean(pass_hat_k(len(won), sum(won), k) for won in found.values())
        rows.append(OfficialRow(f"{prefix}pass^{k}", mean, len(found), None, note))
    return rows


def groups(episodes: Iterable[Played], of: Callable[[Played], Iterable[str]]) -> dict[str, list[Played]]:
    """Episodes by the names that `of` gives each (several, if it counts in several), in the order of their first."""
    found: dict[str, list[Played]] = {}
    for one in episodes:
        for name in of(one):
            found.setdefault(name, []).append(one)
    return found


def pass_hat_table(episodes: Sequence[Played], of: str) -> list[OfficialRow]:
    """`pass_hat_rows` for each value of the tasks' `data[of]` (a row without a value if nothing of it was scored), and the plain
    mean of their pass^1."""
    parts = sorted(groups(episodes, lambda one: [one.data[of]]).items())
    rows = [pass_hat_rows(part, f"{name} ") or [mean_row(f"{name} pass^1", part)] for name, part in parts]
    first = [replace(known[0], weight=1 / len(rows)) for known in rows]
    return [*(row for known in rows for row in known), weighted_row(f"mean of {of}s pass^1", first)]


def left_out(episodes: Sequence[Played], scored: int) -> str:
    """A note on the episodes that are in no mean; "" if all are."""
    return f"{len(episodes) - scored} of {len(episodes)} episodes unscored, in no mean" if scored < len(episodes) else ""

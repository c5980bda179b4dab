"""Rows of a benchmark's official table, for `SuiteEnv.official`.

A task counts once, whatever the number of its samples. Unscored episodes (an outage, say) are in no mean, and the row's note
says how many there are: official tools differ there, and count such episodes as wrong or not at all.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from agentrl.env.official import OfficialRow, Played, pass_hat_k


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

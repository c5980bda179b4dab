"""Rows of the leaderboard: means of means, and the spread of groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import stdev

from agentrl.contrib.suites.benchmarks import groups, left_out, mean_row
from agentrl.env.official import OfficialRow, Played

AS_ZERO = "overall (unplayed: 0)"


_PART = "not every category of it was played"


_Known = tuple[float, int, bool]  # value, number of episodes, whether all of it was played


@dataclass(frozen=True)
class MeansTable:
    """`means`: of each mean, the categories or earlier means that it is of. A mean is plain, but one that `over_tasks` names is
    over tasks: that has the benchmark's number of tasks of each category, which is its share however many of them were played or
    scored. `weights`: those of the overall value.

    A mean is shown only if all of its categories were played, the overall value too. If some were not, a row of another name
    (`AS_ZERO`) has what a leaderboard shows that counts them as 0."""

    means: Mapping[str, tuple[str, ...]]
    weights: Mapping[str, float]
    over_tasks: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def rows(self, found: Mapping[str, Sequence[Played]]) -> list[OfficialRow]:
        """A row for each category (`found` has its episodes), for each mean with some played task, and "overall"."""
        rows = [mean_row(name, played) for name, played in found.items()]
        known: dict[str, _Known] = {row.name: (row.value, row.n, True) for row in rows if row.value is not None}
        for name, parts in self.means.items():
            known[name] = value, n, whole = self._mean(name, [(part, known.get(part)) for part in parts])
            if n:
                rows.append(OfficialRow(name, value if whole else None, n, self.weights.get(name), "" if whole else _PART))
        played = [one for part in found.values() for one in part]
        return [*rows, *self._overall(known, left_out(played, sum(one.success is not None for one in played)))]

    def _mean(self, name: str, parts: Sequence[tuple[str, _Known | None]]) -> _Known:
        tasks = self.over_tasks.get(name)
        sizes = [1 if tasks is None else tasks[part] for part, _ in parts]
        value = sum(known[0] * size for (_, known), size in zip(parts, sizes, strict=True) if known is not None) / sum(sizes)
        return value, sum(known[1] for _, known in parts if known), all(known is not None and known[2] for _, known in parts)

    def _overall(self, known: Mapping[str, _Known], lost: str) -> list[OfficialRow]:
        parts = {name: known.get(name, (0.0, 0, False)) for name in self.weights}
        n = sum(part[1] for part in parts.values())
        if not n:
            return []
        value = sum(weight * parts[name][0] for name, weight in self.weights.items())
        if missing := [name for name, part in parts.items() if not part[2]]:
            said = f"not every category was played (in {', '.join(missing)})"
            as_zero = OfficialRow(AS_ZERO, value, n, None, "what the leaderboard would show of this; no model's accuracy")
            return [OfficialRow("overall", None, n, None, said), as_zero]
        return [OfficialRow("overall", value, n, None, lost)]


def spread_rows(name: str, episodes: Iterable[Played], of: Callable[[Played], Iterable[str]]) -> list[OfficialRow]:
    """Spread of the means of groups of episodes (the same tasks under several prompts, say), and their standard deviation (of a
    sample, with n - 1); nothing for fewer than two groups."""
    played = list(episodes)
    values = [row.value for row in (mean_row(one, part) for one, part in groups(played, of).items()) if row.value is not None]
    if len(values) < 2:
        return []
    return [
        OfficialRow(f"{name}: range", max(values) - min(values), len(played)),
        OfficialRow(f"{name}: deviation", stdev(values), len(played)),
    ]

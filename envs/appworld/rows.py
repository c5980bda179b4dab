"""Rows over scenarios, for AppWorld's table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from agentrl.contrib.suites.benchmarks import left_out
from agentrl.env.official import OfficialRow, Played


def whole_row(name: str, episodes: Sequence[Played], size: int = 0) -> OfficialRow:
    """The share of families whose every task is a success, by sample if tasks were played more than once; a family with an
    unscored task is in none. `size`: a family's number of tasks; one with fewer played tasks is in none either (0: those that
    were played are all of it). `n`: the families."""
    found: dict[tuple[str, int], list[bool | None]] = defaultdict(list)
    for one in episodes:
        found[one.family, one.sample].append(one.success)
    played = [results for results in found.values() if len(results) >= size]
    whole = [float(all(results)) for results in played if None not in results]
    parts = f"{len(found) - len(played)} of {len(found)} not played whole" if len(played) < len(found) else ""
    notes = [left_out(episodes, sum(one.success is not None for one in episodes)), parts]
    return OfficialRow(name, fmean(whole) if whole else None, len(whole), None, "; ".join(filter(None, notes)))


def in_percent(row: OfficialRow) -> OfficialRow:
    """A row whose value is a share, as a percentage."""
    return row if row.value is None else replace(row, value=100 * row.value)

"""Numbers that are not finite, found on the driver before they reach the weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from agentrl.algorithm.ragged import row_counts
from agentrl.batch.rows import Ragged, is_ragged

COLUMNS = ("reward", "rewards", "baseline", "logprobs", "old_logprobs", "ref_logprobs", "values", "advantages", "returns")
SHOWN = 8


def broken_rows(view: Ragged) -> dict[str, list[int]]:
    """Rows in which a column of `COLUMNS` has a number that is not finite, by column; empty if all are finite."""
    broken: dict[str, list[int]] = {}
    for name in COLUMNS:
        if name not in view:
            continue
        column = view.row(name)
        values = column.values() if is_ragged(column) else column
        if bool(torch.isfinite(values.sum())):
            continue  # the usual case, found without a mask of the column's size: one such number makes the sum not finite
        bad = ~torch.isfinite(values)
        rows = np.flatnonzero(row_counts(bad, view.offsets).numpy() > 0 if is_ragged(column) else bad.numpy()).tolist()
        if rows:  # none if only the sum overflowed
            broken[name] = rows
    return broken


def described(view: Ragged, broken: dict[str, list[int]]) -> str:
    """The result of `broken_rows` as text."""
    return "; ".join(f"{name} of {named_rows(view, rows)}" for name, rows in broken.items())


def named_rows(view: Ragged, rows: Sequence[int]) -> str:
    """Rows by the numbers that a run's records use: group, member, and ledger of that episode."""
    episode, group, member = view.episode, view.numbers("group"), view.numbers("member")
    names = [
        f"(group {group[row]}, member {member[row]}, ledger {int((episode[:row] == episode[row]).sum())})"
        for row in list(rows)[:SHOWN]
    ]
    more = len(rows) - len(names)
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")

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
    """Rows in which a column of `COLUMNS` holds a number that is not finite, by column; empty where all is well."""
    found: dict[str, list[int]] = {}
    for name in COLUMNS:
        if name not in view:
            continue
        column = view.row(name)
        values = column.values() if is_ragged(column) else column
        if bool(torch.isfinite(values.sum())):
            continue  # the usual case, without a column of its own: one such number makes the sum so
        bad = ~torch.isfinite(values)
        rows = np.flatnonzero(row_counts(bad, view.offsets).numpy() > 0 if is_ragged(column) else bad.numpy()).tolist()
        if rows:
            found[name] = rows
    return found


def described(view: Ragged, found: dict[str, list[int]]) -> str:
    """What `broken_rows` found, as text."""
    return "; ".join(f"{name} of {named_rows(view, rows)}" for name, rows in found.items())


def named_rows(view: Ragged, rows: Sequence[int]) -> str:
    """Rows as a reader of the run knows them: number of the group, member, and which ledger of that episode."""
    episode, group, member = view.episode, view.numbers("group"), view.numbers("member")
    names = [
        f"(group {group[row]}, member {member[row]}, ledger {int((episode[:row] == episode[row]).sum())})"
        for row in list(rows)[:SHOWN]
    ]
    more = len(rows) - len(names)
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")

"""Where prefix sharing is used: which rows of a batch stay together, and whether that wins.

On the driver `with_trees` finds what could be shared, and `settled` decides, for the rows of one pass over
so many ranks, by the time of the slowest rank with and without. Workers read two row columns: `together`
int64 (rows with one number, not negative, lie on one rank and, as far as the cap allows, in one
micro-batch) and `prefix` int64 (so many first tokens are computed once for them; 0: none).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from tensordict import TensorDict

from agentrl.batch.balance import partition
from agentrl.batch.plan import group_units, unit_sums
from agentrl.batch.prefix import WORTH, Tree, find_trees
from agentrl.batch.rows import Rows, lengths, row_index, wide

Mode = Literal["off", "auto", "on"]
ALWAYS = 1.0
"""The ratio from which `on` shares: wherever it does not cost tokens."""


def resolved(mode: Mode) -> Mode:
    """What "auto" is on this machine: with a GPU "off", as it was measured to win on CPUs only."""
    return "off" if mode == "auto" and torch.cuda.is_available() else mode


def with_trees(batch: TensorDict, mode: Mode) -> TensorDict:
    """The batch with row columns `tree` int64 (the number of its tree, -1 alone) and `tree_prefix` int64
    (tokens that the tree shares), and the batch-wide `share_from` (the ratio from which sharing is used).

    Unchanged where `mode` is "off" or no rows of a group begin alike. Needs `token_ids` and `group`.
    """
    if mode == "off" or len(batch) < 2:
        return batch
    tree = torch.full((len(batch),), -1, dtype=torch.int64)
    prefix = torch.zeros(len(batch), dtype=torch.int64)
    for number, found in enumerate(find_trees(batch, np.arange(len(batch)))):
        if found.prefix:
            tree[list(found.rows)] = number
            prefix[list(found.rows)] = found.prefix
    if not bool((tree >= 0).any()):
        return batch
    out: TensorDict = batch.copy()
    out.update({"tree": tree, "tree_prefix": prefix})
    out.set("share_from", wide(WORTH if mode == "auto" else ALWAYS, len(batch)))
    return out


@dataclass(frozen=True, slots=True)
class Settled:
    """Rows of each rank, the columns `together` and `prefix` of all rows, the tokens that the slowest rank
    computes (`load`), and how many times that it would compute without sharing (1.0: nothing is shared)."""

    ranks: list[np.ndarray]
    together: np.ndarray
    prefix: np.ndarray
    load: float
    ratio: float


def settled(
    tokens: np.ndarray,
    ranks: int,
    trees: tuple[np.ndarray, np.ndarray] | None,
    share_from: float,
    keep: np.ndarray | None = None,
) -> Settled:
    """Where rows of `tokens` tokens each go, and whether the trees (numbers, prefixes) are used.

    `keep[i]`: a group number; all rows of one group go to one rank, shared or not. Without it a tree with
    more than its share of the work is cut over ranks, and each of its parts computes the prefix.
    """
    nothing = np.zeros(len(tokens), dtype=np.int64)
    apart = np.full(len(tokens), -1, dtype=np.int64) if keep is None else keep
    plain, plain_load = _spread(tokens, ranks, apart, nothing, keep)
    if trees is None:
        return Settled(plain, apart, nothing, plain_load, 1.0)
    together, prefix = _used(*trees)
    shared, shared_load = _spread(tokens, ranks, together, prefix, keep)
    ratio = plain_load / max(shared_load, 1.0)
    if ratio <= ALWAYS or ratio < share_from:
        return Settled(plain, apart, nothing, plain_load, 1.0)
    if keep is not None:
        together = np.where(together >= 0, together, together.max() + 1 + keep)
    return Settled(shared, together, prefix, shared_load, ratio)


def _used(tree: np.ndarray, prefix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Trees of which at least two rows are here."""
    count = np.bincount(tree[tree >= 0], minlength=1)
    alive = (tree >= 0) & (count[np.maximum(tree, 0)] > 1)
    return np.where(alive, tree, -1), np.where(alive, prefix, 0)


def _spread(
    tokens: np.ndarray, ranks: int, together: np.ndarray, prefix: np.ndarray, keep: np.ndarray | None
) -> tuple[list[np.ndarray], float]:
    """Rows of each rank, and the tokens that the busiest one computes."""
    if keep is None and not bool((together >= 0).any()):
        parts = [np.sort(np.asarray(part, dtype=np.int64)) for part in partition(tokens, ranks)]
        return parts, max((float(tokens[part].sum()) for part in parts), default=0.0)
    unit = group_units(tokens, together, np.inf, prefix)
    cost = unit_sums(unit, tokens, prefix)
    if keep is not None:
        group = np.unique(keep, return_inverse=True)[1]
        home = np.zeros(len(cost), dtype=np.int64)
        home[unit] = group
        unit, cost = group, np.bincount(home, weights=cost)
    elif ranks > 1:
        unit = group_units(tokens, together, -(-float(cost.sum()) // ranks), prefix)
        cost = unit_sums(unit, tokens, prefix)
    owner = np.zeros(len(cost), dtype=np.int64)
    loads = [0.0]
    for rank, mine in enumerate(partition(cost, ranks)):
        owner[mine] = rank
        loads.append(float(cost[mine].sum()))
    return [np.flatnonzero(owner[unit] == rank) for rank in range(ranks)], max(loads)


def columns_of(batch: TensorDict, rows: np.ndarray) -> tuple[tuple[np.ndarray, np.ndarray] | None, float]:
    """The trees of `rows` as `settled` takes them, and the ratio to share from; None where there are none."""
    if "tree" not in set(batch.keys()):
        return None, ALWAYS
    trees = (np.asarray(batch.get("tree"))[rows], np.asarray(batch.get("tree_prefix"))[rows])
    return trees, float(batch["share_from"])


def trees_of(batch: TensorDict, rows: Rows) -> list[Tree]:
    """On a worker: the trees of a micro-batch by its columns; empty where none of its rows share."""
    if "prefix" not in set(batch.keys()):
        return []
    index = row_index(rows)
    prefix = np.asarray(batch.get("prefix"))[index]
    together = np.asarray(batch.get("together"))[index]
    trees: dict[int, list[int]] = {}
    for place, number in enumerate(together.tolist()):
        trees.setdefault(number if prefix[place] else -1 - place, []).append(place)
    found = [Tree(tuple(p), int(prefix[p[0]]) if len(p) > 1 else 0) for p in trees.values()]
    return found if any(tree.prefix for tree in found) else []


def planned_columns(batch: TensorDict, rows: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
    """On a worker: `groups` and `prefix` of `plan` for these rows; None where all rows are free."""
    if "together" not in set(batch.keys()):
        return None, None
    return np.asarray(batch.get("together"))[rows], np.asarray(batch.get("prefix"))[rows]


def token_ratio(batch: TensorDict) -> float:
    """Plain tokens of a batch for each token that remains where every tree computes its prefix once."""
    trees, _ = columns_of(batch, np.arange(len(batch)))
    tokens = lengths(batch).numpy()
    if trees is None:
        return 1.0
    unit = group_units(tokens, trees[0], np.inf, trees[1])
    return float(tokens.sum() / unit_sums(unit, tokens, trees[1]).sum())

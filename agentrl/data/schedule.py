"""Schedule rows over minibatches, ranks and micro-batches; find shared prefixes; mark the origin of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Any, Literal

import numpy as np
import torch

from agentrl.config.schema import AlgorithmConfig
from agentrl.data.packing import group_units, micro_batches, partition, unit_sums
from agentrl.data.rows import Ragged, Rows
from agentrl.utils.errors import ConfigError

# Prefix sharing: rows of a group that begin with the same tokens compute those tokens once.
#
# A tree is a shared prefix followed by the suffix of every row. Each suffix attends to [prefix; itself], so hidden
# states, logprobs and gradients are those of the plain layout. The last token of the prefix predicts the first
# token of every suffix.

PER_TREE, PER_ROW = 8.0, 4.0
"""Extra cost of a tree, and of each of its rows, in tokens: separate attention calls. Measured on a CPU with the smallest models,
for which calls are most expensive (benchmarks/cluster.py --only prefix)."""

MIN_PREFIX = 16
"""Minimum tokens of a shared prefix."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Rows (positions in the batch or micro-batch) that share their first `prefix` tokens; a single row has prefix 0."""

    rows: tuple[int, ...]
    prefix: int


@dataclass(frozen=True, slots=True)
class SharedPack:
    """A micro-batch with shared prefixes: U computed tokens represent T plain ones.

    - `token_ids` (dtype of the batch), `position_ids` int64 [U]: the model's input (positions as in the plain rows).
    - `spans` int64 [S, 4]: (prefix start, prefix stop, start, stop); the tokens [start, stop) see the
      prefix and, causally, themselves. All spans together cover [0, U) in order.
    - `at` int64 [T]: position among the computed tokens of each plain token (rows end to end, as in `pack`). So
      `hidden[at]` is the hidden state of the plain layout, and autograd sums the gradients of shared tokens.
    """

    token_ids: torch.Tensor
    position_ids: torch.Tensor
    spans: torch.Tensor
    at: torch.Tensor


def find_trees(view: Ragged, shortest: int = MIN_PREFIX) -> list[Tree]:
    """Find the trees of a batch: rows of one group (column `group`) that begin with the same tokens.

    Of all ways to split a group into trees, it saves the most tokens. A shared prefix is the longest common one that leaves at
    least one token to every row. Every row is in exactly one tree.
    """
    texts = np.split(view.tokens("token_ids").numpy(), view.offsets.numpy()[1:-1])
    buckets: dict[Any, list[int]] = {}
    for row, group in enumerate(view.numbers("group").tolist()):
        # Rows with different first `shortest` tokens never share a tree, so only rows of one bucket are compared.
        head = texts[row][:shortest]
        buckets.setdefault((group, head.tobytes()) if len(head) == shortest else ("alone", row), []).append(row)
    trees: list[Tree] = []
    for members in buckets.values():
        # Sorted by bytes, texts with a common prefix are adjacent, so every tree is a run in this order.
        members.sort(key=lambda row: texts[row].tobytes())
        for run, prefix in _best_runs([texts[row] for row in members], shortest):
            rows = tuple(sorted(members[run]))
            trees += [Tree(rows, prefix)] if prefix else [Tree((row,), 0) for row in rows]
    return sorted(trees, key=attrgetter("rows"))


def _best_runs(texts: Sequence[np.ndarray], shortest: int) -> list[tuple[slice, int]]:
    """Cut sorted texts into the runs that save the most tokens. Returns runs and common prefixes (0 for a run of one)."""
    common: list[int] = []  # length of the common prefix of each text and the next
    for one, other in pairwise(texts):
        most = min(len(one), len(other))
        differ = np.flatnonzero(one[:most] != other[:most])
        common.append(int(differ[0]) if len(differ) else most)
    best: list[tuple[int, int, int]] = [(0, 0, 0)]  # up to text j: tokens saved, start and prefix of its run
    for stop in range(1, len(texts) + 1):
        # Dynamic programming over the start of the last run. Going backwards, the common prefix only shrinks, so the first
        # start with less than `shortest` ends the search.
        saved = (best[stop - 1][0], stop - 1, 0)
        prefix = len(texts[stop - 1]) - 1  # no suffix is empty
        for start in range(stop - 2, -1, -1):
            prefix = min(prefix, common[start], len(texts[start]) - 1)
            if prefix < shortest:
                break
            saved = max(saved, (best[start][0] + (stop - start - 1) * prefix, start, prefix))
        best.append(saved)
    runs: list[tuple[slice, int]] = []
    stop = len(texts)
    while stop:
        _, start, prefix = best[stop]
        runs.append((slice(start, stop), prefix))
        stop = start
    return runs


def share(view: Ragged, rows: Rows, trees: Sequence[Tree]) -> SharedPack:
    """Build the shared layout of at least one row of a batch (see SharedPack)."""
    index = np.asarray(rows, dtype=np.int64)
    tokens, offsets = view.tokens("token_ids").numpy(), view.offsets.numpy()
    counts = view.lengths[index]
    plain = np.concatenate(([0], np.cumsum(counts)))
    at = np.empty(plain[-1], dtype=np.int64)
    parts: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    spans: list[tuple[int, int, int, int]] = []
    total = 0

    # A tree is its prefix, then each row's suffix: positions continue from the prefix, so rotary embeddings are those of the
    # plain rows, and `at` maps the prefix tokens of all rows to the same computed tokens.
    for tree in trees:
        start = total
        pieces = [(tree.rows[0], 0, tree.prefix)] if tree.prefix else []
        for place, first, last in pieces + [(place, tree.prefix, int(counts[place])) for place in tree.rows]:
            begin, total = total, total + last - first
            row = offsets[index[place]]
            parts.append(tokens[row + first : row + last])
            positions.append(np.arange(first, last))
            spans.append((start, start + first, begin, total))
            where = at[plain[place] : plain[place + 1]]
            where[:first] = np.arange(start, start + first)
            where[first:last] = np.arange(begin, total)
    return SharedPack(
        torch.from_numpy(np.concatenate(parts)),
        torch.from_numpy(np.concatenate(positions)),
        torch.tensor(spans, dtype=torch.int64).reshape(-1, 4),
        torch.from_numpy(at),
    )


# Added rows

ORIGIN, FRESH = "origin", 0
"""Row column: FRESH for a row that was played for the update, else the number of its loss term, from 1."""


def origins(view: Ragged) -> np.ndarray:
    """Return the origin of each row, int64 [N]."""
    return view.numbers(ORIGIN) if ORIGIN in view else np.full(len(view), FRESH)


# The schedule of rows over minibatches and ranks (on the driver: row columns `minibatch`, `dp_rank`, `together`, `prefix`) and
# over micro-batches (`plan_micro_batches`, on each worker).
#
# Minibatches come first and do not depend on the number of ranks, so neither do the content and result of an optimizer
# step. Ranks are balanced within a minibatch, because all ranks wait for each other at its end. Micro-batches come last,
# on the worker: they do not change the result (losses have global denominators), ranks search for a good packing in
# parallel, and the cap is that of the computing role.
#
# `with_trees` finds shared prefixes; `plan_ranks` decides if a minibatch uses them.

Mode = Literal["off", "auto", "on"]
ADDED_STREAM = 1
"""Seed component that separates the random order of added episodes from the shuffle of the others."""
NO_COST = 0.0
"""Weight of the extra cost of trees for mode "on", which shares whenever that saves tokens; 1 for "auto"."""


def cut_minibatches(view: Ragged, algorithm: AlgorithmConfig, seed: int, step: int) -> list[np.ndarray]:
    """Cut a batch into minibatches: all rows of at most `algorithm.minibatch` episodes, shuffled by seed and step.

    Added episodes are distributed evenly over the minibatches: they change neither the number of optimizer steps nor the other
    episodes in each.
    """
    origin = origins(view)
    among = np.flatnonzero(origin == FRESH)
    episode = view.episode[among]  # fresh rows come first, so that their episodes are numbered from 0 without a gap
    count = int(episode.max()) + 1 if len(episode) else 0
    groups = None
    if algorithm.groups == "kept":
        groups = np.zeros(count, dtype=np.int64)
        groups[episode] = view.numbers("group")[among]
    # By episode, not by row: aggregation and counts are per episode, so all rows of one belong to one optimizer step.
    order = np.argsort(episode, kind="stable")
    rows = np.split(among[order], np.cumsum(np.bincount(episode, minlength=count))[:-1]) if count else []
    cut = shuffle_parts(count, algorithm.minibatch, seed, step, groups)
    parts = [np.concatenate([rows[number] for number in part]) for part in cut]
    added = np.flatnonzero(origin != FRESH)
    if not len(added):
        return parts
    # "kept": all added episodes of a group are in one minibatch.
    names = view.numbers("group") if algorithm.groups == "kept" else view.episode
    unit = np.unique(names[added], return_inverse=True)[1]
    order = np.random.default_rng([seed, step, ADDED_STREAM]).permutation(int(unit.max()) + 1)
    dealt = [added[np.isin(unit, order[number :: len(parts)])] for number in range(len(parts))]
    return [np.concatenate(pair) for pair in zip(parts, dealt, strict=True)]


def shuffle_parts(count: int, size: int, seed: int, step: int, groups: np.ndarray | None = None) -> list[np.ndarray]:
    """Shuffle `count` episodes into the fewest nearly equal parts of at most `size`.

    With `groups` (a number per episode), whole groups in random order fill parts of at most `size` episodes; only larger groups
    are cut.
    """
    if count == 0:
        return []
    # A separate generator per step: a resumed run makes the same minibatches without replaying earlier steps.
    rng = np.random.default_rng([seed, step])
    if groups is None:
        return np.array_split(rng.permutation(count), -(-count // size))
    order = np.argsort(groups, kind="stable")
    members = np.split(order, np.flatnonzero(np.diff(groups[order])) + 1)
    parts: list[list[int]] = [[]]
    for number in rng.permutation(len(members)):
        for start in range(0, len(members[number]), size):
            piece = members[number][start : start + size].tolist()
            if parts[-1] and len(parts[-1]) + len(piece) > size:
                parts.append([])
            parts[-1] += piece
    return [np.asarray(part, dtype=np.int64) for part in parts]


def effective_mode(mode: Mode, gpus: bool) -> Mode:
    """Resolve mode "auto": "off" for actors with `gpus`, because sharing was measured to be faster on CPUs only."""
    return "off" if mode == "auto" and gpus else mode


def with_trees(view: Ragged, mode: Mode) -> Ragged:
    """Add the prefix trees of a batch, as columns; unchanged if `mode` is "off" or no rows of a group share a prefix.

    Row columns int64 `tree` (number of the row's tree, or -1) and `tree_prefix` (shared tokens); batch-wide `tree_cost` (weight
    of the extra cost of trees, see `plan_ranks`). Needs `token_ids` and `group`.
    """
    if mode == "off" or len(view) < 2:
        return view
    tree = torch.full((len(view),), -1, dtype=torch.int64)
    prefix = torch.zeros(len(view), dtype=torch.int64)
    for number, shared in enumerate(find_trees(view)):
        if shared.prefix:
            tree[list(shared.rows)] = number
            prefix[list(shared.rows)] = shared.prefix
    if not bool((tree >= 0).any()):
        return view
    return view.with_rows(tree=tree, tree_prefix=prefix).with_rows(tree_cost=1.0 if mode == "auto" else NO_COST)


def assign_ranks(view: Ragged, parts: Sequence[np.ndarray], ranks: int, kept: bool = False) -> Ragged:
    """Assign the rows of each part to ranks, balanced by tokens. Adds int64 row columns:

    - `minibatch`: part of the row; `dp_rank`: its rank, -1 for a row in no part;
    - if any rows stay together: `together`: rows with the same number >= 0 are on one rank and, as far as the cap allows, in one
      micro-batch; `prefix`: number of their first tokens that are computed once, or 0.

    `kept`: all rows of a group in a minibatch stay on one rank.
    """
    minibatch, prefix = np.zeros((2, len(view)), dtype=np.int64)
    rank, together = np.full((2, len(view)), -1, dtype=np.int64)
    keep = view.numbers("group") if kept else None
    for number, rows in enumerate(parts):
        if len(rows) == 0:
            continue
        minibatch[rows] = number
        trees, cost = None, NO_COST
        if "tree" in view:
            trees, cost = (view.numbers("tree")[rows], view.numbers("tree_prefix")[rows]), float(view.batch["tree_cost"])
        made = plan_ranks(view.lengths[rows], ranks, trees, cost, None if keep is None else keep[rows])
        rank[rows], together[rows], prefix[rows] = made.rank, made.together, made.prefix
    view = view.with_rows(minibatch=torch.from_numpy(minibatch), dp_rank=torch.from_numpy(rank))
    if not (together >= 0).any():
        return view
    return view.with_rows(together=torch.from_numpy(together), prefix=torch.from_numpy(prefix))


@dataclass(frozen=True, slots=True)
class RankPlan:
    """Ranks of rows, the columns `together` and `prefix`, and `load`: tokens of the slowest rank."""

    rank: np.ndarray
    together: np.ndarray
    prefix: np.ndarray
    load: float


def plan_ranks(
    tokens: np.ndarray, ranks: int, trees: tuple[np.ndarray, np.ndarray] | None, tree_cost: float, keep: np.ndarray | None = None
) -> RankPlan:
    """Assign rows to ranks by tokens, and decide whether to use `trees` (numbers, prefixes).

    `keep[i]`: group number; all rows of a group go to one rank, shared or not. Without it, a tree with more work than a rank's
    even share is split over ranks, and each part computes the prefix.

    Both layouts are planned. The shared one is used if its *slowest rank* has fewer tokens, including `tree_cost` times the extra
    cost of its trees. The total over ranks would mislead: one large tree on one rank saves tokens and makes it the slowest.
    """
    nothing = np.zeros(len(tokens), dtype=np.int64)
    apart = np.full(len(tokens), -1, dtype=np.int64) if keep is None else keep
    plain, plain_load = _balance(tokens, ranks, apart, nothing, keep)
    if trees is None:
        return RankPlan(plain, apart, nothing, plain_load)
    tree, prefix = trees
    # Only trees with at least two rows here: of a tree that is cut over minibatches, a single row shares nothing.
    count = np.bincount(tree[tree >= 0], minlength=1)
    used = (tree >= 0) & (count[np.maximum(tree, 0)] > 1)
    together, prefix = np.where(used, tree, -1), np.where(used, prefix, 0)
    shared, shared_load = _balance(tokens, ranks, together, prefix, keep)
    extra = 0.0  # maximum over ranks
    for number in range(ranks):
        sizes = np.unique(together[used & (shared == number)], return_counts=True)[1]
        extra = max(extra, float(PER_TREE * len(sizes) + PER_ROW * sizes.sum()))
    if plain_load <= shared_load + tree_cost * extra:
        return RankPlan(plain, apart, nothing, plain_load)
    if keep is not None:
        # Rows without a tree still stay with their kept group, under a number that no tree has.
        together = np.where(together >= 0, together, together.max() + 1 + keep)
    return RankPlan(shared, together, prefix, shared_load)


def _balance(
    tokens: np.ndarray, ranks: int, together: np.ndarray, prefix: np.ndarray, keep: np.ndarray | None
) -> tuple[np.ndarray, float]:
    """Balance units over ranks: rows that stay together, with their prefix counted once.

    Returns the rank of each row, and the number of tokens of the busiest rank.
    """
    alone = keep is None and not bool((together >= 0).any())
    unit = np.arange(len(tokens)) if alone else group_units(tokens, together, np.inf, prefix)
    cost = unit_sums(unit, tokens, prefix)
    if keep is not None:
        # A kept group is one unit, even if it has several trees.
        group = np.unique(keep, return_inverse=True)[1]
        home = np.zeros(len(cost), dtype=np.int64)
        home[unit] = group
        unit, cost = group, np.bincount(home, weights=cost)
    elif ranks > 1 and not alone:
        # A unit larger than a rank's even share would always make its rank the slowest, so cut it at that size.
        unit = group_units(tokens, together, -(-float(cost.sum()) // ranks), prefix)
        cost = unit_sums(unit, tokens, prefix)
    owner = partition(cost, ranks)
    return owner[unit], float(np.bincount(owner, weights=cost, minlength=ranks).max())


def token_ratio(view: Ragged) -> float:
    """Return a batch's tokens per computed token, if every tree computes its prefix once."""
    if "tree" not in view:
        return 1.0
    tree, prefix = view.numbers("tree"), view.numbers("tree_prefix")
    unit = group_units(view.lengths, tree, np.inf, prefix)
    return float(view.lengths.sum() / unit_sums(unit, view.lengths, prefix).sum())


def plan_micro_batches(view: Ragged, cap: int, engine: Any, parts: Sequence[np.ndarray] | None = None) -> list[list[list[int]]]:
    """Plan the micro-batches of a worker's rows: `[part][micro]` -> row numbers; equal numbers on all ranks.

    `engine`: a BaseEngine. `parts`: default: the rows of each minibatch. `cap`: maximum computed tokens (a shared prefix counts
    once). An empty list is a dummy: a rank with fewer micro-batches must still take part in the collectives. If the engine does
    not pack, each row is a micro-batch, longest first. Raises ConfigError, on all ranks, if any row is longer than `cap`.
    """
    # Reduce before the check: if only one rank raised, the others would hang in their next collective.
    longest = int(engine.reduce(torch.tensor([int(view.lengths.max()) if len(view) else 0]), "max"))
    if longest > cap:
        raise ConfigError(
            f"a row has {longest} tokens, more than the hard cap of {cap} tokens per micro-batch: "
            f"set optim.micro_tokens to at least {longest}, or lower rollout.max_episode_tokens"
        )
    if parts is None:
        number = view.numbers("minibatch")
        parts = [np.flatnonzero(number == index) for index in range(len(view.batch["counts"]))]
    bins: list[list[list[int]]] = []
    for part in parts:
        if not engine.packs:
            bins.append([[int(row)] for row in part[np.argsort(-view.lengths[part], kind="stable")]])
            continue
        together = prefix = None
        if "together" in view:
            together, prefix = view.numbers("together")[part], view.numbers("prefix")[part]
        # Rows already have their ranks; moving them would take another exchange.
        made = micro_batches(view.lengths[part], cap, groups=together, prefix=prefix)
        bins.append([part[micro].tolist() for micro in made])
    counts = engine.reduce(torch.tensor([len(micros) for micros in bins], dtype=torch.int64), "max")
    return [micros + [[]] * (int(most) - len(micros)) for micros, most in zip(bins, counts, strict=True)]


def trees_of(view: Ragged, rows: Rows) -> list[Tree]:
    """Read the trees of a worker's micro-batch from its columns; empty if no rows share a prefix."""
    if "prefix" not in view:
        return []
    index = np.asarray(rows, dtype=np.int64)
    prefix, together = view.numbers("prefix")[index], view.numbers("together")[index]
    trees: dict[int, list[int]] = {}
    for place, number in enumerate(together.tolist()):
        # Rows of a kept group may stay together without a prefix: each is then a separate tree, with a separate number.
        trees.setdefault(number if prefix[place] else -1 - place, []).append(place)
    if len(trees) == len(index):  # no tree with two rows
        return []
    return [Tree(tuple(p), int(prefix[p[0]]) if len(p) > 1 else 0) for p in trees.values()]

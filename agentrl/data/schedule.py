"""Schedule rows over minibatches, ranks and micro-batches; share common prefixes; mark where rows come from."""

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

# Prefix sharing: members of a group that begin with the same tokens compute those tokens once.
#
# A tree is a shared prefix followed by the suffix of every member. Each suffix attends to [prefix; itself],
# so hidden states, and therefore logprobs and gradients, are those of the plain layout. The first token after
# the prefix is predicted by the prefix's last token, which all members read.

PER_TREE, PER_ROW = 8.0, 4.0
"""Extra cost of a tree, and of each of its rows, in tokens of the model: calls of the attention for the tree alone.
Measured on a CPU with the smallest models, to which calls cost the most (benchmarks/cluster.py --only prefix)."""

SHORTEST = 16
"""Shorter common prefixes are not worth a tree."""


@dataclass(frozen=True, slots=True)
class Tree:
    """`rows` (positions in the micro-batch) share their first `prefix` tokens; a row by itself has prefix 0."""

    rows: tuple[int, ...]
    prefix: int


@dataclass(frozen=True, slots=True)
class SharedPack:
    """A micro-batch with shared prefixes: U computed tokens stand for T plain ones.

    - `token_ids` (dtype of the batch), `position_ids` int64 [U]: the model's input (positions as in the plain rows).
    - `spans` int64 [S, 4]: (prefix start, prefix stop, start, stop); the tokens [start, stop) see the
      prefix and, causally, themselves. All spans together cover [0, U) in order.
    - `at` int64 [T]: where the plain token t (rows end to end, as `pack` puts them) is computed. So
      `hidden[at]` is the plain layout's hidden state, and autograd sums the gradients of shared tokens.
    """

    token_ids: torch.Tensor
    position_ids: torch.Tensor
    spans: torch.Tensor
    at: torch.Tensor


def find_trees(view: Ragged, shortest: int = SHORTEST) -> list[Tree]:
    """Trees of a batch: rows of one group (column `group`) that begin with the same tokens.

    Of all ways to split a group's rows into trees, this is the one that saves the most tokens. A shared prefix is
    the longest common one, but leaves every member at least one token of its own. Every row is in exactly
    one tree.
    """
    texts = np.split(view.tokens("token_ids").numpy(), view.offsets.numpy()[1:-1])
    buckets: dict[Any, list[int]] = {}
    for row, group in enumerate(view.numbers("group").tolist()):
        # Rows that differ in their first `shortest` tokens never share a tree, so only rows of one bucket are compared.
        head = texts[row][:shortest]
        buckets.setdefault((group, head.tobytes()) if len(head) == shortest else ("alone", row), []).append(row)
    trees: list[Tree] = []
    for members in buckets.values():
        # Sorted by their bytes, texts with a common prefix are adjacent, so every tree is a run of this order.
        members.sort(key=lambda row: texts[row].tobytes())
        for run, prefix in _best_runs([texts[row] for row in members], shortest):
            rows = tuple(sorted(members[run]))
            trees += [Tree(rows, prefix)] if prefix else [Tree((row,), 0) for row in rows]
    return sorted(trees, key=attrgetter("rows"))


def _best_runs(texts: Sequence[np.ndarray], shortest: int) -> list[tuple[slice, int]]:
    """Sorted texts cut into runs, each with its common prefix (0 for a run of one), so that the most tokens are saved."""
    common: list[int] = []  # the longest common prefix of each text and the next
    for one, other in pairwise(texts):
        most = min(len(one), len(other))
        differ = np.flatnonzero(one[:most] != other[:most])
        common.append(int(differ[0]) if len(differ) else most)
    best: list[tuple[int, int, int]] = [(0, 0, 0)]  # up to text j: tokens saved, start and prefix of its run
    for stop in range(1, len(texts) + 1):
        # Dynamic programming over where the last run begins: at the last text, or at an earlier one. Going backwards, the
        # common prefix only shrinks, so the first start with less than `shortest` ends the search.
        saved = (best[stop - 1][0], stop - 1, 0)
        prefix = len(texts[stop - 1]) - 1  # a member keeps at least one token of its own: no suffix is empty
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
    """The shared layout of the rows `rows` of a batch (at least one row; see SharedPack)."""
    index = np.asarray(rows, dtype=np.int64)
    tokens, offsets = view.tokens("token_ids").numpy(), view.offsets.numpy()
    counts = view.lengths[index]
    plain = np.concatenate(([0], np.cumsum(counts)))
    at = np.empty(plain[-1], dtype=np.int64)
    parts: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    spans: list[tuple[int, int, int, int]] = []
    total = 0

    # A tree is its prefix, then each member's suffix: positions continue from the prefix, so rotary embeddings are
    # those of the plain rows, and `at` maps all members' prefix tokens to the one place where they are computed.
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


# Rows that are added to an update

ORIGIN, FRESH = "origin", 0
"""A row column: FRESH for a row that was played for the update, else the number of its loss term, from 1."""


def origins(view: Ragged) -> np.ndarray:
    """The origin of each row, int64 [N]."""
    return view.numbers(ORIGIN) if ORIGIN in view else np.full(len(view), FRESH)


# Where and when each row of a batch is computed: in which minibatch, on which rank, and in which micro-batch.
#
# All of it is decided here, in three steps; the decisions are written to row columns, which all other code reads.
#
# cut_minibatches      driver   episodes -> minibatches (optimizer steps), by seed and step
# assign_ranks         driver   rows of each minibatch -> ranks; whether prefixes are shared
# columns `minibatch`, `dp_rank`; if rows stay together, `together`, `prefix`
# plan_micro_batches   worker   a rank's rows of each minibatch -> micro-batches under the token cap
#
# Minibatches come first and do not depend on the number of ranks, so neither does the content of an optimizer step, nor
# its result. Ranks are balanced within a minibatch, because all ranks wait for each other at its end. Micro-batches come
# last, and are planned on the worker: they do not change the result (losses have global denominators), all ranks then
# search for a good packing in parallel, and the cap is that of the role that computes.
#
# Rows that begin with the same tokens (members of a group, ledgers of one prompt) can compute these once if they are
# in one micro-batch. `with_trees` finds what could be shared; `plan_ranks` decides for the rows of one minibatch.

Mode = Literal["off", "auto", "on"]
ADDED = 1
"""Tells the random numbers by which added episodes are dealt out from those that shuffle the others."""
FREE = 0.0
"""The weight of a tree's own cost for `on`, which shares whenever that saves tokens; for `auto` it is 1."""


def cut_minibatches(view: Ragged, algorithm: AlgorithmConfig, seed: int, step: int) -> list[np.ndarray]:
    """The rows of each minibatch: all rows of at most `algorithm.minibatch` episodes, shuffled by seed and step.

    Episodes that were added to those of this update are dealt out evenly to the parts, which the others are cut into as
    without them: they change neither the number of optimizer steps nor what else is in one.
    """
    origin = origins(view)
    among = np.flatnonzero(origin == FRESH)
    episode = view.episode[among]  # fresh rows come first, so that their episodes are numbered from 0 without a gap
    count = int(episode.max()) + 1 if len(episode) else 0
    groups = None
    if algorithm.groups == "kept":
        groups = np.zeros(count, dtype=np.int64)
        groups[episode] = view.numbers("group")[among]
    # By episode, not by row: aggregation and counts are per episode, so all its rows belong to one optimizer step.
    order = np.argsort(episode, kind="stable")
    rows = np.split(among[order], np.cumsum(np.bincount(episode, minlength=count))[:-1]) if count else []
    cut = shuffle_parts(count, algorithm.minibatch, seed, step, groups)
    parts = [np.concatenate([rows[number] for number in part]) for part in cut]
    added = np.flatnonzero(origin != FRESH)
    if not len(added):
        return parts
    # "kept": all episodes of a group that were added are in one minibatch.
    names = view.numbers("group") if algorithm.groups == "kept" else view.episode
    unit = np.unique(names[added], return_inverse=True)[1]
    order = np.random.default_rng([seed, step, ADDED]).permutation(int(unit.max()) + 1)
    dealt = [added[np.isin(unit, order[number :: len(parts)])] for number in range(len(parts))]
    return [np.concatenate(pair) for pair in zip(parts, dealt, strict=True)]


def shuffle_parts(count: int, size: int, seed: int, step: int, groups: np.ndarray | None = None) -> list[np.ndarray]:
    """`count` episodes in random order, cut into the smallest number of nearly equal parts of at most `size`.

    With `groups` (a number per episode), whole groups in random order fill parts of at most `size` episodes; only a
    larger group is cut.
    """
    if count == 0:
        return []
    # A generator of its own per step: a resumed run makes the same minibatches without replaying earlier steps.
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
    """Meaning of "auto" for actors with or without `gpus`: "off" with, because sharing was measured to be faster on CPUs only."""
    return "off" if mode == "auto" and gpus else mode


def with_trees(view: Ragged, mode: Mode) -> Ragged:
    """The batch with row columns `tree` int64 (the number of the row's tree, -1 if it has none) and `tree_prefix` int64
    (number of tokens that the tree shares), and the batch-wide `tree_cost` (how much a tree's own cost counts, see `plan_ranks`).

    Unchanged if `mode` is "off" or no rows of a group have a common prefix. Needs `token_ids` and `group`.
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
    return view.with_rows(tree=tree, tree_prefix=prefix).with_rows(tree_cost=1.0 if mode == "auto" else FREE)


def assign_ranks(view: Ragged, parts: Sequence[np.ndarray], ranks: int, kept: bool = False) -> Ragged:
    """The batch with `minibatch` (the part of each row), `dp_rank` (balanced by tokens within each part; -1 for a
    row of no part), and `together` and `prefix` if any rows stay together:

    - `together` int64: rows with the same number, if it is not negative, are on one rank and, as far as the cap
      allows, in one micro-batch;
    - `prefix` int64: the number of their first tokens that are computed once for all of them; 0: none.

    `kept`: all rows of a group in a minibatch stay on one rank.
    """
    minibatch, prefix = np.zeros((2, len(view)), dtype=np.int64)
    rank, together = np.full((2, len(view)), -1, dtype=np.int64)
    keep = view.numbers("group") if kept else None
    for number, rows in enumerate(parts):
        if len(rows) == 0:
            continue
        minibatch[rows] = number
        trees, cost = None, FREE
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
    """The rank of each row, the columns `together` and `prefix`, and the number of tokens that the slowest rank computes
    (`load`)."""

    rank: np.ndarray
    together: np.ndarray
    prefix: np.ndarray
    load: float


def plan_ranks(
    tokens: np.ndarray, ranks: int, trees: tuple[np.ndarray, np.ndarray] | None, tree_cost: float, keep: np.ndarray | None = None
) -> RankPlan:
    """The rank of each row, given its number of tokens, and whether the trees (numbers, prefixes) are used.

    `keep[i]`: a group number; all rows of one group go to one rank, shared or not. Without it, a tree with
    more work than a rank's even share is cut over ranks, and each of its parts computes the prefix.

    Both layouts are planned, and the shared one is taken if the *slowest rank* is faster by it: fewer tokens, also with
    `tree_cost` times the extra cost of its trees. The total over all ranks would be misleading: one large tree that must stay on
    one rank saves tokens but makes that rank the slowest.
    """
    nothing = np.zeros(len(tokens), dtype=np.int64)
    apart = np.full(len(tokens), -1, dtype=np.int64) if keep is None else keep
    plain, plain_load = _spread(tokens, ranks, apart, nothing, keep)
    if trees is None:
        return RankPlan(plain, apart, nothing, plain_load)
    tree, prefix = trees
    # Trees with at least two rows here: if a tree is cut over minibatches, a part of one row shares nothing.
    count = np.bincount(tree[tree >= 0], minlength=1)
    used = (tree >= 0) & (count[np.maximum(tree, 0)] > 1)
    together, prefix = np.where(used, tree, -1), np.where(used, prefix, 0)
    shared, shared_load = _spread(tokens, ranks, together, prefix, keep)
    extra = 0.0  # of the trees on one rank, the most
    for number in range(ranks):
        sizes = np.unique(together[used & (shared == number)], return_counts=True)[1]
        extra = max(extra, float(PER_TREE * len(sizes) + PER_ROW * sizes.sum()))
    if plain_load <= shared_load + tree_cost * extra:
        return RankPlan(plain, apart, nothing, plain_load)
    if keep is not None:
        # Rows of a kept group without a tree still stay with their group, under a number that no tree has.
        together = np.where(together >= 0, together, together.max() + 1 + keep)
    return RankPlan(shared, together, prefix, shared_load)


def _spread(
    tokens: np.ndarray, ranks: int, together: np.ndarray, prefix: np.ndarray, keep: np.ndarray | None
) -> tuple[np.ndarray, float]:
    """The rank of each row, and the number of tokens that the busiest rank computes.

    Units are balanced: rows that stay together, with their prefix counted once.
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
        # A unit larger than a rank's even share would make its rank the slowest in any assignment, so it is cut at that size.
        unit = group_units(tokens, together, -(-float(cost.sum()) // ranks), prefix)
        cost = unit_sums(unit, tokens, prefix)
    owner = partition(cost, ranks)
    return owner[unit], float(np.bincount(owner, weights=cost, minlength=ranks).max())


def token_ratio(view: Ragged) -> float:
    """Plain tokens of a batch per token that remains if every tree computes its prefix once."""
    if "tree" not in view:
        return 1.0
    tree, prefix = view.numbers("tree"), view.numbers("tree_prefix")
    unit = group_units(view.lengths, tree, np.inf, prefix)
    return float(view.lengths.sum() / unit_sums(unit, view.lengths, prefix).sum())


def plan_micro_batches(view: Ragged, cap: int, engine: Any, parts: Sequence[np.ndarray] | None = None) -> list[list[list[int]]]:
    """On a worker: micro-batches of each part of its rows: `[part][micro]` -> row numbers; equally many on all ranks. `engine`
    (a BaseEngine) reduces over them, and says whether rows may share a pass. `parts`: by default the rows of each minibatch.

    An empty list is a dummy: a rank with fewer micro-batches than another must still take part in each of the collectives.
    The cap counts the tokens that are computed: a shared prefix once. If the engine does not pack, each row is a
    micro-batch of its own, longest first. Raises ConfigError, on all ranks, if a row
    of any rank is longer than `cap` tokens.
    """
    # Reduced before it is checked: if only one rank raised, the others would hang in their next collective.
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
        # For one rank: each row has its rank by now, and moving it would take another exchange.
        made = micro_batches(view.lengths[part], cap, groups=together, prefix=prefix)
        bins.append([part[micro].tolist() for micro in made])
    counts = engine.reduce(torch.tensor([len(micros) for micros in bins], dtype=torch.int64), "max")
    return [micros + [[]] * (int(most) - len(micros)) for micros, most in zip(bins, counts, strict=True)]


def trees_of(view: Ragged, rows: Rows) -> list[Tree]:
    """On a worker: the trees of a micro-batch, read from its columns; empty if none of its rows share a prefix."""
    if "prefix" not in view:
        return []
    index = np.asarray(rows, dtype=np.int64)
    prefix, together = view.numbers("prefix")[index], view.numbers("together")[index]
    trees: dict[int, list[int]] = {}
    for place, number in enumerate(together.tolist()):
        # Rows may stay together without a prefix (a kept group): each is then a tree of its own, under a number of its own.
        trees.setdefault(number if prefix[place] else -1 - place, []).append(place)
    if len(trees) == len(index):  # each row by itself
        return []
    return [Tree(tuple(p), int(prefix[p[0]]) if len(p) > 1 else 0) for p in trees.values()]

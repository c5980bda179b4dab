"""Prefix sharing: members of a group that begin with the same tokens compute those tokens once.

A tree is a shared prefix followed by the suffix of every member. Each suffix attends to [prefix; itself],
so hidden states, and therefore logprobs and gradients, are those of the plain layout. The first token after
the prefix is predicted by the prefix's last token, which all members read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from agentrl.batch.rows import Ragged, Rows, row_index

PER_TREE, PER_ROW = 8.0, 4.0
"""What a tree costs besides its tokens, and each of its rows, in tokens of the model: calls of the attention for the tree alone.
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
    trees: tuple[Tree, ...]

    @property
    def ratio(self) -> float:
        """Plain tokens per computed token."""
        return len(self.at) / max(1, len(self.token_ids))


def find_trees(view: Ragged, rows: Rows, shortest: int = SHORTEST) -> list[Tree]:
    """Trees over `rows`: rows of one group (column `group`) that begin with the same tokens.

    Of all ways to split a group's rows into trees, this is the one that saves the most tokens. A shared prefix is
    the longest common one, but leaves every member at least one token of its own. Every row is in exactly
    one tree.
    """
    index = row_index(rows)
    tokens, offsets = view.tokens("token_ids").numpy(), view.offsets.numpy()
    group = view.numbers("group")
    buckets: dict[Any, list[int]] = {}
    for place, row in enumerate(index.tolist()):
        # Rows that differ in their first `shortest` tokens never share a tree, so only rows of one bucket are compared.
        head = tokens[offsets[row] : offsets[row + 1]][:shortest]
        key = (int(group[row]), head.tobytes()) if len(head) == shortest else ("alone", place)
        buckets.setdefault(key, []).append(place)
    trees: list[Tree] = []
    for members in buckets.values():
        texts = [tokens[offsets[row] : offsets[row + 1]] for row in index[members]]
        # Sorted by their bytes, texts with a common prefix are adjacent, so every tree is a run of this order.
        order = sorted(range(len(texts)), key=lambda i: texts[i].tobytes())
        for part, prefix in _best_runs([texts[i] for i in order], shortest):
            rows = tuple(sorted(members[order[i]] for i in part))
            trees += [Tree(rows, prefix)] if prefix else [Tree((row,), 0) for row in rows]
    return sorted(trees, key=lambda tree: tree.rows)


def _best_runs(texts: Sequence[np.ndarray], shortest: int) -> list[tuple[range, int]]:
    """Sorted texts cut into runs, each with its common prefix (0 for a run of one), so that the most tokens are saved."""
    common = [_common(texts[i], texts[i + 1]) for i in range(len(texts) - 1)]
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
    runs: list[tuple[range, int]] = []
    stop = len(texts)
    while stop:
        _, start, prefix = best[stop]
        runs.append((range(start, stop), prefix))
        stop = start
    return runs


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """Length of the longest common prefix."""
    most = min(len(one), len(other))
    differ = np.flatnonzero(one[:most] != other[:most])
    return int(differ[0]) if len(differ) else most


def share(view: Ragged, rows: Rows, trees: Sequence[Tree] | None = None) -> SharedPack:
    """The shared layout of the rows `rows` of a batch (at least one row; see SharedPack)."""
    index = row_index(rows)
    if len(index) == 0:
        raise ValueError("a shared layout needs at least one row; use pack for a dummy")
    chosen = tuple(find_trees(view, rows) if trees is None else trees)
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
    def append(row: int, first: int, last: int, prefix: tuple[int, int]) -> int:
        nonlocal total
        begin = total
        parts.append(tokens[offsets[row] + first : offsets[row] + last])
        positions.append(np.arange(first, last))
        total += last - first
        spans.append((*prefix, begin, total))
        return begin

    for tree in chosen:
        start = total
        if tree.prefix:
            append(int(index[tree.rows[0]]), 0, tree.prefix, (start, start))
        for place in tree.rows:
            begin = append(int(index[place]), tree.prefix, int(counts[place]), (start, start + tree.prefix))
            where = at[plain[place] : plain[place + 1]]
            where[: tree.prefix] = np.arange(start, start + tree.prefix)
            where[tree.prefix :] = np.arange(begin, total)
    return SharedPack(
        torch.from_numpy(np.concatenate(parts)),
        torch.from_numpy(np.concatenate(positions)),
        torch.tensor(spans, dtype=torch.int64).reshape(-1, 4),
        torch.from_numpy(at),
        chosen,
    )

"""The view through which a batch is read, and the plan of where its rows are computed, against counts by hand."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch

from agentrl.config.schema import AlgorithmConfig
from agentrl.data.rows import Ragged, build, nested_tensor
from agentrl.data.schedule import Tree, assign_ranks, cut_minibatches, plan_micro_batches, trees_of, with_trees
from agentrl.utils.errors import ConfigError


def view_of(lengths: list[int], group: list[int] | None = None, member: list[int] | None = None, prompt: int = 0) -> Ragged:
    """Rows of so many tokens, numbered from 100 on, those longer than `prompt` behind a common prompt."""
    offsets = torch.tensor([0, *np.cumsum(lengths).tolist()])
    flat = torch.arange(100, 100 + sum(lengths))
    for start, length in zip(offsets[:-1].tolist(), lengths, strict=True):
        if length > prompt:
            flat[start : start + prompt] = torch.arange(prompt)
    rows = len(lengths)
    columns = {
        "token_ids": nested_tensor(flat, offsets),
        "group": torch.tensor(group or [0] * rows),
        "member": torch.tensor(member or list(range(rows))),
    }
    return Ragged.of(build(columns, rows))


class Ranks:
    """Ranks of which the others answer what they are told to."""

    packs = True

    def __init__(self, *others: list[int]) -> None:
        self.others, self.asked = others, 0

    def reduce(self, values: torch.Tensor, how: Literal["sum", "max"]) -> torch.Tensor:
        assert how == "max"
        other = torch.tensor(self.others[self.asked]) if self.asked < len(self.others) else values
        self.asked += 1
        return torch.maximum(values, other)


def test_the_view_says_where_rows_lie_and_adds_columns_over_the_same_offsets() -> None:
    view = view_of([3, 1, 2], group=[7, 7, 5], member=[1, 0, 1])
    assert view.offsets.tolist() == [0, 3, 4, 6] and view.lengths.tolist() == [3, 1, 2] and len(view) == 3
    assert view.tokens("token_ids").tolist() == [100, 101, 102, 103, 104, 105]
    assert view.numbers("group").tolist() == [7, 7, 5] and "rewards" not in view
    more = view.with_tokens(rewards=torch.arange(6.0)).with_rows(reward=torch.ones(3), counts=(1, 2))
    assert more.row("rewards")[1].tolist() == [3.0] and more.row("rewards")[2].tolist() == [4.0, 5.0]
    assert more.batch["counts"] == (1, 2) and more.offsets is view.offsets
    assert "rewards" not in view, "the view that was there stays as it is"
    assert torch.equal((more.row("rewards") * more.row("token_ids")).values(), torch.arange(6.0) * torch.arange(100, 106))


def test_episodes_are_numbered_by_first_appearance() -> None:
    view = view_of([1] * 5, group=[9, 2, 9, 2, 9], member=[0, 0, 1, 0, 0])
    assert view.episode.tolist() == [0, 1, 2, 1, 0]


def test_a_batch_without_token_columns_has_rows_of_one() -> None:
    view = Ragged.of(build({"group": torch.zeros(3, dtype=torch.int64)}, 3))
    assert view.lengths.tolist() == [1, 1, 1] and view.offsets.tolist() == [0, 1, 2, 3]


def test_a_rank_with_fewer_micro_batches_gets_dummies_and_the_longest_row_of_all_ranks_counts() -> None:
    """Rows of 4, 3 and 2 tokens under a cap of 5 make two micro-batches; another rank has 4 of them in part 0, 1 in part 1."""
    view = view_of([4, 3, 2, 1])
    parts = [np.array([0, 1, 2]), np.array([3])]
    first, second = plan_micro_batches(view, 5, Ranks([5], [4, 1]), parts)
    assert sorted(sorted(rows) for rows in first if rows) == [[0], [1, 2]] and len(first) == 4 and first[2:] == [[], []]
    assert second == [[3]]
    one_row = Ranks([5], [4])
    one_row.packs = False  # then the longest comes first, so that ranks wait for each other least
    assert plan_micro_batches(view, 5, one_row, [np.array([1, 0, 3])]) == [[[0], [1], [3], []]]
    with pytest.raises(ConfigError, match=r"has 6 tokens.*optim.micro_tokens to at least 6"):
        plan_micro_batches(view, 5, Ranks([6]), parts)


def test_rows_of_a_tree_meet_on_a_rank_and_in_a_micro_batch_with_their_prefix_counted_once() -> None:
    """Two groups of three rows of 22 tokens, 20 of them shared within a group: 20 + 3 x 2 = 26 tokens are computed for each,
    so under a cap of 26 each group is one micro-batch of 66 plain tokens; without sharing each row is one."""
    view = view_of([22] * 6, group=[0, 1, 0, 1, 0, 1], prompt=20)
    for mode, expected in (("on", [[0, 2, 4], [1, 3, 5]]), ("off", [[0], [1], [2], [3], [4], [5]])):
        placed = assign_ranks(with_trees(view, mode), [np.arange(6)], 2)  # type: ignore[arg-type]
        rank, found = placed.numbers("dp_rank"), []
        for owner in (0, 1):
            mine = np.flatnonzero(rank == owner)
            [micros] = plan_micro_batches(placed, 26, Ranks(), [mine])
            found += [sorted(rows) for rows in micros]
            assert len(mine) == 3 and (mode == "off" or [tree.prefix for tree in trees_of(placed, mine)] == [20])
        assert sorted(found) == expected


def test_a_tree_of_more_than_a_ranks_share_is_cut_and_each_part_computes_the_prefix() -> None:
    """Eight rows of 16 + 16 tokens in one tree: 144 are computed, 72 a rank; so at most three rows (16 + 3 x 16 = 64) stay
    together. Parts of 64, 64 and 48 tokens over two ranks make 112 on the slower one, less than the 128 of eight plain rows;
    the whole tree on one rank would be more."""
    placed = assign_ranks(with_trees(view_of([32] * 8, prompt=16), "on"), [np.arange(8)], 2)
    assert sorted(np.bincount(placed.numbers("dp_rank")).tolist()) == [3, 5]
    assert placed.numbers("prefix").tolist() == [16] * 8


def test_a_kept_group_stays_together_with_its_rows_that_share_nothing() -> None:
    """Group 0: a tree of three rows and a row of another beginning; group 1: two such rows."""
    view = view_of([22, 22, 22, 5, 5, 5], group=[0, 0, 0, 0, 1, 1], prompt=20)
    placed = assign_ranks(with_trees(view, "on"), [np.arange(6)], 2, kept=True)
    rank, together = placed.numbers("dp_rank").tolist(), placed.numbers("together").tolist()
    assert len({*rank[:4]}) == 1 and len({*rank[4:]}) == 1
    tree, alone, other = together[0], together[3], together[4]
    assert together == [tree, tree, tree, alone, other, other] and len({tree, alone, other}) == 3 and min(together) >= 0
    assert placed.numbers("prefix").tolist() == [20, 20, 20, 0, 0, 0]
    assert trees_of(placed, [0, 1, 2, 4, 5]) == [Tree((0, 1, 2), 20), Tree((3,), 0), Tree((4,), 0)]


def test_of_a_tree_cut_over_minibatches_a_row_alone_shares_nothing() -> None:
    """Rows 0 to 2 are in the first minibatch with row 5, whose tree has its other rows in the second."""
    view = with_trees(view_of([22] * 6, group=[0, 0, 0, 1, 1, 1], prompt=20), "on")
    placed = assign_ranks(view, [np.array([0, 1, 2, 5]), np.array([3, 4])], 1)
    assert placed.numbers("prefix").tolist() == [20, 20, 20, 20, 20, 0]
    assert placed.numbers("together").tolist()[5] == -1


def test_minibatches_hold_whole_episodes_and_do_not_know_the_ranks() -> None:
    """Six episodes, the first of two rows, in minibatches of four: two of three episodes each, as numpy's generator cuts."""
    view = view_of([2] * 7, member=[0, 0, 1, 2, 3, 4, 5])
    parts = cut_minibatches(view, AlgorithmConfig(minibatch=4), seed=5, step=3)
    episodes = np.array_split(np.random.default_rng([5, 3]).permutation(6), 2)
    rows = [[row for number in part for row in np.flatnonzero(view.episode == number)] for part in episodes]
    assert [part.tolist() for part in parts] == rows
    for ranks in (1, 3):
        placed = assign_ranks(view, parts, ranks)
        assert [np.flatnonzero(placed.numbers("minibatch") == n).tolist() for n in (0, 1)] == [sorted(part) for part in rows]
        loads = [[int((placed.numbers("dp_rank")[part] == rank).sum()) for rank in range(ranks)] for part in parts]
        assert all(max(load) - min(load) <= 1 for load in loads)

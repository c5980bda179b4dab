"""Shared prefixes: the trees, their layout, and what each token attends to; numbers: trainer/test_attention.py."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.data.rows import Ragged, build, nested_tensor, pack
from agentrl.data.schedule import Tree, find_trees, share, token_ratio, with_trees
from tests.conftest import examples

SHORT = 2


def visible(spans: torch.Tensor) -> torch.Tensor:
    """Who sees whom: bool [U, U], row = query."""
    size = int(spans[-1, 3])
    mask = torch.zeros(size, size, dtype=torch.bool)
    for first, last, start, stop in spans.tolist():
        mask[start:stop, first:last] = True
        mask[start:stop, start:stop] = torch.ones(stop - start, stop - start, dtype=torch.bool).tril()
    return mask


def group_batch(texts, groups):
    offsets = torch.tensor([0, *torch.tensor([len(text) for text in texts]).cumsum(0).tolist()])
    flat = torch.tensor([token for text in texts for token in text], dtype=torch.int64)
    sampled = nested_tensor(torch.ones(len(flat), dtype=torch.bool), offsets)
    columns = {"token_ids": nested_tensor(flat, offsets), "sampled": sampled, "group": torch.tensor(groups)}
    return Ragged.of(build(columns, len(texts)))


def test_trees_by_hand():
    texts = [[1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 2, 3], [7, 8, 9], [1, 2, 3, 4]]
    batch = group_batch(texts, [0, 0, 0, 0, 1])
    assert find_trees(batch, SHORT) == [Tree((0, 1, 2), 2), Tree((3,), 0), Tree((4,), 0)]
    made = share(batch, [0, 1, 2], [Tree((0, 1, 2), 2)])
    assert made.token_ids.tolist() == [1, 2, 3, 4, 3, 5, 6, 3]
    assert made.position_ids.tolist() == [0, 1, 2, 3, 2, 3, 4, 2]
    assert made.spans.tolist() == [[0, 0, 0, 2], [0, 2, 2, 4], [0, 2, 4, 7], [0, 2, 7, 8]]
    assert made.at.tolist() == [0, 1, 2, 3, 0, 1, 4, 5, 6, 0, 1, 7]
    assert visible(made.spans)[7].nonzero().flatten().tolist() == [0, 1, 7]


def test_a_rewritten_history_does_not_shorten_what_the_others_share():
    """Five members share 30 tokens; two ledgers of a forked member share 20 with them, and 25 with each other."""
    prompt = list(range(1, 31))
    fork = [*prompt[:20], 90, 91, 92, 93, 94]
    texts = [prompt + [40 + i] * 3 for i in range(5)] + [[*fork, 50, 51], [*fork, 60]]
    batch = group_batch(texts, [0] * 7)
    assert find_trees(batch) == [Tree((0, 1, 2, 3, 4), 30), Tree((5, 6), 25)]


text = st.lists(st.integers(1, 2), min_size=1, max_size=8)


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(st.tuples(text, st.integers(0, 1)), min_size=1, max_size=7))
def test_every_plain_token_is_computed_somewhere_with_its_own_history(rows):
    texts, groups = [row[0] for row in rows], [row[1] for row in rows]
    batch = group_batch(texts, groups)
    made = share(batch, range(len(texts)), find_trees(batch, SHORT))
    packed = pack(batch, range(len(texts)))
    assert torch.equal(made.token_ids[made.at], packed["token_ids"])
    assert torch.equal(made.position_ids[made.at], packed["position_ids"])
    mask = visible(made.spans)
    start = 0
    for one in texts:
        for position in range(len(one)):
            seen = mask[made.at[start + position]].nonzero().flatten()
            assert made.token_ids[seen].tolist() == one[: position + 1]
        start += len(one)


def test_what_could_be_shared_counts_tokens():
    prompt = list(range(1, 41))
    batch = group_batch([prompt + [50 + i] * 10 for i in range(4)], [0] * 4)
    found = with_trees(batch, "auto")
    assert {found.row(name).dtype for name in ("tree", "tree_prefix")} == {torch.int64}
    assert token_ratio(found) == 200 / 80 and found.numbers("tree").tolist() == [0] * 4
    assert token_ratio(batch) == 1.0 and with_trees(batch, "off") is batch
    apart = group_batch([prompt + [50 + i] * 10 for i in range(4)], [0, 1, 2, 3])
    assert with_trees(apart, "on") is apart

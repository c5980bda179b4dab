"""The experts in a ledger stay beside the tokens that went to them: against plain lists, in files, in forks and in a batch."""

import json
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.data.expert_routing import FREE
from agentrl.data.rows import Ragged, collate, pack, select
from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import Task, Trajectory
from tests.conftest import examples

SHAPE = (3, 2)


turns = st.lists(
    st.tuples(
        st.lists(st.integers(0, 999), min_size=1, max_size=20),  # context
        st.lists(st.integers(0, 999), max_size=20),  # sampled
        st.integers(0, 3),  # how many tokens the engine did not compute, beside the last
        st.booleans(),  # whether the turn's experts are lost
        st.booleans(),  # whether the engine tells all tokens or those that are missing
    ),
    max_size=5,
)


@settings(max_examples=examples(150), deadline=None)
@given(turns, st.sampled_from([np.uint8, np.int16]), st.data())
def test_experts_stay_with_their_tokens(parts: list[Any], kind: Any, data: st.DataObject) -> None:
    ledger, ids, want = TokenLedger(), [], []
    for turn, (context, sampled, behind, lost, whole) in enumerate(parts):
        ledger.append_context(context, turn)
        ledger.append_sampled(sampled, [-1.0] * len(sampled), [0] * len(sampled), turn)
        ids += context + sampled
        start, stop = 0 if whole else ledger.routed_tokens, max(ledger.routed_tokens, len(ids) - 1 - behind)
        if not lost:  # by token and position; in the last column by turn, as if the engine were asked again
            rows = [[[token % 200, at % 200], [(token + at) % 200, 7], [turn, 1]] for at, token in enumerate(ids)][start:stop]
            told = np.asarray(rows, dtype=kind).reshape(-1, *SHAPE)
            ledger.add_experts(start, told)
            want += told[len(want) - start :].tolist()  # a token keeps those of the turn that first told them
    assert ledger.routed_tokens == len(want) and (ledger.experts is None) == all(part[3] for part in parts)
    if ledger.experts is None:
        return
    assert ledger.experts.tolist() == want and ledger.experts.dtype == kind
    for copy in (
        pickle.loads(pickle.dumps(ledger)),
        TokenLedger.from_json(json.loads("".join(ledger.json_chunks()))),
        TokenLedger.from_json(json.loads(json.dumps(ledger.to_json()))),
    ):
        assert copy == ledger and copy.experts.dtype == kind and copy.experts.tolist() == want
    keep = data.draw(st.integers(0, len(ledger)))
    fork = ledger.fork(keep)
    assert fork.experts is not None and fork.experts.tolist() == want[:keep]
    fork.append_context([5, 6], 0)
    if fork.routed_tokens == keep:
        fork.add_experts(keep, np.ones((1, *SHAPE), kind))
        assert fork.experts.tolist() == [*want[:keep], np.ones(SHAPE).tolist()] and ledger.experts.tolist() == want


def test_what_a_ledger_refuses() -> None:
    ledger = TokenLedger()
    ledger.append_context([1, 2, 3, 4], 0)
    ledger.add_experts(0, np.zeros((2, 3, 2), np.uint8))
    for start, rows, why in (
        (3, np.zeros((1, 3, 2), np.uint8), "the ledger has 4 tokens and those of the first 2"),
        (2, np.zeros((3, 3, 2), np.uint8), "experts of tokens 2 to 5"),
        (2, np.zeros((1, 4, 2), np.uint8), r"shape \(4, 2\) after some of shape \(3, 2\)"),
        (2, np.zeros((1, 3, 2), np.int16), "after some of"),
        (2, np.zeros((1, 3, 2), np.int64), "uint8 or int16, got int64"),
        (2, np.zeros((1, 3), np.uint8), r"got uint8 \(1, 3\)"),
    ):
        with pytest.raises(ValueError, match=why):
            ledger.add_experts(start, rows)
    assert ledger.routed_tokens == 2 and TokenLedger() != ledger
    other = ledger.fork(4)
    assert other == ledger
    other.add_experts(2, np.ones((1, 3, 2), np.uint8))
    assert other != ledger, "experts count in a comparison"


def test_a_batch_has_the_experts_of_its_rows() -> None:
    """Of rows of 3, 5 and 4 tokens the first 2, none and all 4 have experts; the others are marked as free, also when rows are
    taken out of the batch and put end to end."""
    lengths, known = (3, 5, 4), (2, 0, 4)
    rows = []
    for number, (length, count) in enumerate(zip(lengths, known, strict=True)):
        ledger = TokenLedger()
        ledger.append_context(list(range(length)), 0)
        if count:
            ledger.add_experts(0, np.full((count, *SHAPE), 10 * number + 1, np.int16))
        rows.append(Trajectory("made-up", Task("t", 0), member=number, ledgers=[ledger], reward=1.0))
    batch = collate(rows)
    want = [1, 1, -1, *[-1] * 5, *[21] * 4]
    assert batch["experts"].values().tolist() == [np.full(SHAPE, value).tolist() for value in want]
    packed = pack(Ragged.of(select(batch, [2, 0])), [0, 1])
    assert packed["experts"][:, 0, 0].tolist() == [21, 21, 21, 21, 1, 1, -1]
    assert "experts" not in collate(rows[1:2])
    rows[0].ledgers[0].experts = np.zeros((2, *SHAPE), np.uint8)
    with pytest.raises(ValueError, match="several models"):
        collate(rows)
    narrow = collate(rows[:1])["experts"].values()
    assert narrow[:, 0, 0].tolist() == [0, 0, FREE[narrow.dtype]]

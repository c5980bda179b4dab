"""Row operations and the serialized form, on every kind of column."""

from __future__ import annotations

import pickle
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.data.rows import Ragged, build, concat, deserialize, items_column, nested_tensor, select, serialize, wide


def every_column(sizes):
    offsets = torch.tensor([0, *torch.tensor(list(sizes), dtype=torch.int64).cumsum(0).tolist()])
    total = int(offsets[-1])
    return build(
        {
            "ids": nested_tensor(torch.arange(total), offsets),
            "half": nested_tensor(torch.arange(total).to(torch.bfloat16), offsets),
            "flag": nested_tensor(torch.arange(total) % 3 == 0, offsets),
            "wide": nested_tensor(torch.arange(2.0 * total).view(total, 2), offsets),
            "row": torch.arange(len(sizes)),
            "pair": torch.arange(2.0 * len(sizes)).view(-1, 2),
            "name": items_column([{"i": i} for i in range(len(sizes))]),
            "note": wide("all", len(sizes)),
        },
        len(sizes),
    )


def as_lists(batch):
    rows = {key: [row.tolist() for row in batch.get(key).unbind()] for key in ("ids", "half", "flag", "wide")}
    return rows | {
        "row": batch["row"].tolist(), "pair": batch["pair"].tolist(),
        "name": batch.get("name").tolist(), "note": batch.get("note").data, "dtype": batch["half"].dtype,
    }  # fmt: skip


def chosen(full, rows):
    return {k: [v[r] for r in rows] if k not in ("note", "dtype") else v for k, v in full.items()}


sizes = st.lists(st.integers(0, 6), min_size=1, max_size=7)


@settings(max_examples=80, deadline=None)
@given(sizes, st.data())
def test_select_serialized_and_concat_agree_with_lists(row_sizes, data):
    batch = every_column(row_sizes)
    full = as_lists(batch)
    rows = data.draw(st.lists(st.integers(0, len(row_sizes) - 1), max_size=9))
    wanted = chosen(full, rows)
    picked = select(batch, rows)
    sent = deserialize(pickle.loads(pickle.dumps(serialize(batch), protocol=5)), rows)
    if not rows:  # an empty nested tensor has no rows to unbind
        assert len(picked) == len(sent) == 0 and set(picked.keys()) == set(sent.keys()) == set(batch.keys())
        assert picked["half"].dtype == sent["half"].dtype == torch.bfloat16
        assert as_lists(concat([picked, batch])) == full
        return
    assert as_lists(picked) == as_lists(sent) == wanted
    assert Ragged.of(picked).lengths.tolist() == [row_sizes[row] for row in rows]
    both = concat([picked, batch])
    assert as_lists(both)["ids"] == wanted["ids"] + full["ids"] and as_lists(both)["name"][-1] == full["name"][-1]


def test_ragged_columns_of_a_result_share_offsets():
    for batch in (select(every_column([2, 3]), [1, 0]), concat([every_column([2]), every_column([1])])):
        assert torch.equal((batch["ids"] * batch["flag"]).values(), batch["ids"].values() * batch["flag"].values())


def test_rows_have_storage_of_their_own():
    batch = every_column([1000, 2])
    small = select(batch, [1])
    assert small["ids"].values().untyped_storage().nbytes() == 2 * 8
    serialized = serialize(batch)
    taken = deserialize(serialized, [0, 1])
    taken["ids"].values().fill_(-1)
    taken["row"].fill_(-1)
    assert batch["ids"].values()[1] == 1 and batch["row"].tolist() == [0, 1]


def test_while_rows_are_copied_the_warnings_of_other_threads_are_filtered_as_they_were(monkeypatch):
    before, seen = list(warnings.filters), []
    monkeypatch.setattr("agentrl.data.rows.nested_tensor", lambda *of: seen.append(list(warnings.filters)) or nested_tensor(*of))
    deserialize(serialize(every_column([2, 3])))
    assert seen == [before] * 4


def test_what_does_not_fit_is_refused():
    with pytest.raises(IndexError):
        select(every_column([1, 2]), [2])
    with pytest.raises(KeyError, match="differ in columns"):
        concat([every_column([1]), every_column([1]).exclude("row")])
    with pytest.raises(ValueError, match="at least one"):
        concat([])
    other = nested_tensor(torch.arange(3), torch.tensor([0, 1, 3]))
    odd = build({"a": nested_tensor(torch.arange(3), torch.tensor([0, 2, 3])), "b": other}, 2)
    with pytest.raises(ValueError, match="'b' has other row lengths than the first one"):
        serialize(odd)


def test_a_batch_without_tokens_travels():
    batch = every_column([1, 2]).select("row")
    sent = deserialize(pickle.loads(pickle.dumps(serialize(batch), protocol=5)), [1])
    assert set(sent.keys()) == {"row"} and sent["row"].tolist() == batch["row"][1:].tolist()

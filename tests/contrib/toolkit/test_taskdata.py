"""Tasks from JSONL, Parquet and datasets folders: splits, weights, and bad rows by file, line and field."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.contrib.toolkit.taskdata import Row, TaskSet, held_out_families, load_tasks
from agentrl.utils.errors import TaskDataError
from tests.conftest import examples


def row(n: int, **more: Any) -> dict[str, Any]:
    return {"id": f"t{n}", "data": {"q": f"question {n}"}, "gold": {"answer": n}, **more}


def write(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


def ids(tasks: TaskSet, split: str) -> set[str]:
    return {r.id for r in tasks.rows[split]}


def test_splits_by_column_by_name_and_by_hash(tmp_path: Path) -> None:
    tasks = load_tasks(write(tmp_path / "a.jsonl", [row(1, split="train"), row(2, split="test")]))
    assert (ids(tasks, "train"), ids(tasks, "heldout")) == ({"t1"}, {"t2"})
    write(tmp_path / "b" / "train-00000-of-00001.jsonl", [row(1), row(2)])
    write(tmp_path / "b" / "validation.jsonl", [row(3)])
    tasks = load_tasks(tmp_path / "b")
    assert tasks.splits == ("train", "validation") and len(tasks) == 3
    tasks = load_tasks(write(tmp_path / "c.jsonl", [row(n) for n in range(400)]))
    assert 20 < len(tasks.rows["heldout"]) < 90
    assert tasks == load_tasks(tmp_path / "c.jsonl")


@pytest.mark.parametrize(
    ("name", "split"),
    [("val", "validation"), ("Valid-0", "validation"), ("EVAL", "heldout"), ("held_out", "heldout"), ("retail_test", "heldout"),
     ("airline-dev", "validation"), ("train.v2", "train"), ("training", "train"), ("a/test/part-0", "heldout")],
)  # fmt: skip
def test_names_of_splits_as_people_write_them(tmp_path: Path, name: str, split: str) -> None:
    """Rows of val.jsonl beside train.jsonl were divided by a hash: seven of eight were trained on."""
    rows = [row(n) for n in range(40)]
    write(tmp_path / "d" / "train.jsonl", rows[:3])
    write(tmp_path / "d" / f"{name}.jsonl", rows[3:])
    assert {"t3", "t39"} < ids(load_tasks(tmp_path / "d"), split)
    column = write(tmp_path / "c.jsonl", [{**one, "split": name.upper()} for one in rows])
    assert load_tasks(column).splits == ((split,) if name in ("val", "EVAL", "training") else (name.upper(),))


def test_whole_families_are_held_out(tmp_path: Path) -> None:
    rows = [row(n, family=f"kind {n % 30}") for n in range(300)]
    tasks = load_tasks(write(tmp_path / "a.jsonl", rows), family_column="family")
    held = held_out_families(f"kind {n}" for n in range(30))
    assert ids(tasks, "heldout") == {f"t{n}" for n in range(300) if f"kind {n % 30}" in held} and 0 < len(held) < 10
    assert tasks.task(0, "train").data["family"] == tasks.rows["train"][0].family
    # Without the column the same rows are split one by one: a family is on both sides.
    apart = load_tasks(tmp_path / "a.jsonl")
    split = {name: {int(one[1:]) % 30 for one in ids(apart, name)} for name in ("train", "heldout")}
    assert split["train"] & split["heldout"]
    own = [row(0, family="x", split="train"), row(1, family="x", split="test")]
    with pytest.raises(TaskDataError, match=r"b.jsonl:2: family 'x' is in heldout, and in train too \(.*b.jsonl:1\)"):
        load_tasks(write(tmp_path / "b.jsonl", own), family_column="family")
    with pytest.raises(TaskDataError, match=r"c.jsonl:1: field kind: expected the name of the task's family, got None"):
        load_tasks(write(tmp_path / "c.jsonl", own), family_column="kind")
    one = load_tasks(write(tmp_path / "d.jsonl", [row(n, family="x") for n in range(90)]), family_column="family")
    assert 0 < len(one.rows["heldout"]) < 40, "one family alone is split by task"


def test_training_draws_by_weight_and_evaluation_walks(tmp_path: Path) -> None:
    rows = [row(1, split="train", weight=3.0), row(2, split="train"), *(row(n, split="test") for n in (3, 4, 5))]
    tasks = load_tasks(write(tmp_path / "a.jsonl", rows))
    counts = Counter(tasks.task(seed, "train").id for seed in range(10, 4010))
    assert 0.7 < counts["t1"] / 4000 < 0.8
    assert tasks.task(7, "train") == tasks.task(7, "train") and copy.deepcopy(tasks) is tasks, (
        "forks of an environment share them"
    )
    assert [tasks.task(seed, "heldout").id for seed in range(4)] == ["t3", "t4", "t5", "t3"]
    with pytest.raises(TaskDataError, match="no tasks of split 'heldot'; did you mean 'heldout'"):
        tasks.task(0, "heldot")


def test_a_misspelt_split_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its rows were a split that no command takes, without a word."""
    names = ("train", "Test ", "trian", "trian", "extra", "train_2", "hard")
    tasks = load_tasks(write(tmp_path / "a.jsonl", [row(n, split=name) for n, name in enumerate(names)]))
    assert len(tasks.rows["train"]) == len(tasks.rows["heldout"]) == 1
    assert [message.partition("a.jsonl")[2] for message in caplog.messages] == [
        ":3: field split: 'trian' is only taken by a config that asks for it; did you mean 'train'?"
    ]


def test_a_file_with_a_misspelt_split_in_its_name_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its rows were divided by a hash, without a word; one whose rows say their split has no need of a name."""
    for name, split in (("my-trian", {}), ("heldout", {}), ("tasks", {}), ("evl", {"split": "train"})):
        write(tmp_path / "all" / f"{name}.jsonl", [row(f"{name}{n}", **split) for n in range(9)])
    load_tasks(tmp_path / "all")
    assert [message.partition("/all/")[2] for message in caplog.messages] == [
        "my-trian.jsonl: its name says no split, so its rows are divided by a hash of their content; did you mean 'train'?"
    ]


NAMELESS = {"data": {"q": "?"}, "gold": {"a": 1}}


@pytest.mark.parametrize(("rows", "says"), [
    ([row(1), '{"id": '], ":2: not JSON"),
    ([row(1), {"id": "t2", "data": {}}], ":2: field (the row): 'gold' is a required property"),
    ([row(1, weight=0)], ":1: field weight"), ([row(1, weight="a")], ":1: field weight"),
    ([row(1, weight=float("nan"))], ":1: field weight: expected a finite number, got nan"),
    ([row(1, idx=1, weigth=3)], ":1: field weigth is not read; did you mean 'weight'?"),
    ([row(1, Split="test")], ":1: field Split is not read; did you mean 'split'?"),  # the row was trained on
    ([{**row(1), "data": 3}], ":1: field data: 3 is not of type 'object'"), (["[1, 2]"], ":1: field (the row)"),
    ([json.dumps([row(n) for n in range(99)])], "... is not of type 'object'"),
    (['{"data": {"q": "a"}, "data": {"q": "b"}, "gold": {}}'], ":1: not JSON: key 'data' is given twice"),
    ([{**row(1), "gold": {"a": [float("nan")]}}], ":1: nan is not a JSON number"),
    ([{**row(1), "data": {"q": 10**400}}], "00000000000000 is not a JSON number"),
    ([f'{{"data": {{"q": {"[" * 300}{"]" * 300}}}, "gold": {{}}}}'], ":1: ValueError: it contains itself, or is nested too deep"),
    ([row(1), row(2), {**row(1), "data": {"q": "other"}}], ":3: field id: 't1' is also the id of"),
    ([NAMELESS, row(2), NAMELESS], "bad.jsonl:1. Remove one, or give each an id of its own"),
    ([row(1, split="train"), {**row(1, split="test"), "id": "x"}], ":2: field data: this heldout task is also"),
    ([], "no rows"),
])  # fmt: skip
def test_a_bad_row_names_file_line_and_field(rows: list[Any], says: str, tmp_path: Path) -> None:
    path = write(tmp_path / "bad.jsonl", rows)
    with pytest.raises(TaskDataError) as caught:
        load_tasks(path)
    assert says in str(caught.value) and "bad.jsonl" in str(caught.value)


def test_other_layouts_and_their_schema(tmp_path: Path) -> None:
    schema = {
        "type": "object",
        "properties": {"question": {"type": "string", "minLength": 1}, "n": {"type": "integer"}},
        "required": ["question", "n"],
    }

    def to_task(raw: Any) -> Any:
        return {"q": raw["question"]}, {"answer": 10 // raw["n"]}

    path = write(tmp_path / "train.jsonl", [{"question": "a", "n": 5}])
    assert load_tasks(path, schema=schema, to_task=to_task).task(0, "train").gold == {"answer": 2}
    near = {**schema, "properties": {**schema["properties"], "height": {}}}  # a declared field is read: no slip of "weight"
    write(path, [{"question": "a", "n": 5, "height": 1, "splits": "tall"}])
    assert len(load_tasks(path, schema=near, to_task=to_task, family_column="splits")) == 1
    write(path, [{"question": "a", "n": 5}, {"question": "", "n": 5}])
    with pytest.raises(TaskDataError, match=r"train.jsonl:2: field question"):
        load_tasks(path, schema=schema, to_task=to_task)
    with pytest.raises(TaskDataError, match=r"train.jsonl:1: KeyError"):
        load_tasks(write(path, [{"q": 1}]), schema={}, to_task=to_task)
    with pytest.raises(TaskDataError, match="declared schema"):
        load_tasks(path, schema={"type": "objekt"})


def test_places_that_hold_nothing(tmp_path: Path) -> None:
    for path, says in ((tmp_path / "no", "no such file"), (tmp_path, "no file ending in"), (Path(__file__), "ending in")):
        with pytest.raises(TaskDataError, match=says):
            load_tasks(path)
    (tmp_path / "x.parquet").write_text("no table")
    with pytest.raises(TaskDataError, match=r"x\.parquet: not a readable"):
        load_tasks(tmp_path / "x.parquet")
    (tmp_path / "y.jsonl").write_bytes(b"\xff\xfe{}")
    with pytest.raises(TaskDataError, match="UTF-8"):
        load_tasks(tmp_path / "y.jsonl")


def test_parquet_and_a_datasets_folder(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the parquet extra is not installed")
    parquet = pytest.importorskip("pyarrow.parquet", reason="the parquet extra is not installed")
    rows = [row(1), {**row(2), "gold": {"answer": 2, "note": "x"}}]
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "train.parquet")
    tasks = load_tasks(tmp_path / "train.parquet")
    assert tasks.rows["train"][0].gold == {"answer": 1} and tasks.rows["train"][1].gold["note"] == "x"
    # The layout that datasets.DatasetDict.save_to_disk writes: a folder a split, Arrow streams inside.
    for split, part in (("train", table.slice(0, 1)), ("test", table.slice(1, 1))):
        folder = tmp_path / "saved" / split
        folder.mkdir(parents=True)
        (folder / "state.json").write_text("{}")
        place = str(folder / "data-00000-of-00001.arrow")
        with pyarrow.OSFile(place, "wb") as sink, pyarrow.ipc.new_stream(sink, part.schema) as stream:
            stream.write_table(part)
    tasks = load_tasks(tmp_path / "saved")
    assert ids(tasks, "train") == {"t1"} and ids(tasks, "heldout") == {"t2"}
    bad = pyarrow.Table.from_pylist([row(1), {"id": "t2", "data": {"q": "a"}, "gold": None}])
    parquet.write_table(bad, tmp_path / "train.parquet")
    with pytest.raises(TaskDataError, match=r"train\.parquet: row 1: field"):
        load_tasks(tmp_path / "train.parquet")


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=20), st.integers(0, 2**60))
@settings(max_examples=examples(100), deadline=None)
def test_every_seed_has_a_task(weights: list[float], seed: int) -> None:
    rows = [Row("x", str(n), "train", weight, {}, {}) for n, weight in enumerate(weights)]
    assert TaskSet("x", {"train": rows}).task(seed, "train").id in {r.id for r in rows}

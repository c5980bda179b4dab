"""Load tasks with a declared schema from JSONL, Parquet or Arrow files, or a folder of them.

All rows are read and checked before the first episode: a bad row stops the run with file, line and field."""

from __future__ import annotations

import bisect
import itertools
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from agentrl.contrib.toolkit.chat_forms import without_padding
from agentrl.data.trajectory import Json, Task
from agentrl.env.authoring import content_split, task_rng
from agentrl.env.call_options import nearest
from agentrl.utils.errors import TaskDataError, did_you_mean, fault_text, need_package
from agentrl.utils.files import decode_text
from agentrl.utils.parsing import is_unbounded, json_form, parts_of, read_json
from agentrl.utils.schemas import BadSchemaError, checked_validator, fault_words, first_fault

log = logging.getLogger(__name__)

ROW_SCHEMA: dict[str, Json] = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "split": {"type": "string"},
        "weight": {"type": "number", "exclusiveMinimum": 0},
        "data": {"type": "object"},
        "gold": {"type": "object"},
    },
    "required": ["data", "gold"],
}
"""Default schema of a task row."""

CALL_SCHEMA: dict[str, Json] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "arguments": {"type": "object"}},
    "required": ["name", "arguments"],
    "additionalProperties": False,
}
"""Schema of a call in a row."""

SUFFIXES = (".jsonl", ".parquet", ".arrow")
_PACKED = (".gz", ".zst", ".bz2", ".xz", ".zip", ".lz4")
_SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("heldout", "held", "holdout", "test", "testing", "eval", "evaluation"), "heldout"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
}

_COMMON_KEYS = ("id", "split", "weight")  # keys that rows of all layouts may have
ToTask = Callable[[Mapping[str, Json]], tuple[Mapping[str, Json], Mapping[str, Json]]]
Settle = Callable[[Any, bool], Any]


@dataclass(frozen=True, slots=True)
class Row:
    """A task; `where`: file and line for error messages."""

    where: str
    id: str
    split: str
    weight: float
    data: Mapping[str, Json]
    gold: Mapping[str, Json]
    family: str = ""


@dataclass(frozen=True)
class TaskSet:
    """Tasks by split. `task(seed, split)` is a drop-in `make_task`.

    Seeds 0..n-1 are the n rows of a split in order. A higher seed draws a training row by weight, deterministically; in other
    splits the rows repeat (row `seed` modulo n).
    """

    name: str
    rows: Mapping[str, Sequence[Row]]
    _sums: dict[str, list[float]] = field(default_factory=dict, compare=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> TaskSet:
        """Tasks never change, so forks of an environment share them."""
        return self

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self.rows)

    def __len__(self) -> int:
        return sum(map(len, self.rows.values()))

    def task(self, seed: int, split: str) -> Task:
        """Return the task of a seed. Raises TaskDataError, which names the existing splits, for a split without tasks."""
        rows = self.rows.get(split)
        if not rows:
            raise TaskDataError(f"{self.name}: no tasks of split {split!r}; {nearest(split, list(self.rows))}")
        row = rows[seed % len(rows)]
        if split == "train" and seed >= len(rows):
            sums = self._sums.setdefault(split, list(itertools.accumulate(row.weight for row in rows)))
            point = task_rng(self.name, split, seed).random() * sums[-1]
            row = rows[min(bisect.bisect_right(sums, point), len(rows) - 1)]
        data = {**row.data, "family": row.family} if row.family else row.data
        return Task(id=row.id, seed=seed, split=split, data=data, gold=row.gold)

    def count(self, split: str) -> int | None:
        """Return the number of rows of a split, for `task_count`; None for weighted training rows, which are drawn."""
        rows = self.rows.get(split, ())
        return None if split == "train" and len({row.weight for row in rows}) > 1 else len(rows)


def tasks_path(given: str | None, own: Path) -> Path:
    """Return the given file or folder, by default the environment's `own`. Raises TaskDataError for ''."""
    if given == "":  # for example from an unset variable
        raise TaskDataError("tasks = '': it names no file. Leave it out, or write a path")
    return own if given is None else Path(given)


def load_tasks(
    path: str | Path,
    *,
    schema: Mapping[str, Json] = ROW_SCHEMA,
    to_task: ToTask | None = None,
    settle: Settle | None = None,
    family_column: str | None = None,
) -> TaskSet:
    """Read all tasks of a file, or of a folder of files (also one written by `datasets.save_to_disk`).

    Each row must fit `schema` (JSON Schema). `to_task` converts a row of another layout to (data, gold), by default its keys
    `data` and `gold`. `settle(row, table)` removes nulls from a row; `table`: the rows have every column, as in Parquet. By
    default a table's null stays only if the schema requires the key and accepts null. A row's split is its `split`, else the
    split named by the first or last word of the file's or a folder's name (train, test, heldout, validation, ...; "test" counts
    as "heldout"), else a hash of its content puts an eighth of the rows into "heldout".

    `family_column`: column with a row's task family, which is then also in the task's data as "family". Rows without a split
    are held out by whole families, chosen by a hash of the name (`held_out_families`). Raises TaskDataError naming file, line
    and field for an invalid row, a duplicate id, a task in two splits, or a family that is in "heldout" and in another split.
    """
    place = Path(path)
    if not place.exists():
        raise TaskDataError(f"{place}: no such file or folder")
    try:
        validator = checked_validator(schema)
    except BadSchemaError as problem:
        raise TaskDataError(f"{place}: its declared schema is not a JSON Schema: {problem}") from problem
    rows: list[Row] = []
    files = [place] if place.is_file() else data_files(place, SUFFIXES)
    if not files or files[0].suffix not in SUFFIXES:
        raise TaskDataError(f"{place}: it is no file ending in {', '.join(SUFFIXES)}, and no folder of such")
    for file in files:
        begun, table, named = len(rows), file.suffix != ".jsonl", named_split(file, place)
        for where, raw in _read_rows(file):
            plain = settle(raw, table) if settle is not None else raw
            if table and settle is None:
                plain = without_padding(raw, schema, table=True)
                # A gold with only nulls means "nothing" and stays: a gold cannot be missing.
                plain = {**plain, "gold": raw["gold"]} if raw.get("gold") and not plain.get("gold") else plain
            row = _row(where, plain, validator, to_task, named, family_column)
            if family_column is not None:
                named_family = raw.get(family_column)
                if not isinstance(named_family, str) or not named_family:
                    expected = "expected the name of the task's family"
                    raise TaskDataError(f"{where}: field {family_column}: {expected}, got {named_family!r}")
                row = replace(row, family=named_family)
            rows.append(row)
        hints = (did_you_mean(word, _SPLIT_NAMES, like=0.8) for word in _words_of(file, place))
        if not all(row.split for row in rows[begun:]) and (hint := next(filter(None, hints), "")):
            log.warning("%s: its name says no split, so its rows are divided by a hash of their content; %s", file, hint)
    if not rows:
        raise TaskDataError(f"{place}: no rows")
    if family_column is not None:
        rows = _split_by_family(rows)
    rows = [row if row.split else replace(row, split=content_split(_content(row))) for row in rows]
    _check_disjoint(rows)
    splits = dict.fromkeys(row.split for row in rows)
    return TaskSet(place.name, {split: [row for row in rows if row.split == split] for split in splits})


def data_files(folder: Path, suffixes: Sequence[str], key: str = "") -> list[Path]:
    """Return the files below a folder, by name, except hidden ones and caches. Raises TaskDataError for a compressed one."""
    every = sorted(one for one in folder.rglob("*") if not any(part[0] == "." for part in one.relative_to(folder).parts))
    if packed := next((one for one in every if one.suffix in _PACKED and Path(one.stem).suffix in suffixes), None):
        raise TaskDataError(f"{key}{packed}: is compressed, and would be left out. Decompress it, or move it out of the folder")
    return [one for one in every if one.suffix in suffixes and not one.match("cache-*.arrow")]


def named_split(file: Path, place: Path) -> str | None:
    """Return the split that the name of a file, or of its folders below `place`, gives; None without one."""
    return next((_SPLIT_NAMES[word] for word in _words_of(file, place) if word in _SPLIT_NAMES), None)


def _words_of(file: Path, place: Path) -> list[str]:
    """Return the first and last word of the names of the file and the folders below `place`."""
    parts = (file.stem, *(folder.name for folder in file.parents if place in folder.parents))
    names = [re.findall("[a-z]+", part.lower()) for part in parts]
    return [word for words in names for word in (*words[:1], *words[-1:])]


def _read_rows(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield (file and line, row) of every row."""
    if file.suffix == ".jsonl":
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    try:
                        yield f"{file}:{number}", read_json(decode_text(line), once=True)
                    except UnicodeDecodeError as problem:
                        raise TaskDataError(f"{file}: cannot be read: {problem}") from problem
                    except ValueError as problem:
                        raise TaskDataError(f"{file}:{number}: not JSON: {problem}") from problem
        return
    need_package("pyarrow", f"{file}: needs pyarrow: pip install 'agentrl[parquet]'")
    import pyarrow
    import pyarrow.ipc
    import pyarrow.parquet

    try:
        if file.suffix == ".parquet":
            table = pyarrow.parquet.read_table(file)
        else:
            with pyarrow.memory_map(str(file)) as source:
                table = pyarrow.ipc.open_stream(source).read_all()
    except pyarrow.ArrowInvalid as problem:
        raise TaskDataError(f"{file}: not a readable {file.suffix} file: {problem}") from problem
    for number, row in enumerate(table.to_pylist()):
        yield f"{file}: row {number}", row


def _row(where: str, raw: Any, validator: Any, to_task: ToTask | None, named: str | None, family_column: str | None) -> Row:
    try:
        error = first_fault(validator, raw)
    except TimeoutError as late:
        raise TaskDataError(f"{where}: {late}") from late
    if error is not None:
        place = "/".join(str(part) for part in error.absolute_path)
        raise TaskDataError(f"{where}: field {place or '(the row)'}: {fault_words(error)}")
    try:
        data, gold = (raw["data"], raw["gold"]) if to_task is None else to_task(raw)
        json_form([data, gold])
    except (KeyError, TypeError, ValueError, IndexError) as problem:
        raise TaskDataError(f"{where}: {fault_text(problem)}") from problem
    if odd := [part for part in parts_of([data, gold]) if is_unbounded(part)]:  # a Task would hold it as text
        raise TaskDataError(
            f"{where}: {str(odd[0])[:24]} is not a JSON number. Write null, a text, or a number within a double's range"
        )
    read = {*_COMMON_KEYS, *validator.schema.get("properties", ()), family_column}
    for key in raw:
        if key not in read and (hint := did_you_mean(key.lower(), [name for name in _COMMON_KEYS if name not in raw], like=0.83)):
            raise TaskDataError(f"{where}: field {key} is not read; {hint}")
    own = raw.get("split")
    if own is not None and not isinstance(own, str):
        raise TaskDataError(f"{where}: field split: expected a string, got {own!r}")
    split = _SPLIT_NAMES.get(own.strip().lower(), own) if own is not None else named or ""
    weight = raw.get("weight", 1.0)
    if not weight < 1e300:  # Python's JSON allows NaN, which passes the bounds of a schema
        raise TaskDataError(f"{where}: field weight: expected a finite number, got {weight!r:.40}")
    row = Row(where, "", split, float(weight), data, gold)
    return replace(row, id=str(raw.get("id", _content_id(row))))


def _content_id(row: Row) -> str:
    """Return the ID of a row that has none of its own."""
    return blake2b(_content(row).encode(), digest_size=6).hexdigest()


def _content(row: Row) -> str:
    return json.dumps([row.data, row.gold], sort_keys=True, default=str)


def _split_by_family(rows: Sequence[Row]) -> list[Row]:
    """Assign the split of its family to each row without one. A single family is left to the hash of the content."""
    families = {row.family for row in rows}
    held = held_out_families(row.family for row in rows if not row.split)
    found = [
        row if row.split or len(families) == 1 else replace(row, split="heldout" if row.family in held else "train")
        for row in rows
    ]
    first: dict[str, Row] = {}
    for row in found:
        other = first.setdefault(row.family, row)
        if row.split != other.split and "heldout" in (row.split, other.split):
            raise TaskDataError(
                f"{row.where}: family {row.family!r} is in {row.split}, and in {other.split} too ({other.where}); a family is "
                "held out whole"
            )
    return found


def _check_disjoint(rows: Sequence[Row]) -> None:
    """Refuse duplicate IDs and tasks in two splits (compared by `data`, without `gold`); warn about misspelt splits, which no
    command would use."""
    by_id: dict[str, Row] = {}
    by_content: dict[str, Row] = {}
    for row in rows:
        other = by_id.setdefault(row.id, row)
        if other is not row and row.id == _content_id(row):
            raise TaskDataError(f"{row.where}: the same row is at {other.where}. Remove one, or give each an id of its own")
        if other is not row:
            raise TaskDataError(f"{row.where}: field id: {row.id!r} is also the id of {other.where}")
        content = json.dumps(row.data, sort_keys=True, default=str)
        same = by_content.setdefault(content, row)
        if same.split != row.split:
            raise TaskDataError(f"{row.where}: field data: this {row.split} task is also a {same.split} task ({same.where})")
    for split, row in {row.split: row for row in reversed(rows)}.items():
        word = split.strip().lower()
        if split not in _SPLIT_NAMES.values() and word.isalpha() and (hint := did_you_mean(word, _SPLIT_NAMES, like=0.8)):
            log.warning("%s: field split: %r is only taken by a config that asks for it; %s", row.where, split, hint)


# Held-out splits by task family: a family is held out as a whole or not at all.
#
# Tasks of one family (a category, a domain, a template with other names) are similar, so a random split of tasks measures memory
# as well as skill.


def held_out_families(names: Iterable[str]) -> frozenset[str]:
    """Return the held-out families, chosen by a hash of the name: those that `content_split` selects (an eighth on average),
    filled up by the smallest hashes to an eighth (rounded down), at least one. Never all families, and none if there is only
    one. A family that its own hash selects stays held out when families are added."""
    known = sorted(set(names), key=lambda name: (blake2b(name.encode(), digest_size=4).digest(), name))
    if len(known) < 2:
        return frozenset()
    by_hash = sum(content_split(name) == "heldout" for name in known)  # these come first, since `known` is sorted by hash
    return frozenset(known[: min(max(by_hash, len(known) // 8, 1), len(known) - 1)])

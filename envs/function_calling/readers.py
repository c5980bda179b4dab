"""Rows of a local file in any of the supported layouts, checked while reading."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from agentrl.contrib.toolkit.bfcl_calls import solvable
from agentrl.data.trajectory import Json
from agentrl.utils.errors import ConfigError, TaskDataError
from agentrl.utils.files import read_text
from agentrl.utils.network import strict_json

from .conversations import hermes, toolace
from .rows import NO_FUNCTION, BadRowError, Row, UnsolvableError, bad, check_row
from .schemas import as_sets, declared, read_tools

log = logging.getLogger("agentrl.envs.function_calling")
Reader = Callable[[Mapping[str, Json], int], Iterator[Row]]
BFCL = re.compile(r"^BFCL_v[34]_(\w+)\.jsonl?$")
CATEGORIES = frozenset(
    ["simple", "simple_python", "multiple", "parallel", "parallel_multiple", "live_simple", "live_multiple",
     "live_parallel", "live_parallel_multiple", "irrelevance", "live_irrelevance", "live_relevance"]
)  # fmt: skip


def native(row: Mapping[str, Json], number: int) -> Iterator[Row]:
    """{"messages", "tools", "calls": [{"name", "arguments": {key: [allowed, ...]}}], "answers"?, "kind"?, "id"?}.

    Without calls, `answers` (by default "NO FUNCTION") lists the correct texts.
    """
    messages, tools, calls = row.get("messages"), row.get("tools"), row.get("calls", [])
    for name, value in (("messages", messages), ("tools", tools), ("calls", calls)):
        if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
            bad(name, "expected a list of objects")
    functions = read_tools(tools, "tools")
    for index, call in enumerate(calls):
        sets = call.get("arguments")
        if not isinstance(call.get("name"), str) or not isinstance(sets, Mapping):
            bad(f"calls[{index}]", "expected a string 'name' and an object 'arguments'")
        if lone := [key for key, allowed in sets.items() if not isinstance(allowed, list) or not allowed]:
            bad(f"calls[{index}].arguments.{lone[0]}", "expected a list of its allowed values")
    answers = row.get("answers", [] if calls else [NO_FUNCTION])
    if not isinstance(answers, list) or not all(isinstance(text, str) and text.strip() for text in answers):
        bad("answers", "expected a list of non-empty strings")
    scoring = "sets" if calls else "answer"
    yield check_row(
        Row(str(row.get("id", number)), list(messages or []), functions, scoring, list(calls), answers,
            str(row.get("kind", "")))
    )  # fmt: skip


def xlam(row: Mapping[str, Json], number: int) -> Iterator[Row]:
    """{"id", "query", "tools": JSON string, "answers": JSON string}; types are Python annotations."""
    query = row.get("query")
    if not isinstance(query, str) or not query:
        bad("query", "expected a non-empty string")
    functions = read_tools(_listed(row.get("tools"), "tools"), "tools")
    gold = [as_sets(call.get("name"), call.get("arguments"), functions) for call in _listed(row.get("answers"), "answers")]
    message: dict[str, Json] = {"role": "user", "content": query}
    scoring, texts = ("sets", []) if gold else ("answer", [NO_FUNCTION])
    yield check_row(Row(str(row.get("id", number)), [message], functions, scoring, gold, texts))


def _listed(value: Json, name: str) -> list[Mapping[str, Json]]:
    try:
        value = strict_json(value) if isinstance(value, str) else value
    except ValueError as problem:
        bad(name, f"not JSON: {problem}")
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        bad(name, "expected a list of objects")
    return value


def _bfcl(answers: Mapping[str, Json], category: str) -> Reader:
    """The Berkeley leaderboard: {"id", "question": [[messages]], "function": [...]}, and answers by id."""

    def read(row: Mapping[str, Json], number: int) -> Iterator[Row]:
        question, functions = row.get("question"), row.get("function")
        if not isinstance(question, list) or len(question) != 1 or not isinstance(question[0], list):
            bad("question", "expected one turn, [[messages]]; multi-turn categories need their own simulated APIs")
        if not isinstance(functions, list | dict):
            bad("function", "expected a list of declarations")
        tools = read_tools(functions, "function")
        name = str(row.get("id", number))
        if category.endswith("irrelevance"):
            yield check_row(Row(name, question[0], tools, "answer", [], [NO_FUNCTION], "irrelevance"))
        elif category.endswith("relevance"):
            yield check_row(Row(name, question[0], tools, "any", [], [], "relevance"))
        else:
            task = check_row(Row(name, question[0], tools, "bfcl", _ground_truth(answers, name)))
            if not solvable(task.calls, declared(tools)):
                raise UnsolvableError(
                    "ground_truth", "no call fits it: an argument without allowed values, or none of its declared type"
                )
            yield task

    return read


def _ground_truth(answers: Mapping[str, Json], name: str) -> list[dict[str, Json]]:
    if name not in answers:
        bad("id", f"possible_answer has no row {name!r}")
    calls = answers[name]
    shaped = isinstance(calls, list) and all(
        isinstance(call, Mapping)
        and len(call) == 1
        and all(
            isinstance(arguments, Mapping) and all(isinstance(allowed, list) for allowed in arguments.values())
            for arguments in call.values()
        )
        for call in calls
    )
    if not shaped:
        bad("ground_truth", "expected [{name: {argument: [allowed, ...]}}, ...]")
    return [dict(call) for call in calls]


LAYOUTS: dict[str, Reader] = {"native": native, "xlam": xlam, "toolace": toolace, "hermes": hermes}


def read_rows(path: str, layout: str, bad_rows: str) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    """All tasks of a file (or of a folder of the Berkeley leaderboard's files), and the skipped rows with reasons.

    Raises ConfigError for an unknown layout, TaskDataError (file, row, field) for the first invalid row unless
    `bad_rows` is "skip", and if there are no tasks.
    """
    if layout not in (*LAYOUTS, "bfcl", "auto"):
        raise ConfigError(f"function_calling: layout = {layout!r}; expected auto, bfcl, {', '.join(LAYOUTS)}")
    place = Path(path).expanduser()
    if not place.exists():
        raise TaskDataError(f"{path}: no such file or folder")
    files = _bfcl_files(place) if place.is_dir() else [place]
    rows: list[Row] = []
    skipped: list[str] = []
    unsolvable: list[str] = []
    for file in files:
        found, left, hopeless = _read_file(file.resolve(), layout, file.stat().st_mtime_ns)
        if left and bad_rows == "raise":
            raise TaskDataError(f'{left[0]} (bad_rows = "skip" leaves such rows out)')
        rows += found
        skipped += left
        unsolvable += hopeless
    if unsolvable:
        log.warning(
            "%s: %d rows are left out, which the leaderboard's own rules let nobody solve: %s",
            path,
            len(unsolvable),
            unsolvable[0],
        )
    if not rows:
        raise TaskDataError(f"{path}: it contains no tasks" + (f"; the first problem: {skipped[0]}" if skipped else ""))
    return tuple(rows), (*skipped, *unsolvable)


def _bfcl_files(folder: Path) -> list[Path]:
    """The folder's files of supported categories; the others are ignored."""
    files = [file for file in sorted(folder.iterdir()) if (match := BFCL.match(file.name)) and match[1] in CATEGORIES]
    if not files:
        raise TaskDataError(f"{folder}: no BFCL_v3_*.json or BFCL_v4_*.json of {', '.join(sorted(CATEGORIES))}")
    return files


@lru_cache(maxsize=32)
def _read_file(file: Path, layout: str, modified: int) -> tuple[tuple[Row, ...], tuple[str, ...], tuple[str, ...]]:
    """Its tasks, the bad rows, and those that nobody can solve."""
    rows: list[Row] = []
    skipped: list[str] = []
    unsolvable: list[str] = []
    reader: Reader | None = None
    for number, item in _items(file):
        if isinstance(item, str):
            skipped.append(f"{file}, row {number}: {item}")
            continue
        reader = reader or _reader(file, layout, item)
        try:
            rows += list(reader(item, number))
        except BadRowError as problem:
            left = unsolvable if isinstance(problem, UnsolvableError) else skipped
            left.append(f"{file}, row {number}, field {problem.field!r}: {problem}")
    return tuple(rows), tuple(skipped), tuple(unsolvable)


def _items(file: Path) -> Iterator[tuple[int, Mapping[str, Json] | str]]:
    """(number from 1, object or error message) for each entry of a JSON list or line of a JSONL file."""
    try:
        text = read_text(file)
    except (OSError, UnicodeDecodeError) as problem:
        raise TaskDataError(f"{file}: cannot be read: {problem}") from problem
    if text.lstrip().startswith("["):
        try:
            entries = strict_json(text, len(text))
        except ValueError as problem:
            raise TaskDataError(f"{file}: not JSON: {problem}") from problem
        for number, entry in enumerate(entries, 1):
            yield number, entry if isinstance(entry, dict) else "expected an object"
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                entry = strict_json(line)
            except ValueError as problem:
                yield number, f"not JSON: {problem}"
                continue
            yield number, entry if isinstance(entry, dict) else "expected an object"


def _reader(file: Path, layout: str, first: Mapping[str, Json]) -> Reader:
    if layout == "auto":
        layout = _guess(file, first)
    if layout != "bfcl":
        return LAYOUTS[layout]
    match = BFCL.match(file.name)
    category = match[1] if match else str(first.get("id", "")).rpartition("_")[0]
    if category not in CATEGORIES:
        raise TaskDataError(
            f"{file}: category {category!r} cannot be scored by its calls alone; known: {', '.join(sorted(CATEGORIES))}"
        )
    answers: dict[str, Json] = {}
    beside = file.parent / "possible_answer" / file.name
    if not category.endswith("relevance"):
        if not beside.is_file():
            raise TaskDataError(f"{file}: its answers should be in {beside}, which does not exist")
        for number, item in _items(beside):
            if isinstance(item, str) or "id" not in item or "ground_truth" not in item:
                raise TaskDataError(f"{beside}, row {number}: expected 'id' and 'ground_truth'")
            answers[str(item["id"])] = item["ground_truth"]
    return _bfcl(answers, category)


def _guess(file: Path, row: Mapping[str, Json]) -> str:
    for layout, keys in (
        ("bfcl", {"question", "function"}),
        ("xlam", {"query", "tools", "answers"}),
        ("native", {"messages", "tools"}),
        ("toolace", {"system", "conversations"}),
        ("hermes", {"conversations"}),
    ):
        if keys <= set(row):
            return layout
    raise TaskDataError(f"{file}: no known layout has the fields {', '.join(sorted(row))}")

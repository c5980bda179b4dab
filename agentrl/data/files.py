"""Rows of files, one at a time: JSON lines and Parquet. A row that is none is a fault, with its place and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agentrl.errors import BadRowError, ConfigError, DependencyError, hinted
from agentrl.files import decoded, open_plain
from agentrl.plain_data import read_json

SUFFIXES = (".jsonl", ".parquet")
_BATCH = 256


@dataclass(frozen=True, slots=True)
class RowPlace:
    """Where a row is: line (of a Parquet file: row) `number`, from 1, of `file`, and its byte offset, which only lines have."""

    file: Path
    number: int
    offset: int = -1

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


def sources(paths: Sequence[str]) -> list[Path]:
    """The files that the paths name, in order: of a folder, those in it and below by name; of a run, its updates' episodes.

    Raises ConfigError for a path that does not exist or holds no such file, DependencyError for Parquet without pyarrow.
    """
    found: list[Path] = []
    for path in paths:
        if not path.strip():  # a variable of a shell that is not set; as a path it is the working directory
            raise ConfigError("data.path: one of its paths is empty; name a file, a folder or a run")
        found += _of_path(Path(path))
    if any(file.suffix == ".parquet" for file in found) and find_spec("pyarrow") is None:
        raise DependencyError("data.path: Parquet needs pyarrow: pip install 'agentrl[parquet]'")
    return list(dict.fromkeys(found))


def _of_path(path: Path) -> list[Path]:
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise ConfigError(f"data.path: {path}: expected a file ending in {' or '.join(SUFFIXES)}, or a folder of them")
        return [path]
    if not path.is_dir():
        near = [item.name for item in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ConfigError(f"data.path: {path}: there is no such file or folder{hinted(path.name, near)}")
    if (path / "trajectories").is_dir():  # a run: what it played before, between and after its updates are evaluations
        found = sorted((path / "trajectories").glob("step_*.jsonl"))
        if not found:
            raise ConfigError(f"data.path: {path}: the run has no episodes of updates (trajectories/step_*.jsonl)")
        return found
    if (path / "trajectories.jsonl").is_file():  # an evaluation or a rollout
        return [path / "trajectories.jsonl"]
    found = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and not _hidden(file.relative_to(path)))
    if not found:
        raise ConfigError(f"data.path: {path}: no file ending in {' or '.join(SUFFIXES)} in this folder")
    return found


def _hidden(file: Path) -> bool:
    """Whether it is hidden, or in a hidden folder: caches and what version control keeps."""
    return any(part.startswith(".") for part in file.parts)


def rows_of(file: Path) -> Iterator[tuple[RowPlace, dict[str, Any] | BadRowError]]:
    """Every row of a file with its place; a line that holds no JSON object is a BadRowError. Raises ConfigError if the file as a
    whole cannot be read."""
    yield from _table(file) if file.suffix == ".parquet" else _lines(file)


def row_at(place: RowPlace) -> dict[str, Any]:
    """The row of a place that `rows_of` gave. Only of files of lines."""
    with open_plain(place.file) as lines:
        lines.seek(place.offset)
        row: dict[str, Any] = read_json(lines.readline())
    return row


def _lines(file: Path) -> Iterator[tuple[RowPlace, dict[str, Any] | BadRowError]]:
    try:
        with open_plain(file) as lines:
            offset = 0
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield RowPlace(file, number, offset), _row(line)
                offset += len(line)
    except OSError as problem:
        raise ConfigError(f"data.path: {file}: {problem.strerror or problem}") from None


def _row(line: bytes) -> dict[str, Any] | BadRowError:
    try:
        row = read_json(decoded(line))
    except (ValueError, RecursionError) as problem:
        return BadRowError(f"not JSON: {problem}"[:200])
    return row if isinstance(row, dict) else BadRowError(f"expected a JSON object, got {type(row).__name__}")


def _table(file: Path) -> Iterator[tuple[RowPlace, dict[str, Any] | BadRowError]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            number = 0
            for batch in table.iter_batches(batch_size=_BATCH):
                for row in batch.to_pylist():
                    number += 1
                    yield RowPlace(file, number), without_nulls(row)
    except (pyarrow.ArrowException, OSError) as problem:
        raise ConfigError(f"data.path: {file}: not a readable Parquet file: {problem}") from None


_OPEN = ("arguments", "parameters", "input_schema", "inputSchema", "input", "args")
"""Keys below which a null may be meant: only the schema of the tool says."""


def without_nulls(value: Any) -> Any:
    """A table has every field in every row: what a row does not have is null there and must be absent here."""
    if isinstance(value, Mapping):
        return {key: item if key in _OPEN else without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value

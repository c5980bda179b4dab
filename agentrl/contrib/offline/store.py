"""Read rows of data files, and store token rows on disk."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from agentrl.contrib.toolkit.taskdata import data_files, named_split
from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import StopReason, Task, Trajectory
from agentrl.trainer.checkpoint import MANIFEST, check_model, seal
from agentrl.utils.errors import BadRowError, CheckpointError, ConfigError, hint_text, need_package
from agentrl.utils.files import atomic_write, decode_text, open_plain
from agentrl.utils.parsing import read_json

SUFFIXES = (".jsonl", ".parquet")
_BATCH = 256


@dataclass(frozen=True, slots=True)
class RowPlace:
    """Location of a row: line (in Parquet: row) `number` of `file`, from 1, and the line's byte offset."""

    file: Path
    number: int
    offset: int = -1

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


def sources(paths: Sequence[str]) -> dict[Path, str | None]:
    """List the files of the paths in order, each once: of a folder, all below it with the splits that their names give; of a
    run, the episodes of its updates.

    Raises ConfigError for a path without such a file, TaskDataError for a compressed one, DependencyError without pyarrow.
    """
    found: dict[Path, str | None] = {}
    for path in paths:
        if not path.strip():  # for example an unset shell variable; as a path it is the working directory
            raise ConfigError("data.path: one of its paths is empty; name a file, a folder or a run")
        place = Path(path)
        if place.is_file():
            if place.suffix not in SUFFIXES:
                raise ConfigError(f"data.path: {path}: expected a file ending in {' or '.join(SUFFIXES)}, or a folder of them")
            found[place] = None
        elif not place.is_dir():
            near = [item.name for item in place.parent.iterdir()] if place.parent.is_dir() else []
            raise ConfigError(f"data.path: {path}: there is no such file or folder{hint_text(place.name, near)}")
        elif (place / "trajectories").is_dir():  # a run; its other episodes are evaluations
            steps = sorted((place / "trajectories").glob("step_*.jsonl"))
            if not steps:
                raise ConfigError(f"data.path: {path}: the run has no episodes of updates (trajectories/step_*.jsonl)")
            found |= dict.fromkeys(steps)
        elif (place / "trajectories.jsonl").is_file():  # an evaluation or a rollout
            found[place / "trajectories.jsonl"] = None
        elif not (files := data_files(place, SUFFIXES, "data.path: ")):
            raise ConfigError(f"data.path: {path}: no file ending in {' or '.join(SUFFIXES)} in this folder")
        else:
            found |= {file: named_split(file, place) for file in files if file not in found}
    if any(file.suffix == ".parquet" for file in found):
        need_package("pyarrow", "data.path: Parquet needs pyarrow: pip install 'agentrl[parquet]'")
    first: dict[Path, Path] = {}
    for file, split in found.items():
        kept = first.setdefault(file.resolve(), file)
        found[kept] = found[kept] and split  # None: the file itself is named, however its folder is written
    return {file: found[file] for file in first.values()}


def rows_of(file: Path) -> Iterator[tuple[RowPlace, dict[str, Any] | BadRowError]]:
    """Yield every row of a file with its place; a line without a JSON object yields a BadRowError. Raises ConfigError if the
    file as a whole cannot be read."""
    if file.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        try:
            with pyarrow.parquet.ParquetFile(file) as table:
                rows = (row for batch in table.iter_batches(batch_size=_BATCH) for row in batch.to_pylist())
                for number, row in enumerate(rows, start=1):
                    yield RowPlace(file, number), without_nulls(row)
        except (pyarrow.ArrowException, OSError) as problem:
            raise ConfigError(f"data.path: {file}: not a readable Parquet file: {problem}") from None
        return
    try:
        with open_plain(file) as lines:
            offset = 0
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    try:
                        row = read_json(decode_text(line), once=True)
                        found = row if isinstance(row, dict) else BadRowError(f"expected a JSON object, got {type(row).__name__}")
                    except (ValueError, RecursionError) as problem:
                        found = BadRowError(f"not JSON: {problem}"[:200])
                    yield RowPlace(file, number, offset), found
                offset += len(line)
    except OSError as problem:
        raise ConfigError(f"data.path: {file}: {problem.strerror or problem}") from None


_OPEN = ("arguments", "parameters", "input_schema", "inputSchema", "input", "args")
"""Keys below which a null may be a value; only the tool's schema decides."""


def without_nulls(value: Any) -> Any:
    """Remove null fields: a table has every field in every row, with null for those that a row lacks."""
    if isinstance(value, Mapping):
        return {key: item if key in _OPEN else without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


# Token rows on disk, written once and read by index, so that a run holds only a step's data in memory.
#
# An example is one episode, or a pair whose first is preferred; an episode has one or more ledgers. In a folder:
#
# token_ids.bin  int32, sampled.bin  bool    of all ledgers, end to end
# ledgers.npy    int64 [L, 2]                the episode of each ledger, and where it ends
# tasks.npy      int64 [X]                   the task number of each example
# data.json      summary, and the held-out tasks; written last, except for the manifest with the checksums of all files

ABOUT = "data.json"


@dataclass(frozen=True, slots=True)
class About:
    """Contents of a store. `each`: episodes per example. `left_out`: places and faults of bad rows; `passed`: number of rows
    that filters removed, by reason; `unread`: number of untrained parts of used rows, by name; `heldout`: numbers of the
    held-out tasks."""

    each: int
    examples: int
    tasks: int
    tokens: int
    trained_tokens: int
    rows: int
    left_out: list[tuple[str, str]] = field(default_factory=list)
    passed: dict[str, int] = field(default_factory=dict)
    heldout: list[int] = field(default_factory=list)
    unread: dict[str, int] = field(default_factory=dict)


class RowWriter(ExitStack):
    """Writes a store, example by example. Use as a context manager; `finish` completes it."""

    def __init__(self, folder: Path, each: int) -> None:
        super().__init__()
        folder.mkdir(parents=True, exist_ok=True)
        for last in (ABOUT, MANIFEST):
            (folder / last).unlink(missing_ok=True)
        self.folder, self.each = folder, each
        self._ids, self._sampled = (self.enter_context((folder / f"{name}.bin").open("wb")) for name in ("token_ids", "sampled"))
        self._ledgers: list[tuple[int, int]] = []
        self._tasks: list[int] = []
        self._numbers: dict[str, int] = {}
        self._episodes = self.tokens = self.trained = 0

    @property
    def examples(self) -> int:
        """Number of added examples."""
        return len(self._tasks)

    def add(self, task: str, episodes: Sequence[Sequence[TokenLedger]]) -> None:
        """Add an example, the ledgers of its episodes. Examples of one `task` are held out together."""
        assert len(episodes) == self.each
        for ledgers in episodes:
            for ledger in ledgers:
                self._ids.write(ledger.token_ids.astype("<i4").tobytes())
                self._sampled.write(ledger.sampled.astype(np.bool_).tobytes())
                self.tokens += len(ledger)
                self.trained += ledger.sampled_tokens
                self._ledgers.append((self._episodes, self.tokens))
            self._episodes += 1
        self._tasks.append(self._numbers.setdefault(task, len(self._numbers)))

    def finish(
        self,
        heldout: float,
        seed: int,
        rows: int,
        left_out: list[tuple[str, str]],
        passed: dict[str, int],
        unread: dict[str, int],
    ) -> About:
        """Complete the store. Holds out a share of the tasks (rounded up, but not all), chosen by seed and name alone."""
        drawn = sorted(self._numbers, key=lambda name: sha256(f"{seed} {name}".encode()).digest())
        count = math.ceil(heldout * len(drawn) - 1e-9)  # 0.07 * 100 is slightly more than 7 in floating point
        out = sorted(self._numbers[name] for name in drawn[: min(count, len(drawn) - 1)])
        np.save(self.folder / "ledgers.npy", np.asarray(self._ledgers, dtype=np.int64).reshape(-1, 2))
        np.save(self.folder / "tasks.npy", np.asarray(self._tasks, dtype=np.int64))
        self._ids.flush()
        self._sampled.flush()
        counts = (self.each, self.examples, len(self._numbers), self.tokens, self.trained, rows)
        about = About(*counts, left_out, passed, out, unread)
        atomic_write(self.folder / ABOUT, json.dumps(asdict(about)))
        seal(self.folder, 0)
        return about


class RowStore:
    """Reads a store of `RowWriter`. Raises CheckpointError if it is incomplete or damaged."""

    def __init__(self, folder: Path) -> None:
        try:
            check_model(folder)  # sizes alone miss a truncated copy, or zeros after a power cut
            found: dict[str, Any] = read_json((folder / ABOUT).read_text())
            self.about = About(**{**found, "left_out": [(str(a), str(b)) for a, b in found["left_out"]]})
            ledgers = np.load(folder / "ledgers.npy")
            tasks = np.load(folder / "tasks.npy")
            self._ids = _map_array(folder / "token_ids.bin", "<i4", self.about.tokens)
            self._sampled = _map_array(folder / "sampled.bin", "?", self.about.tokens)
        except (OSError, ValueError, TypeError, KeyError, CheckpointError) as problem:
            raise CheckpointError(
                f"{folder}: the data of this run is missing or damaged: {problem}; start over: --overwrite"
            ) from None
        self._ends = ledgers[:, 1]
        # Ledgers are in the order of their episodes.
        self._first = np.searchsorted(ledgers[:, 0], np.arange(self.about.examples * self.about.each + 1))
        held = np.isin(tasks, self.about.heldout)
        self.train, self.heldout = np.flatnonzero(~held), np.flatnonzero(held)

    def steps(self, batch: int) -> int:
        """Return the steps per epoch; the last one may have fewer examples."""
        return math.ceil(len(self.train) / batch)

    def drawn(self, step: int, batch: int, seed: int) -> npt.NDArray[np.int64]:
        """Draw the examples of step `step` (from 0), a function of the seed alone."""
        epoch, place = divmod(step, self.steps(batch))
        order = np.random.default_rng([seed, epoch]).permutation(self.train)
        return np.asarray(order[place * batch : (place + 1) * batch], dtype=np.int64)

    def load(self, examples: Iterable[int]) -> list[Trajectory]:
        """Load the episodes of the examples, in order, as trajectories with ledgers only."""
        found, each = list[Trajectory](), self.about.each
        for example in examples:
            for episode in range(int(example) * each, (int(example) + 1) * each):
                ledgers = [self._ledger(at) for at in range(self._first[episode], self._first[episode + 1])]
                found.append(Trajectory("", Task("", 0), ledgers=ledgers, stop=StopReason.DONE))
        return found

    def _ledger(self, at: int) -> TokenLedger:
        begin, end = (0 if at == 0 else int(self._ends[at - 1])), int(self._ends[at])
        ids, sampled = self._ids[begin:end], self._sampled[begin:end]
        ledger = TokenLedger()
        bounds = [0, *(np.flatnonzero(np.diff(sampled)) + 1).tolist(), end - begin]
        for start, stop in pairwise(bounds):
            part = ids[start:stop].tolist()
            if sampled[start]:
                ledger.append_sampled(part, [0.0] * len(part), [0] * len(part), 0)
            else:
                ledger.append_context(part, 0)
        return ledger


def _map_array(file: Path, kind: str, count: int) -> npt.NDArray[Any]:
    if file.stat().st_size != count * np.dtype(kind).itemsize:
        raise ValueError(f"{file.name} has {file.stat().st_size} bytes")
    return np.memmap(file, dtype=kind, mode="r", shape=(count,)) if count else np.empty(0, dtype=kind)

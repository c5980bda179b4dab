"""Suites: benchmarks as environments, the location of their sources, and their installation."""

from __future__ import annotations

import inspect
import json
import os
import platform
import threading
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import lru_cache
from hashlib import blake2b, sha256
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, ClassVar

from agentrl.contrib.toolkit.taskdata import held_out_families
from agentrl.data.trajectory import Json, Task
from agentrl.env.address import DRIVER_SOURCES, SOURCES, module_folder
from agentrl.env.official import WHOLE, Benchmark
from agentrl.utils.errors import ConfigError, TaskDataError, did_you_mean
from agentrl.utils.files import atomic_write, file_sha256
from agentrl.utils.parsing import read_json
from agentrl.utils.threads import fork_safe


def known_word(word: str, known: Iterable[str], where: str) -> str:
    """Return `word` if it is one of `known`. Raises ConfigError with the place `where` ("tau2: domain") and similar or all known
    names."""
    names = list(known)
    if word not in names:
        raise ConfigError(f"{where} = {word!r}; {did_you_mean(word, names, 'known: ' + ', '.join(names))}")
    return word


def members(names: Iterable[str], groups: Mapping[str, Iterable[str]], where: str) -> tuple[str, ...]:
    """Return the members of the named groups, each once, in the order of `names`. A member may be its own group. Raises
    ConfigError as `known_word`."""
    return tuple(dict.fromkeys(one for name in names for one in groups[known_word(name, groups, where)]))


def within(number: int, least: int, most: int, where: str) -> int:
    """Return `number` if least <= number <= most. Raises ConfigError with its place `where` and the range."""
    if not least <= number <= most:
        raise ConfigError(f"{where} = {number!r}; expected a number within {least}..{most}")
    return number


def user_folder() -> Path:
    """Return the folder of user state outside of runs (the installed suites): AGENTRL_HOME, by default ~/.agentrl."""
    return Path(os.environ.get("AGENTRL_HOME") or "~/.agentrl").expanduser()


# Location of a suite's source on this machine: a benchmark's checkout or package, and the record of its installation.
#
# `agentrl env install` writes a record to the user's folder: source, version, counts, and size, time and sha256 of the files of
# tasks and checkers. An environment reads the benchmark in place; no file is copied.

SHOWN = 6
"""Maximum number of changed files in a note."""
_LEFT_OUT = frozenset({"__pycache__", "node_modules"})


@dataclass(frozen=True)
class SourceFile:
    """A file's state at the installation: bytes, modification time in ns, sha256."""

    size: int
    modified: int
    sha256: str


@dataclass(frozen=True)
class InstallRecord:
    """Record of `agentrl env install`. `source`: the folder; `files`: by path relative to it; `tasks`: counts by environment
    ID, split and family; `installed`: the date."""

    suite: str
    source: str
    version: str
    installed: str
    files: dict[str, SourceFile] = field(repr=False)
    tasks: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)

    def changes(self, patterns: Iterable[str]) -> list[str]:
        """Describe changes since the installation of the files that match the patterns ("data/tasks.json was changed"); empty if
        no file changed."""
        now = {str(path.relative_to(self.source)) for path in _matching(Path(self.source), patterns)}
        found = [f"{name} is new" for name in sorted(now - set(self.files))]
        for name, old in self.files.items():
            path = Path(self.source) / name
            if not path.is_file():
                found.append(f"{name} is gone")
                continue
            stat = path.stat()
            if (stat.st_size, stat.st_mtime_ns) != (old.size, old.modified) and file_of(path).sha256 != old.sha256:
                found.append(f"{name} was changed")
        return found


def record_file(suite: str) -> Path:
    """Return the path of a suite's record, which may not exist."""
    return user_folder() / "suites" / f"{suite}.json"


def read_record(suite: str) -> InstallRecord | None:
    """Return the record of a suite's installation, or None. Raises ConfigError if it is damaged."""
    file = record_file(suite)
    try:
        stat = file.stat()
    except OSError:
        return None
    return _read_record(suite, file, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=64)  # called for each episode
def _read_record(suite: str, file: Path, modified: int, size: int) -> InstallRecord:
    """Read a record; time and size of the file are only keys of the cache."""
    try:
        raw: dict[str, Any] = read_json(file.read_text(encoding="utf-8"))
        return InstallRecord(**{**raw, "files": {name: SourceFile(**one) for name, one in raw["files"].items()}})
    except (ValueError, TypeError, KeyError, AttributeError) as problem:
        raise ConfigError(f"{file}: not a record of `agentrl env install` ({problem}); install {suite} again") from None


@SOURCES.register("suites")
def recorded_sources() -> dict[str, str]:
    """Return suite -> source of all installed suites, for cluster workers; in a worker, the driver's sources take precedence."""
    folder = user_folder() / "suites"
    records = [read_record(file.stem) for file in sorted(folder.glob("*.json"))] if folder.is_dir() else []
    return {**{record.suite: record.source for record in records if record is not None}, **_driver_sources()}


def find_source(
    suite: str, given: str | None, module: str | None, own: Path | None = None, *, obtain: str = "", called: str = "params.source"
) -> Path:
    """Return the folder of a suite's source: the first of `given`, the driver's, the installed one, the package's, and the
    suite's `own`. `called`: the user's name for `given`, for errors. Raises ConfigError, with commands that help, if no source
    is found, or if a named folder does not exist on this machine."""
    expected = "the folder that holds the benchmark" + (f", which you get by `{obtain}`" if obtain else f" {suite}")
    if given is not None and not given.strip():
        raise ConfigError(f"{suite}: {called} is empty; expected {expected}")
    record = read_record(suite)
    for place, said in (
        (given, called),
        (_driver_sources().get(suite), "the source on the driver's machine"),
        (None if record is None else record.source, "the source that `agentrl env install` recorded"),
    ):
        if place is None:
            continue
        folder = Path(place).expanduser()
        if not folder.is_dir():
            found = "that is a file" if folder.is_file() else f"there is no such folder on {platform.node() or 'this machine'}"
            raise ConfigError(
                f"{suite}: {said} is {str(folder)!r}, and {found}; expected {expected}. A suite is read in place, so each "
                f"machine that plays it needs it at that path (`agentrl env install {suite} --from FOLDER` records another)"
            )
        return folder.resolve()
    packaged = None if module is None else module_folder(module)
    if found_here := packaged or own:
        return found_here
    first = f"First `{obtain}`, then" if obtain else "Use"
    help_text = f"{first} `agentrl env install {suite} --from FOLDER` (or set params.source=FOLDER for one run)"
    raise ConfigError(f"{suite}: its source is not installed. {help_text}")


def checkout_version(folder: Path) -> str:
    """Return the first 12 digits of the commit of a folder's git checkout, or "no version" outside of one. Reads files only, and
    does not run git."""
    for place in (folder, *folder.parents):
        git = place / ".git"
        if git.is_file():  # in a worktree: "gitdir: PATH", whose refs are two folders above it
            git = place / git.read_text().removeprefix("gitdir:").strip()
        if not (git / "HEAD").is_file():
            continue
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref:"):
            return head[:12] or "no version"
        name = head.removeprefix("ref:").strip()
        for root in (git, git.parent.parent):
            if (root / name).is_file():
                return (root / name).read_text().strip()[:12] or "no version"
            packed = (root / "packed-refs").read_text().splitlines() if (root / "packed-refs").is_file() else []
            if found := [line.split()[0] for line in packed if line.endswith(f" {name}")]:
                return found[0][:12]
        break
    return "no version"


def found_version(folder: Path) -> str:
    """Return the version of a checkout or package: from its `pyproject.toml`, from the `NAME-*.dist-info` next to an installed
    package, else `checkout_version`. Raises ConfigError for an invalid `pyproject.toml`."""
    project = folder / "pyproject.toml"
    if project.is_file():
        try:
            said = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {}).get("version")
        except ValueError as problem:
            raise ConfigError(f"pyproject.toml: {problem}") from None
        if said is not None:
            return str(said)
    infos = sorted(folder.parent.glob(f"{folder.name}-*.dist-info"))
    return infos[-1].name.removesuffix(".dist-info").partition("-")[2] if infos else checkout_version(folder)


def read_files(folder: Path, patterns: Iterable[str]) -> dict[str, SourceFile]:
    """Hash the files of a folder that match a glob pattern; by relative path, sorted."""
    return {str(path.relative_to(folder)): file_of(path) for path in _matching(folder, patterns)}


def file_of(path: Path) -> SourceFile:
    """Return a file's size, modification time and hash."""
    stat = path.stat()
    return SourceFile(stat.st_size, stat.st_mtime_ns, file_sha256(path))


def fingerprint(files: Mapping[str, SourceFile]) -> str:
    """Return one digest of the files' names and contents."""
    return sha256(json.dumps([[name, one.sha256] for name, one in sorted(files.items())]).encode()).hexdigest()


def _matching(folder: Path, patterns: Iterable[str]) -> Iterator[Path]:
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    for path in sorted(found):
        parts = path.relative_to(folder).parts
        if not any(part.startswith(".") or part in _LEFT_OUT for part in parts):
            yield path


def _driver_sources() -> dict[str, str]:
    found: dict[str, str] = read_json(os.environ.get(DRIVER_SOURCES) or "{}")
    return found


# A suite: a benchmark's tasks, tools and data as an environment, read in place from the user's checkout or package.
#
# class Toy(SuiteEnv):
# id, suite, module, obtain = "me/Toy-v0", "toy", None, "git clone https://..."
# files = ("data/*.json",)                                    # files of tasks and checkers
# required = ("data",)                                        # a benchmark's folder must have these
# def load(self): ...                                         # yields a SuiteTask for each task
# def prompt(self, task): ...                                 # and the rest of a ToolEnv
#
# This base class finds the source and provides its fingerprint, splits by family, and the table of official metrics.


@dataclass(frozen=True, slots=True)
class SuiteTask:
    """One task of a benchmark. `split`: the benchmark's own split; None: chosen by the family."""

    id: str
    family: str
    data: Mapping[str, Json] = field(repr=False)
    gold: Mapping[str, Json] = field(repr=False)
    split: str | None = None


class SuiteEnv(Benchmark):
    """Base class of suites. A subclass defines the members of a `ToolEnv` and:

    `suite`: the name in `agentrl env install NAME`; several classes may share one. `module`: the importable package with the
    benchmark, if there is one. `obtain`: the command or text that tells a user how to get it, shown in errors. `own`: a folder
    next to the class's file, used if nothing is installed. `files`: glob patterns below the source for the files of tasks and
    checkers. `required`: files and folders that must exist below the source. `kind`: key of a task's data over which samples of
    tasks are spread ("category"); by default the family. `beside`: parameters that do not change the list of tasks (for example
    the interpreter that runs the benchmark). `holdout`: the unit by which tasks without a benchmark split are held out, for
    reports. All but `files` and `required` must be constants of the class body, since listing reads source text and runs nothing.
    """

    module: ClassVar[str | None] = None
    obtain: ClassVar[str] = ""
    own: ClassVar[str | None] = None
    files: ClassVar[tuple[str, ...]] = ("**/*",)
    required: ClassVar[tuple[str, ...]] = ()
    kind: ClassVar[str] = ""
    beside: ClassVar[frozenset[str]] = frozenset()
    host_params = frozenset({"source"})

    def __init__(self, *, source: str | None = None, **base: Any) -> None:
        """`source`: the benchmark's checkout or package folder, by default the one recorded by `agentrl env install`, else the
        importable package. Raises ConfigError if no source is found, or if a required file is missing."""
        super().__init__(**base)
        self.source, self.version = type(self).locate(source)

    @classmethod
    def check_source(cls, folder: Path) -> str:
        """Return the version of the benchmark in a folder (see `found_version`). Raises ConfigError if a `required` file is
        missing."""
        if missing := [name for name in cls.required if not (folder / name).exists()]:
            raise ConfigError(f"{missing[0]} is missing")
        return found_version(folder)

    @classmethod
    def locate(cls, source: str | None = None) -> tuple[Path, str]:
        """Return the source's folder and version. Raises ConfigError as `__init__`."""
        own = None if cls.own is None else Path(inspect.getfile(cls)).with_name(cls.own)
        folder = find_source(cls.suite, source, cls.module, own, obtain=cls.obtain)
        try:  # checked once per process and folder, since each episode builds an environment
            return folder, _VERSIONS.get((cls, folder)) or _VERSIONS.setdefault((cls, folder), cls.check_source(folder))
        except ConfigError as problem:
            get = f"To get it: {cls.obtain or 'see its README'}"
            raise ConfigError(f"{cls.suite}: {folder} is not its source: {problem}\n{get}") from None

    @classmethod
    def task_counts(cls, folder: Path) -> dict[str, dict[str, int]]:
        """Count a folder's tasks by split and family, for the record of the installation."""
        env = cls(source=str(folder), scorer=None)
        found: dict[str, dict[str, int]] = {}
        for split in env.splits:
            tasks = (env.make_task(seed, split) for seed in range(env.task_count(split)))
            found[split] = dict(Counter(env.family(task) for task in tasks))
        env.close()
        return found

    # -- tasks -------------------------------------------------------------------------------------

    def load(self) -> Iterable[SuiteTask]:
        """Return the benchmark's tasks that this environment's parameters select, in the benchmark's order; all without
        parameters. Called once per process for each source and set of parameters. (Not needed if a subclass overrides
        `make_task` and `task_count`.)"""
        raise NotImplementedError(f"{type(self).__name__}.load")

    def whole(self) -> Sequence[SuiteTask]:
        """Return every task of the benchmark, regardless of the parameters: the held-out families depend on all tasks, so that
        selecting a part of them does not move a family from held-out to training. By default, the tasks that the class loads
        without parameters; () if there are no parameters."""
        if not self._parameters():
            return ()
        kept = {name: value for name, value in self._built_with[1].items() if name in self.beside}
        return type(self)(source=str(self.source), scorer=None, **kept)._pool()[WHOLE]

    def check_split(self, split: str) -> None:
        """Accept any split: `make_task` checks it, and also allows `WHOLE`."""

    def make_task(self, rng_seed: int, split: str) -> Task:
        rows = self._rows(split)
        row = rows[rng_seed % len(rows)]
        return Task(row.id, rng_seed, split, {"family": row.family, **row.data}, row.gold)

    def spread(self, split: str, count: int, seed: int = 0) -> tuple[int, ...]:
        """Choose `count` tasks spread over the kinds (see `kind`): one per kind in turn, with kinds and tasks in the order of a
        hash of their names and `seed`. (The first `count` if a subclass overrides `make_task`.)"""
        if type(self).make_task is not SuiteEnv.make_task:
            return tuple(range(count))
        kinds: dict[str, list[tuple[bytes, int]]] = {}
        for number, row in enumerate(self._rows(split)):
            kinds.setdefault(self._kind(row), []).append((_shuffle_key(seed, row.id), number))
        ordered = [sorted(kinds[name]) for name in sorted(kinds, key=lambda name: _shuffle_key(seed, name))]
        turns = (one[1] for ring in zip_longest(*ordered) for one in ring if one is not None)
        return tuple(sorted(islice(turns, count)))

    def task_count(self, split: str) -> int:
        return len(self._pool().get(split, ()))

    def split_sizes(self) -> dict[str, dict[str, Any]]:
        found = {}
        for split in self.splits:
            rows = self._pool().get(split, ())
            ids = sha256("\n".join(sorted(row.id for row in rows)).encode()).hexdigest()
            found[split] = {"tasks": len(rows), "kinds": dict(Counter(map(self._kind, rows))), "sha256": ids}
        return found

    def _kind(self, row: SuiteTask) -> str:
        return str(row.data[self.kind]) if self.kind else row.family

    def _rows(self, split: str) -> Sequence[SuiteTask]:
        pool = self._pool()
        if not pool.get(split):
            known = [name for name, rows in pool.items() if rows]
            hint = did_you_mean(split, known, f"its splits: {', '.join(known) or 'none'}")
            if split in pool:  # the split exists, but these parameters select none of its tasks
                every = by_split(self.suite, self.whole())[split] if self._parameters() else ()
                families = sorted({row.family for row in every})
                hint += f"; env.params choose none of its families: {', '.join(families)}" if families else ""
            raise TaskDataError(f"{self.suite}: no tasks of split {split!r}; {hint}")
        return pool[split]

    def _pool(self) -> dict[str, tuple[SuiteTask, ...]]:
        """Return the tasks by split. The process holds them, not the environment, so snapshots do not copy them."""
        key = (type(self), self.source, repr(self._parameters()))
        with _LOCK:
            if key not in _POOLS:
                _POOLS[key] = by_split(self.suite, tuple(self.load()), self.whole())
            return _POOLS[key]

    def _parameters(self) -> list[tuple[str, Any]]:
        return sorted((name, value) for name, value in self._built_with[1].items() if name not in _NEUTRAL | self.beside)

    # -- files -------------------------------------------------------------------------------------

    def source_notes(self) -> Sequence[str]:
        record = self._record_of_source()
        changed = [] if record is None else record.changes(self.files)
        if record is None or not changed:
            return ()
        more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
        return (
            f"{self.suite}: its source {self.source} is not the one installed on {record.installed} ({record.version}): "
            f"{', '.join(changed[:SHOWN])}{more}; to accept the changes: agentrl env install {self.suite} --from {self.source}",
        )

    def source_digest(self) -> str:
        record = self._record_of_source()
        if record is not None and not record.changes(self.files):
            return fingerprint(record.files)
        return fingerprint(read_files(self.source, self.files))

    def _record_of_source(self) -> InstallRecord | None:
        record = read_record(self.suite)
        return record if record is not None and Path(record.source).resolve() == self.source else None


def _shuffle_key(seed: int, name: str) -> bytes:
    return blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()


_LOCK = fork_safe(threading.RLock())
_POOLS: dict[tuple[Any, ...], dict[str, tuple[SuiteTask, ...]]] = {}
_NEUTRAL = frozenset({"source", "split", "scorer", "render_mode", "count_tokens"})


def by_split(suite: str, tasks: Sequence[SuiteTask], whole: Sequence[SuiteTask] = ()) -> dict[str, tuple[SuiteTask, ...]]:
    """Return tasks by split, and all of them under "all". Tasks without a benchmark split are held out by whole families (by
    single tasks if there is only one family). `whole`: further tasks that count for the choice of families. Raises
    TaskDataError for a duplicate ID, and for a family with and without a split."""
    if not tasks:
        raise TaskDataError(f"{suite}: its source has no tasks")
    ids: set[str] = set()
    for task in tasks:
        if task.id in ids:
            raise TaskDataError(f"{suite}: two tasks have the id {task.id!r}")
        ids.add(task.id)
    named = {task.family for task in tasks if task.split is not None}
    if mixed := sorted(named & {task.family for task in tasks if task.split is None}):
        raise TaskDataError(f"{suite}: tasks of the family {mixed[0]!r} have a split of their own, and others of it have none")
    open_ones = [task for task in (*tasks, *whole) if task.split is None]
    several = len({task.family for task in open_ones}) > 1
    held = held_out_families(task.family if several else task.id for task in open_ones)
    found: dict[str, list[SuiteTask]] = {"train": [], "heldout": []}
    for task in tasks:
        hashed = "heldout" if (task.family if several else task.id) in held else "train"
        found.setdefault(task.split or hashed, []).append(task)
    return {**{name: tuple(rows) for name, rows in found.items()}, WHOLE: tuple(tasks)}


_VERSIONS: dict[tuple[type, Path], str] = {}


# Installation


def install(classes: Mapping[str, type[SuiteEnv]], given: str | None) -> InstallRecord:
    """Check the source of a suite and write its record. `classes`: its environments by ID, at least one. `given`: the folder, by
    default the recorded one, or the importable package.

    Raises ConfigError if there is no source, or if it lacks files of the suite; TaskDataError for an invalid task."""
    suite = next(iter(classes.values()))
    folder = find_source(suite.suite, given, suite.module, obtain=suite.obtain, called="--from")
    version = suite.locate(str(folder))[1]
    tasks = {env_id: one.task_counts(folder) for env_id, one in classes.items()}
    files = read_files(folder, suite.files)
    if not files:
        raise ConfigError(f"{suite.suite}: no file of {folder} matches {', '.join(suite.files)}")
    record = InstallRecord(suite.suite, str(folder), version, date.today().isoformat(), files, tasks)
    record_file(suite.suite).parent.mkdir(parents=True, exist_ok=True)
    atomic_write(record_file(suite.suite), json.dumps(asdict(record), indent=1) + "\n")
    return record


def remove(suite: str) -> Path:
    """Delete the record of a suite, but not its source; return the record's path. Raises ConfigError if it is not installed."""
    file = record_file(suite)
    if not file.is_file():
        raise ConfigError(f"{suite} is not installed: there is no {file}")
    file.unlink()
    return file

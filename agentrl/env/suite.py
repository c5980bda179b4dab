"""A suite: a benchmark's own tasks, tools and data as an environment, read in place from the user's checkout or package.

    class Toy(SuiteEnv):
        id, suite, module, obtain = "me/Toy-v0", "toy", None, "git clone https://..."
        files = ("data/*.json",)                                    # what tasks and checkers come from

        required = ("data",)                                           # without which a folder is not the benchmark's
        def load(self): ...                                         # yields a SuiteTask for each task
        def prompt(self, task): ...                                 # and the rest of a ToolEnv

What is general is here: where the source is, its fingerprint, splits by family, the table of official metrics.
"""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, ClassVar

from agentrl.env.base import ToolEnv
from agentrl.env.families import held_out_families
from agentrl.env.source import find_source, found_version, need
from agentrl.errors import ConfigError, TaskDataError, did_you_mean
from agentrl.executors import fork_safe
from agentrl.trajectory import Json, StopReason, Task

WHOLE = "all"
"""The split that has every task: to evaluate a benchmark as a whole. It is in no `splits`, and nothing trains on it."""


@dataclass(frozen=True, slots=True)
class SuiteTask:
    """One task of a benchmark. `split`: the benchmark's own; None: by the family."""

    id: str
    family: str
    data: Mapping[str, Json] = field(repr=False)
    gold: Mapping[str, Json] = field(repr=False)
    split: str | None = None


@dataclass(frozen=True, slots=True)
class Played:
    """An episode as the official metrics see it. `sample`: its number among those of its task, 0 to k - 1; `unscored`: why it has
    no score (an outage, say), or None."""

    task_id: str
    family: str
    data: Mapping[str, Json] = field(repr=False)
    sample: int
    value: float | None
    success: bool | None
    stop: StopReason
    turns: int
    calls: int
    unscored: str | None = None


@dataclass(frozen=True, slots=True)
class OfficialRow:
    """A row of a benchmark's official table: `n` is what the value is a mean of, `weight` its part in the overall value (None:
    none); `value` is None if nothing of it was scored."""

    name: str
    value: float | None
    n: int
    weight: float | None = None
    note: str = ""


class SuiteEnv(ToolEnv):
    """Base class of suites. A subclass sets what `ToolEnv` asks for and:

    `suite`: the name of `agentrl env install NAME`; several classes may share one. `module`: the importable package that holds
    the benchmark, if one does. `obtain`: what a person does to get it, told by every error. `own`: a folder beside the class's
    file that is used if nothing is installed. `files`: glob patterns, below the source, of what tasks and checkers come from.
    `required`: files and folders, below the source, without which it is not the benchmark's.
    `kind`: what of a task's data a part of the tasks is spread over ("category"); by default the family.
    `beside`: parameters that the list of tasks does not depend on (which interpreter runs the benchmark, say).
    All but `files` and `required` are constants of the class body, since listing reads source text and runs nothing.
    """

    suite: ClassVar[str] = ""
    module: ClassVar[str | None] = None
    obtain: ClassVar[str] = ""
    own: ClassVar[str | None] = None
    files: ClassVar[tuple[str, ...]] = ("**/*",)
    required: ClassVar[tuple[str, ...]] = ()
    kind: ClassVar[str] = ""
    beside: ClassVar[frozenset[str]] = frozenset()
    host_params = frozenset({"source"})

    def __init__(self, *, source: str | None = None, **base: Any) -> None:
        """`source`: the benchmark's checkout or package folder; by default what `agentrl env install` recorded, else the
        importable package. Raises ConfigError if there is none, or if a file of it is missing."""
        super().__init__(**base)
        self.source, self.version = type(self).located(source)

    @classmethod
    def check_source(cls, folder: Path) -> str:
        """The benchmark's version at a folder (see `found_version`). Raises ConfigError naming what of `required` is missing."""
        need(folder, cls.required)
        return found_version(folder)

    @classmethod
    def official(cls, episodes: Sequence[Played]) -> Sequence[OfficialRow]:
        """The benchmark's own metrics with its own weights; by default none. Unscored episodes (`success` None) are counted by
        no mean, and `n` says how many were."""
        return ()

    @classmethod
    def located(cls, source: str | None = None) -> tuple[Path, str]:
        """The source's folder and version. Raises ConfigError as `__init__`."""
        own = None if cls.own is None else Path(inspect.getfile(cls)).with_name(cls.own)
        folder, _ = find_source(cls.suite, source, cls.module, own, obtain=cls.obtain)
        return folder, _checked(cls, folder)

    @classmethod
    def counted(cls, folder: Path) -> dict[str, dict[str, int]]:
        """The number of tasks of the benchmark at a folder by split and family, for the record of its installation."""
        env = cls(source=str(folder), scorer=None)
        found: dict[str, dict[str, int]] = {}
        for split in env.splits:
            tasks = (env.make_task(seed, split) for seed in range(env.task_count(split)))
            found[split] = dict(Counter(env.family(task) for task in tasks))
        env.close()
        return found

    # -- tasks -------------------------------------------------------------------------------------

    def load(self) -> Iterable[SuiteTask]:
        """Every task of the benchmark under this environment's parameters, in its own order; without parameters, every task.
        Called once per process for each source and set of parameters. (An author who overrides `make_task` and `task_count`
        needs none.)"""
        raise NotImplementedError(f"{type(self).__name__}.load")

    def whole(self) -> Sequence[SuiteTask]:
        """Every task of the benchmark, whatever the parameters: which families are held out depends on these and on nothing that
        selects from them, so that nobody trains on a part in which other families are held out. By default, what the class
        loads without parameters."""
        if not self._parameters():
            return ()
        kept = {name: value for name, value in self._built_with[1].items() if name in self.beside}
        return type(self)(source=str(self.source), scorer=None, **kept)._pool()[WHOLE]

    def make_task(self, rng_seed: int, split: str) -> Task:
        rows = self._rows(split)
        row = rows[rng_seed % len(rows)]
        return Task(row.id, rng_seed, split, {"family": row.family, **row.data}, row.gold)

    def spread(self, split: str, count: int, seed: int = 0) -> tuple[int, ...]:
        """The numbers of `count` tasks of a split, spread over its kinds (see `kind`): one of each kind in turn, kinds and the
        tasks of a kind in the order of a hash of their names and of `seed`. The same for the same seed; those of a smaller count
        are among those of a larger one. (The first ones of an author who overrides `make_task`.)"""
        if type(self).make_task is not SuiteEnv.make_task:
            return tuple(range(count))
        kinds: dict[str, list[tuple[bytes, int]]] = {}
        for number, row in enumerate(self._rows(split)):
            name = str(row.data[self.kind]) if self.kind else row.family
            kinds.setdefault(name, []).append((_drawn(seed, row.id), number))
        ordered = [sorted(kinds[name]) for name in sorted(kinds, key=lambda name: _drawn(seed, name))]
        turns = (one[1] for ring in zip_longest(*ordered) for one in ring if one is not None)
        return tuple(sorted(islice(turns, count)))

    def task_count(self, split: str) -> int:
        return len(self._pool().get(split, ()))

    def _rows(self, split: str) -> Sequence[SuiteTask]:
        pool = self._pool()
        if not pool.get(split):
            known = [name for name, rows in pool.items() if rows]
            hint = did_you_mean(split, known, f"its splits: {', '.join(known) or 'none'}")
            if split in pool:  # there is such a split, and these parameters choose nothing of it
                every = by_split(self.suite, self.whole())[split] if self._parameters() else ()
                families = sorted({row.family for row in every})
                hint += f"; env.params choose none of its families: {', '.join(families)}" if families else ""
            raise TaskDataError(f"{self.suite}: no tasks of split {split!r}; {hint}")
        return pool[split]

    def _pool(self) -> dict[str, tuple[SuiteTask, ...]]:
        """The tasks by split. Held by the process and not by the environment, so that no snapshot copies them."""
        key = (type(self), self.source, repr(self._parameters()))
        with _LOCK:
            if key not in _POOLS:
                _POOLS[key] = by_split(self.suite, tuple(self.load()), self.whole())
            return _POOLS[key]

    def _parameters(self) -> list[tuple[str, Any]]:
        return sorted((name, value) for name, value in self._built_with[1].items() if name not in _NO_MATTER | self.beside)


def _drawn(seed: int, name: str) -> bytes:
    return blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()


_LOCK = fork_safe(threading.RLock())
_POOLS: dict[tuple[Any, ...], dict[str, tuple[SuiteTask, ...]]] = {}
_NO_MATTER = frozenset({"source", "split", "scorer", "render_mode", "count_tokens"})


def by_split(suite: str, tasks: Sequence[SuiteTask], whole: Sequence[SuiteTask] = ()) -> dict[str, tuple[SuiteTask, ...]]:
    """Tasks by split, and under "all": the benchmark's own split if a task has one, else whole families are held out (single
    tasks if there is only one family). `whole`: more tasks, whose families count for that. Raises TaskDataError for two tasks
    of one id, and for a family with and without a split."""
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


def _checked(cls: type[SuiteEnv], folder: Path) -> str:
    """The version, asked once per process and folder, since an environment is built for every episode."""
    try:
        return _VERSIONS.get((cls, folder)) or _VERSIONS.setdefault((cls, folder), cls.check_source(folder))
    except ConfigError as problem:
        raise ConfigError(
            f"{cls.suite}: {folder} is not its source: {problem}\nTo get it: {cls.obtain or 'see its README'}"
        ) from None

"""Read a benchmark where it lies: code in place, Python worlds, gold scripts, official means."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import statistics
import sys
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from statistics import fmean, stdev
from types import ModuleType
from typing import Any, Self

from agentrl.data.trajectory import Json, Message, ToolCall
from agentrl.env.base import ToolEnv
from agentrl.env.call_options import Options
from agentrl.env.official import OfficialRow, Played, pass_hat_k
from agentrl.env.tools import Tool
from agentrl.utils.errors import ConfigError, DependencyError
from agentrl.utils.parsing import expression_of, module_of
from agentrl.utils.threads import fork_safe

# Reading a benchmark's code where it is: modules of a package in a checkout, and texts that its source has as constants.
#
# Only what a suite needs is imported. A benchmark's own `__init__` often imports its runner, its clients of models and all that
# these need; a suite needs none of it.

_LOCK = fork_safe(threading.RLock())


def import_in_place(module: str, folder: Path, *, extra: str | None = None) -> ModuleType:
    """The module of a package whose folder is `folder` ("toy.rules" of .../src/toy), without running the package's own
    `__init__`. Packages next to it (`pip install --target`) are found while it is imported. `extra`: the extra of agentrl
    that installs what the module imports, if one does, for errors.

    Raises ConfigError if the package was imported from elsewhere in this process, or does not load on this Python;
    DependencyError for a package that is not installed.
    """
    top = module.partition(".")[0]
    with _LOCK:
        package = sys.modules.get(top)
        if package is None:
            package = sys.modules[top] = ModuleType(top, f"{top}, read in place from {folder}")
            package.__path__ = [str(folder)]
        places = [Path(place).resolve() for place in getattr(package, "__path__", ())]
        if folder.resolve() not in places:
            raise ConfigError(f"{top} is to be read from {folder}, but this process has imported it from {places or 'a file'}")
        sys.path.append(str(folder.parent))
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as problem:
            if (problem.name or "").partition(".")[0] == top:
                raise ConfigError(f"{folder} has no {problem.name}: is it the version that this suite reads?") from problem
            wanted = problem.name if extra is None else f"'agentrl[{extra}]'"
            raise DependencyError(f"{module} needs {problem.name}: pip install {wanted}") from problem
        except SyntaxError as problem:
            running = f"{sys.version_info.major}.{sys.version_info.minor}"
            raise ConfigError(f"{module} does not load on Python {running}: {problem}; use a newer Python") from problem
        finally:
            sys.path.remove(str(folder.parent))


class PackageInPlace:
    """A package's folder and its modules. Copies of an environment share it, and it is a key of caches: it is its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __hash__(self) -> int:
        return hash(self.folder)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and isinstance(other, PackageInPlace) and other.folder == self.folder

    def module(self, name: str) -> ModuleType:
        """A module by its name in the package ("constants.enums"); raises as `import_in_place`."""
        return import_in_place(f"{self.folder.name}.{name}", self.folder)


@contextmanager
def named_if_missing(suite: str) -> Iterator[None]:
    """Turn a benchmark's error about a missing file into a ConfigError with the file's name."""
    try:
        yield
    except FileNotFoundError as missing:
        raise ConfigError(f"{suite}: {missing.filename} is missing") from missing


@cache
def text_constant(file: Path, name: str) -> str:
    """The text that a module's source assigns to a name at its top level: the longest string in the assigned expression, with
    white space around it removed. Nothing is run. Raises ConfigError without one."""
    if not file.is_file():
        raise ConfigError(f"{file} is missing")
    for node in module_of(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any(isinstance(to, ast.Name) and to.id == name for to in node.targets):
            inside = (part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant))
            texts = [text for text in inside if isinstance(text, str)]
            if texts:
                return max(texts, key=len).strip()
    raise ConfigError(f"{file} assigns no text to {name}: is it the version that this suite reads?")


_AS_IT_IS = frozenset({str, int, float, type(None)})


def published_tool(declared: Mapping[str, Any], run: Callable[..., Any], **options: Any) -> Tool:
    """Make a tool as its benchmark publishes it: `declared` is {"name", "description", "parameters"}, which the policy is shown.

    `run(env, **arguments)` answers. Its own code judges the arguments, so nothing checks them before, and the calls of a turn are
    made one after the other. `options`: others, as in `Options`."""
    made = Options(**{"check": "off", "parallel": False, **options})
    name, parameters = declared["name"], declared.get("parameters", {})
    return replace(Tool.from_schema(name, declared.get("description", ""), parameters, run, made), method=True)


def read_call(text: str, function: Callable[[str], Callable[..., Any]]) -> tuple[str, dict[str, Json]]:
    """Name and arguments of a call that is written in Python, such as `move("a", to="b")`; values are literals. `function(name)`
    gives what would be called, whose signature names arguments given by position (of a method, looked up in its class, the first
    parameter is left out). Raises ValueError for anything else."""
    try:
        node = expression_of(text.strip())
    except SyntaxError as problem:
        raise ValueError(f"not a call: {text[:100]!r}") from problem
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError(f"not a call by name: {text[:100]!r}")
    places = [ast.literal_eval(item) for item in node.args]
    named = {item.arg: ast.literal_eval(item.value) for item in node.keywords if item.arg}
    if places:
        parameters = [name for name in inspect.signature(function(node.func.id)).parameters if name != "self"]
        named = dict(zip(parameters, places, strict=False)) | named
    return node.func.id, named


def public_methods(classes: Mapping[str, type]) -> dict[str, str]:
    """The public methods of classes, each with the name of the last class that has it."""
    return {
        method: name
        for name, one in classes.items()
        for method, _ in inspect.getmembers(one, inspect.isroutine)
        if method[0] != "_"
    }


def answer_of(api: Any, name: str, arguments: Mapping[str, Json], fault: str = "Error during execution: {}") -> str:
    """Result of a method call, as text: JSON for a dictionary that has a JSON form, else `str`; for an exception, `fault` with
    its words. `api` None: Python's words for a name that nothing has."""
    try:
        if api is None:
            raise NameError(f"name {name!r} is not defined")
        result = getattr(api, name)(**arguments)
    except Exception as problem:  # whatever the benchmark's code raises is its answer
        return fault.format(problem)
    if isinstance(result, dict):
        try:
            return json.dumps(result)
        except (TypeError, ValueError):
            return str(result)
    return str(result)


def public_state(value: Any) -> Json:
    """A value as JSON, for states that are compared as Python compares them: true and 1 and 1.0 are the same.

    Of an object: its attributes without those whose name begins with "_", and without those that hold another object of its class
    (a directory's parent, say, which would lead in a circle). Keys that are not strings differ from strings that look
    like them.
    """
    kind = type(value)
    if kind in _AS_IT_IS:  # by far the most, and twice as quick as what follows
        return value
    if kind is dict:
        return {key if type(key) is str else _key(key): public_state(item) for key, item in value.items()}
    if kind is list:
        return [item if type(item) in _AS_IT_IS else public_state(item) for item in value]
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {_key(key): public_state(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [public_state(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((public_state(item) for item in value), key=repr)
    if hasattr(value, "__dict__"):
        return {
            name: item if type(item) in _AS_IT_IS else public_state(item)
            for name, item in vars(value).items()
            if name[:1] != "_" and type(item) is not kind
        }
    return repr(value)


def _key(key: Any) -> str:
    if isinstance(key, str):
        return key
    if isinstance(key, float | bool) and key == int(key):
        key = int(key)
    return f"{key!r} ({type(key).__name__})"


Asked = Mapping[str, Any]
"""A call of a task's solution: {"name", "arguments"}, and "by", "assistant" or "user", if there are two sides."""


def calling(calls: Iterable[tuple[str, Mapping[str, Json]]]) -> Message:
    """An assistant turn that makes calls, each (name, arguments)."""
    return Message("assistant", "", tuple(ToolCall(name, dict(arguments)) for name, arguments in calls))


def round_turns(rounds: Iterable[Sequence[Asked]]) -> list[Message]:
    """The turns of a solution by rounds of a conversation: the calls of each round at once, if it has some, and then a text, to
    which the user answers."""
    pairs = [(calling((call["name"], call["arguments"]) for call in calls), Message("assistant", "done")) for calls in rounds]
    return [turn for pair in pairs for turn in pair if turn.tool_calls or turn.content]


def message_of(row: Mapping[str, Any]) -> Message:
    """A message as benchmarks write it: {"role", "content"}, of an assistant or user with "tool_calls" ({"name", "arguments",
    "id"}), of a tool with the "id" of the call that it answers."""
    calls = tuple(ToolCall(call["name"], call["arguments"], id=call["id"]) for call in row.get("tool_calls") or ())
    return Message(row["role"], row.get("content") or "", calls, tool_call_id=row.get("id"))


def two_sided_turns(calls: Iterable[Asked]) -> list[Message]:
    """The agent's turns of a solution of two sides: its own calls, one a turn, and a text that names the tools of the user's next
    calls (see `AskedUser`)."""
    turns = []
    for by, run in groupby(calls, lambda call: call["by"]):
        if by == "user":
            turns.append(Message("assistant", "Please use " + ", ".join(call["name"] for call in run)))
        else:
            turns += [calling([(call["name"], call["arguments"])]) for call in run]
    return turns


class AskedUser:
    """A user by script: says its opening; makes its next calls of a solution once the agent's text names all their tools; to
    anything else it leaves."""

    def __init__(self, opening: str, calls: Iterable[Asked]) -> None:
        runs = groupby(calls, lambda call: call["by"])
        self.opening: str | None = opening
        self.runs = [tuple(ToolCall(call["name"], call["arguments"]) for call in run) for by, run in runs if by == "user"]

    async def reply(self, conversation: Sequence[Message]) -> str | Message | None:
        """See `agentrl.env.users.User`."""
        last = conversation[-1]
        if self.opening is not None:
            said, self.opening = self.opening, None
            return said
        if last.role == "tool":
            return "I have done that."
        if self.runs and all(call.name in last.content for call in self.runs[0]):
            return Message("user", "", self.runs.pop(0))
        return None


Ask = Callable[[Sequence[ToolCall]], Awaitable[Sequence[str]]]
"""Makes calls; their answers, in the same order."""


class CallsTogether:
    """The first call of a turn asks for the answers of all of them (those of the benchmark's tools, with arguments that could be
    read); each of the others finds its own. Part of one episode's state."""

    def __init__(self, names: Iterable[str]) -> None:
        """`names`: of the benchmark's tools; others (a tool set's) are not its own."""
        self.names = frozenset(names)
        self.due: list[tuple[ToolCall, str]] = []
        self.answered = -1  # turns when calls were made last

    async def answer(self, env: ToolEnv, name: str, arguments: dict[str, Json], ask: Ask) -> str:
        """The answer to a call. One that is in no turn (made by itself) is asked for alone."""
        turns = env.trajectory.turns
        if (found := self._found(len(turns), name, arguments)) is not None:
            return found
        made = (
            [one for one in turns[-1].message.tool_calls if one.name in self.names and one.arguments is not None] if turns else []
        )
        if (name, arguments) not in [(one.name, one.arguments) for one in made] or self.answered == len(turns):
            made = [ToolCall(name, arguments)]
        self.due, self.answered = list(zip(made, await ask(made), strict=True)), len(turns)
        return self._found(len(turns), name, arguments) or ""

    def _found(self, turn: int, name: str, arguments: dict[str, Json]) -> str | None:
        if self.answered != turn:
            return None
        places = [i for i, (one, _) in enumerate(self.due) if (one.name, one.arguments) == (name, arguments)]
        return self.due.pop(places[0])[1] if places else None


AS_ZERO = "overall (unplayed: 0)"
_PART = "not every category of it was played"
_Known = tuple[float, int, bool]  # value, number of episodes, whether all of it was played


@dataclass(frozen=True)
class MeansTable:
    """`means`: of each mean, the categories or earlier means that it is of. A mean is plain, but one that `over_tasks` names is
    over tasks: that has the benchmark's number of tasks of each category, which is its share however many of them were played or
    scored. `weights`: those of the overall value.

    A mean is shown only if all of its categories were played, the overall value too. If some were not, a row of another name
    (`AS_ZERO`) has what a leaderboard shows that counts them as 0."""

    means: Mapping[str, tuple[str, ...]]
    weights: Mapping[str, float]
    over_tasks: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def rows(self, found: Mapping[str, Sequence[Played]]) -> list[OfficialRow]:
        """A row for each category (`found` has its episodes), for each mean with some played task, and "overall"."""
        rows = [mean_row(name, played) for name, played in found.items()]
        known: dict[str, _Known] = {row.name: (row.value, row.n, True) for row in rows if row.value is not None}
        for name, parts in self.means.items():
            known[name] = value, n, whole = self._mean(name, [(part, known.get(part)) for part in parts])
            if n:
                rows.append(OfficialRow(name, value if whole else None, n, self.weights.get(name), "" if whole else _PART))
        played = [one for part in found.values() for one in part]
        return [*rows, *self._overall(known, left_out(played, sum(one.success is not None for one in played)))]

    def _mean(self, name: str, parts: Sequence[tuple[str, _Known | None]]) -> _Known:
        tasks = self.over_tasks.get(name)
        sizes = [1 if tasks is None else tasks[part] for part, _ in parts]
        value = sum(known[0] * size for (_, known), size in zip(parts, sizes, strict=True) if known is not None) / sum(sizes)
        return value, sum(known[1] for _, known in parts if known), all(known is not None and known[2] for _, known in parts)

    def _overall(self, known: Mapping[str, _Known], lost: str) -> list[OfficialRow]:
        parts = {name: known.get(name, (0.0, 0, False)) for name in self.weights}
        n = sum(part[1] for part in parts.values())
        if not n:
            return []
        value = sum(weight * parts[name][0] for name, weight in self.weights.items())
        if missing := [name for name, part in parts.items() if not part[2]]:
            said = f"not every category was played (in {', '.join(missing)})"
            as_zero = OfficialRow(AS_ZERO, value, n, None, "what the leaderboard would show of this; no model's accuracy")
            return [OfficialRow("overall", None, n, None, said), as_zero]
        return [OfficialRow("overall", value, n, None, lost)]


def spread_rows(name: str, episodes: Iterable[Played], of: Callable[[Played], Iterable[str]]) -> list[OfficialRow]:
    """Spread of the means of groups of episodes (the same tasks under several prompts, say), and their standard deviation (of a
    sample, with n - 1); nothing for fewer than two groups."""
    played = list(episodes)
    values = [row.value for row in (mean_row(one, part) for one, part in groups(played, of).items()) if row.value is not None]
    if len(values) < 2:
        return []
    return [
        OfficialRow(f"{name}: range", max(values) - min(values), len(played)),
        OfficialRow(f"{name}: deviation", stdev(values), len(played)),
    ]


# Rows of official tables


def whole_row(name: str, episodes: Sequence[Played], size: int = 0) -> OfficialRow:
    """The share of families whose every task is a success, by sample if tasks were played more than once; a family with an
    unscored task is in none. `size`: a family's number of tasks; one with fewer played tasks is in none either (0: those that
    were played are all of it). `n`: the families."""
    found: dict[tuple[str, int], list[bool | None]] = defaultdict(list)
    for one in episodes:
        found[one.family, one.sample].append(one.success)
    played = [results for results in found.values() if len(results) >= size]
    whole = [float(all(results)) for results in played if None not in results]
    parts = f"{len(found) - len(played)} of {len(found)} not played whole" if len(played) < len(found) else ""
    notes = [left_out(episodes, sum(one.success is not None for one in episodes)), parts]
    return OfficialRow(name, fmean(whole) if whole else None, len(whole), None, "; ".join(filter(None, notes)))


def in_percent(row: OfficialRow) -> OfficialRow:
    """A row whose value is a share, as a percentage."""
    return row if row.value is None else replace(row, value=100 * row.value)


# Rows of a benchmark's official table, for `SuiteEnv.official`
#
# A task counts once, whatever the number of its samples. Unscored episodes (an outage, say) are in no mean, and the row's note
# says how many there are: official tools differ there, and count such episodes as wrong or not at all.


def mean_row(
    name: str,
    episodes: Sequence[Played],
    weight: float | None = None,
    *,
    value: Callable[[Played], float | None] = lambda one: None if one.success is None else float(one.success),
) -> OfficialRow:
    """The mean over tasks of an episode's value, by default its success (0 or 1); of a task with several samples, of their mean.
    `n`: the tasks with a scored episode."""
    found: dict[str, list[float]] = defaultdict(list)
    for one in episodes:
        if (known := value(one)) is not None:
            found[one.task_id].append(known)
    mean = statistics.fmean(statistics.fmean(values) for values in found.values()) if found else None
    return OfficialRow(name, mean, len(found), weight, left_out(episodes, sum(map(len, found.values()))))


def weighted_row(name: str, rows: Iterable[OfficialRow], weight: float | None = None, *, absent: str = "skip") -> OfficialRow:
    """The mean of rows by their weights (a row without one is in none). `absent`: what a row without a value does: "skip" (the
    others' weights are scaled up, which the note says) or "unknown" (the mean is unknown, too). Raises ValueError for another."""
    if absent not in ("skip", "unknown"):
        raise ValueError(f"absent = {absent!r}; expected 'skip' or 'unknown'")
    counted = [row for row in rows if row.weight]
    known = [(row.value, row.weight or 0.0, row.n) for row in counted if row.value is not None]
    lacking = [row.name for row in counted if row.value is None]
    total = sum(share for _, share, _ in known)
    value = sum(one * share for one, share, _ in known) / total if total and not (lacking and absent == "unknown") else None
    note = f"without {', '.join(lacking)}" if lacking else ""
    return OfficialRow(name, value, sum(n for _, _, n in known), weight, note)


def pass_hat_rows(episodes: Sequence[Played], prefix: str = "") -> list[OfficialRow]:
    """pass^k for each k up to the least number of scored samples of a task (a task with none is left out), as tau2 computes it:
    the mean over tasks of C(c, k) / C(n, k), c of n samples being successes."""
    found: dict[str, list[bool]] = defaultdict(list)
    for one in episodes:
        if one.success is not None:
            found[one.task_id].append(one.success)
    note = left_out(episodes, sum(map(len, found.values())))
    rows = []
    for k in range(1, min(map(len, found.values()), default=0) + 1):
        mean = statistics.fmean(pass_hat_k(len(won), sum(won), k) for won in found.values())
        rows.append(OfficialRow(f"{prefix}pass^{k}", mean, len(found), None, note))
    return rows


def groups(episodes: Iterable[Played], of: Callable[[Played], Iterable[str]]) -> dict[str, list[Played]]:
    """Episodes by the names that `of` gives each (several, if it counts in several), in the order of their first."""
    found: dict[str, list[Played]] = {}
    for one in episodes:
        for name in of(one):
            found.setdefault(name, []).append(one)
    return found


def pass_hat_table(episodes: Sequence[Played], of: str) -> list[OfficialRow]:
    """`pass_hat_rows` for each value of the tasks' `data[of]` (a row without a value if nothing of it was scored), and the plain
    mean of their pass^1."""
    parts = sorted(groups(episodes, lambda one: [one.data[of]]).items())
    rows = [pass_hat_rows(part, f"{name} ") or [mean_row(f"{name} pass^1", part)] for name, part in parts]
    first = [replace(known[0], weight=1 / len(rows)) for known in rows]
    return [*(row for known in rows for row in known), weighted_row(f"mean of {of}s pass^1", first)]


def left_out(episodes: Sequence[Played], scored: int) -> str:
    """A note on the episodes that are in no mean; "" if all are."""
    return f"{len(episodes) - scored} of {len(episodes)} episodes unscored, in no mean" if scored < len(episodes) else ""

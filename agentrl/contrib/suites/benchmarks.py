"""Parts that suites share: code read in place, published tools, messages, rows of official tables."""

from __future__ import annotations

import importlib
import statistics
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from agentrl.data.trajectory import Json, Message, ToolCall
from agentrl.env.call_options import Options
from agentrl.env.official import OfficialRow, Played, pass_hat_k
from agentrl.env.tools import Tool
from agentrl.utils.errors import ConfigError, DependencyError
from agentrl.utils.threads import fork_safe

# Reading a benchmark's code where it is: modules of a package in a checkout.
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


def published_tool(declared: Mapping[str, Any], run: Callable[..., Any], **options: Any) -> Tool:
    """Make a tool as its benchmark publishes it: `declared` is {"name", "description", "parameters"}, which the policy is shown.

    `run(env, **arguments)` answers. Its own code judges the arguments, so nothing checks them before, and the calls of a turn are
    made one after the other. `options`: others, as in `Options`."""
    made = Options(**{"check": "off", "parallel": False, **options})
    name, parameters = declared["name"], declared.get("parameters", {})
    return replace(Tool.from_schema(name, declared.get("description", ""), parameters, run, made), method=True)


def calling(calls: Iterable[tuple[str, Mapping[str, Json]]]) -> Message:
    """An assistant turn that makes calls, each (name, arguments)."""
    return Message("assistant", "", tuple(ToolCall(name, dict(arguments)) for name, arguments in calls))


def message_of(row: Mapping[str, Any]) -> Message:
    """A message as benchmarks write it: {"role", "content"}, of an assistant or user with "tool_calls" ({"name", "arguments",
    "id"}), of a tool with the "id" of the call that it answers."""
    calls = tuple(ToolCall(call["name"], call["arguments"], id=call["id"]) for call in row.get("tool_calls") or ())
    return Message(row["role"], row.get("content") or "", calls, tool_call_id=row.get("id"))


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


def weighted_row(name: str, rows: Iterable[OfficialRow]) -> OfficialRow:
    """The mean of rows by their weights (a row without one is in none). If one has no value, the others' weights are scaled up,
    which the note says."""
    counted = [row for row in rows if row.weight]
    known = [(row.value, row.weight or 0.0, row.n) for row in counted if row.value is not None]
    lacking = [row.name for row in counted if row.value is None]
    total = sum(share for _, share, _ in known)
    value = sum(one * share for one, share, _ in known) / total if total else None
    note = f"without {', '.join(lacking)}" if lacking else ""
    return OfficialRow(name, value, sum(n for _, _, n in known), None, note)


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

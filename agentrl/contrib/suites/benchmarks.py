"""Shared code of suites: imports in place, published tools, messages, rows of official tables."""

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

# Import a benchmark's code in place: single modules of a package in a checkout.
#
# A benchmark's own `__init__` is skipped: it often imports the runner, model clients and their dependencies, which a suite does
# not need.

_LOCK = fork_safe(threading.RLock())


def import_in_place(module: str, folder: Path, *, extra: str | None = None) -> ModuleType:
    """Import a module of the package in `folder` ("toy.rules" of .../src/toy) without running the package's `__init__`.
    Packages next to the folder (`pip install --target`) are found during the import. `extra`: the extra of agentrl that installs
    the module's dependencies, for errors.

    Raises ConfigError if this process imported the package from elsewhere, or if it does not load on this Python;
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
            raise ConfigError(f"{top}: expected from {folder}, but this process has imported it from {places or 'a file'}")
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
    """Make a tool from its benchmark's declaration: `declared` is {"name", "description", "parameters"}, shown to the policy.

    `run(env, **arguments)` answers. The benchmark's code judges the arguments, so agentrl does not check them, and the calls of
    a turn run one after the other. `options`: further `Options`."""
    made = Options(**{"check": "off", "parallel": False, **options})
    name, parameters = declared["name"], declared.get("parameters", {})
    return replace(Tool.from_schema(name, declared.get("description", ""), parameters, run, made), method=True)


def calling(calls: Iterable[tuple[str, Mapping[str, Json]]]) -> Message:
    """Make an assistant turn with calls, each (name, arguments)."""
    return Message("assistant", "", tuple(ToolCall(name, dict(arguments)) for name, arguments in calls))


def message_of(row: Mapping[str, Any]) -> Message:
    """Convert a benchmark's message: {"role", "content"}, for an assistant or user with "tool_calls" ({"name", "arguments",
    "id"}), for a tool with the "id" of the answered call."""
    calls = tuple(ToolCall(call["name"], call["arguments"], id=call["id"]) for call in row.get("tool_calls") or ())
    return Message(row["role"], row.get("content") or "", calls, tool_call_id=row.get("id"))


# Rows of a benchmark's official table, for `SuiteEnv.official`
#
# A task counts once, regardless of its number of samples. Means leave out unscored episodes (for example after an outage), and
# the row's note gives their number: official tools differ here and count such episodes as wrong or not at all.


def mean_row(
    name: str,
    episodes: Sequence[Played],
    weight: float | None = None,
    *,
    value: Callable[[Played], float | None] = lambda one: None if one.success is None else float(one.success),
) -> OfficialRow:
    """Return the mean over tasks of the mean value of their episodes; `value`: by default the success (0 or 1). `n`: number of
    tasks with a scored episode."""
    found: dict[str, list[float]] = defaultdict(list)
    for one in episodes:
        if (known := value(one)) is not None:
            found[one.task_id].append(known)
    mean = statistics.fmean(statistics.fmean(values) for values in found.values()) if found else None
    return OfficialRow(name, mean, len(found), weight, left_out(episodes, sum(map(len, found.values()))))


def weighted_row(name: str, rows: Iterable[OfficialRow]) -> OfficialRow:
    """Return the weighted mean of rows; rows without a weight are ignored. If a row has no value, the other weights are scaled
    up, and the note names it."""
    counted = [row for row in rows if row.weight]
    known = [(row.value, row.weight or 0.0, row.n) for row in counted if row.value is not None]
    lacking = [row.name for row in counted if row.value is None]
    total = sum(share for _, share, _ in known)
    value = sum(one * share for one, share, _ in known) / total if total else None
    note = f"without {', '.join(lacking)}" if lacking else ""
    return OfficialRow(name, value, sum(n for _, _, n in known), None, note)


def pass_hat_rows(episodes: Sequence[Played], prefix: str = "") -> list[OfficialRow]:
    """Return pass^k for each k up to the smallest number of scored samples per task, leaving out tasks without any. As in tau2,
    it is the mean over tasks of C(c, k) / C(n, k) for c successes in n samples."""
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
    """Group episodes by name, in order of first occurrence. `of`: returns the names of an episode, one or several."""
    found: dict[str, list[Played]] = {}
    for one in episodes:
        for name in of(one):
            found.setdefault(name, []).append(one)
    return found


def pass_hat_table(episodes: Sequence[Played], of: str) -> list[OfficialRow]:
    """Return `pass_hat_rows` per value of the tasks' `data[of]`, and the unweighted mean of their pass^1. A value without scored
    episodes has a row without a number."""
    parts = sorted(groups(episodes, lambda one: [one.data[of]]).items())
    rows = [pass_hat_rows(part, f"{name} ") or [mean_row(f"{name} pass^1", part)] for name, part in parts]
    first = [replace(known[0], weight=1 / len(rows)) for known in rows]
    return [*(row for known in rows for row in known), weighted_row(f"mean of {of}s pass^1", first)]


def left_out(episodes: Sequence[Played], scored: int) -> str:
    """Return a note on the unscored episodes, "" if all are scored."""
    return f"{len(episodes) - scored} of {len(episodes)} episodes unscored, in no mean" if scored < len(episodes) else ""

"""Comparison of evaluations: official metrics of suites, and models on the same tasks with paired differences."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from rich.console import Console

from agentrl.config import TrainConfig
from agentrl.config.identity import changes
from agentrl.data.trajectory import Trajectory
from agentrl.env.catalog import EnvRef
from agentrl.env.official import WHOLE, Benchmark, played_of, rate_of
from agentrl.run.digests import suite_env
from agentrl.run.folder import stored_object
from agentrl.run.outcomes import label_of, order
from agentrl.run.reader import REPEAT_EVAL, RunRecord
from agentrl.utils.errors import ConfigError
from agentrl.utils.terminal import cell, folding

# Official metrics


def official(envs: Sequence[TrainConfig], episodes: Mapping[str, Sequence[Trajectory]], split: str) -> dict[str, Any]:
    """Compute the official tables of a report, one per suite among the environments. `envs`: configs with one environment
    each; `episodes`: by environment name. Environments of one suite share a table; a suite without official metrics has none."""
    found: dict[str, list[tuple[Benchmark, Sequence[Trajectory]]]] = {}
    for one in envs:
        suite, called = suite_env(EnvRef.of(one.the_env, one.tools)), one.the_env.called
        if suite is not None and called in episodes:
            found.setdefault(suite.suite, []).append((suite, episodes[called]))
    tables = {}
    for name, parts in found.items():
        suite = parts[0][0]
        played = [played_of(env, one) for env, of_env in parts for one in of_env]
        if rows := [asdict(row) for row in type(suite).official(played)]:
            ids = sorted({one.task_id for one in played})
            tables[name] = {
                "version": suite.version,
                "split": split,
                "tasks": len(ids),
                "ids": sha256(json.dumps(ids).encode()).hexdigest(),
                "of": sum(env.task_count(WHOLE) for env, _ in parts),
                "holdout": suite.holdout,
                "splits": [env.split_sizes() for env, _ in parts],
                "rows": rows,
            }
    return tables


def choose_tasks(env: EnvRef, split: str, wanted: int | None, seed: int, first: bool) -> tuple[int | None, tuple[int, ...]]:
    """Return the number of tasks to evaluate on, and their indices in the split if they are not the first ones.

    For a suite: at most the tasks of the split (all if `wanted` is None); fewer are drawn by `seed` and spread over its kinds
    of tasks (`Benchmark.spread`), unless `first`. Raises TaskDataError if the split is empty."""
    suite = suite_env(env)
    if suite is None:
        return wanted, ()
    count = suite.task_count(split)
    available = count or len([suite.make_task(0, split)])
    tasks = available if wanted is None else min(wanted, available)
    return tasks, suite.spread(split, tasks, seed) if tasks < (count or 0) and not first else ()


def print_official(tables: Mapping[str, Any], console: Console) -> None:
    """Print one table per suite, below the report."""
    for name, found in tables.items():
        table = folding("", "value", "n", "weight", "")
        part = "; only a part, so not a result of the benchmark" if found["tasks"] < found["of"] else ""
        over = f"{found['tasks']} of its {found['of']} tasks ({found['split']}){part}"
        table.title = cell(f"{name} {found['version']}: its own metrics, over {over}")
        for row in found["rows"]:
            table.add_row(cell(row["name"]), _number(row["value"]), str(row["n"]), _number(row["weight"], ""), cell(row["note"]))
        console.print(table)


def side_by_side(folders: Sequence[Path]) -> dict[str, Any]:
    """Join the official tables of several evaluations, for each suite that all their reports contain. One row per metric, with
    a value (or None) and `n` per evaluation; `same`: all are over the same tasks of the same split and version."""
    tables = [RunRecord(folder).report.get("official") or {} for folder in folders]
    joined = {}
    for suite in (name for name in tables[0] if all(name in other for other in tables)):
        by_name = [{row["name"]: row for row in table[suite]["rows"]} for table in tables]
        rows = [
            {"name": name, "values": [rows[name]["value"] if name in rows else None for rows in by_name],
             "n": [rows[name]["n"] if name in rows else 0 for rows in by_name]}
            for name in dict.fromkeys(name for rows in by_name for name in rows)
        ]  # fmt: skip
        over = [[table[suite][key] for key in ("version", "split", "tasks")] for table in tables]
        models = [folder.absolute().name for folder in folders]
        ids = {table[suite].get("ids") for table in tables}
        same = all(one == over[0] for one in over) and len(ids) < 2
        joined[suite] = {"models": models, "rows": rows, "over": over, "same": same}
    return joined


def print_side_by_side(joined: Mapping[str, Any], console: Console) -> None:
    """Print one table per suite, with one column per model."""
    for name, found in joined.items():
        table = folding("", *map(cell, found["models"]))
        table.title = cell(f"{name}: its own metrics")
        for row in found["rows"]:
            table.add_row(cell(row["name"]), *(f"{_number(v)} ({n})" for v, n in zip(row["values"], row["n"], strict=True)))
        console.print(table)
        if not found["same"]:
            over = "; ".join(f"{model}: {tasks} tasks of {split}, {version}" for model, (version, split, tasks) in
                             zip(found["models"], found["over"], strict=True))  # fmt: skip
            console.print(cell(f"they are not over the same tasks: {over}"))


def _number(value: float | None, unknown: str = "-") -> str:
    return unknown if value is None else f"{value:.4f}".rstrip("0").rstrip(".")


# Comparison

_OF_MODEL = ("model", "the files of model", "seed")
"""Keys in which two evaluations of the same tasks may differ without a note."""


@dataclass(frozen=True, slots=True)
class TaskResult:
    """Result of a task: mean success and reward over episodes where known, and calls of its gold solution if known."""

    id: str
    success: float | None
    reward: float | None
    horizon: int | None = None


@dataclass(frozen=True, slots=True)
class Results:
    """Evaluation of one environment, read from its folder; `tasks` by `Trajectory.task_key`."""

    label: str
    env: str
    tasks: Mapping[str, TaskResult]
    identity: Mapping[str, Any]


def read_results(folder: Path) -> dict[str, Results]:
    """Read the evaluations in a folder of `agentrl eval` or in its subfolders, by environment.

    Raises ConfigError without one, or if one has no episodes yet.
    """
    is_evaluation = (folder / "eval.json").is_file()
    parts = [folder] if is_evaluation else sorted(path.parent for path in folder.glob("*/eval.json")) if folder.is_dir() else []
    if not parts:
        raise ConfigError(f"{folder}: not a folder of an evaluation (neither it nor its folders have an eval.json)")
    label, found = folder.absolute().name, {}  # the default --out is named after the model
    for part in parts:
        episodes = list(RunRecord(part).episodes())
        if not episodes:
            raise ConfigError(f"{part}: the evaluation has no episodes yet")
        members: dict[str, list[Trajectory]] = defaultdict(list)
        for episode in episodes:
            members[episode.task_key].append(episode)
        env = episodes[0].env or episodes[0].env_id
        if env in found:
            raise ConfigError(f"{folder}: it holds several evaluations of {env}. Give their own folders: {folder}/*")
        note = stored_object(part / "eval.json", REPEAT_EVAL) or {}
        identity = note.get("identity") or {}
        if len(episodes) < (wanted := note.get("episodes", 0)):  # the shorter ones, which end first, may be the easier ones
            identity = {**identity, "episodes": f"{len(episodes)} of {wanted}, as it was interrupted"}
        tasks: dict[str, TaskResult] = {}
        for name, played in members.items():
            known = [float(t.success) for t in played if t.success is not None]
            tasks[name] = TaskResult(played[0].task.id, mean_of(known), mean_of(t.reward for t in played), played[0].horizon)
        found[env] = Results(label, env, tasks, identity)
    return found


def mean_of(values: Iterable[float | None]) -> float | None:
    """Return the mean of the known values; None without any."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def compare(results: Sequence[Results]) -> dict[str, Any]:
    """Compare evaluations of one environment with the first of them, one row each.

    `difference`: mean over common tasks of success minus the first's, with a 95 % interval over tasks; `better` and `worse` count
    the tasks with a difference. `also`: differences other than the model. `horizons`: the same by calls of the gold solution, if
    tasks differ in it. Raises ConfigError if an evaluation has no task in common with the first.
    """
    first, rows = results[0], []
    for result in results:
        row: dict[str, Any] = {
            "model": result.label,
            "tasks": len(result.tasks),
            "pass@1": rate_of([task.success for task in result.tasks.values() if task.success is not None]),
            "reward": mean_of(task.reward for task in result.tasks.values()),
        }
        rows.append(row)
        if result is first:
            continue
        gained = _task_gains(first, result, result.tasks)
        also = changes(*({k: v for k, v in of.identity.items() if not k.startswith(_OF_MODEL)} for of in (first, result)))
        if gained is None:
            disjoint = {one.id for one in first.tasks.values()}.isdisjoint(one.id for one in result.tasks.values())
            why = "none of their tasks is the same" if disjoint else "their tasks have the same names and other contents"
            differ = f" ({'; '.join(also)})" if also else ""
            raise ConfigError(
                f"{result.label} cannot be compared with {first.label} in {first.env}: {why}{differ}; "
                "evaluate both with the same environment, parameters and split"
            )
        better, worse = sum(value > 0 for value in gained), sum(value < 0 for value in gained)
        row |= {"difference": rate_of(gained, -1.0), "paired": len(gained), "better": better, "worse": worse, "also": also}
    labels = [
        {name: label_of(task.horizon) for name, task in result.tasks.items() if task.horizon is not None} for result in results
    ]
    horizons: dict[str, list[dict[str, Any]]] = {}
    for label in sorted({label for result in labels for label in result.values()}, key=order):
        horizons[label] = []
        for result, of in zip(results, labels, strict=True):
            names = [name for name, bin in of.items() if bin == label]
            part = {"model": result.label, "tasks": len(names), "pass@1": mean_of(result.tasks[name].success for name in names)}
            if result is not first:
                gained = _task_gains(first, result, names) or []
                part |= {"difference": mean_of(gained), "paired": len(gained)}
            horizons[label].append(part)
    return {"env": first.env, "rows": rows, "horizons": horizons if len(horizons) > 1 else {}}


def _task_gains(first: Results, other: Results, names: Iterable[str]) -> list[float] | None:
    """Return the success gain over `first` on each common task where both are known; None without a common task."""
    same = [name for name in names if name in first.tasks]
    if not same:
        return None
    pairs = [(first.tasks[name].success, other.tasks[name].success) for name in same]
    return [after - before for before, after in pairs if before is not None and after is not None]


def compare_all(folders: Sequence[Mapping[str, Results]]) -> dict[str, Any]:
    """Compare the evaluations in each environment that all have. Raises ConfigError without one."""
    shared = [env for env in folders[0] if all(env in other for other in folders)]
    if not shared:
        names = "; ".join(", ".join(found) for found in folders)
        raise ConfigError(f"the evaluations have no environment in common ({names}); compare evaluations of the same one")
    return {"envs": {env: compare([found[env] for found in folders]) for env in shared}}


def print_comparison(comparison: Mapping[str, Any], console: Console) -> None:
    """Print one table per environment; "-" is an unknown value."""
    for env, part in comparison["envs"].items():
        first = part["rows"][0]["model"]
        table = folding(
            "", "tasks", "pass@1", "95 % interval", "reward", cell(f"minus {first}"), "95 % interval", "better / worse"
        )
        table.title = cell(env)
        for row in part["rows"]:
            cells = [cell(row["model"]), str(row["tasks"]), *_cells(row["pass@1"]), _short(row["reward"])]
            paired = [f"{row['better']} / {row['worse']} of {row['paired']}"] if "paired" in row else []
            table.add_row(*cells, *(_cells(row["difference"], "+") if paired else ()), *paired)
        console.print(table)
        for row in part["rows"][1:]:
            for line in row["also"]:
                console.print(cell(f"{row['model']} also differs: {line}"))
        if part["horizons"]:
            # One row per horizon: number of tasks, and per model pass@1 and the difference to the first.
            models = (cell(row["model"]) for row in part["rows"])
            table = folding("calls", "tasks", *models, title=cell(f"{env} by calls of the solution"))
            for label, rows in part["horizons"].items():
                ends = ["" if row.get("difference") is None else f" ({row['difference']:+.3f})" for row in rows]
                values = [_short(row["pass@1"]) + end for row, end in zip(rows, ends, strict=True)]
                table.add_row(label, " / ".join(dict.fromkeys(str(row["tasks"]) for row in rows)), *values)
            console.print(table)


def _cells(rate: Mapping[str, float] | None, sign: str = "") -> tuple[str, str]:
    if rate is None:
        return "-", ""
    mean, low, high = (f"{rate[key]:{sign}.3f}" for key in ("mean", "low", "high"))
    return mean, f"{low} to {high}"


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"

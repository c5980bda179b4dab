"""The official metrics of a suite's evaluation: computed from its episodes, put into its report, printed, set side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from agentrl.catalog import EnvRef
from agentrl.config import TrainConfig
from agentrl.config.envs import alone
from agentrl.config.schema import EnvConfig
from agentrl.env.official import played_of
from agentrl.env.suite import WHOLE, SuiteEnv
from agentrl.plain_data import read_json
from agentrl.run.contents import suite_env
from agentrl.shown import cell, folding
from agentrl.trajectory import Trajectory


def official(config: TrainConfig, episodes: Mapping[str, Sequence[Trajectory]], split: str) -> dict[str, Any]:
    """For each suite among the environments of `config`, whose episodes are given by name: what a report keeps as "official".
    Several environments of a suite have one table. A suite without metrics of its own has none."""
    found: dict[str, list[tuple[SuiteEnv, Sequence[Trajectory]]]] = {}
    for env in config.envs:
        suite = suite_env(EnvRef.of(alone(config, env)))
        if suite is not None and env.called in episodes:
            found.setdefault(suite.suite, []).append((suite, episodes[env.called]))
    tables = {name: _table(parts, split) for name, parts in found.items()}
    return {name: table for name, table in tables.items() if table["rows"]}


def suite_tasks(config: TrainConfig, env: EnvConfig, split: str) -> int | None:
    """How many tasks a split of an environment has, if that is of a suite; else None. Raises TaskDataError if it has none."""
    suite = suite_env(EnvRef.of(alone(config, env)))
    if suite is None:
        return None
    return suite.task_count(split) or len([suite.make_task(0, split)])


def suite_choice(config: TrainConfig, env: EnvConfig, split: str, tasks: int) -> tuple[int, ...]:
    """Which tasks of a split `tasks` of them are, if the environment is of a suite that has more: spread over its kinds, drawn by
    the run's seed (`SuiteEnv.spread`). Else none, which stands for the first ones."""
    suite = suite_env(EnvRef.of(alone(config, env)))
    return suite.spread(split, tasks, config.seed) if suite is not None and tasks < suite.task_count(split) else ()


def _table(parts: Sequence[tuple[SuiteEnv, Sequence[Trajectory]]], split: str) -> dict[str, Any]:
    first = parts[0][0]
    played = [played_of(env, one) for env, episodes in parts for one in episodes]
    return {
        "version": first.version,
        "split": split,
        "tasks": len({one.task_id for one in played}),
        "of": sum(env.task_count(WHOLE) for env, _ in parts),
        "rows": [asdict(row) for row in type(first).official(played)],
    }


def print_official(tables: Mapping[str, Any], console: Console) -> None:
    """A table for each suite, below the report."""
    for name, found in tables.items():
        table = folding("", "value", "n", "weight", "")
        part = "; a part of it, and no result of the benchmark" if found["tasks"] < found["of"] else ""
        over = f"{found['tasks']} of its {found['of']} tasks ({found['split']}){part}"
        table.title = cell(f"{name} {found['version']}: its own metrics, over {over}")
        for row in found["rows"]:
            table.add_row(cell(row["name"]), _number(row["value"]), str(row["n"]), _number(row["weight"], ""), cell(row["note"]))
        console.print(table)


def read_official(folder: Path) -> dict[str, Any]:
    """The tables in the report.json of an evaluation's folder; empty if there are none, or no report."""
    file = folder / "report.json"
    report = read_json(file.read_text()) if file.is_file() else {}
    found: dict[str, Any] = report.get("official") or {}
    return found


def side_by_side(labels: Sequence[str], tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """For each suite that all evaluations have a table of: a row for each metric that one of them has, with a value (or None) and
    `n` for each evaluation, and whether all are over as many tasks of the same split and version (`same`)."""
    shared = [name for name in tables[0] if all(name in other for other in tables)]
    return {name: _joined(labels, [one[name] for one in tables]) for name in shared}


def _joined(labels: Sequence[str], tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    by_name = [{row["name"]: row for row in table["rows"]} for table in tables]
    names = list(dict.fromkeys(name for rows in by_name for name in rows))
    rows = [
        {"name": name, "values": [rows[name]["value"] if name in rows else None for rows in by_name],
         "n": [rows[name]["n"] if name in rows else 0 for rows in by_name]}
        for name in names
    ]  # fmt: skip
    over = [(table["version"], table["split"], table["tasks"]) for table in tables]
    return {"models": list(labels), "rows": rows, "over": [list(one) for one in over], "same": len(set(over)) == 1}


def print_side_by_side(joined: Mapping[str, Any], console: Console) -> None:
    """A table for each suite, a column for each model."""
    for name, found in joined.items():
        table = folding("", *map(cell, found["models"]))
        table.title = cell(f"{name}: its own metrics")
        for row in found["rows"]:
            table.add_row(cell(row["name"]), *(f"{_number(v)} ({n})" for v, n in zip(row["values"], row["n"], strict=True)))
        console.print(table)
        if not found["same"]:
            said = "; ".join(f"{model}: {tasks} tasks of {split}, {version}" for model, (version, split, tasks) in
                             zip(found["models"], found["over"], strict=True))  # fmt: skip
            console.print(cell(f"they are not over the same: {said}"))


def _number(value: float | None, unknown: str = "-") -> str:
    return unknown if value is None else f"{value:.4f}".rstrip("0").rstrip(".")

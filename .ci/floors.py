"""Measure the reward of agents that solve nothing, into docs/floors.json (`make docs` prints it).

    python .ci/floors.py                   all that is installed; the other rows stay, with their date and version
    python .ci/floors.py --only bfcl tau2  only these

A suite is found as usual, through AGENTRL_HOME or its package. Environments that need a program or server of the user are left
out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from agentrl.contrib.suites.measures import headline  # noqa: E402
from agentrl.utils.errors import AgentrlError  # noqa: E402

RECORD = ROOT / "docs" / "floors.json"
LEFT_OUT = {"mcp"}  # its tools and tasks come from a server
VARIANTS: dict[str, list[list[str]]] = {}
"""Parameter sets of environments that need several rows; others are measured with their defaults."""
SHOWN = 8
Row = dict[str, Any]


def measured(only: list[str]) -> list[Row]:
    """Measure the available environments, a row each."""
    from agentrl.contrib.suites.commands import floor_of
    from agentrl.env.catalog import list_envs

    rows: list[Row] = []
    own = [entry for entry in list_envs() if entry.path is not None and entry.path.is_relative_to(ROOT / "envs")]
    for entry in own:
        suite = entry.suite
        if entry.name in LEFT_OUT or (only and not {entry.name, suite} & set(only)):
            continue
        for params in VARIANTS.get(entry.name, [[]]):
            label = " ".join([entry.name, *params])
            try:
                found = floor_of(entry.name, params)
            except AgentrlError as reason:
                print(f"{label}: not measured: {str(reason).splitlines()[0]}")
                continue
            rows.append({"name": label, "suite": suite, "date": date.today().isoformat(), **found})
            print(f"{label}: {found['any']['paid']} of {found['tasks']} tasks pay one of the scripts in full")
    return rows


def page(rows: list[Row]) -> str:
    """Return a table of the scripts' rewards per environment, then the tasks that give a reward."""
    agents = list(rows[0]["agents"])
    head = ["environment", "version, date", "tasks", *agents, "any of them"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        over = f"{row['tasks']}" if row["every"] else f"{row['tasks']} of {row['split']}"
        cells = [_cell(row["agents"][agent]) for agent in agents]
        version = f"{row['version']}, {row['date']}" if row["version"] else row["date"]
        lines.append(f"| {row['name']} | {version} | {over} | {' | '.join(cells)} | {_share(row['any'])} |")
    told = [line for row in rows if row["any"]["paid"] for line in _named(row)]
    return "\n".join(lines) + "\n" + ("\nTasks that pay in full:\n\n" + "\n".join(told) + "\n" if told else "")


def _cell(one: Row) -> str:
    mean = "-" if one["mean"] is None else f"{one['mean']:.3f}"
    lost = f", {one['unscored']} unscored" if one["unscored"] else ""
    own = headline(one)
    return f"{mean}; {_share(one)}{lost}{f'; {own}' if own else ''}"


def _share(one: Row) -> str:
    return f"{one['paid']} ({100 * one['low']:.1f} to {100 * one['high']:.1f} %)"


def _named(row: Row) -> list[str]:
    lines = []
    for agent, one in row["agents"].items():
        if not one["paid"]:
            continue
        kinds = ", ".join(f"{name} {count} of {of}" for name, (count, of) in one["families"].items() if name)
        ids = ", ".join(f"`{name}`" for name in one["ids"][:SHOWN])
        more = f" and {len(one['ids']) - SHOWN} more (floors.json)" if len(one["ids"]) > SHOWN else ""
        lines.append(f"- {row['name']}, {agent}: {kinds + ': ' if kinds else ''}{ids}{more}")
    return lines


def main() -> int:
    """Measure and write; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[])
    args = parser.parse_args()
    rows: list[Row] = json.loads(RECORD.read_text()) if RECORD.is_file() else []
    os.chdir(ROOT)
    new = {row["name"]: row for row in measured(args.only)}
    rows = sorted([new.pop(row["name"], row) for row in rows] + list(new.values()), key=_order)
    RECORD.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    return 0


def _order(row: Row) -> tuple[bool, str]:
    return row["suite"] is None, row["name"]


if __name__ == "__main__":
    sys.exit(main())

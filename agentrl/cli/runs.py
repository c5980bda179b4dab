"""`agentrl runs`: list runs, compare them, and say why their episodes failed."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.errors import RunFolderError
from agentrl.shown import say

if TYPE_CHECKING:
    from agentrl.run.reader import RunRecord

HELP = "list runs, compare them, group their failures"
EPILOG = """examples:
  agentrl runs                                       the runs in runs/
  agentrl runs list other/runs --json                those of another folder, as JSON
  agentrl runs compare runs/seed0 runs/seed1         what differs in their configs, and their final figures
  agentrl runs failures runs/quickstart --step 10    why episodes did not succeed, by reason

In a browser: agentrl view. One run, a step of it or an episode: agentrl show.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands with their arguments."""
    parser.set_defaults(run=run_list, folders=[])
    parser.add_argument("--json", action="store_true", help="as JSON")
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    listing = actions.add_parser("list", help="the runs in folders (what `agentrl runs` alone does)")
    listing.add_argument("folders", nargs="*", metavar="FOLDER", help="folders of runs, or runs (default: runs)")
    listing.set_defaults(run=run_list)
    compare = actions.add_parser("compare", help="differences of their configs, and final figures")
    compare.add_argument("folders", nargs="+", metavar="RUN", help="run folders, side by side")
    compare.set_defaults(run=run_compare)
    failures = actions.add_parser("failures", help="why episodes did not succeed, by reason")
    failures.add_argument("folder", metavar="RUN", help="a run folder, or an evaluation's")
    failures.add_argument("--step", type=int, help="of the episodes after so many updates")
    failures.set_defaults(run=run_failures)
    for action in (listing, compare, failures):
        # Suppressed: its default would otherwise replace what stands before the action.
        action.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="as JSON")


def run_list(args: argparse.Namespace) -> int:
    """List runs."""
    from agentrl.run.reader import find_runs, is_run, load_run, overview
    from agentrl.view.terminal import console, print_json, runs_table

    found: list[RunRecord] = []
    for name in args.folders or ["runs"]:
        folder = Path(name)
        found += [load_run(folder)] if is_run(folder) else find_runs(folder)
        if not folder.is_dir():
            raise RunFolderError(f"{folder}: there is no such folder")
    rows = [{"run": str(_short(run.path)), **overview(run)} for run in found]
    if args.json:
        print_json(rows)
    elif rows:
        console().print(runs_table(rows))
        for row in rows:
            if row["status"] == "damaged":
                say(f"{row['run']!a}: {row['error']!a}")
    else:
        say(f"no runs in {', '.join(args.folders or ['runs'])}")
    return 0


def run_compare(args: argparse.Namespace) -> int:
    """Compare runs: a table of config keys that differ, and one of figures."""
    from agentrl.run.reader import load_run, overview
    from agentrl.view.compare import config_differences, figures
    from agentrl.view.terminal import console, print_json, table

    runs = [load_run(folder) for folder in args.folders]
    names = [str(_short(run.path)) for run in runs]
    differ = config_differences([run.table for run in runs])
    rows: list[dict[str, Any]] = [overview(run) for run in runs]
    found = figures([run.metrics for run in runs], rows)
    if args.json:
        print_json({"runs": names, "config": differ, "figures": found})
        return 0
    out = console()
    out.print(table("what differs in the configs", ("key", *names), [(key, *values) for key, values in differ.items()]))
    out.print(table("figures", ("", *names), [(key, *values) for key, values in found.items()]))
    return 0


def run_failures(args: argparse.Namespace) -> int:
    """Failures by reason."""
    from agentrl.run.reader import load_run
    from agentrl.view import queries
    from agentrl.view.index import read_now
    from agentrl.view.terminal import console, failures_table, print_json

    with read_now(load_run(args.folder)) as db:
        rows = queries.failures(db, args.step)
        counts = dict(db.execute("SELECT step, count(*) FROM episodes GROUP BY step").fetchall())
    if args.step is not None and args.step not in counts:
        raise queries.NotFoundError(f"--step {args.step}: no episodes are of it; there are episodes of {queries.listed(counts)}")
    count = sum(counts.values()) if args.step is None else counts[args.step]
    if args.json:
        print_json(rows)
    elif rows:
        console().print(failures_table(rows))
    else:
        say(f"none of {count} episodes failed" if count else "there are no episodes")
    return 0


def _short(path: Path) -> Path:
    """The path from here, if it is below here."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path

"""`agentrl view`, `agentrl runs`, `agentrl show`: inspect runs in a browser and in the terminal."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.cli.arguments import COMMANDS
from agentrl.utils.errors import RunFolderError
from agentrl.utils.files import shown_path
from agentrl.utils.terminal import console as safe_console
from agentrl.utils.terminal import say

if TYPE_CHECKING:
    from agentrl.contrib.view.api import Api
    from agentrl.contrib.view.library import Library, Shelved
    from agentrl.run.reader import RunRecord

_LARGE = 64 << 20


# agentrl view

VIEW_EPILOG = """examples:
  agentrl view                                all runs in runs/, including running ones
  agentrl view runs/quickstart                one run
  agentrl view runs/a runs/b other/runs       several runs, and all runs in a folder
  agentrl view evals/key_value                an evaluation of `agentrl eval`
  agentrl view --port 0 --no-browser          on a free port; prints the address

The page is on this machine only (127.0.0.1). From another one: ssh -L 8300:127.0.0.1:8300 HOST. docs/viewer.md says more.
"""
PORT = 8300


@COMMANDS.register("view")
def add_view_arguments(parser: argparse.ArgumentParser) -> None:
    """Look at runs in a browser: curves, episodes, tokens, failures."""
    parser.epilog = VIEW_EPILOG
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run folders, or folders of runs (default: runs)")
    parser.add_argument("--port", type=int, default=PORT, help=f"the port on 127.0.0.1 (default {PORT}; 0: a free one)")
    parser.add_argument("--no-browser", action="store_true", help="only print the address")
    parser.add_argument("--no-envs", action="store_true", help="do not run environments, which show initial states of episodes")
    parser.set_defaults(run=run_view)


def run_view(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C; returns 0. Raises RunFolderError without runs."""
    import webbrowser

    from agentrl.contrib.view.library import Library
    from agentrl.contrib.view.server import serve

    paths = [Path(name) for name in args.runs or ["runs"]]
    if not args.runs and not paths[0].is_dir():
        raise RunFolderError("runs: there is no such folder here; name a run, or start one with agentrl train")
    library = Library(paths)

    def began(url: str) -> None:
        say(f"agentrl view: {len(library.scan())} runs at {url}  (Ctrl-C ends it)", flush=True)
        names = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")  # without these, Python would start a text browser in this terminal
        if not args.no_browser and (sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in names)):
            webbrowser.open(url)

    serve(library, args.port, began, envs=not args.no_envs)
    return 0


# agentrl runs

RUNS_EPILOG = """examples:
  agentrl runs                                       the runs in runs/
  agentrl runs list other/runs --json                those of another folder, as JSON
  agentrl runs compare runs/seed0 runs/seed1         their config differences and final figures
  agentrl runs failures runs/quickstart --step 10    why episodes did not succeed, by reason

In a browser: agentrl view. One run, a step of it or an episode: agentrl show.
"""


@COMMANDS.register("runs")
def add_runs_arguments(parser: argparse.ArgumentParser) -> None:
    """List runs, compare them, group their failures."""
    parser.epilog = RUNS_EPILOG
    parser.set_defaults(run=run_list, folders=[])
    parser.add_argument("--json", action="store_true", help="as JSON")
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    listing = actions.add_parser("list", help="list the runs in folders (the default action)")
    listing.add_argument("folders", nargs="*", metavar="FOLDER", help="folders of runs, or runs (default: runs)")
    listing.set_defaults(run=run_list)
    compare = actions.add_parser("compare", help="compare config differences and final figures")
    compare.add_argument("folders", nargs="+", metavar="RUN", help="run folders to compare")
    compare.set_defaults(run=run_compare)
    failures = actions.add_parser("failures", help="count reasons of unsuccessful episodes")
    failures.add_argument("folder", metavar="RUN", help="a run folder, or an evaluation's")
    failures.add_argument("--step", type=int, help="only episodes after this many updates")
    failures.set_defaults(run=run_failures)
    for action in (listing, compare, failures):
        # Suppressed: its default would otherwise override the option given before the action.
        action.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="as JSON")


def run_list(args: argparse.Namespace) -> int:
    """List runs."""
    from agentrl.contrib.view.library import overview
    from agentrl.contrib.view.terminal import console, print_json, runs_table
    from agentrl.run.reader import find_runs, is_run, load_run

    found: list[RunRecord] = []
    for name in args.folders or ["runs"]:
        folder = Path(name)
        found += [load_run(folder)] if is_run(folder) else find_runs(folder)
        if not folder.is_dir():
            raise RunFolderError(f"{folder}: there is no such folder")
    rows = [{"run": shown_path(run.path), **overview(run)} for run in found]
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
    """Compare runs by a table of differing config keys and one of figures."""
    from agentrl.contrib.view.library import overview
    from agentrl.contrib.view.terminal import console, figures, flat, print_json, table
    from agentrl.run.reader import load_run

    runs = [load_run(folder) for folder in args.folders]
    names = [shown_path(run.path) for run in runs]
    tables = [{**flat(run.table), **run.identity()} for run in runs]
    keys = dict.fromkeys(key for found in tables for key in found if key not in ("name", "out"))  # except those that name the run
    values = {key: [found.get(key) for found in tables] for key in keys}  # None: the run does not set it
    differ = {key: of for key, of in values.items() if any(value != of[0] for value in of)}
    rows: list[dict[str, Any]] = [overview(run) for run in runs]
    found = figures([run.metrics for run in runs], rows)
    if args.json:
        print_json({"runs": names, "config": differ, "figures": found})
        return 0
    out = console()
    out.print(table("what differs in the configs and their files", ("key", *names), [(key, *of) for key, of in differ.items()]))
    out.print(table("figures", ("", *names), [(key, *of) for key, of in found.items()]))
    return 0


def run_failures(args: argparse.Namespace) -> int:
    """Failures by reason."""
    from agentrl.contrib.view import queries
    from agentrl.contrib.view.terminal import console, failures_table, print_json

    _, one = _read(args.folder)
    with one.index.reading() as db:
        rows = queries.failures(db, args.step)
        counts = dict(db.execute("SELECT step, count(*) FROM episodes GROUP BY step").fetchall())
    if args.step is not None and args.step not in counts:
        raise queries.NotFoundError(
            f"--step {args.step}: no episodes are of it; there are episodes of {queries.list_steps(counts)}"
        )
    count = sum(counts.values()) if args.step is None else counts[args.step]
    if args.json:
        print_json(rows)
    elif rows:
        console().print(failures_table(rows))
    else:
        say(f"none of {count} episodes failed" if count else "there are no episodes")
    return 0


# agentrl show

SHOW_EPILOG = """examples:
  agentrl show runs/quickstart                                  its result, its steps, failures, suspects
  agentrl show runs/quickstart --step 10                        the metrics, groups and episodes of a step
  agentrl show runs/quickstart --episode step_000010.3          one episode, turn by turn, with its reward
  agentrl show evals/quickstart/final --episode trajectories.0  of an evaluation
  agentrl show runs/quickstart --step 10 --json                 the same for programs

What a policy or a tool wrote is shown as text: escape sequences are written out. docs/viewer.md has the JSON.
"""


@COMMANDS.register("show")
def add_show_arguments(parser: argparse.ArgumentParser) -> None:
    """Show a run, a step or an episode in the terminal."""
    parser.epilog = SHOW_EPILOG
    parser.add_argument("folder", metavar="RUN", help="a run folder, or an evaluation's")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--step", type=int, help="the episodes after this many updates")
    what.add_argument("--episode", metavar="ID", help="one episode, as --step and the viewer name it: FILE.ROW")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=run_show)


def run_show(args: argparse.Namespace) -> int:
    """Show it; returns 0. Raises RunFolderError or NotFoundError if it is missing."""
    from agentrl.contrib.view.api import Api
    from agentrl.contrib.view.terminal import PAGE, console, episode_text, print_json

    if _show_parts(args):
        return 0
    library, one = _read(args.folder)
    # The initial state of an episode would run the environment; only the browser shows it.
    api = Api(library, envs=False)
    if args.episode is None:
        return _step(api, one.ident, args) if args.step is not None else _run(api, one.ident, args)
    row = api.episode(one.ident, args.episode, {})
    if args.json:
        print_json(row)
    else:
        out = console()
        out.print(episode_text(row), width=min(out.width, PAGE))  # boxes use the whole width
    return 0


def _read(folder: str) -> tuple[Library, Shelved]:
    """Return a run with its index up to date; on a terminal, announces the reading of a large run.

    Raises RunFolderError."""
    from agentrl.contrib.view.index import file_size
    from agentrl.contrib.view.library import Library
    from agentrl.run.reader import load_run

    load_run(folder)  # raises with the reason
    library = Library([Path(folder)])
    [one] = library.scan()
    size = sum(file_size(file.path) for file in one.run.files)
    err = safe_console(stderr=True)
    with err.status(f"reading {size >> 20} MB of episodes") if size > _LARGE and err.is_terminal else nullcontext():
        library.refresh(one)
    if one.problem is not None:
        raise RunFolderError(one.problem)
    return library, one


def _show_parts(args: argparse.Namespace) -> bool:
    """Print the report of `agentrl eval` above the folders of several models or environments; False in other folders."""
    from agentrl.contrib.view.terminal import console, print_json
    from agentrl.run.compare import print_comparison, print_official, print_side_by_side
    from agentrl.run.evaluate import print_reports
    from agentrl.run.folder import stored_object
    from agentrl.run.reader import find_runs, is_run

    folder = Path(args.folder)
    files = () if is_run(folder) or not folder.is_dir() else (folder / "comparison.json", folder / "report.json")
    tables = next((found for file in files if (found := stored_object(file, "remove it")) and "envs" in found), None)
    if tables is None:
        return False
    if args.step is not None or args.episode is not None:
        inside = ", ".join(shown_path(run.path) for run in find_runs(folder))
        raise RunFolderError(f"{folder}: it has no episodes of its own; there are evaluations in it: {inside}")
    if args.json:
        print_json(tables)
    elif "success" in tables:
        print_reports(tables["envs"], tables["success"], console())
        print_official(tables.get("official", {}), console())
    else:
        print_comparison(tables, console())
        print_side_by_side(tables.get("official", {}), console())
    return True


def _step(api: Api, ident: str, args: argparse.Namespace) -> int:
    from agentrl.contrib.view.queries import NotFoundError, list_steps
    from agentrl.contrib.view.terminal import console, print_json, table

    step = str(args.step)
    metrics = [row for row in api.metrics(ident, {})["rows"] if row.get("step") == args.step and row.get("phase") not in _WARM]
    page = api.episodes(ident, {"step": step, "limit": "500"})
    groups = api.groups(ident, {"step": step, "limit": "500"})
    if not metrics and not page["rows"]:
        files = api.run(ident, {})["steps"]
        wrong = [f"{file['file']}.jsonl: {file['problem'] or 'it has no row'}" for file in files if file["step"] == args.step]
        steps = sorted({file["step"] for file in files if file["episodes"]})
        said = "; ".join(wrong) or "the run has no such step"
        raise NotFoundError(f"--step {step}: {said}; there are episodes of {list_steps(steps)}")
    if args.json:
        print_json({"metrics": metrics, "groups": groups, "episodes": page["rows"], "total": page["total"]})
        return 0
    out = console()
    for row in metrics:
        shown = [(key, value) for key, value in row.items() if key not in ("step", "phase")]
        out.print(table(f"metrics of step {step}, {row['phase']}", ("metric", "value"), shown))
    rewards = [" ".join("-" if m["reward"] is None else f"{m['reward']:.3g}" for m in group["members"]) for group in groups]
    keys = ("group", "task", "mean", "std")
    out.print(table("groups", (*keys, "rewards"), [(*(g[k] for k in keys), r) for g, r in zip(groups, rewards, strict=True)]))
    headings = ("episode", "task", "reward", "success", "stop", "turns", "calls", "tool errors", "tokens", "signs")
    fields = ("id", "task", "reward", "success", "stop", "turns", "calls", "tool_errors", "tokens")
    listed = [(*(row[field] for field in fields), " ".join(row["suspects"])) for row in page["rows"]]
    out.print(table(f"episodes ({len(listed)} of {page['total']})", headings, listed, most=40))
    return 0


_WARM = ("sft", "gate")


def _run(api: Api, ident: str, args: argparse.Namespace) -> int:
    from agentrl.contrib.view.terminal import console, failures_table, print_json, runs_table, table
    from agentrl.run.compare import print_official

    run = api.run(ident, {})
    failures, suspects = api.failures(ident, {})[:10], api.suspects(ident, {})
    if args.json:
        print_json({**run, "failures": failures, "suspects": suspects})
        return 0
    out = console()
    out.print(runs_table([api.library.row(api.library.get(ident))]))
    if run["error"]:
        out.print(table("", ("error",), [(run["error"],)], most=2000))
    if held := run["evaluations"]:
        names = list(dict.fromkeys(name for row in held for name in row["rates"] if name != "pass^1"))  # the same as pass@1
        keys = ("phase", "step", "env", "tasks", "episodes", "unscored")
        cells = [[*(row[key] for key in keys), *(row["rates"].get(name) for name in names)] for row in held]
        interval = "{mean:.3f} ({low:.3f} to {high:.3f})"
        cells = [[interval.format(**cell) if isinstance(cell, dict) else cell for cell in row] for row in cells]
        out.print(table("held-out tasks (95 % intervals)", (*keys, *names), cells))
    print_official(run["official"], out)
    keys = ("file", "phase", "step", "episodes", "damaged", "problem")
    out.print(table("episodes", keys, [[file[key] for key in keys] for file in run["steps"]]))
    if failures:
        out.print(failures_table(failures))
    if suspects:
        shown: list[tuple[Any, ...]] = [
            (s["title"], s["value"], s["why"], " ".join(e["id"] for e in s["episodes"][:2])) for s in suspects
        ]
        out.print(table("worth a look", ("suspicion", "value", "why", "for example"), shown, most=200))
    return 0

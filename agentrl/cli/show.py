"""`agentrl show RUN`: a run, one of its steps, or one episode, in the terminal."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.view.api import Api

HELP = "show a run, a step or an episode in the terminal"
EPILOG = """examples:
  agentrl show runs/quickstart                                  its result, its steps, failures, suspects
  agentrl show runs/quickstart --step 10                        the metrics, groups and episodes of a step
  agentrl show runs/quickstart --episode step_000010.3          one episode, turn by turn, with its reward
  agentrl show evals/quickstart/final --episode trajectories.0  of an evaluation
  agentrl show runs/quickstart --step 10 --json                 the same for programs

What a policy or a tool wrote is shown as text: escape sequences are written out. docs/viewer.md has the JSON.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("folder", metavar="RUN", help="a run folder, or an evaluation's")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--step", type=int, help="the episodes after so many updates")
    what.add_argument("--episode", metavar="ID", help="one episode, as --step and the viewer name it: FILE.ROW")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show; returns 0. Raises RunFolderError or NotFoundError for what is not there."""
    from pathlib import Path

    from agentrl.run.reader import load_run
    from agentrl.view.api import Api
    from agentrl.view.index import say_reading
    from agentrl.view.library import Library

    found = load_run(args.folder)
    library = Library([Path(args.folder)])
    [one] = library.scan()
    with say_reading(found):
        library.refresh(one)
    if one.problem is not None:
        from agentrl.errors import RunFolderError

        raise RunFolderError(one.problem)
    # The state that an episode began with would run the environment: that is for who looks in the browser.
    api = Api(library, envs=False)
    if args.episode is not None:
        return _episode(api, one.ident, args)
    return _step(api, one.ident, args) if args.step is not None else _run(api, one.ident, args)


def _episode(api: Api, ident: str, args: argparse.Namespace) -> int:
    from agentrl.view.terminal import PAGE, console, episode_text, print_json

    row = api.episode(ident, args.episode, {})
    if args.json:
        print_json(row)
    else:
        out = console()
        out.print(episode_text(row), width=min(out.width, PAGE))  # boxes are as wide as they may be
    return 0


def _step(api: Api, ident: str, args: argparse.Namespace) -> int:
    from agentrl.view.queries import NotFoundError, listed
    from agentrl.view.terminal import console, episodes_table, print_json, table

    step = str(args.step)
    metrics = [row for row in api.metrics(ident, {})["rows"] if row.get("step") == args.step and row.get("phase") not in _WARM]
    page = api.episodes(ident, {"step": step, "limit": "500"})
    groups = api.groups(ident, {"step": step, "limit": "500"})
    if not metrics and not page["rows"]:
        files = api.run(ident, {})["steps"]
        wrong = [f"{file['file']}.jsonl: {file['problem'] or 'it has no row'}" for file in files if file["step"] == args.step]
        steps = sorted({file["step"] for file in files if file["episodes"]})
        said = "; ".join(wrong) or "the run has no such step"
        raise NotFoundError(f"--step {step}: {said}; there are episodes of {listed(steps)}")
    if args.json:
        print_json({"metrics": metrics, "groups": groups, "episodes": page["rows"], "total": page["total"]})
        return 0
    out = console()
    for row in metrics:
        shown = [(key, value) for key, value in row.items() if key not in ("step", "phase")]
        out.print(table(f"metrics of step {step}, {row['phase']}", ("metric", "value"), shown))
    columns = ("group", "task", "mean", "std", "rewards")
    rewards = [" ".join("-" if m["reward"] is None else f"{m['reward']:.3g}" for m in group["members"]) for group in groups]
    keys = ("group", "task", "mean", "std")
    out.print(table("groups", columns, [(*(g[k] for k in keys), r) for g, r in zip(groups, rewards, strict=True)]))
    out.print(episodes_table(f"episodes ({len(page['rows'])} of {page['total']})", page["rows"]))
    return 0


_WARM = ("sft", "gate")


def _run(api: Api, ident: str, args: argparse.Namespace) -> int:
    from agentrl.view.terminal import console, failures_table, print_json, runs_table, table

    run = api.run(ident, {})
    failures, suspects = api.failures(ident, {})[:10], api.suspects(ident, {})
    if args.json:
        print_json({**run, "failures": failures, "suspects": suspects})
        return 0
    out = console()
    planned = api.library.row(api.library.get(ident))
    out.print(runs_table([planned]))
    if run["error"]:
        out.print(table("", ("error",), [(run["error"],)], most=2000))
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

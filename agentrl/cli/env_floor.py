"""`agentrl env floor`: what an agent that solves nothing earns in environments."""

from __future__ import annotations

import argparse
import json
from typing import Any

from agentrl.errors import UserError
from agentrl.shown import say

EPILOG = """examples:
  agentrl env floor key_value sql                         what doing nothing earns, of 200 held-out tasks each
  agentrl env floor bfcl                                  of every task of a benchmark, with the ids of those that pay
  agentrl env floor tau2 domain=retail --json
  agentrl env floor key_value --reward my_spec.json --tasks 1000
"""
SHOWN = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument("words", nargs="+", metavar="ENV|a=b", help="environments; with one, also its parameters")
    parser.add_argument("--tasks", type=int, help="tasks (default: all of a suite, 200 of another environment)")
    parser.add_argument("--split", help="of which split (default: all tasks of a suite, heldout of another environment)")
    parser.add_argument("--reward", help="score with this reward spec instead of the environment's own")
    parser.add_argument("--json", action="store_true", help="one JSON array instead of tables")
    parser.set_defaults(run=run_floor)


def run_floor(args: argparse.Namespace) -> int:
    """Measure and print; returns the exit code."""
    names = [word for word in args.words if "=" not in word]
    params = [word for word in args.words if "=" in word]
    if not names or (params and len(names) > 1):
        raise UserError("agentrl env floor: give environments, or one with parameters a=b")
    if args.tasks is not None and args.tasks < 1:
        raise UserError(f"--tasks {args.tasks}: expected 1 or more")
    found = [floor_of(name, params, args.reward, args.split, args.tasks) for name in names]
    if args.json:
        say(json.dumps(found))
    else:
        for one in found:
            _print(one)
    return 0


def floor_of(
    name: str, params: list[str], reward: str | None = None, split: str | None = None, tasks: int | None = None
) -> dict[str, Any]:
    """What `agentrl.env.check.floor.measure` finds for an environment. Raises UserError if it has no reward spec."""
    from agentrl.cli.env_subject import reference, subject_of
    from agentrl.env.check.floor import measure

    ref = reference(name, params)
    subject = subject_of(ref, reward)
    if subject.scorer is None:
        raise UserError(f"{name} names no reward spec, so nothing is paid; --reward SPEC scores with one")
    return measure(subject, split, tasks)


def _print(found: dict[str, Any]) -> None:
    from agentrl.env.check.floor import headline

    every = "every task" if found["every"] else f"the first {found['tasks']} tasks"
    version = f" {found['version']}" if found["version"] else ""
    say(f"{found['env']}{version}: {every} of {found['split']} ({found['tasks']})")
    for agent, one in found["agents"].items():
        own = f", {headline(one)}" if headline(one) else ""
        mean = "-" if one["mean"] is None else f"{one['mean']:.3f}"
        lost = f", {one['unscored']} unscored" if one["unscored"] else ""
        share = f"{100 * one['low']:.1f} to {100 * one['high']:.1f} %, 95 %"
        say(f"  {agent:15} mean {mean}, paid in full on {one['paid']} ({share}){lost}{own}")
        if one["ids"]:
            more = f" and {len(one['ids']) - SHOWN} more (--json has all)" if len(one["ids"]) > SHOWN else ""
            say(f"    {', '.join(one['ids'][:SHOWN])}{more}")

"""`agentrl env difficulty`: calls, turns, tokens and state writes of the gold solutions of an environment's tasks."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from agentrl.errors import UserError
from agentrl.shown import cell, console, folding, say

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentrl.env.difficulty import DifficultyReport

EPILOG = """examples:
  agentrl env difficulty key_value calls=8                64 tasks of the split "train"
  agentrl env difficulty tau2 --all-tasks                 every task of a benchmark, by family
  agentrl env difficulty bfcl --split heldout --json      a row for each task
  agentrl env difficulty workspace --tokenizer Qwen/Qwen3-0.6B     in a model's own tokens
"""
COLUMNS = ("calls", "turns", "user_turns", "prompt_tokens", "tool_tokens", "gold_tokens", "read_tokens", "writes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument("--tasks", type=int, default=64, help="tasks (default 64)")
    parser.add_argument("--all-tasks", action="store_true", help="every task of an environment that has an end")
    parser.add_argument("--split", help="of which split (default train; all tasks of a suite)")
    parser.add_argument("--tokenizer", metavar="MODEL", help="count the tokens of this model (default: four bytes each)")
    parser.add_argument("--json", action="store_true", help="one JSON object with a row for each task")
    parser.set_defaults(run=run_difficulty)


def run_difficulty(args: argparse.Namespace) -> int:
    """Measure and print; returns the exit code: 1 if no gold solution could be played."""
    from agentrl.cli.env_subject import reference
    from agentrl.env.difficulty import measured
    from agentrl.env.suite import WHOLE, SuiteEnv

    if args.tasks < 1:
        raise UserError(f"--tasks {args.tasks}: expected 1 or more")
    ref = reference(args.env, args.params).scripted()
    env = ref.build(scorer=None)
    split = args.split or (WHOLE if isinstance(env.unwrapped, SuiteEnv) else "train")
    there = env.task_count(split)
    if args.all_tasks and there is None:
        raise UserError(f"--all-tasks: split {split!r} of {ref.id} has no end of tasks; use --tasks N")
    wanted = args.tasks if there is None else min(args.tasks, there)
    report = measured(env, split, range(there if args.all_tasks and there is not None else wanted), _counter(args.tokenizer))
    if args.json:
        say(json.dumps({"env": env.id, **report.to_json()}))
    else:
        _print(env.id, report)
    return 0 if report.tasks else 1


def _counter(model: str | None) -> Callable[[str], int]:
    if model is None:
        from agentrl.tool import estimate_tokens

        return estimate_tokens
    from agentrl.train.pretrained import load_tokenizer

    tokenizer = load_tokenizer(model)
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


def _print(env_id: str, report: DifficultyReport) -> None:
    from agentrl.env.difficulty import SHARES

    low, middle, high = (SHARES.index(share) for share in (0, 50, 100))
    table = folding(
        "family",
        "tasks",
        *COLUMNS,
        title=f"{env_id}: gold of {len(report.tasks)} tasks of {report.split}: median (least to most)",
    )
    counts = report.counts()
    for family, numbers in report.by_family().items():
        cells = [f"{one[middle]:g} ({one[low]:g} to {one[high]:g})" for one in (numbers[name] for name in COLUMNS)]
        table.add_row(cell(family or "-"), str(counts[family]), *cells)
    console(highlight=False).print(table)
    for task, reason in list(report.unplayed.items())[:4]:
        say(f"without gold: {task}: {reason}")
    if len(report.unplayed) > 4:
        say(f"... and {len(report.unplayed) - 4} more (--json has all)")

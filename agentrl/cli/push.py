"""`agentrl push SOURCE NAME`: a model, an adapter, data or an environment to a Hugging Face hub."""

from __future__ import annotations

import argparse

from agentrl.shown import say

HELP = "push a run's model or adapter, data or an environment to a hub"
EPILOG = """examples:
  agentrl push runs/quickstart me/quickstart               its last model
  agentrl push runs/quickstart me/mine --best              the best checkpoint
  agentrl push runs/lora me/lora --adapter                 its adapter alone
  agentrl push rows.jsonl me/rows                          data
  agentrl push envs/my_env me/my_env                       an environment
  HF_ENDPOINT=https://hub.example agentrl push models/m m  to a hub of your own

Repositories are private (HF_TOKEN). Secrets, links and pickles are refused. To a shared folder: agentrl export, and cp.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("source", help="a run, a model folder, an environment's folder, or data", metavar="SOURCE")
    parser.add_argument("name", help="the repository: NAME or OWNER/NAME", metavar="NAME")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, default=None, help="of a run: the checkpoint of this step (default: the last model)")
    which.add_argument("--best", action="store_true", help="of a run: the checkpoint with the best evaluation")
    parser.add_argument("--adapter", action="store_true", help="of a run with model.lora: its adapter alone")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Push; returns 0. Raises UserError."""
    from agentrl.run.push import push

    which = "best" if args.best else "last" if args.step is None else str(args.step)
    commit = push(args.source, args.name, which, args.adapter)
    say(f"pushed {args.name} at revision {commit}")
    return 0

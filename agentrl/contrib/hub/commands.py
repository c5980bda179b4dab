"""Commands `agentrl push` and `agentrl pull`: transfer a model, an adapter, data or an environment to and from a hub."""

from __future__ import annotations

import argparse

from agentrl.cli.arguments import COMMANDS
from agentrl.utils.terminal import say

PUSH_EPILOG = """examples:
  agentrl push runs/quickstart me/quickstart               its last model
  agentrl push runs/quickstart me/mine --best              the best checkpoint
  agentrl push runs/lora me/lora --adapter                 its adapter alone
  agentrl push rows.jsonl me/rows                          data
  agentrl push envs/my_env me/my_env                       an environment
  HF_ENDPOINT=https://hub.example agentrl push models/m m  to a hub of your own

Repositories are private (HF_TOKEN). Secrets, links and pickles are refused. To a shared folder: agentrl export, and cp.
"""


@COMMANDS.register("push")
def add_push_arguments(parser: argparse.ArgumentParser) -> None:
    """Push a run's model or adapter, data or an environment to a hub."""
    parser.epilog = PUSH_EPILOG
    parser.add_argument("source", help="a run, a model folder, an environment's folder, or data", metavar="SOURCE")
    parser.add_argument("name", help="the repository: NAME or OWNER/NAME", metavar="NAME")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, default=None, help="of a run: the checkpoint of this step (default: the last model)")
    which.add_argument("--best", action="store_true", help="of a run: the checkpoint with the best evaluation")
    parser.add_argument("--adapter", action="store_true", help="of a run with model.lora: its adapter alone")
    parser.set_defaults(run=run_push)


def run_push(args: argparse.Namespace) -> int:
    """Push and print the revision; return 0. Raises UserError if the push fails."""
    from agentrl.contrib.hub.transfer import push

    which = "best" if args.best else "last" if args.step is None else str(args.step)
    commit = push(args.source, args.name, which, args.adapter)
    say(f"pushed {args.name} at revision {commit}")
    return 0


PULL_EPILOG = """examples:
  agentrl pull me/quickstart models/quickstart              the newest revision; then: model.path=models/quickstart
  agentrl pull me/quickstart old --revision 3f2a9c1         an earlier one: a commit, branch or tag
  agentrl pull datasets/me/my_env envs/my_env               an environment, found by its name from here
  agentrl pull datasets/me/rows rows                        data

Repeat the command if it was interrupted: it continues.
"""


@COMMANDS.register("pull")
def add_pull_arguments(parser: argparse.ArgumentParser) -> None:
    """Get a model, data or an environment from a hub."""
    parser.epilog = PULL_EPILOG
    parser.add_argument("name", help="the repository: NAME, or datasets/NAME for data and environments", metavar="NAME")
    parser.add_argument("target", help="the folder to make; must not exist", metavar="TARGET")
    parser.add_argument("--revision", default=None, help="a commit, branch or tag (default: the newest)")
    parser.set_defaults(run=run_pull)


def run_pull(args: argparse.Namespace) -> int:
    """Pull and print the folder; return 0. Raises UserError if the pull fails."""
    from agentrl.contrib.hub.transfer import pull

    pull(args.name, args.target, args.revision)
    say(f"pulled {args.target}")
    return 0

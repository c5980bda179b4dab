"""`agentrl pull NAME TARGET`: a repository of a hub, as a folder."""

from __future__ import annotations

import argparse

from agentrl.shown import say

HELP = "get a model, data or an environment from a hub"
EPILOG = """examples:
  agentrl pull me/quickstart models/quickstart              the newest revision; then: model.path=models/quickstart
  agentrl pull me/quickstart old --revision 3f2a9c1         an earlier one: a commit, branch or tag
  agentrl pull datasets/me/my_env envs/my_env               an environment, found by its name from here
  agentrl pull datasets/me/rows rows                        data

Repeat the command if it was interrupted: it continues.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("name", help="the repository: NAME, or datasets/NAME for data and environments", metavar="NAME")
    parser.add_argument("target", help="the folder to make; must not exist", metavar="TARGET")
    parser.add_argument("--revision", default=None, help="a commit, branch or tag (default: the newest)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Pull; returns 0. Raises UserError."""
    from agentrl.run.push import pull

    pull(args.name, args.target, args.revision)
    say(f"pulled {args.target}")
    return 0

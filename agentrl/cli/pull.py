"""`agentrl pull SOURCE TARGET`: what `agentrl push` pushed, as a folder, verified."""

from __future__ import annotations

import argparse

from agentrl.shown import say

HELP = "get what was pushed to a shared folder or a hub, verified"
EPILOG = """examples:
  agentrl pull /mnt/share/models/quickstart models/quickstart     the newest revision; then: model.path=models/quickstart
  agentrl pull /mnt/share/models/quickstart old --revision 3f2a   an earlier one
  agentrl pull /mnt/share/environments/my_env envs/my_env         an environment, onto the shelf of the working folder
  agentrl pull hf:me/quickstart models/quickstart                 from a hub

Repeat the command if it was cut short: it goes on with what it has.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "source", help="SHARE/models/NAME (or datasets, environments; also as file:PATH), or hf:NAME", metavar="SOURCE"
    )
    parser.add_argument("target", help="the folder to make; must not exist, or be the same already", metavar="TARGET")
    parser.add_argument("--revision", default=None, help="which one, or how it begins (default: the newest)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Pull; returns 0. Raises UserError."""
    from agentrl.run.push import pull

    done = pull(args.source, args.target, args.revision)
    say(f"{'pulled' if done.new else 'is there already:'} {done.place} at revision {done.revision}")
    return 0

"""`agentrl push SOURCE SHARE`: a model, an adapter, data or an environment to a shared folder or a hub."""

from __future__ import annotations

import argparse

from agentrl.shown import say

HELP = "push a run's model or adapter, data or an environment to a shared folder or a hub"
EPILOG = """examples:
  agentrl push runs/quickstart /mnt/share                     its model, as models/quickstart
  agentrl push runs/quickstart /mnt/share --best --name mine  the best checkpoint, as models/mine
  agentrl push runs/lora /mnt/share --adapter                 its adapter alone
  agentrl push rows.jsonl /mnt/share --name rows              data
  agentrl push envs/my_env /mnt/share                         an environment
  agentrl push runs/quickstart hf:me/quickstart               to a hub, as a private repository (HF_TOKEN)

Equal content is one revision: a second push changes nothing. Secrets, links and pickles are refused.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("source", help="a run, a model folder, an environment's folder, or data", metavar="SOURCE")
    parser.add_argument("share", help="a folder that is there (also as file:PATH), or hf:NAME", metavar="SHARE")
    parser.add_argument("--name", default=None, help="the repository's name (default: the source's)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, default=None, help="of a run: the checkpoint of this step (default: the last model)")
    which.add_argument("--best", action="store_true", help="of a run: the checkpoint with the best evaluation")
    parser.add_argument("--adapter", action="store_true", help="of a run with model.lora: its adapter alone")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Push; returns 0. Raises UserError."""
    from agentrl.run.push import push

    which = "best" if args.best else "last" if args.step is None else str(args.step)
    done = push(args.source, args.share, args.name, which, args.adapter)
    said = "pushed" if done.new else "is there already:"
    say(f"{said} {done.place} at revision {done.revision}")
    say(f"get it with: agentrl pull {done.place} TARGET")
    return 0

"""`agentrl metrics`: what the numbers in metrics.jsonl are."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from agentrl.errors import hinted
from agentrl.shown import say

HELP = "what the numbers in metrics.jsonl mean"
EPILOG = """examples:
  agentrl metrics                                    all of them, with units and formulas
  agentrl metrics entropy                            those whose name or meaning has this word
  agentrl metrics --json                             for a script
  agentrl metrics --markdown > metrics.md            as a page
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("words", nargs="*", metavar="WORD", help="only names and meanings with one of these")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON array")
    form.add_argument("--markdown", action="store_true", help="print the page that `make docs` shows")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the table; returns 0, or 1 if no entry has one of the words."""
    from agentrl.run.metrics import as_markdown, info_of, metrics_table

    if args.markdown:
        say(as_markdown(), end="")
        return 0
    exact = {entry.name for word in args.words if (entry := info_of(word)) is not None}
    found = [
        entry
        for _, entry in metrics_table()
        if not args.words
        or entry.name in exact
        or any(word.lower() in f"{entry.name} {entry.meaning}".lower() for word in args.words)
    ]
    if not found:
        words = ", ".join(map(repr, args.words))
        near = hinted(args.words[0], [entry.name for _, entry in metrics_table()])
        say(f"agentrl: no metric has {words} in its name or meaning{near}", file=sys.stderr)
    if args.json:
        say(json.dumps([asdict(entry) for entry in found], indent=2))
    else:
        for entry in found:
            say(f"{entry.name}  [{entry.unit}; {', '.join(entry.phases)}]\n    {entry.meaning}")
    return 0 if found else 1

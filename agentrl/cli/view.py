"""`agentrl view`: look at runs in a browser."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from agentrl.errors import RunFolderError
from agentrl.shown import say

HELP = "look at runs in a browser: curves, episodes, tokens, failures"
EPILOG = """examples:
  agentrl view                                all runs in runs/, also those that go on
  agentrl view runs/quickstart                one run
  agentrl view runs/a runs/b other/runs       several, and all in a folder
  agentrl view evals/key_value                what `agentrl eval` wrote
  agentrl view --port 0 --no-browser          on a free port; prints the address

The page is on this machine only (127.0.0.1). From another one: ssh -L 8300:127.0.0.1:8300 HOST. docs/viewer.md says more.
"""
PORT = 8300


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run folders, or folders of runs (default: runs)")
    parser.add_argument("--port", type=int, default=PORT, help=f"the port on 127.0.0.1 (default {PORT}; 0: a free one)")
    parser.add_argument("--no-browser", action="store_true", help="only print the address")
    parser.add_argument("--no-envs", action="store_true", help="run no environment to show the state that an episode began with")
    parser.set_defaults(run=run)


def _has_display() -> bool:
    """Without one, Python would start a browser inside this terminal, if there is one."""
    names = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    return sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in names)


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C; returns 0. Raises RunFolderError if there are no runs."""
    import webbrowser

    from agentrl.view.library import Library
    from agentrl.view.server import serve

    paths = [Path(name) for name in args.runs or ["runs"]]
    if not args.runs and not paths[0].is_dir():
        raise RunFolderError("runs: there is no such folder here; name a run, or start one with agentrl train")
    library = Library(paths)

    def began(url: str) -> None:
        say(f"agentrl view: {len(library.scan())} runs at {url}  (Ctrl-C ends it)", flush=True)
        if not args.no_browser and _has_display():
            webbrowser.open(url)

    serve(library, args.port, began, envs=not args.no_envs)
    return 0

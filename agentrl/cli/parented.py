"""What a command that uses Ray does if Ray ends its process from within (agentrl/cluster/ray_parent.py)."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from agentrl.cluster.ray_parent import die_of, end_of_driver, restarting, tell
from agentrl.errors import WorkerDiedError
from agentrl.run.interrupt import ended_as_interrupted
from agentrl.shown import say

Drive = Callable[[int], int]
"""The command's work, given how often it has started again; returns the exit code."""


def with_parent(args: argparse.Namespace, drive: Drive, again: Callable[[str], Drive] | None = None) -> int:
    """`drive` in a process of its own, if this one is the command; returns its exit code, or dies of the signal that it died of.

    It is forked before anything is imported that has threads (numpy's OpenBLAS has), so before it is known whether it will use
    Ray. It tells of its run (`ray_parent.tell`); if Ray ended it, `again(folder)` is driven, up to `max_restarts` times in all.
    Raises WorkerDiedError if it does not go on by itself.
    """
    if not args.program:
        return drive(0)
    restarts = 0
    while (end := end_of_driver()) is not None:
        if end.code < 0:
            if "folder" in end.told:
                name = signal.Signals(-end.code).name
                say(f"agentrl: the driver (pid {end.pid}) was ended by {name}; {end.told['then']}", file=sys.stderr)
            return die_of(-end.code)
        error = end.told.get("error", "")
        if end.silent and error:
            say(f"agentrl: {error}", file=sys.stderr)
        if not end.by_ray:
            if end.silent and not error:
                say(f"agentrl: the driver (pid {end.pid}) has ended without a word; {end.told['then']}", file=sys.stderr)
            return end.code
        restarts, limit = end.told["restarts"] + 1, end.told["max_restarts"]
        if end.stopping and not error:  # the signal has reached Ray's processes too
            if again is not None:  # a run, and not episodes, which are all kept
                from agentrl.train.checkpoint import newest_checkpoint

                say(f"newest checkpoint           {newest_checkpoint(Path(end.told['folder']))}", file=sys.stderr)
            say(f"interrupted; {end.told['then']}", file=sys.stderr)
            return 130
        if again is None or restarts > limit or error:
            raise WorkerDiedError(f"{end.by_ray}; {end.told['then']}")
        say(restarting(end.by_ray, restarts, limit))
        drive = again(end.told["folder"])
    try:
        with ended_as_interrupted():
            return drive(restarts)
    finally:
        tell(over=True)

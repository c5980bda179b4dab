"""The user's shelf on the workers: by path on this machine, as a copy on a cluster of several."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

SHELVES = ("envs", "tools", "rewards", "configs")


def shelf_roots() -> list[Path]:
    """Folders that hold the user's shelves: the working directory, then AGENTRL_PATH."""
    given = os.environ.get("AGENTRL_PATH", "").split(os.pathsep)
    return [Path.cwd(), *(Path(item).resolve() for item in given if item)]


def stage_shelves(into: Path) -> str:
    """Copy every shelf of the user below `into`, one folder a root; returns AGENTRL_PATH relative to it.

    Ray sends that folder to the workers as their working directory.
    """
    names: list[str] = []
    for number, root in enumerate(shelf_roots()):
        found = [root / shelf for shelf in SHELVES if (root / shelf).is_dir()]
        if not found:
            continue
        names.append(f"shelf{number}")
        for shelf in found:
            target = into / names[-1] / shelf.name
            shutil.copytree(shelf, target, ignore=shutil.ignore_patterns("__pycache__", "*.pyc", ".git"))
    return os.pathsep.join(names)

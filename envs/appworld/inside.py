"""Run by AppWorld's own Python (see `agentrl.contrib.suites.foreign`): one world at a time, as its class and its server have it.

    foreign_main.py inside.py ROOT

ROOT is the folder with AppWorld's `data`. What AppWorld writes of an episode (logs, databases) goes to a folder that is deleted
when the process ends; ROOT is only read.
"""

from __future__ import annotations

import atexit
import importlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(tempfile.mkdtemp(prefix="agentrl-appworld-"))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
(FOLDER / "data").symlink_to(Path(sys.argv[1]).resolve() / "data")
os.environ["APPWORLD_ROOT"] = str(FOLDER)

AppWorld: Any = importlib.import_module("appworld").AppWorld  # which reads the variable as it is imported

WORLD: Any = None


def start(task: str) -> None:
    """Begin a task, in place of the one before."""
    global WORLD
    close()
    WORLD = AppWorld(task_id=task, experiment_name="agentrl")


def execute(code: str) -> dict[str, Any]:
    """Run code in the world; what it printed or raised, and whether the task is marked as complete."""
    output = WORLD.execute(code)
    return {"output": output, "completed": bool(WORLD.task_completed())}


def evaluate() -> dict[str, Any]:
    """AppWorld's own tests of the task on the databases as they are."""
    return WORLD.evaluate(suppress_errors=True).to_dict()  # type: ignore[no-any-return]


def close() -> None:
    """End the task, if one runs."""
    global WORLD
    world, WORLD = WORLD, None
    if world is not None:
        world.close()
        shutil.rmtree(FOLDER / "experiments", ignore_errors=True)

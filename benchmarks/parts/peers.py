"""Run benchmarks of other platforms, each in a separate virtual environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PARTS = Path(__file__).resolve().parent


def interpreter(name: str) -> Path:
    """Return the Python interpreter of `.integrations/NAME`; `.ci/integrations.py` creates it if necessary.

    Raises RuntimeError with the end of the installer's output if it fails.
    """
    command = [sys.executable, str(ROOT / ".ci" / "integrations.py"), name]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name} could not be installed: {done.stderr.strip()[-400:]}")
    return Path(done.stdout.strip().splitlines()[-1])


def ask(name: str, script: str, *args: object, timeout: float = 600, **environment: str) -> dict[str, Any]:
    """Run a script of this folder with the peer's interpreter, and return the JSON object of its last output line.

    Raises RuntimeError with the end of the script's error output if it fails.
    """
    python = interpreter(name)
    command = [str(python), str(PARTS / script), *map(str, args)]
    settings = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=settings)
    except subprocess.TimeoutExpired as late:
        raise RuntimeError(f"{name}: {script} did not end within {timeout:g} s") from late
    if done.returncode:
        raise RuntimeError(f"{name}: {script} failed: {done.stderr.strip()[-1500:]}")
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def ratio(above: float | None, below: float | None) -> float | None:
    """Return above / below, rounded; None if one is None."""
    return None if above is None or below is None else round(above / below, 4)

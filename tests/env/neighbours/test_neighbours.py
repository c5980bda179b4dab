"""Neighbours with their real packages, each in an interpreter that has it.

verifiers 0.3.1 needs mcp below 2 and openenv-core brings a web stack of its own, so neither belongs into one
environment with everything else. Name an interpreter that has the package and agentrl's core dependencies:
AGENTRL_VERIFIERS_PYTHON, AGENTRL_OPENENV_PYTHON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from agentrl.env.neighbours.openenv import OpenEnv, openenv_app
from agentrl.env.neighbours.verifiers import VerifiersEnv, to_verifiers
from agentrl.errors import DependencyError

HERE = Path(__file__).parent
ROOT = HERE.parent.parent.parent


def run(package: str, module: str) -> Any:
    variable = f"AGENTRL_{package.upper()}_PYTHON"
    python = os.environ.get(variable) or (sys.executable if find_spec(module) else "")
    if not python:
        pytest.skip(f"{package} is not installed here and {variable} names no interpreter that has it")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [python, str(HERE / f"{package}_script.py")]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.slow
def test_verifiers_both_ways() -> None:
    report = run("verifiers", "verifiers")
    assert report["export"]["rewards"] == [1.0, 0.0]
    assert report["import"]["rewards"] == [1.0, 0.0]


@pytest.mark.slow
def test_openenv_both_ways() -> None:
    report = run("openenv", "openenv")
    assert report["export"] == {"reward": 1.0, "done": True, "other": 0.0}
    assert report["import"]["state"] == {"reward": 1.0, "steps": 2, "done": True}
    assert report["import"]["terminated"] and "Connection refused" in report["import"]["unreachable"]


def test_without_the_package_the_extra_is_named() -> None:
    if find_spec("verifiers") is None:
        for call in (lambda: VerifiersEnv(load="x"), lambda: to_verifiers(lambda: None, None)):  # type: ignore[arg-type,return-value]
            with pytest.raises(DependencyError, match=r"agentrl\[verifiers\]"):
                call()
    if find_spec("openenv") is None:
        for call in (lambda: OpenEnv(url="http://x"), lambda: openenv_app(lambda: None)):  # type: ignore[arg-type,return-value]
            with pytest.raises(DependencyError, match=r"agentrl\[openenv\]"):
                call()

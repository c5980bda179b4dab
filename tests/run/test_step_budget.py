"""One update stays readable: the files and functions that it enters are within .ci/budgets.json."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(300)
def test_an_update_enters_no_more_files_and_functions_than_its_budget() -> None:
    done = subprocess.run([sys.executable, ROOT / ".ci" / "measure.py", "--step"], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    step = json.loads(done.stdout[done.stdout.index('{\n "files of a step"') :])
    budgets = json.loads((ROOT / ".ci" / "budgets.json").read_text())
    assert any(names for file, names in step["entered"].items() if file.endswith("run/loop.py"))
    for name in ("files of a step", "functions of a step"):
        most = 1.01 * budgets[name]  # on a busy machine an update also enters what waits and tells of it
        assert step[name] <= most, f"{name}: {step[name]}, budget {budgets[name]} (.ci/measure.py --step lists them)"

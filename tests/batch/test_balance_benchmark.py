"""The balancer's benchmark runs, and on its instances no baseline beats the portfolio."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def last_object(*command: str) -> dict:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_balance():
    out = last_object(str(BENCHMARKS / "balance.py"), "--quick")
    assert out["benchmark"] == "balance" and out["instances"] == 27
    assert out["instances_worse_than_a_baseline"] == 0
    assert all(ratio >= 1.0 for ratio in out["ratios"].values())


@pytest.mark.slow
def test_the_controllers_share_is_measured():
    out = last_object(str(BENCHMARKS / "cluster.py"), "--only", "scale", "--rows", "4000")
    assert out["benchmark"] == "cluster" and out["ratios"]["scale.growth_8_to_1024"] > 0

"""Benchmarks that compute no model run, and find what they claim."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import proof

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def last_object(*command: str) -> dict:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_routing_over_replicas():
    """In the smallest simulation, of two replicas: fewer prompt tokens are computed, with no longer a queue."""
    out = last_object(str(BENCHMARKS / "routing.py"), "--quick")["ratios"]
    assert out["computed_over_round_robin"] < 0.6 and out["computed_over_sticky"] < 1.0
    assert out["longest_queue_over_round_robin"] < 1.05 and out["cached_share_router"] > 0.9


@proof
def test_the_controllers_share_is_measured():
    out = last_object(str(BENCHMARKS / "cluster.py"), "--only", "scale", "--rows", "4000")
    assert out["benchmark"] == "cluster" and out["ratios"]["scale.growth_8_to_1024"] > 0

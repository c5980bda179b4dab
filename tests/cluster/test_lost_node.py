"""A node of a joined cluster is lost, with a training process on it (`make proofs`, two minutes on a quiet machine)."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.strikes import CONFIG
from tests.conftest import proof
from tests.run.broken_off import assert_same
from tests.tiny_run import MODEL

ROOT = Path(__file__).resolve().parents[2]
RANKS = """
[cluster]
actors = 2
startup_timeout = 120.0
"""


@proof
@pytest.mark.timeout(1800)
def test_a_node_that_is_lost_with_a_training_process(tmp_path: Path) -> None:
    """The run goes on if what is left has room; else it ends, names what is missing, and goes on once that is there again."""
    config = CONFIG.format(reward=ROOT / "tests" / "e2e" / "short.json", model=MODEL)
    (tmp_path / "run.toml").write_text(config + RANKS)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))}
    command = [sys.executable, "-m", "tests.cluster.lost_node", str(tmp_path)]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    out = json.loads((tmp_path / "out.json").read_text())

    assert out["whole"]["code"] == 0, out["whole"]["said"]
    for name in ("fits", "wide"):
        [(pid, _)] = [(pid, line) for pid, line in out[name]["killed"].items() if line.startswith("ray::Host")]
        said = out[name]["said"].replace("\n", " ")
        assert re.search(rf"group 'actor'.* worker process gone: rank \d \(pid {pid} on ", said), said
        assert said.count("; restarting from the newest checkpoint (1 of 2)") == 1 and "Traceback" not in said, said
    assert out["fits"]["code"] == 0, out["fits"]["said"]
    assert_same(tmp_path / "fits", tmp_path / "whole")

    assert out["wide"]["code"] == 1, out["wide"]["said"]
    *_, pool, _, node, then = out["wide"]["said"].strip().splitlines()
    assert (
        "NoRoomLeftError: the remaining nodes have no room for the run: the pools do not fit the cluster" in out["wide"]["said"]
    )
    assert pool.split()[:3] == ["pool", "train", "2"] and node.startswith("node ")
    assert then == f"continue with: agentrl train --resume {tmp_path / 'wide'}"
    assert out["resumed"]["code"] == 0, out["resumed"]["said"]
    assert_same(tmp_path / "wide", tmp_path / "whole")

"""The quickstart on a card, in bfloat16, in one process: without Ray, vLLM and network."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.conftest import REHEARSAL

pytestmark = pytest.mark.gpus(1, timeout=540)
ROOT = Path(__file__).resolve().parents[2]
START = """
import sys
for name in ("ray", "vllm"):
    sys.modules[name] = None  # an import of it fails, as if it were not installed
from agentrl.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.timeout(540)
def test_the_quickstart_learns_in_bfloat16(tmp_path: Path) -> None:
    settings = ["cluster.backend=inline", "engine=embedded", "model.dtype=bfloat16", f"out={tmp_path}"]
    if REHEARSAL:
        settings += ["model.dtype=float32", "steps=2", "sft.gate=0.0", "sft.min_steps=10", "sft.max_steps=20", "eval.tasks=20"]
    command = [sys.executable, "-c", START, "train", "configs/quickstart.toml", *settings]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary = json.loads((tmp_path / "quickstart" / "summary.json").read_text())
    assert summary["status"] == "done"
    if not REHEARSAL:
        assert summary["success_after"] >= 0.9 > 0.5 > summary["success_before"]

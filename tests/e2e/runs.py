"""Small real runs through the real command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# The whole path of the quickstart, shrunk: a few warm-up steps, an open gate, a few updates.
SMALL = [
    f"env.reward={Path(__file__).with_name('short.json')}",
    "sft.max_steps=20",
    "sft.min_steps=20",
    "sft.gate_every=20",
    "sft.gate=0.0",
    "sft.gate_tasks=4",
    "steps=4",
    "rollout.groups=3",
    "rollout.group_size=4",
    "rollout.max_turns=4",
    "rollout.max_turn_tokens=24",
    "algorithm.minibatch=8",
    "eval.tasks=8",
    "eval.every=2",
    "checkpoint.every=2",
    "trajectories_every=1",
]


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "agentrl.cli.main", *args]


def start(out: Path, *args: str) -> subprocess.Popen[str]:
    """A training command in its own session, so that a test can end it with all its children."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command("train", *args),
        cwd=out,
        env=env,
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finish(process: subprocess.Popen[str], timeout: float = 240) -> str:
    """Wait for the end; kill the whole session where it does not come. Returns what was printed."""
    try:
        return process.communicate(timeout=timeout)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise


def train(out: Path, *args: str, code: int = 0) -> str:
    process = start(out, *args)
    text = finish(process)
    assert process.returncode == code, text
    return text


def small(out: Path, name: str, *more: str) -> list[str]:
    return [str(ROOT / "configs" / "quickstart.toml"), f"name={name}", f"out={out}", *SMALL, *more]


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def numbers(folder: Path) -> list[dict[str, Any]]:
    """Metrics rows without what a clock measured and what an engine counted since its start."""
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "engine/"))} for row in rows(folder)]


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[str], timeout: float = 120) -> None:
    """Until the run has recorded update `step`."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        assert process.poll() is None, finish(process)
        if (folder / "metrics.jsonl").exists():
            text = (folder / "metrics.jsonl").read_text()
            if any(f'"step": {n}, "phase": "train"' in text for n in range(step, step + 3)):
                return
        time.sleep(0.02)
    raise AssertionError(f"update {step} was not reached within {timeout} s")

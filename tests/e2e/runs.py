"""Small real runs through the real command line."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from tests.run.made_folders import unknown_keys

ROOT = Path(__file__).resolve().parents[2]
# The whole path of the quickstart, shrunk: one layer, a few warm-up steps, an open gate, a few updates.
SHORT = Path(__file__).with_name("short.json")
WARM, GROUPS, MEMBERS = 20, 3, 4
SMALL = f"""
    model.init.layers=1 steps=4 stop_at_success=false trajectories_every=1 algorithm.minibatch=8 eval.tasks=8 eval.every=2
    sft.max_steps={WARM} sft.min_steps={WARM} sft.gate_every={WARM} sft.gate=0.0 sft.gate_tasks=4 checkpoint.every=2
    rollout.groups={GROUPS} rollout.group_size={MEMBERS} rollout.max_turns=4 rollout.max_turn_tokens=24
""".split()
SMALL.append(f"env.reward={SHORT}")


def forked(target: Callable[..., None], *args: Any) -> ForkServerProcess:
    """A process, not begun, forked from a server that has the libraries imported: they are most of a short run's time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.e2e.warm"])
    return context.Process(target=target, args=args)


def exit_code(target: Callable[..., None], *args: Any) -> int | None:
    """How such a process ends; None if it does not within two minutes, and is killed."""
    process = forked(target, *args)
    process.start()
    process.join(120)
    code = process.exitcode
    process.kill()
    return code


class Command:
    """`agentrl ARGS`, `pytest ARGS` or, if `program` is a path, `python SCRIPT ARGS`, as subprocess.Popen, in a session that
    ends with all its children."""

    def __init__(self, cwd: Path, *args: str, typed: str = "", program: str = "agentrl") -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="agentrl-command-")
        self._typed, self._said = (str(Path(self._folder.name) / name) for name in ("typed", "said"))
        Path(self._typed).write_text(typed)
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = forked(_run, (program, *args), str(cwd), env, self._typed, self._said)
        self._process.start()
        self.pid = self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill_all(self) -> None:
        os.killpg(self.pid, signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> str:
        """What it printed, to the end. Raises TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("agentrl", timeout or 0.0)
        return Path(self._said).read_text()


def _run(words: tuple[str, ...], cwd: str, env: dict[str, str], typed: str, said: str) -> None:
    """The command, in the process that was forked for it, as a shell would have begun it."""
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.path.insert(0, cwd)
    sys.argv = [*words]
    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(typed, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    try:
        if words[0] == "pytest":
            sys.exit(pytest.main([*words[1:]]))
        if words[0] != "agentrl":
            sys.path.insert(0, str(Path(words[0]).parent))
            runpy.run_path(words[0], run_name="__main__")
            return
        from agentrl.cli.main import main

        sys.exit(main(words[1:]))
    finally:
        atexit._run_exitfuncs()


def start(out: Path, *args: str) -> Command:
    """A training command."""
    return Command(out, "train", *args)


def finish(process: Command, timeout: float = 240) -> str:
    """Wait for the end; kill the whole session if it does not come. Returns what was printed."""
    try:
        return process.communicate(timeout)
    except subprocess.TimeoutExpired:
        process.kill_all()
        raise


def run_script(script: Path, *words: str, timeout: float) -> None:
    """`python SCRIPT WORDS`; fails with what it printed."""
    command = Command(ROOT, *words, program=str(script))
    said = finish(command, timeout)
    assert command.returncode == 0, said


def train(out: Path, *args: str, code: int = 0) -> str:
    process = start(out, *args)
    text = finish(process)
    assert process.returncode == code, text
    return text


def small(out: Path, name: str, *more: str) -> list[str]:
    return [str(ROOT / "configs" / "quickstart.toml"), f"name={name}", f"out={out}", *SMALL, *more]


def rows(folder: Path) -> list[dict[str, Any]]:
    """Its metrics, whose names are all in the table."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {name for row in found for name in unknown_keys(row)} == set(), "agentrl/run/metrics.py"
    return found


def updates(folder: Path) -> list[dict[str, Any]]:
    return [row for row in rows(folder) if row["phase"] == "train"]


def numbers(folder: Path) -> list[dict[str, Any]]:
    """Metrics rows without what a clock measured and what an engine counted since its start."""
    return [
        {k: v for k, v in row.items() if not k.startswith(("time/", "engine/", "throughput/", "loop/"))} for row in rows(folder)
    ]


def wait_for_step(folder: Path, step: int, process: Command, timeout: float = 120) -> None:
    """Until the run has recorded update `step`."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        assert process.returncode is None, finish(process)
        if (folder / "metrics.jsonl").exists():
            text = (folder / "metrics.jsonl").read_text()
            if any(f'"step": {n}, "phase": "train"' in text for n in range(step, step + 3)):
                return
        time.sleep(0.02)
    raise AssertionError(f"update {step} was not reached within {timeout} s")

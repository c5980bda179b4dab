"""Whole runs with an agent, in `make proofs`: trained, resumed, with adapters, stale weights and workers."""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import proof
from tests.e2e.inside import HERE, config_of, episodes, execute, numbers, updates
from tests.e2e.runs import Command
from tests.waits import until

pytestmark = pytest.mark.timeout(300)
AGENT = "agent.python=tests.contrib.agents.parts:plain_agent"
COMMAND = f"agent.command={[sys.executable, '-S', str(Path(__file__).parent / 'agent_over_http.py')]}"


def learned(run: Path) -> list[dict[str, Any]]:
    """What a run's rows say of what it learned from, and not how long that took."""
    rows = [row for row in numbers(run) if row["phase"] == "train"]
    return [{key: value for key, value in row.items() if not key.startswith("loop/")} for row in rows]


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that has seen enough transcripts to make calls."""
    out = tmp_path_factory.mktemp("warm")
    sft = ["sft.max_steps=120", "sft.min_steps=120", "sft.gate_every=120", "sft.gate=0.0", "sft.gate_tasks=2"]
    return f"model.path={execute(config_of(out, 'warm', *sft), only_warm_start=True) / 'warm_start'}"


@proof
@pytest.mark.parametrize("agent", [AGENT, COMMAND], ids=["function", "command"])
def test_its_episodes_are_the_built_in_loop_s_and_a_resumed_run_is_the_unbroken_one(
    warm: str, agent: str, tmp_path: Path
) -> None:
    # One episode after the other: which requests share a step of the engine decides about the last digits.
    steps = [warm, "rollout.max_episodes=1", "steps=3", "rollout.groups=2", "checkpoint.every=1", "optim.schedule=constant"]
    unbroken = execute(config_of(tmp_path, "unbroken", agent, *steps))
    execute(config_of(tmp_path, "resumed", agent, *[text.replace("steps=3", "steps=1") for text in steps]))
    resumed = execute(config_of(tmp_path, "resumed", agent, *steps), resumed=True)
    rows = zip(learned(resumed), learned(unbroken), strict=True)
    assert [{key for key in one | other if one.get(key) != other.get(key)} for one, other in rows] == [set(), set(), set()]
    by_loop = episodes(execute(config_of(tmp_path, "loop", *[text.replace("steps=3", "steps=1") for text in steps])), 1)
    # What the built-in loop answers with an error, an agent sees as text: from there on they differ.
    pairs = zip(episodes(unbroken, 1), by_loop, strict=True)
    same = [(one, other) for one, other in pairs if all(call.arguments is not None for _, call, _ in other.calls())]
    assert len(same) > 2 and sum(1 for one, _ in same for _ in one.calls()) > 2
    for one, other in same:
        assert (one.ledgers, one.reward, one.stop) == (other.ledgers, other.reward, other.stop) and one.agent is not None


@proof
@pytest.mark.parametrize("more", [
    ["rollout.max_staleness=1"], ["model.lora={}", "optim.lr=1e-2"], ["rollout.temperature=0.7", "rollout.top_p=0.9"],
    ["rollout.workers=2", "cluster.backend=ray"],
], ids=str)  # fmt: skip
def test_beside_its_neighbours(warm: str, more: list[str], tmp_path: Path) -> None:
    run = execute(config_of(tmp_path, "agent", AGENT, warm, "steps=3", *more))
    rows = updates(run)
    assert len(rows) == 3 and all(row["unscored"] == 0 for row in rows) and any(row["grad_norm"] > 0 for row in rows)
    assert all(abs(row["ratio_mean"] - 1) < 0.02 for row in rows if "ratio_mean" in row)


@proof
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_no_agent_outlives_its_run(how: signal.Signals, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    code = f"import os, time; open({str(note)!r}, 'a').write(str(os.getpid()) + ' '); time.sleep(600)"
    sleeps = f"agent.command={[sys.executable, '-S', '-c', code]}"
    words = ["train", "configs/quickstart.toml", sleeps, f"out={tmp_path}", "name=run", "sft=false", "model.init.layers=1"]
    command = Command(Path(__file__).resolve().parents[3], *words, *HERE)
    try:
        while not note.exists() or not note.read_text().strip():
            time.sleep(0.05)
            assert command.returncode is None
        os.kill(command.pid, how)
        if how is signal.SIGINT:
            os.kill(command.pid, how)  # the second one ends it at once
        command.communicate(60)
        found = [int(pid) for pid in note.read_text().split()]
        assert until(lambda: not any(map(psutil.pid_exists, found)), 1.0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            command.kill_all()

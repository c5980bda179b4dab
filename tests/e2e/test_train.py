"""`agentrl train`, whole: what it leaves behind, kill and resume, Ctrl-C, a lost worker, ranks."""

from __future__ import annotations

import json
import shlex
import signal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

from agentrl.data.trajectory import Trajectory
from agentrl.run.reader import token_columns
from tests.conftest import proof
from tests.e2e.inside import episodes
from tests.e2e.runs import Command, finish, numbers, rows, small, start, train, updates, wait_for_step

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unbroken run. (That a cold process does the same, tests/test_packaging.py says.)"""
    out = tmp_path_factory.mktemp("runs")
    text = train(out, *small(out, "whole", "cluster.backend=inline"))
    assert "success on held-out tasks" in text and "ETA" in text and "tokens/s" in text
    return out / "whole"


def test_the_run_folder_is_complete(done: Path) -> None:
    summary = json.loads((done / "summary.json").read_text())
    assert summary["status"] == "done" and summary["engine"] == "embedded" and summary["steps"] == 4
    assert {"success_before", "success_after", "seconds", "tokens", "seed"} <= set(summary)
    assert (done / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert any((done / "tensorboard").iterdir())
    assert (done / "config.toml").is_file() and (done / "log.txt").is_file()
    assert sorted(p.name for p in (done / "checkpoints").iterdir()) == ["step_000002", "step_000004"]
    assert len(episodes(done, 1)) == 12
    for episode in episodes(done, 1):
        [ledger] = episode.ledgers
        assert len({len(column) for column in ledger.to_json().values()}) == 1 and 0 < ledger.sampled.sum() < len(ledger)
        assert episode.evidence is not None and episode.messages[0].role == "system"


def test_updates_have_gradients_and_the_trainer_agrees_with_the_engine_on_every_token(done: Path) -> None:
    found = updates(done)
    assert [row["step"] for row in found] == [1, 2, 3, 4]
    assert [row["minibatches"] for row in found] == [2] * 4  # 12 episodes, at most 8 a step, whatever they teach
    # If all members of every group score alike, an update has nothing to learn: its gradient is 0.
    assert found[0]["grad_norm"] > 0 and sum(row["grad_norm"] > 0 for row in found) >= 2
    for row in found:
        assert row["mismatch_max"] < 1e-4 and row["skipped_steps"] == row["skipped_optimizer_steps"] == 0


def trained(run: Path, step: int) -> list[tuple[Trajectory, Any, Any]]:
    """Of each episode of a step: advantages and ratios of its tokens, None if they were not computed."""
    tokens = (run / "tokens" / f"step_{step:06d}.jsonl").read_text().splitlines()
    members = zip(episodes(run, step), tokens, strict=True)
    return [(member, *(token_columns(json.loads(row), member.ledgers, 0) or ((), None))) for member, row in members]


def test_what_training_made_of_each_token_lies_beside_the_trajectories(done: Path) -> None:
    """Advantages by hand from the rewards; the engine's tokens are on-policy, so ratios of what teaches are 1 at first."""
    taught = 0
    for step in range(1, 5):
        found = trained(done, step)
        for member, advantages, ratio in found:
            rewards = np.array([other.reward for other, *_ in found if other.task == member.task])
            expected = (member.reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
            np.testing.assert_allclose(advantages, [expected] * member.sampled_tokens, rtol=1e-5, atol=1e-7)
            # Only in a step's first minibatch: the second is computed after an optimizer step.
            taught += ratio is not None and bool(np.abs(ratio - 1).max() < 1e-4)
    assert taught >= 4


@pytest.mark.parametrize("backend", ["inline", pytest.param("ray", marks=proof)])
def test_killed_and_resumed_equals_unbroken_to_the_last_digit(done: Path, tmp_path: Path, backend: str) -> None:
    process = start(tmp_path, *small(tmp_path, "whole", f"cluster.backend={backend}"))
    wait_for_step(tmp_path / "whole", 3, process)
    process.kill_all()
    process.communicate()
    # Without Ray, which changes no number: that costs less time, and what a Ray run left is read by another backend.
    text = train(tmp_path, "--resume", str(tmp_path / "whole"), "cluster.backend=inline")
    assert "resumed" in text
    assert numbers(tmp_path / "whole") == numbers(done)
    for file in ("step_000001", "step_000003", "step_000004"):
        assert (tmp_path / "whole" / "tokens" / f"{file}.jsonl").read_text() == (done / "tokens" / f"{file}.jsonl").read_text()


@proof
def test_inline_and_ray_give_the_same_numbers(done: Path, tmp_path: Path) -> None:
    """The first update on Ray, of two ranks, is held to the same run below."""
    train(tmp_path, *small(tmp_path, "whole", "cluster.backend=ray"))
    assert numbers(tmp_path / "whole") == numbers(done)


def test_ctrl_c_finishes_the_step_leaves_a_checkpoint_and_says_how_to_go_on(tmp_path: Path) -> None:
    process = start(
        tmp_path, *small(tmp_path, "cut", "steps=500", "checkpoint.every=400", "cluster.backend=inline", "rollout.colocate=true")
    )
    wait_for_step(tmp_path / "cut", 2, process)
    process.send_signal(signal.SIGINT)
    text = finish(process, timeout=60)
    assert process.returncode == 130, text
    assert f"agentrl train --resume {tmp_path / 'cut'}" in text
    last = updates(tmp_path / "cut")[-1]["step"]
    assert (tmp_path / "cut" / "checkpoints" / f"step_{last:06d}" / "manifest.json").is_file()
    assert json.loads((tmp_path / "cut" / "summary.json").read_text())["status"] == "interrupted"
    train(tmp_path, "--resume", str(tmp_path / "cut"), f"steps={last + 1}")
    assert json.loads((tmp_path / "cut" / "summary.json").read_text())["status"] == "done"


@pytest.mark.parametrize("kill", [False, pytest.param(True, marks=proof)])
def test_two_ranks_learn_the_same_and_when_one_is_killed_it_is_named_and_the_run_goes_on(
    done: Path, tmp_path: Path, kill: bool
) -> None:
    """The first update has one rank's numbers. The kill alone: test_ray_group.py and test_restarts.py."""
    pool = ["cluster.actors=2", "cluster.pools.train.per_node=2", "cluster.pools.train.cpus=0.5", "cluster.roles.actor=train"]
    steps = 6 if kill else 1
    config = [arg for arg in small(tmp_path, "lost", f"steps={steps}", *pool) if not arg.startswith(("sft.", "model.init."))]
    head, _, rest = Path(config[0]).read_text().partition("[model.init]")
    plain = tmp_path / "plain.toml"
    plain.write_text(head + "[rollout]" + rest.partition("[rollout]")[2])
    process = start(tmp_path, str(plain), *config[1:], f"model.path={done / 'warm_start'}")
    if kill:
        wait_for_step(tmp_path / "lost", 3, process)
        victims = [
            child
            for child in psutil.Process(process.pid).children(recursive=True)
            if " ".join(child.cmdline()).startswith("ray::Host")
        ]
        assert len(victims) == 2
        victims[0].kill()
    text = finish(process)
    assert process.returncode == 0, text
    assert ("restarting from the newest checkpoint (1 of 2)" in text and "actor" in text) == kill
    summary = json.loads((tmp_path / "lost" / "summary.json").read_text())
    assert summary["status"] == "done" and summary["restarts"] == kill
    assert [row["step"] for row in updates(tmp_path / "lost")] == [*range(1, steps + 1)]
    two, one = updates(tmp_path / "lost")[0], updates(done)[0]
    assert two["success"] == one["success"]
    for key in ("loss", "grad_norm", "entropy"):
        assert two[key] == pytest.approx(one[key], rel=1e-5, abs=1e-6)
    # What either rank made of its tokens is in one file, in the order of the trajectories.
    found = [[ratio for *_, ratio in trained(run, 1)] for run in (tmp_path / "lost", done)]
    assert [row is None for row in found[0]] == [row is None for row in found[1]] and any(row is not None for row in found[0])
    for mine, theirs in zip(*found, strict=True):
        if mine is not None and theirs is not None:
            np.testing.assert_allclose(np.log(mine), np.log(theirs), rtol=2e-3, atol=1e-5)


def test_evaluations_of_a_run_are_its_own_to_the_token_and_two_of_them_make_a_table(done: Path, tmp_path: Path) -> None:
    """Its parameters, reward, limits, temperature and seeds: what the run's evaluations of these updates played, again."""
    command = Command(tmp_path, "eval", "--run", str(done), "--checkpoint", "2", "--checkpoint", "last")
    said = finish(command)
    assert command.returncode == 0, said
    here = tmp_path / "evals" / "whole"
    own = {row["phase"]: row for row in rows(done) if row["phase"] in ("eval", "after")}
    for label, step, phase in (("step_2", 2, "eval"), ("final", 4, "after")):
        lines = (here / label / "trajectories.jsonl").read_text().splitlines()
        one, two = episodes(done, step, phase), [Trajectory.from_json(json.loads(line)) for line in lines]
        assert len(one) == 8 and [t.reward for t in one] == [t.reward for t in two]
        for ours, theirs in zip(one, two, strict=True):
            assert [led.token_ids.tolist() for led in ours.ledgers] == [led.token_ids.tolist() for led in theirs.ledgers]
        report = json.loads((here / label / "report.json").read_text())
        assert report["pass@1"]["mean"] == own[phase]["success"]
        assert report["reward"] == pytest.approx(own[phase]["reward"], rel=1e-12)
        assert report["run"] == {"folder": str(done), "step": step, "differs": []}
    table = json.loads((here / "comparison.json").read_text())["envs"]["key_value"]["rows"]
    assert [(row["model"], row["tasks"]) for row in table] == [("step_2", 8), ("final", 8)] and table[1]["paired"] == 8
    assert "different from the run" not in said and "minus" in said


def test_the_trained_model_is_evaluated_by_its_folder_and_a_second_call_runs_nothing(done: Path, tmp_path: Path) -> None:
    words = f"eval key_value --model {done / 'final'} -n 6 -k 2 --out {tmp_path / 'out'}"
    args = shlex.split(f"{words} rollout.max_turns=3 rollout.max_turn_tokens=16")
    first = Command(tmp_path, *args)
    said = finish(first)
    assert first.returncode == 0, said
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["episodes"] == 12 and {"pass@1", "pass@2", "pass^2", "stops", "tokens"} <= set(report)
    lines = (tmp_path / "out" / "trajectories.jsonl").read_text()
    again = Command(tmp_path, *args)
    said = finish(again)
    assert again.returncode == 0, said
    assert (tmp_path / "out" / "trajectories.jsonl").read_text() == lines
    assert f"agentrl eval --run {done}" in said  # its parameters are not the run's
    other = Command(tmp_path, *args, "seed=5")
    assert "evaluation of something else" in finish(other) and other.returncode == 2


def test_a_run_whose_groups_all_score_alike_goes_on_to_its_end_and_is_no_success(tmp_path: Path) -> None:
    """A model that knows nothing: no group has variance, no weight moves, and the run says the cause."""
    keys = "cluster.backend=inline env.reward=key_value_exact steps=2 eval.every=0 health.idle_updates=2"
    keys += " rollout.filter_zero_variance=true rollout.max_filtered=1.0"
    said = train(tmp_path, *small(tmp_path, "alike", *keys.split()), code=1)
    assert "THIS RUN FAILED: trained nothing. no token was trained in the 2 updates" in said and "trained model" not in said
    run = tmp_path / "alike"
    assert [(row["groups_filtered"], row["groups_zero_variance"], row["success"]) for row in updates(run)] == [(3, 3, 0)] * 2
    assert json.loads((run / "summary.json").read_text())["status"] == "trained nothing"
    before, after = (load_file(run / folder / "model.safetensors") for folder in ("warm_start", "final"))
    assert before.keys() == after.keys() and all((before[name] == after[name]).all() for name in before)

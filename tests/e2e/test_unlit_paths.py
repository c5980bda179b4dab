"""Runs next to the quickstart's path: stale weights, a critic, several ledgers, and kills at random."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from agentrl.data.trajectory import Trajectory
from agentrl.rollout import collector as collect
from agentrl.run.checks import size_checks as sizes
from agentrl.run.trackers import TRACKERS, TrackedRun, Tracker
from agentrl.trainer import train_engine as layout
from tests.conftest import PROOFS, proof
from tests.e2e.inside import config_of, episodes, execute, killed_at_random, ledger_of, numbers, updates
from tests.run.timelines import check_update

pytestmark = pytest.mark.timeout(240)
STALE = 2
COMPACT = 'rollout.context={name="compact", args={tokens=230, summary_tokens=8, keep=1, prompt="note"}}'


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that has seen enough transcripts to make calls."""
    out = tmp_path_factory.mktemp("warm")
    config = config_of(
        out, "warm", "sft.max_steps=80", "sft.min_steps=80", "sft.gate_every=80", "sft.gate=0.0", "sft.gate_tasks=2"
    )
    return f"model.path={execute(config, only_warm_start=True) / 'warm_start'}"


def versions(episode: Trajectory) -> np.ndarray:
    """The version of the weights that sampled each token of an episode, over all its ledgers."""
    parts = [np.asarray(ledger.versions)[np.asarray(ledger.sampled)] for ledger in episode.ledgers]
    return np.concatenate([np.zeros(0), *parts])


def test_no_trained_token_is_staler_than_the_bound_and_no_healthy_group_fails(warm: str, tmp_path: Path) -> None:
    run = execute(config_of(tmp_path, "stale", warm, f"rollout.max_staleness={STALE}", "steps=5", "weights.bucket_mib=0.02"))
    ages = [np.concatenate([step - 1 - versions(episode) for episode in episodes(run, step)]) for step in range(1, 6)]
    age = np.concatenate(ages)
    assert age.min() >= 0 and age.max() <= STALE
    assert age.max() >= 1, "nothing was stale: this run shows nothing"
    for step, row in enumerate(updates(run)):
        assert (row["staleness_mean"], row["staleness_max"]) == (pytest.approx(ages[step].mean()), ages[step].max())
    last = updates(run)[-1]
    states = dict.fromkeys(("failed", "filtered", "stale", "cancelled"), 0) | {"trained": 15}
    assert {state: last[f"groups/{state}"] for state in states} == states
    assert [(row["step"], row["unscored"]) for row in updates(run) if row["unscored"]] == []


def test_a_critic_learns_the_returns_and_the_actor_waits_for_it(warm: str, tmp_path: Path) -> None:
    critic = "critic={lr=3e-3,epochs=4,warmup=2,clip=10.0}"
    run = execute(config_of(tmp_path, "critic", warm, "steps=6", 'algorithm.advantage={name="gae"}', critic))
    rows = updates(run)
    assert ["grad_norm" in row for row in rows] == [False, False, True, True, True, True]
    # With gamma = lambda = 1 a return is the episode's reward: the loss of a critic that says 0 is half its square.
    rewards = [np.concatenate([np.full(len(versions(e)), e.reward) for e in episodes(run, step)]) for step in (1, 6)]
    zero = [float((reward**2).mean() / 2) for reward in rewards]
    losses = [row[next(key for key in row if key.startswith("critic/") and key.endswith("loss"))] for row in rows]
    assert losses[-1] < 0.25 * zero[1], (losses, zero)
    assert rows[2]["mismatch_max"] < 1e-4


def test_several_ledgers_train_each_sampled_token_once_and_as_the_engine_saw_it(warm: str, tmp_path: Path) -> None:
    run = execute(config_of(tmp_path, "forks", warm, COMPACT, "steps=4", "optim.lr=1e-4", "rollout.max_episode_tokens=1024"))
    forked = 0
    for row in updates(run):
        members = episodes(run, row["step"])
        forked += sum(len(member.ledgers) > 1 for member in members)
        groups: dict[int, list[Trajectory]] = {}
        for member in members:
            groups.setdefault(member.task.seed, []).append(member)
        teaching = [m for group in groups.values() if len({m.reward for m in group}) > 1 for m in group]
        counts = {sum(len(versions(m)) for m in some) for some in (members, teaching)}
        assert row["tokens_trained"] in counts, (row["tokens_trained"], counts)
        assert row["mismatch_max"] < 1e-4
    assert forked >= 10, "hardly an episode forked: this run shows nothing"


STEPS, KILLS = (12, 12) if PROOFS else (4, 2)
KILLED = ["checkpoint.every=1", "checkpoint.keep=2", f"steps={STEPS}", "eval.every=2"]


PLAIN, COLOCATED = "rollout.colocate=false", "rollout.colocate=true"


@proof
@pytest.mark.parametrize(("unbroken", "cut"), [(PLAIN, COLOCATED), (PLAIN, PLAIN), (COLOCATED, COLOCATED)])
def test_killed_at_random_a_synchronous_run_ends_with_the_numbers_of_the_unbroken(
    warm: str, tmp_path: Path, unbroken: str, cut: str
) -> None:
    whole = execute(config_of(tmp_path / "whole", "run", warm, unbroken, *KILLED))
    moments = killed_at_random(tmp_path / "cut", "run", [warm, cut, *KILLED], KILLS, STEPS)
    assert numbers(tmp_path / "cut" / "run") == numbers(whole), moments


@proof
def test_a_run_whose_roles_give_their_memory_back_has_the_numbers_of_one_whose_roles_keep_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Critic, reference, a colocated engine; then resumed from the last checkpoint but one, which was written from the host."""
    monkeypatch.setattr(layout, "check_on_host", lambda cfg: None)  # on a CPU nothing is gained, and nothing else differs
    monkeypatch.setattr(sizes, "check_on_host", lambda model: None)
    roles = ['algorithm.advantage={name="gae"}', "critic.lr=1e-3", "algorithm.kl.coef=0.1", "checkpoint.every=1", "steps=2"]

    kept = numbers(execute(config_of(tmp_path, "kept", *roles)))
    idle = [*roles, "model.offload=idle", "rollout.colocate=true", "profile.steps=[2]"]
    run = execute(config_of(tmp_path, "idle", *idle))
    assert numbers(run) == kept
    timeline = run / "profile" / "step_000002.json.gz"
    check_update(timeline)
    check_update(timeline, "critic")
    assert len(list(timeline.parent.glob("step_000002.critic.0.*.compute_values.json.gz"))) == 1
    timeline.unlink()
    [last] = run.glob("checkpoints/step_000002")
    shutil.rmtree(last)
    assert numbers(execute(config_of(tmp_path, "idle", *idle), resumed=True)) == kept
    assert timeline.is_file(), "the step that was done again has its timeline"


def test_no_number_depends_on_how_fast_the_machine_is(warm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines look at the clock every 5 ms, many times within a request, or not once."""
    found = []
    for seconds in (1000.0, 0.005):
        monkeypatch.setattr(collect, "LONGEST", seconds)
        found.append(numbers(execute(config_of(tmp_path / f"{seconds}", "run", warm, "steps=2"))))
    assert found[0] == found[1]


@proof
def test_killed_at_random_a_stale_run_trains_each_task_once(warm: str, tmp_path: Path) -> None:
    overrides = [warm, *KILLED, f"rollout.max_staleness={STALE}"]
    moments = killed_at_random(tmp_path, "run", overrides, KILLS, STEPS)
    run, ledger = tmp_path / "run", ledger_of(tmp_path / "run")
    assert [row["step"] for row in updates(run)] == list(range(1, STEPS + 1)), moments
    assert ledger["past"] == {"trained": 3 * STEPS}, moments
    # Every group ever numbered was trained, waits trained-to-be, or is to be run again.
    waiting = [group["index"] for group in ledger["complete"]] + ledger["again"]
    assert len(set(waiting)) == len(waiting) and ledger["next"] == 3 * STEPS + len(waiting), moments
    trained = [seed for step in range(1, STEPS + 1) for seed in {member.task.seed for member in episodes(run, step)}]
    assert len(trained) == len(set(trained)) == 3 * STEPS, moments
    ages = [step - 1 - versions(member) for step in range(1, STEPS + 1) for member in episodes(run, step)]
    assert max(age.max() for age in ages) <= STALE, moments


@TRACKERS.register("unlit_broken")
class Broken(Tracker):
    """Opens, and then fails at everything."""

    def __init__(self, run: TrackedRun) -> None:
        pass

    def row(self, phase: str, step: int, values: Any) -> None:
        raise ConnectionError("the network is gone")

    def close(self, status: str, summary: Any) -> None:
        raise ConnectionError("the network is gone")


EVENTS: list[dict[str, Any]] = []


@TRACKERS.register("unlit_events")
class Events(Tracker):
    def __init__(self, run: TrackedRun) -> None:
        EVENTS.append({"event": "start", "resumed": run.resumed})

    def row(self, phase: str, step: int, values: Any) -> None:
        EVENTS.append({"event": "row", "phase": phase, "step": step, "values": dict(values)})

    def rewind(self, step: int) -> None:
        EVENTS.append({"event": "rewind", "step": step})

    def episodes(self, phase: str, step: int, rows: Any) -> None:
        EVENTS.append({"event": "episodes", "phase": phase, "step": step, "episodes": list(rows)})

    def picture(self, name: str, path: Path) -> None:
        EVENTS.append({"event": "picture"})

    def close(self, status: str, summary: Any) -> None:
        EVENTS.append({"event": "end", "status": status, "summary": json.loads(json.dumps(summary))})


def test_a_resumed_run_counts_all_its_updates_and_its_trackers_are_told_which_come_again(
    warm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [warm, "checkpoint.every=1", "trackers=[{name='unlit_events'},{name='tensorboard'},{name='unlit_broken'}]"]
    run = execute(config_of(tmp_path, "run", *overrides, "steps=2"))
    shutil.rmtree(run / "checkpoints" / "step_000002")
    execute(config_of(tmp_path, "run", *overrides, "steps=3"), resumed=True)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 3 and summary["tokens"] == sum(row["tokens"] for row in updates(run))
    events, told = EVENTS, [(e["event"], e.get("phase"), e.get("step"), e.get("status")) for e in EVENTS]
    assert told == [
        ("start", None, None, None),
        ("row", "before", 0, None), ("episodes", "before", 0, None), ("row", "train", 1, None), ("row", "train", 2, None),
        ("row", "after", 2, None), ("episodes", "after", 2, None), ("picture", None, None, None), ("end", None, None, "done"),
        ("start", None, None, None), ("rewind", None, 1, None),
        ("row", "train", 2, None), ("row", "train", 3, None),
        ("row", "after", 3, None), ("episodes", "after", 3, None), ("picture", None, None, None), ("end", None, None, "done"),
    ]  # fmt: skip
    assert events[-1]["summary"] == summary and [e["resumed"] for e in events if e["event"] == "start"] == [False, True]
    rows = {(e["phase"], e["step"]): e["values"] for e in events if e["event"] == "row"}
    for row in updates(run):  # of those that were done twice, the last ones
        same = {key: value for key, value in row.items() if value is None or isinstance(value, (int, float))}
        assert same == {**rows["train", row["step"]], "step": row["step"]}
    assert len(events[2]["episodes"]) == 4 and {"task", "reward", "stop", "transcript"} <= events[2]["episodes"][0].keys()
    scalars = EventAccumulator(str(run / "tensorboard")).Reload().Scalars("train/reward")
    assert [event.step for event in scalars] == [1, 2, 3]
    said = capsys.readouterr().out
    assert said.count("tracker unlit_broken: it failed, and the run continues: ConnectionError: the network is gone") == 2

"""remax and multi_reward in a real session: rollouts, columns, advantages, an update. No process is started."""

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.config import Choice, TrainConfig
from agentrl.data.rows import Ragged
from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import Group, Task, Trajectory
from agentrl.rollout.group_ledger import GroupLedger
from agentrl.run.checks import check_config
from agentrl.run.display import Display
from agentrl.run.folder import RunFolder
from agentrl.run.loop import make_batch
from agentrl.run.session import open_session
from agentrl.trainer.estimator_inputs import with_advantages, with_estimator_inputs
from agentrl.utils.errors import ConfigError
from tests.run.own_spec import RIGHT, with_spec


# What an untrained model says holds some letters and not others, so rewards differ within a group.
def letters(id: str, these: str, **more: Any) -> dict[str, Any]:
    args = {"expect": list(these), "where": "all", "credit": "partial"}
    return {"use": "text.contains", "id": id, "args": args, **more}


EARLY, LATE = letters("early", "abcdefghij"), letters("late", "klmnopqrst", weight=0.5)
BOTH = {"op": "sum", "of": [EARLY, LATE]}
COMPARING = {"use": "group.rank", "args": {"of": EARLY}}


def config(out: Path, advantage: dict[str, Any], root: dict[str, Any] = BOTH) -> TrainConfig:
    return with_spec(
        out,
        root,
        None if root is COMPARING else RIGHT,
        out=str(out),
        model={"init": {"layers": 1, "hidden": 32, "mlp": 32, "heads": 2, "kv_heads": 1, "head_dim": 16}},
        rollout={"groups": 2, "group_size": 3, "max_turns": 2, "max_turn_tokens": 12},
        algorithm={"advantage": advantage, "minibatch": 8},
        health={"lint": False},  # these rewards have nothing to do with the task
    )


def one_update(cfg: TrainConfig) -> tuple[list[Group], Any, dict[str, float], GroupLedger]:
    """Groups, batch and metrics of a first update, and the ledger as a resume would find it before."""

    async def body() -> Any:
        check_config(cfg)
        with Display() as display:
            session = await open_session(cfg, RunFolder.create(cfg), display)
            try:
                await session.learner.open(str(session.folder.model))
                await session.publish()
                groups = await session.collector.collect()
                resumed = GroupLedger(2, 0)
                written = json.loads(json.dumps([group.to_json() for group in groups]))
                resumed.load_json(session.collector.ledger.to_json(), map(Group.from_json, written))
                batch = make_batch(groups, cfg.algorithm.advantage)
                return groups, batch, await session.learner.step(batch, 0), resumed
            finally:
                await session.close()

    found: tuple[list[Group], Any, dict[str, float], GroupLedger] = asyncio.run(body())
    return found


def test_remax_takes_the_greedy_reward_of_each_task_off(tmp_path: Path) -> None:
    cfg = config(tmp_path, {"name": "remax"})
    groups, batch, metrics, resumed = one_update(cfg)
    greedy = [group.baseline for group in groups]
    assert all(t is not None and t.reward is not None and t.sampled_tokens > 0 for t in greedy)
    assert all(len(group.trajectories) == 3 for group in groups)  # it is not a member
    assert len(batch) == 6 and metrics["grad_norm"] > 0
    expected = [t.reward - group.baseline.reward for group in groups for t in group.trajectories]  # type: ignore[union-attr, operator]
    assert len(set(expected)) > 2
    out, _ = with_advantages(Ragged.of(batch), cfg.algorithm, 0.0)
    for row, value in enumerate(expected):
        sampled = batch["sampled"][row]
        assert torch.allclose(out.row("advantages")[row][sampled], torch.tensor(value).float(), atol=1e-6)
    again = resumed.ready()
    assert again is not None and [g.baseline.to_json() for g in again] == [t.to_json() for t in greedy]  # type: ignore[union-attr]


def test_multi_reward_reads_the_terms_by_their_ids(tmp_path: Path) -> None:
    args = {"terms": ["early", "late"], "weights": [1.0, 0.25], "whitened": False}
    cfg = config(tmp_path, {"name": "multi_reward", "args": args})
    groups, batch, metrics, _ = one_update(cfg)
    members = [t for group in groups for t in group.trajectories]
    assert batch["terms"].tolist() == pytest.approx(np.array([[t.metrics["early"], t.metrics["late"]] for t in members]))
    assert metrics["grad_norm"] > 0 and all(group.baseline is None for group in groups)
    out, _ = with_advantages(Ragged.of(batch), cfg.algorithm, 0.0)
    terms = np.array([[t.metrics["early"], t.metrics["late"]] for t in members]).reshape(2, 3, 2)
    scaled = (terms - terms.mean(1, keepdims=True)) / (terms.std(1, ddof=1, keepdims=True) + 1e-6)
    expected = (scaled * np.array([1.0, 0.25])).sum(2).reshape(6)
    for row in range(6):
        assert torch.allclose(out.row("advantages")[row][batch["sampled"][row]], torch.tensor(expected[row]).float(), atol=1e-4)


def test_a_greedy_episode_that_fails_is_no_zero() -> None:
    def played(reward: float | None) -> Trajectory:
        ledger = TokenLedger()
        ledger.append_context([5], 0)
        ledger.append_sampled([6], [-1.0], [0], 0)
        return Trajectory("made-up", Task("t", 0), ledgers=[ledger], reward=reward)

    members = [played(1.0), played(0.0)]
    from agentrl.data.rows import collate

    batch = collate(members, groups=[0, 0])
    with pytest.raises(ConfigError, match="no scored greedy episode"):
        with_estimator_inputs(batch, [Group(0, 0, members, played(None))], Choice(name="remax"))
    members[1].metrics["a"] = None
    terms = with_estimator_inputs(batch, [Group(0, 0, members)], Choice(name="multi_reward", args={"terms": ["a"]}))["terms"]
    assert all(math.isnan(value) for value in terms.flatten().tolist())  # unknown, not 0


KL = {"algorithm": {"advantage": {"name": "multi_reward", "args": {"terms": ["early"]}}, "kl": {"coef": 0.1, "where": "reward"}}}


@pytest.mark.parametrize(("advantage", "more", "message"), [
    ({"name": "multi_reward", "args": {"terms": ["earl"]}}, {}, "did you mean 'early'"),
    ({"name": "multi_reward"}, {}, "argument 'terms' is required"),
    ({"name": "multi_reward", "args": {"terms": []}}, {}, r"terms = \[\]: .*at least 1 item"),
    ({"name": "multi_reward", "args": {"terms": ["early", "late"], "weights": [1.0]}}, {}, "1 weights? for 2 terms"),
    ({"name": "remax"}, {"reward_model": {"path": "x"}}, "reward_model"),
    ({"name": "remax"}, {"root": COMPARING}, "compares the members"),
    ({}, KL, 'use where = "loss"'),
])  # fmt: skip
def test_what_cannot_be_is_said_before_the_start(
    tmp_path: Path, advantage: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    cfg = config(tmp_path, advantage or {"name": "grpo"}, more.pop("root", BOTH))
    cfg = TrainConfig.model_validate({**cfg.model_dump(), **more})
    with pytest.raises(ConfigError, match=message):
        check_config(cfg)

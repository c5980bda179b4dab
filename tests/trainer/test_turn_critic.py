"""A training step with `gae_turns`: what the critic regresses on, what the actor gets, and that the critic comes to know it."""

import asyncio
from typing import Any

import pytest
import torch

from agentrl.config.schema import AlgorithmConfig, Choice
from agentrl.data.rows import Ragged, collate
from agentrl.trainer.estimator_inputs import with_advantages
from tests.trainer.learners import config_of, opened
from tests.trainer.train_batches import toy_critic, trajectories


def test_critic_and_actor_get_the_targets_and_advantages_of_turns(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a config: recomputed in a plain loop from the values that the learner itself had, at the second step, when they are no
    longer 0. Rewards of these episodes come at their end; gamma .5, lambda .8."""
    advantage = Choice(name="gae_turns", args={"gamma": 0.5, "lam": 0.8, "whitened": False})
    config = config_of(algorithm=AlgorithmConfig(advantage=advantage, minibatch=8), critic=toy_critic(lr=3e-3))
    learner = opened(tiny, config)
    seen: list[Ragged] = []

    def watched(given: Ragged, *args: Any) -> Any:
        out, metrics = with_advantages(given, *args)
        seen.append(out)
        return out, metrics

    monkeypatch.setattr("agentrl.trainer.learner.with_advantages", watched)
    for step in range(2):
        asyncio.run(learner.step(collate(trajectories(16, seed=step)), step))
    view = seen[1]
    sampled, turns, values = (view.tokens(name) for name in ("sampled", "turns", "values"))
    assert values[sampled].abs().max() > 1e-3
    several = 0
    for row in range(len(view)):
        span = range(int(view.offsets[row]), int(view.offsets[row + 1]))
        tokens = [t for t in span if sampled[t]]
        starts = [t for i, t in enumerate(tokens) if i == 0 or turns[t] != turns[tokens[i - 1]]]
        after = value_after = 0.0
        for number in range(len(starts) - 1, -1, -1):
            last = number == len(starts) - 1
            mine = [t for t in tokens if t >= starts[number] and (last or t < starts[number + 1])]
            value = float(values[starts[number]])
            reward = float(view.row("reward")[row]) if last else 0.0
            advantage = reward + 0.5 * value_after - value + 0.4 * after
            after, value_after = advantage, value
            assert [float(view.tokens("advantages")[t]) for t in mine] == pytest.approx([advantage] * len(mine), abs=1e-6)
            assert [float(view.tokens("returns")[t]) for t in mine] == pytest.approx([advantage + value] * len(mine), abs=1e-6)
        several += len(starts) > 1
    assert several >= 4


def test_the_critic_learns_what_turns_are_worth_and_warms_up_alone(tiny: str) -> None:
    algorithm = AlgorithmConfig(advantage=Choice(name="gae_turns"), minibatch=8)
    learner = opened(tiny, config_of(algorithm=algorithm, critic=toy_critic(lr=3e-3, warmup=2)))
    batch = collate(trajectories(16))
    rows = [asyncio.run(learner.step(batch, step)) for step in range(12)]
    assert ["grad_norm" in row for row in rows[:4]] == [False, False, True, True]
    assert rows[-1]["critic/loss"] < 0.6 * rows[0]["critic/loss"] and rows[-1]["critic/explained_variance"] > 0.2
    # gamma = lambda = 1: every token's target is its episode's reward, as with `gae`
    sampled = batch["sampled"].values()
    counts = torch.tensor([int(part.sum()) for part in batch["sampled"].unbind()]).double()
    mean = float((batch["reward"].double() ** 2 * counts).sum() / sampled.sum()) / 2
    assert rows[0]["critic/loss"] == pytest.approx(mean, rel=0.15)  # values begin at 0

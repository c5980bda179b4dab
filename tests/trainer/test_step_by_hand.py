"""What a step does, against a computation of its own: temperature, schedules of two roles, the KL. Single keys: test_keys.py."""

import asyncio

import pytest
import torch

from agentrl.config.schema import AlgorithmConfig, Choice, KlConfig
from agentrl.data.rows import collate
from agentrl.trainer.actor import Actor
from agentrl.trainer.learner import policy_updates
from agentrl.trainer.minibatch import kl_kind
from tests.trainer.learners import config_of, opened, start
from tests.trainer.train_batches import make_batch, toy_critic, toy_optim, train_batch, trajectories

# -- temperature -----------------------------------------------------------------------------------


def test_greedy_rollouts_are_trained_at_temperature_one(tiny: str) -> None:
    batch = make_batch(4)
    found = [train_batch(start(tiny), Actor.update, batch, AlgorithmConfig(), temperature=t) for t in (0.0, 1.0)]
    assert found[0] == found[1]
    assert torch.equal(*(start(tiny).run(Actor.compute_logprob, batch, t)["logprobs"].values() for t in (0.0, 1.0)))


# -- decay and schedules ---------------------------------------------------------------------------


def test_the_policys_schedule_ends_with_the_run_when_the_critic_warms_up_first(tiny: str) -> None:
    """5 steps, 3 of them of the critic alone: the policy's two updates are at the start and the middle of its schedule."""
    algorithm = AlgorithmConfig(advantage=Choice(name="gae"), minibatch=8)
    config = config_of(algorithm=algorithm, critic=toy_critic(warmup=3), optim=toy_optim(schedule="linear", lr=1e-3), steps=5)
    assert policy_updates(config.steps, config.critic) == 2 and policy_updates(7, None) == 7
    learner = opened(tiny, config)
    found = [asyncio.run(learner.step(collate(trajectories(8)), step)) for step in range(5)]
    assert [row.get("lr") for row in found] == [None, None, None, 1e-3, pytest.approx(5e-4)]
    assert [row["critic/lr"] for row in found] == pytest.approx([1e-3, 8e-4, 6e-4, 4e-4, 2e-4])


# -- the KL ----------------------------------------------------------------------------------------


def test_the_kind_of_a_kl_is_k1_in_the_reward_and_k3_in_the_loss_unless_it_is_said() -> None:
    assert kl_kind(KlConfig(where="reward")) == "k1" and kl_kind(KlConfig()) == "k3"
    assert kl_kind(KlConfig(where="reward", kind="k3")) == "k3" and kl_kind(KlConfig(kind="k2")) == "k2"


def test_the_coefficient_is_steered_by_episodes_and_only_where_the_policy_learns(tiny: str) -> None:
    """Horizon 20 and 8 episodes: 0.1 (1 - 0.2 x 8 / 20) = 0.092 after the first step in which the policy learned."""
    kl = KlConfig(coef=0.1, target=0.5, horizon=20, where="reward")
    algorithm = AlgorithmConfig(advantage=Choice(name="gae"), minibatch=8, proximal="recompute", kl=kl)
    learner = opened(tiny, config_of(algorithm=algorithm, critic=toy_critic(warmup=2)))
    found = []
    for step in range(3):
        asyncio.run(learner.step(collate(trajectories(8, seed=step)), step))
        found.append(learner.kl_coef)
    assert found == pytest.approx([0.1, 0.1, 0.092])
    two = opened(tiny, config_of(algorithm=algorithm.model_copy(update={"advantage": Choice(name="grpo")})))
    batch = collate(trajectories(8))
    batch.update({"member": batch["member"] // 2, "reward": (batch["member"] < 2).float()})  # 4 episodes, no tie
    asyncio.run(two.step(batch, 0))
    assert two.kl_coef == pytest.approx(0.1 * (1 - 0.2 * 4 / 20))


def test_a_penalty_in_the_reward_is_steered_by_what_was_taken_off(tiny: str) -> None:
    """The engine's policy lies 2 from the reference, the trainer's at it; target 1: the penalty, which is of the first, grows."""
    algorithm = AlgorithmConfig(
        advantage=Choice(name="reinforce_pp"), minibatch=8, kl=KlConfig(coef=0.1, target=1.0, horizon=20, where="reward")
    )
    learner = opened(tiny, config_of(algorithm=algorithm))
    batch = collate(trajectories(8))
    now = learner.actors.run(Actor.compute_logprob, batch)["logprobs"].values()
    batch["logprobs"].values().copy_((now + 2.0) * batch["sampled"].values())
    metrics = asyncio.run(learner.step(batch, 0))
    assert metrics["kl_reward"] == pytest.approx(2.0, abs=1e-4) and abs(metrics["kl_reference"]) < 0.1
    assert metrics["kl_coef"] == 0.1 and learner.kl_coef == pytest.approx(0.1 * (1 + 0.2 * 8 / 20))

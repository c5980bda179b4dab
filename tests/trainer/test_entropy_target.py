"""The coefficient of the entropy bonus under a target: which way it goes, how far, in which updates, and over which rows."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.config.schema import AlgorithmConfig, Choice
from agentrl.data.rows import collate
from agentrl.trainer.learner import adapted_entropy_coef, check_learner
from agentrl.utils.errors import ConfigError
from tests.publishing import flat
from tests.trainer.learners import config_of, opened, save
from tests.trainer.train_batches import toy_critic, trajectories


def section(**more: Any) -> AlgorithmConfig:
    return AlgorithmConfig(**{"minibatch": 8, "entropy_target": 100.0, "entropy_step": 0.25, "entropy_max": 0.6, **more})


def test_the_coefficient_rises_below_the_target_and_falls_above_it() -> None:
    cfg = section(entropy_target=0.05, entropy_bonus=0.1)
    seen, coef = [], 0.1
    for entropy in (0.01, 0.04, 0.049, 0.05, 0.2, 0.2):
        coef = adapted_entropy_coef(coef, entropy, cfg)
        seen.append(coef)
    assert seen == pytest.approx([0.35, 0.6, 0.6, 0.35, 0.1, 0.1])  # at most entropy_max, at least entropy_bonus
    assert adapted_entropy_coef(0.3, 0.0, AlgorithmConfig(entropy_bonus=0.3)) == 0.3


def test_an_update_has_the_coefficient_that_the_ones_before_it_led_to(tiny: str, tmp_path: Path) -> None:
    """Entropy (6 nats here) is below a target of 100: 0, .25, .5, .6. An update, from a checkpoint of the one before, is that of
    a run whose `entropy_bonus` is that number; and a resumed run goes on to the same digit."""
    learner, rows = opened(tiny, config_of(algorithm=section())), []
    batches = [collate(trajectories(8, seed=step)) for step in range(4)]
    for step, batch in enumerate(batches):
        (tmp_path / str(step)).mkdir()
        save(learner, tmp_path / str(step))
        rows.append(asyncio.run(learner.step(batch, step)))
    assert [row["entropy_coef"] for row in rows] == pytest.approx([0, 0.25, 0.5, 0.6])
    for bonus, same in ((0.5, True), (0.25, False)):
        plain = opened(tiny, config_of(algorithm=AlgorithmConfig(minibatch=8, entropy_bonus=bonus)))
        asyncio.run(plain.load(tmp_path / "2"))
        found = asyncio.run(plain.step(batches[2], 2))
        assert (found["loss"] == rows[2]["loss"]) == same and "entropy_coef" not in found
    resumed = opened(tiny, config_of(algorithm=section()))
    asyncio.run(resumed.load(tmp_path / "2"))
    assert [asyncio.run(resumed.step(batches[step], step)) for step in (2, 3)] == rows[2:]
    assert torch.equal(flat(resumed.actors), flat(learner.actors))


def test_above_the_target_nothing_is_added_and_no_weight_differs(tiny: str) -> None:
    """Entropy is 6: a target of 1 keeps the coefficient at 0. Only what is computed differs, so the weights agree to rounding."""
    plain, steered = (
        opened(tiny, config_of(algorithm=cfg)) for cfg in (AlgorithmConfig(minibatch=8), section(entropy_target=1.0))
    )
    for step in range(3):
        batch = collate(trajectories(8, seed=step))
        first, second = (asyncio.run(learner.step(batch, step)) for learner in (plain, steered))
        assert second["entropy_coef"] == 0 and first["entropy"] > 1
    assert torch.allclose(flat(plain.actors), flat(steered.actors), atol=1e-6)


def test_the_entropy_of_every_trained_token_is_measured_also_while_the_coefficient_is_0(tiny: str) -> None:
    """The second group's rewards are equal, so its rows teach nothing: without a target they are left out."""
    members = trajectories(8)
    for number, member in enumerate(members):
        member.reward = float(number) if number < 4 else 1.0
    batch = collate(members, groups=[0] * 4 + [1] * 4)
    sampled = int(batch["sampled"].values().sum())
    for cfg, all_of_them in ((AlgorithmConfig(minibatch=8), False), (section(entropy_target=1.0), True)):
        row = asyncio.run(opened(tiny, config_of(algorithm=cfg)).step(batch, 0))
        assert (row["tokens_computed"] == sampled) == all_of_them and row["tokens_trained"] == sampled


def test_an_update_in_which_the_policy_does_not_learn_leaves_the_coefficient(tiny: str) -> None:
    gae = section(advantage=Choice(name="gae"))
    learner = opened(tiny, config_of(algorithm=gae, critic=toy_critic(warmup=2)))
    rows = [asyncio.run(learner.step(collate(trajectories(8, seed=step)), step)) for step in range(4)]
    assert [row["entropy_coef"] for row in rows] == [0, 0, 0, 0.25]
    broken = collate(trajectories(8))
    broken["rewards"].values()[0] = torch.inf
    assert asyncio.run(learner.step(broken, 4))["skipped_steps"] == 1 and learner.entropy_coef == 0.5


def test_a_target_without_room_for_a_coefficient_is_refused() -> None:
    for bonus in (0.6, 0.7):
        with pytest.raises(ConfigError, match=rf"between algorithm.entropy_bonus = {bonus} and algorithm.entropy_max = 0.6"):
            check_learner(config_of(algorithm=section(entropy_bonus=bonus)))

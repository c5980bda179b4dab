"""What an estimator or a loss wants of its batch, and what the papers' oracles (tests/algorithm/oracles) do not reach."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from agentrl.trainer.algorithms import advantages, policy_loss
from agentrl.trainer.algorithms.base import AdvantageInput, Denominators, LossInput, aggregate
from agentrl.trainer.algorithms.losses import CORRECTIONS, kl_estimate
from agentrl.utils.errors import ConfigError


def batch_of(**more: Any) -> AdvantageInput:
    """A group of two members of one token each."""
    one = torch.ones(2, dtype=torch.bool)
    return AdvantageInput(
        torch.zeros(2), one, torch.arange(3), torch.zeros(2, dtype=torch.int64), torch.tensor([1.0, 0.0]), **more
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gae", '"gae" needs a critic'),
        ("gae_turns", 'gae_turns" needs a critic'),
        ("gigpo", "anchors"),
        ("multi_reward", "terms"),
        ("remax", "greedy"),
    ],
)
def test_missing_columns_are_named(name: str, message: str) -> None:
    plain = batch_of(turns=torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ConfigError, match=message):
        advantages(name, {"terms": ["right"]} if name == "multi_reward" else {})(plain)


def test_turns_that_are_missing_are_named() -> None:
    with pytest.raises(ConfigError, match="column `turns`"):
        advantages("gae_turns", {})(batch_of(values=torch.zeros(2)))


def test_terms_and_their_weights_are_as_many_as_the_columns() -> None:
    batch = batch_of(terms=torch.tensor([[1.0, 100.0], [0.0, 300.0]]))
    with pytest.raises(ConfigError, match="terms"):
        advantages("multi_reward", {})
    with pytest.raises(ConfigError, match="1 entries for 2 terms"):
        advantages("multi_reward", {"terms": ["right", "short"], "weights": [1.0]})(batch)
    with pytest.raises(ConfigError, match="a column for each"):
        advantages("multi_reward", {"terms": ["right"]})(batch)


def test_dr_grpo_divides_by_episodes_and_a_constant_length() -> None:
    """1 + 2 + 4 over 2 episodes and a length of 7; the 3 is not masked in."""
    loss, mask = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([True, True, False, True])
    share = aggregate(loss, mask, torch.tensor([0, 1, 4]), "seq_mean_token_sum_norm", Denominators(3, 2, 7.0))
    assert share.item() == pytest.approx(7 / (2 * 7.0))


def test_a_loss_that_picks_tokens_refuses_a_batch_without_them() -> None:
    zero = torch.zeros(1)
    with pytest.raises(ConfigError, match="picked"):
        policy_loss("kl_cov", {})(LossInput(zero, zero, zero, zero + 1, zero == 0, torch.tensor([0, 1])))


def test_row_corrections_add_up_before_they_are_bounded() -> None:
    prox, behave = torch.tensor([-40.0, 15.0, 15.0, 10.5]), torch.zeros(4)
    given = (prox, behave, torch.ones(4, dtype=torch.bool), torch.tensor([0, 4]))
    # sum d = 0.5, mean d = 0.125; token by token it would be 20.5 and 5.1: far over every cap
    assert CORRECTIONS.bind("truncated_sequence", {})(*given).tolist() == pytest.approx([math.exp(0.5)] * 4)
    assert CORRECTIONS.bind("masked_sequence", {})(*given).tolist() == pytest.approx([math.exp(0.5)] * 4)
    assert CORRECTIONS.bind("reject_sequence", {"low": 0.5, "high": 1.2})(*given).tolist() == [1.0] * 4


@pytest.mark.parametrize("d", [1e-2, 1e-3, 1e-4, -1e-4])
def test_k3_of_a_small_distance_has_its_digits_and_no_wrong_sign(d: float) -> None:
    found = kl_estimate("k3", torch.tensor([d]), torch.zeros(1)).item()
    assert found == pytest.approx(d * d / 2 - d**3 / 6, rel=1e-3) and found > 0


def test_clips_at_their_corners() -> None:
    """At a ratio of 1 the whole gradient passes even bounds of 0, once and not by halves; without advantage there is none."""
    new = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor([1.0, -1.0, 0.0, 2.0], dtype=torch.float64)
    mask = torch.ones(4, dtype=torch.bool)
    for name in ("ppo_clip", "gspo", "gmpo"):
        new.grad = None
        given = LossInput(new, torch.zeros(4).double(), torch.zeros(4).double(), advantage, mask, torch.arange(5))
        policy_loss(name, {"clip_low": 0.0, "clip_high": 0.0})(given).loss.sum().backward()
        assert new.grad is not None and new.grad.tolist() == [-1.0, 1.0, 0.0, -2.0], name

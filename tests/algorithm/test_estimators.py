"""What an estimator or a loss wants of its batch, and what the papers' oracles (tests/algorithm/oracles) do not reach."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from agentrl.trainer.algorithms import advantages, policy_loss
from agentrl.trainer.algorithms.base import AdvantageInput, Denominators, LossInput, aggregate
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

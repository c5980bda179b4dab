"""Far ratios and small distances: bounds that keep numbers finite must not bend what they do not have to."""

from __future__ import annotations

import math

import pytest
import torch

from agentrl.trainer.algorithms import policy_loss
from agentrl.trainer.algorithms.base import LossInput
from agentrl.trainer.algorithms.losses import CORRECTIONS, kl_estimate


def loss_of(name: str, delta: list[float], advantage: list[float], args: dict[str, float] | None = None) -> torch.Tensor:
    """The loss of one row of log-ratios."""
    new, old = torch.tensor(delta), torch.zeros(len(delta))
    mask = torch.ones(len(delta), dtype=torch.bool)
    given = LossInput(new, old, old, torch.tensor(advantage), mask, torch.tensor([0, len(delta)]))
    return policy_loss(name, args or {})(given).loss


def test_a_sequence_ratio_is_bounded_as_a_whole_not_token_by_token() -> None:
    # One token at e^-40: the mean of ten log-ratios is -4, not (-20) / 10 = -2.
    far = [-40.0] + [0.0] * 9
    assert loss_of("gspo", far, [1.0] * 10).tolist() == pytest.approx([-math.exp(-4)] * 10)
    assert loss_of("gmpo", far, [1.0] * 10).tolist() == pytest.approx([-math.exp(-4)] * 10)
    # beyond e^+-20 the mean itself is bounded
    assert loss_of("gspo", [90.0], [-1.0]).tolist() == pytest.approx([math.exp(20)], rel=1e-5)


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


def test_gmpo_clips_by_the_sign_of_the_advantage_it_multiplies() -> None:
    """Tokens of different advantages, of mean +0.5: the log-ratio of -1 is on the side that PPO leaves alone."""
    assert loss_of("gmpo", [-1.0, -1.0], [2.0, -1.0]).tolist() == pytest.approx([-0.5 * math.exp(-1)] * 2)
    # the same with mean -0.5: both are cut off at -0.4
    assert loss_of("gmpo", [-1.0, -1.0], [-2.0, 1.0]).tolist() == pytest.approx([0.5 * math.exp(-0.4)] * 2)


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

"""The numbers of docs/math.md, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from agentrl.trainer.algorithms import advantages, policy_loss
from agentrl.trainer.algorithms.base import AdvantageInput, Denominators, LossInput, aggregate
from agentrl.trainer.algorithms.losses import CORRECTIONS, kl_estimate, value_loss


def one_row(rewards, mask, values=None, turns=None):
    n = len(rewards)
    return AdvantageInput(
        token_rewards=torch.tensor(rewards, dtype=torch.float32),
        mask=torch.tensor(mask, dtype=torch.bool),
        offsets=torch.tensor([0, n]),
        group=torch.zeros(1, dtype=torch.int64),
        reward=torch.tensor([float(sum(rewards))]),
        values=None if values is None else torch.tensor(values),
        turns=torch.tensor(turns or [0] * n),
    )


def episodes_of_one_group(rewards, lengths=None, member=None, group=None):
    lengths = lengths or [1] * len(rewards)
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    total = int(offsets[-1])
    return AdvantageInput(
        token_rewards=torch.zeros(total),
        mask=torch.ones(total, dtype=torch.bool),
        offsets=offsets,
        group=torch.tensor(group or [0] * len(rewards)),
        reward=torch.tensor(rewards, dtype=torch.float32),
        values=None,
        turns=torch.zeros(total, dtype=torch.int64),
        member=None if member is None else torch.tensor(member),
    )


def close(found, expected, tolerance=1e-4):
    assert found.tolist() == pytest.approx(expected, abs=tolerance)


def test_gae_steps_from_sampled_token_to_sampled_token():
    batch = one_row([0, 0, 0, 1], [1, 1, 0, 1], values=[0.1, 0.2, 0.9, 0.3])
    raw = advantages("gae", {"whitened": False})(batch)
    close(raw.advantages, [0.9, 0.8, 0.0, 0.7])
    out = advantages("gae", {})(batch)
    close(out.advantages, [1.0, 0.0, 0.0, -1.0])
    close(out.returns, [1.0, 1.0, 0.0, 1.0])


def test_gae_with_discount_by_hand():
    # delta_1 = 1 - .4 = .6; delta_0 = 0 + .5 * .4 - .2 = 0; A_0 = 0 + .5 * .8 * .6 = .24
    batch = one_row([0, 0, 1], [1, 0, 1], values=[0.2, 9.0, 0.4])
    out = advantages("gae", {"gamma": 0.5, "lam": 0.8, "whitened": False})(batch)
    close(out.advantages, [0.24, 0.0, 0.6])
    close(out.returns, [0.44, 0.0, 1.0])


def test_a_reward_after_the_last_sampled_token_is_not_lost():
    late = one_row([0, 0, 0, 1], [1, 1, 0, 0], values=[0.1, 0.2, 0.0, 0.0])
    out = advantages("gae", {"whitened": False})(late)
    close(out.advantages, [0.9, 0.8, 0.0, 0.0])


def test_a_reward_between_turns_goes_to_the_turn_that_earned_it():
    out = advantages("reinforce_pp", {"gamma": 0.0})(one_row([5, 0, 1, 0], [0, 1, 0, 1]))
    close(out.returns, [0.0, 6.0, 0.0, 0.0])


def test_grpo_family():
    batch = episodes_of_one_group([1, 0, 0])
    close(advantages("grpo", {})(batch).advantages, [1.1547, -0.5773, -0.5773])
    close(advantages("dr_grpo", {})(batch).advantages, [0.6667, -0.3333, -0.3333])
    close(advantages("rloo", {})(batch).advantages, [1.0, -0.5, -0.5])


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_unscored_members_leave_before_grouping(name):
    scored = advantages(name, {})(episodes_of_one_group([1, 0, 0])).advantages.tolist()
    mixed = advantages(name, {})(episodes_of_one_group([1, math.nan, 0, 0])).advantages.tolist()
    assert mixed == pytest.approx([scored[0], 0.0, scored[1], scored[2]])


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_an_episode_with_two_ledgers_counts_once(name):
    scored = advantages(name, {})(episodes_of_one_group([1, 0, 0])).advantages.tolist()
    forked = advantages(name, {})(episodes_of_one_group([1, 1, 0, 0], member=[0, 0, 1, 2])).advantages
    assert forked.tolist() == pytest.approx([scored[0], scored[0], scored[1], scored[2]])


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_groups_do_not_touch_each_other(name):
    both = episodes_of_one_group([1, 5, 0, 5, 0, 8], group=[7, 3, 7, 3, 7, 3])
    found = advantages(name, {})(both).advantages
    close(found[[0, 2, 4]], advantages(name, {})(episodes_of_one_group([1, 0, 0])).advantages.tolist())


def test_a_group_of_one_has_no_baseline():
    for name in ("grpo", "dr_grpo", "rloo"):
        close(advantages(name, {})(episodes_of_one_group([3])).advantages, [0.0])


def test_reinforce_pp_returns():
    out = advantages("reinforce_pp", {"gamma": 0.5})(one_row([0, 0, 1], [1, 0, 1]))
    close(out.returns, [0.5, 0.0, 1.0])
    close(out.advantages, [-math.sqrt(0.5), 0.0, math.sqrt(0.5)])


def ratios(values, advantage, old=-1.0):
    logprobs = old + torch.log(torch.tensor(values))
    base = torch.full_like(logprobs, old)
    n = len(values)
    return LossInput(logprobs, base, base, torch.tensor(advantage), torch.ones(n, dtype=torch.bool), torch.tensor([0, n]))


def test_ppo_clip():
    batch = ratios([1.5, 0.5, 4.0, 0.5, 1.0], [1.0, 1.0, -1.0, -1.0, 2.0])
    out = policy_loss("ppo_clip", {"clip_high": 0.28})(batch)
    close(out.loss, [-1.28, -0.5, 3.0, 0.8, -2.0])
    assert out.loss.mean().item() == pytest.approx(0.0040, abs=1e-5)
    close(out.metrics["clip_fraction"], [1, 0, 0, 1, 0])
    close(out.metrics["dual_clip_fraction"], [0, 0, 1, 0, 0])
    close(policy_loss("ppo_clip", {"dual_clip": None})(batch).loss, [-1.2, -0.5, 4.0, 0.8, -2.0])
    close(policy_loss("ppo_clip", {"clip_low": 0.6})(batch).loss, [-1.2, -0.5, 3.0, 0.5, -2.0])


def test_log_ratio_is_clamped():
    far = LossInput(  # type: ignore[call-arg]
        *(torch.tensor([value]) for value in (0.0, -200.0, -200.0, 1.0)),
        torch.ones(1, dtype=torch.bool),
        torch.tensor([0, 1]),
    )
    out = policy_loss("ppo_clip", {})(far)
    assert out.metrics["ratio"].item() == pytest.approx(math.exp(20), rel=1e-5)


def test_decoupled_ppo_clips_on_the_proximal_policy_and_weighs_by_the_behaviour():
    t = torch.tensor
    batch = LossInput(t([math.log(0.3)]), t([math.log(0.2)]), t([math.log(0.1)]), t([1.0]), t([True]), t([0, 1]))
    # theta / prox = 1.5, cut at 1.2; prox / behave = 2
    close(policy_loss("decoupled_ppo", {})(batch).loss, [-2.4])
    close(policy_loss("decoupled_ppo", {"weight_cap": 1.5})(batch).loss, [-1.8])


def test_gspo_takes_the_geometric_mean():
    logprobs = torch.log(torch.tensor([4.0, 1.0, 0.9])).requires_grad_()
    old = torch.zeros(3)
    mask = torch.tensor([True, True, True])
    batch = LossInput(logprobs, old, old, torch.tensor([1.0, 1.0, -1.0]), mask, torch.tensor([0, 2, 3]))
    out = policy_loss("gspo", {"clip_low": 5.0, "clip_high": 5.0})(batch)
    close(out.loss, [-2.0, -2.0, 0.9])
    total = aggregate(out.loss, mask, batch.offsets, "seq_mean_token_mean", Denominators(3, 2))
    total.backward()
    # d/dl of -(1/2) exp((l0 + l1) / 2) = -(1/2) * 2 * 1/2; of (1/2) exp(l2)
    close(logprobs.grad, [-0.5, -0.5, 0.45])
    close(policy_loss("gspo", {"clip_low": 0.5, "clip_high": 0.5})(batch).loss, [-1.5, -1.5, 0.9])


def test_cispo_clips_the_weight_and_keeps_the_gradient():
    logprobs = torch.log(torch.tensor([3.0, 0.5])).requires_grad_()
    old = torch.zeros(2)
    mask = torch.ones(2, dtype=torch.bool)
    batch = LossInput(logprobs, old, old, torch.tensor([1.0, -2.0]), mask, torch.tensor([0, 2]))
    out = policy_loss("cispo", {"clip_high": 0.28})(batch)
    close(out.loss.detach(), [-1.28 * math.log(3), 1.0 * math.log(0.5)])
    out.loss.sum().backward()
    close(logprobs.grad, [-1.28, 1.0])


def test_reinforce():
    batch = ratios([1.0, 0.5], [1.0, -2.0])
    close(policy_loss("reinforce", {})(batch).loss, [1.0, 2.0 * (-1 + math.log(0.5))])


def test_aggregation():
    loss = torch.tensor([1.0, 2.0, 3.0, 4.0, 50.0, 60.0])
    mask = torch.tensor([1, 1, 1, 1, 0, 0], dtype=torch.bool)
    offsets = torch.tensor([0, 3, 6])
    counts = Denominators(tokens=4, episodes=2)
    found = [
        aggregate(loss, mask, offsets, mode, counts).item()
        for mode in ("token_mean", "seq_mean_token_sum", "seq_mean_token_mean")
    ]
    assert found == pytest.approx([2.5, 5.0, 3.0])


def test_kl():
    logprobs, reference = torch.tensor([-1.0]), torch.tensor([-1.5])
    found = [kl_estimate(name, logprobs, reference).item() for name in ("k1", "k2", "k3")]
    assert found == pytest.approx([0.5, 0.125, 0.1065], abs=1e-4)


@pytest.mark.parametrize(
    ("name", "straight", "gradient"),
    [
        ("k1", False, 1.0),
        ("k2", False, 0.5),
        ("k3", False, 1 - math.exp(-0.5)),
        ("k1", True, 0.5),
        ("k3", True, 0.5),
    ],
)
def test_kl_gradients(name, straight, gradient):
    logprobs = torch.tensor([-1.0], requires_grad=True)
    kl_estimate(name + "+" * straight, logprobs, torch.tensor([-1.5])).sum().backward()
    close(logprobs.grad, [gradient])


def test_value_loss():
    one = torch.ones(1)
    close(value_loss(one, torch.zeros(1), 2 * one, clip=0.5), [1.125])
    close(value_loss(one, torch.zeros(1), 2 * one, clip=None), [0.5])


def test_truncated_importance_sampling():
    prox, behave = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-3.0, -1.0, -0.5])
    weights = CORRECTIONS.bind("truncated", {"cap": 2.0})(prox, behave, torch.ones(3, dtype=torch.bool), torch.tensor([0, 3]))
    close(weights, [2.0, 1.0, math.exp(-0.5)])

"""The further estimators and losses: by hand, and against plain-Python versions written here."""

from __future__ import annotations

import inspect
import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.trainer.algorithms import advantages, policy_loss
from agentrl.trainer.algorithms.advantages import ADVANTAGES
from agentrl.trainer.algorithms.base import AdvantageInput, Denominators, LossInput, aggregate
from agentrl.trainer.algorithms.losses import CORRECTIONS, POLICY_LOSSES, Selection, selection_of
from agentrl.utils.errors import ConfigError


def batch_of(rewards, lengths, groups, **extra):
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    total = int(offsets[-1])
    token_rewards = torch.zeros(total)
    token_rewards[offsets[1:] - 1] = torch.tensor(rewards, dtype=torch.float32)
    return AdvantageInput(
        token_rewards=token_rewards,
        mask=torch.ones(total, dtype=torch.bool),
        offsets=offsets,
        group=torch.tensor(groups),
        reward=torch.tensor(rewards, dtype=torch.float32),
        turns=extra.pop("turns", torch.zeros(total, dtype=torch.int64)),
        **extra,
    )


def per_row(out, batch):
    return out.advantages[batch.offsets[:-1]].tolist()


GROUPS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.5, 1.0, 3.0]), st.integers(1, 5), st.integers(0, 3)),
    min_size=1,
    max_size=14,
)


def oracle(name, rewards, lengths, groups):
    """Advantages by row, in plain Python."""
    members = {g: [i for i, other in enumerate(groups) if other == g] for g in set(groups)}
    teaching = sum(len(m) for m in members.values() if len({rewards[i] for i in m}) > 1)
    found = []
    for i, g in enumerate(groups):
        mine = [rewards[j] for j in members[g]]
        mean = statistics.fmean(mine)
        std = statistics.stdev(mine) if len(mine) > 1 else 0.0
        if name == "grpo":
            found.append((rewards[i] - mean) / (std + 1e-6))
        elif name == "dr_grpo":
            found.append(rewards[i] - mean)
        elif name == "rloo":
            others = [rewards[j] for j in members[g] if j != i]
            found.append(rewards[i] - statistics.fmean(others) if others else 0.0)
        elif name == "opo":
            weights = [lengths[j] for j in members[g]]
            found.append(rewards[i] - sum(w * r for w, r in zip(weights, mine, strict=True)) / sum(weights))
        elif name == "gpg":
            found.append((rewards[i] - mean) * len(rewards) / max(teaching, 1))
        elif name == "pass_at_k":
            found.append(brute_pass_at_k(mine, members[g].index(i), k=2))
    return found


def brute_pass_at_k(rewards, index, k):
    k = min(k, len(rewards))
    subsets = list(itertools.combinations(range(len(rewards)), k))
    best = [max(rewards[j] for j in subset) for subset in subsets]
    inside = [b for b, subset in zip(best, subsets, strict=True) if index in subset]
    return (statistics.fmean(inside) - statistics.fmean(best)) / (statistics.pstdev(best) + 1e-6)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo", "gpg", "pass_at_k"])
@settings(max_examples=40, deadline=None)
@given(rows=GROUPS)
def test_against_plain_python(name, rows):
    rewards, lengths, groups = (list(column) for column in zip(*rows, strict=True))
    batch = batch_of(rewards, lengths, groups)
    args = {"k": 2} if name == "pass_at_k" else {}
    found = per_row(advantages(name, args)(batch), batch)
    assert found == pytest.approx(oracle(name, rewards, lengths, groups), abs=2e-3, rel=2e-4)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "gpg"])
@settings(max_examples=20, deadline=None)
@given(rows=GROUPS)
def test_advantages_of_a_group_sum_to_zero(name, rows):
    rewards, lengths, groups = (list(column) for column in zip(*rows, strict=True))
    batch = batch_of(rewards, lengths, groups)
    found = per_row(advantages(name, {})(batch), batch)
    for g in set(groups):
        assert sum(a for a, h in zip(found, groups, strict=True) if h == g) == pytest.approx(0, abs=1e-3)


def test_pass_at_k_is_the_closed_form_for_zero_one_rewards():
    n, k, right = 8, 4, 3
    mean = 1 - math.comb(n - right, k) / math.comb(n, k)
    std = math.sqrt(mean * (1 - mean))
    batch = batch_of([1.0] * right + [0.0] * (n - right), [1] * n, [0] * n)
    found = per_row(advantages("pass_at_k", {"k": k})(batch), batch)
    wrong = (1 - mean - math.comb(n - right - 1, k - 1) / math.comb(n - 1, k - 1)) / std
    assert found == pytest.approx([(1 - mean) / std] * right + [wrong] * (n - right), abs=1e-4)


def test_reinforce_pp_baseline():
    batch = batch_of([1, 0, 0], [1, 2, 1], [0, 0, 0])
    out = advantages("reinforce_pp_baseline", {})(batch).advantages
    raw = torch.tensor([2 / 3, -1 / 3, -1 / 3, -1 / 3])
    assert torch.allclose(out, (raw - raw.mean()) / raw.std(), atol=1e-5)


def test_remax_and_its_missing_column():
    batch = batch_of([1, 0], [1, 2], [0, 1], baseline=torch.tensor([0.5, 0.25]))
    assert per_row(advantages("remax", {})(batch), batch) == [0.5, -0.25]
    with pytest.raises(ConfigError, match="greedy"):
        advantages("remax", {})(batch_of([1], [1], [0]))


def test_missing_columns_are_named():
    plain = batch_of([1, 0], [1, 1], [0, 0])
    for name, word in (("gae", "critic"), ("gae_turns", "critic"), ("gigpo", "anchors"), ("multi_reward", "terms")):
        with pytest.raises(ConfigError, match=word):
            advantages(name, {"terms": ["right"]} if name == "multi_reward" else {})(plain)
    with pytest.raises(ConfigError, match="terms"):
        advantages("multi_reward", {})


def two_turn_batch():
    """Two members of one group, two turns each of two tokens: context, s, s, context, s, s."""
    mask = torch.tensor([0, 1, 1, 0, 1, 1] * 2, dtype=torch.bool)
    rewards = torch.tensor([0, 0, 1, 0, 0, 2, 0, 0, 0, 0, 0, 4], dtype=torch.float32)
    return AdvantageInput(
        token_rewards=rewards,
        mask=mask,
        offsets=torch.tensor([0, 6, 12]),
        group=torch.tensor([0, 0]),
        reward=torch.tensor([3.0, 4.0]),
        turns=torch.tensor([0, 0, 0, 1, 1, 1] * 2),
        anchors=torch.tensor([5, 5, 5, 6, 6, 6, 5, 5, 5, 7, 7, 7]),
    )


def test_turn_returns():
    out = advantages("turn_returns", {"gamma": 0.5, "divide": False})(two_turn_batch())
    # returns: member 0: 1 + .5 * 2 = 2, 2; member 1: 0 + .5 * 4 = 2, 4
    assert out.returns.tolist() == [0, 2, 2, 0, 2, 2, 0, 2, 2, 0, 4, 4]
    assert out.advantages.tolist() == [0, 0, 0, 0, -1, -1, 0, 0, 0, 0, 1, 1]
    divided = advantages("turn_returns", {"gamma": 0.5})(two_turn_batch()).advantages
    assert divided[4].item() == pytest.approx(-1 / math.sqrt(2), abs=1e-4)


def test_gigpo():
    out = advantages("gigpo", {"gamma": 1.0, "weight": 2.0, "divide": False})(two_turn_batch())
    # episodes: -.5, .5; turn 0 shares its state: returns 3 and 4 -> -.5, .5; turn 1 is alone: 0
    assert out.advantages.tolist() == [0, -1.5, -1.5, 0, -0.5, -0.5, 0, 1.5, 1.5, 0, 0.5, 0.5]


def test_multi_reward():
    terms = torch.tensor([[1.0, 100.0], [0.0, 300.0], [math.nan, 200.0]])
    batch = batch_of([0, 0, 0], [1, 1, 1], [0, 0, 0], terms=terms)
    args = {"terms": ["right", "short"], "whitened": False}
    found = per_row(advantages("multi_reward", args)(batch), batch)
    first = [math.sqrt(0.5), -math.sqrt(0.5), 0.0]  # the unknown term is in no statistic, and the std is sqrt(.5)
    assert found == pytest.approx([first[0] - 1, first[1] + 1, 0.0], abs=1e-3)
    heavy = per_row(advantages("multi_reward", {**args, "weights": [2.0, 0.0]})(batch), batch)
    assert heavy == pytest.approx([2 * value for value in first], abs=1e-3)
    with pytest.raises(ConfigError, match="1 entries for 2 terms"):
        advantages("multi_reward", {**args, "weights": [1.0]})(batch)
    with pytest.raises(ConfigError, match="a column for each"):
        advantages("multi_reward", {"terms": ["right"]})(batch)


def loss_input(new, old, advantage, offsets, behave=None, picked=None):
    logprobs = torch.tensor(new, dtype=torch.float32, requires_grad=True)
    n = len(new)
    return LossInput(
        logprobs,
        torch.tensor(old, dtype=torch.float32),
        torch.tensor(old if behave is None else behave, dtype=torch.float32),
        torch.tensor(advantage, dtype=torch.float32),
        torch.ones(n, dtype=torch.bool),
        torch.tensor(offsets),
        None if picked is None else torch.tensor(picked),
    )


def test_gmpo_by_hand():
    batch = loss_input([1.0, -0.2, -1.0], [0.0, 0.0, 0.0], [2.0, 2.0, -1.0], [0, 2, 3])
    out = policy_loss("gmpo", {})(batch)
    # row 0, A > 0: min(1, .4) and min(-.2, -.2) -> mean .1; row 1, A < 0: max(-1, -.4) = -.4
    assert out.loss.tolist() == pytest.approx([-2 * math.exp(0.1)] * 2 + [math.exp(-0.4)], abs=1e-5)
    aggregate(out.loss, batch.mask, batch.offsets, "seq_mean_token_mean", Denominators(3, 2)).backward()
    # only the unclipped token moves: d/dl of -(1/2) * 2 exp((.4 + l) / 2)
    assert batch.logprobs.grad.tolist() == pytest.approx([0, -0.5 * math.exp(0.1), 0], abs=1e-5)


def test_sapo_by_hand():
    batch = loss_input([0.0, math.log(2.0)], [0.0, 0.0], [1.0, -1.0], [0, 2])
    out = policy_loss("sapo", {"tau_positive": 2.0, "tau_negative": 1.0})(batch)
    sigmoid = 1 / (1 + math.exp(-1.0))
    assert out.loss.tolist() == pytest.approx([-1.0, 4 * sigmoid], abs=1e-5)
    out.loss[0].backward()
    assert batch.logprobs.grad.tolist() == pytest.approx([-1.0, 0.0], abs=1e-6)


def test_dr_grpo_divides_by_episodes_and_a_constant_length():
    """1 + 2 + 4 over 2 episodes and a length of 7; the 3 is not masked in."""
    loss, mask = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([True, True, False, True])
    share = aggregate(loss, mask, torch.tensor([0, 1, 4]), "seq_mean_token_sum_norm", Denominators(3, 2, 7.0))
    assert share.item() == pytest.approx(7 / (2 * 7.0))


def test_clip_cov_and_kl_cov():
    batch = loss_input([0.1, 0.1], [0.0, 0.0], [1.0, 1.0], [0, 2], picked=[True, False])
    r = math.exp(0.1)
    assert policy_loss("clip_cov", {})(batch).loss.tolist() == pytest.approx([0.0, -r])
    assert policy_loss("kl_cov", {"coefficient": 3.0})(batch).loss.tolist() == pytest.approx([-r + 0.3, -r])
    assert selection_of("ppo_clip", {}) is None
    assert selection_of("kl_cov", {"share": 0.5}) == Selection(0.5)
    assert selection_of("clip_cov", {}) == Selection(2e-4, 1.0, 5.0) and selection_of("kl_cov", {}) == Selection(
        2e-3
    )  # the paper's
    with pytest.raises(ConfigError, match="picked"):
        policy_loss("kl_cov", {})(loss_input([0.0], [0.0], [1.0], [0, 1]))


def test_corrections_by_hand():
    log = math.log
    prox = torch.tensor([log(3.0), log(0.25), 0.0, log(1.2)])
    behave = torch.zeros(4)
    mask = torch.ones(4, dtype=torch.bool)
    offsets = torch.tensor([0, 2, 4])

    def weights(name, **args):
        return pytest.approx(CORRECTIONS.bind(name, args)(prox, behave, mask, offsets).tolist(), abs=1e-5)

    assert weights("truncated", cap=2.0) == [2.0, 0.25, 1.0, 1.2]
    assert weights("masked", cap=2.0) == [0.0, 0.25, 1.0, 1.2]
    assert weights("truncated_sequence", cap=1.1) == [0.75, 0.75, 1.1, 1.1]
    assert weights("masked_sequence", cap=1.1) == [0.75, 0.75, 0.0, 0.0]
    assert weights("icepop", low=0.5, high=5.0) == [3.0, 0.0, 1.0, 1.2]
    # geometric means: sqrt(.75) = .866 and sqrt(1.2) = 1.095
    assert weights("reject_sequence", low=0.9, high=1.1) == [0.0, 0.0, 1.0, 1.0]


SWITCHES = {
    "gae": [("gamma", 0.5), ("lam", 0.5), ("whitened", False)],
    "gae_turns": [("gamma", 0.5), ("lam", 0.5), ("whitened", False)],
    "gigpo": [("gamma", 0.5), ("weight", 0.5), ("divide", False)],
    "gpg": [("f_norm", 2.0)],
    "grpo": [("eps", 1.0)],
    "max_variance": [("k", 2)],
    "multi_reward": [("weights", [1.0, 3.0]), ("eps", 1.0), ("whitened", False)],
    "pass_at_k": [("k", 1), ("eps", 1.0)],
    "reinforce_pp": [("gamma", 0.5)],
    "tree": [("local", 1.0), ("share", 1.0), ("eps", 1.0)],
    "turn_returns": [("gamma", 0.5), ("divide", False)],
}


@pytest.mark.parametrize(("name", "key", "value"), [(n, k, v) for n, s in SWITCHES.items() for k, v in s])
def test_every_argument_of_an_estimator_changes_something(name, key, value):
    torch.manual_seed(0)
    batch = batch_of(
        [1.0, 0.0, 0.5, 0.0, 2.0],
        [4, 4, 5, 3, 4],
        [0, 0, 0, 1, 1],
        turns=torch.tensor([0, 0, 1, 1] * 2 + [0, 0, 1, 1, 1] + [0, 1, 1] + [0, 0, 1, 1]),
        values=torch.rand(20),
        terms=torch.rand(5, 2),
        anchors=torch.tensor([0, 0, 1, 1] * 2 + [0, 0, 1, 1, 1] + [0, 1, 1] + [0, 0, 1, 1]),
        baseline=torch.zeros(5),
        member=torch.tensor([0, 1, 2, 0, 1]),
        parent=torch.tensor([-1, 2, -1, -1, -1]),
        branch_turn=torch.tensor([0, 1, 0, 0, 0]),
    )
    batch.token_rewards[1] = 0.25
    base = {"pass_at_k": {"k": 2}, "multi_reward": {"terms": ["right", "short"]}}.get(name, {})
    plain = advantages(name, base)(batch).advantages
    assert not torch.allclose(plain, advantages(name, {**base, key: value})(batch).advantages, atol=1e-6)


LOSS_SWITCHES = {
    "cispo": [("clip_low", 0.1), ("clip_high", 0.05)],
    "clip_cov": [("clip_low", 0.1), ("clip_high", 0.05), ("dual_clip", 1.1)],
    "decoupled_ppo": [("clip_low", 0.1), ("clip_high", 0.05), ("dual_clip", 1.1), ("weight_cap", 1.05)],
    "dppo": [("divergence", "kl"), ("delta", 0.01)],
    "gmpo": [("clip_low", 0.01), ("clip_high", 0.01)],
    "gspo": [("clip_low", 0.1), ("clip_high", 0.1)],
    "kl_cov": [("coefficient", 2.0)],
    "ppo_clip": [("clip_low", 0.1), ("clip_high", 0.05), ("dual_clip", 1.1)],
    "sapo": [("tau_positive", 2.0), ("tau_negative", 2.0)],
}


@pytest.mark.parametrize(("name", "key", "value"), [(n, k, v) for n, s in LOSS_SWITCHES.items() for k, v in s])
def test_every_argument_of_a_loss_changes_something(name, key, value):
    generator = torch.Generator().manual_seed(1)
    old = -1 - torch.rand(40, generator=generator)
    new = old + 0.6 * torch.randn(40, generator=generator)
    behave = old + 0.3 * torch.randn(40, generator=generator)
    advantage = torch.randn(40, generator=generator)
    picked = torch.rand(40, generator=generator) < 0.3
    batch = LossInput(new, old, behave, advantage, torch.ones(40, dtype=torch.bool), torch.tensor([0, 17, 40]), picked)
    assert not torch.allclose(policy_loss(name, {})(batch).loss, policy_loss(name, {key: value})(batch).loss, atol=1e-6)


def test_the_tables_above_name_every_algorithm_with_arguments():
    for table, registry in ((SWITCHES, ADVANTAGES), (LOSS_SWITCHES, POLICY_LOSSES)):
        assert set(table) == {name for name, function in registry.items() if inspect.getfullargspec(function).kwonlyargs}

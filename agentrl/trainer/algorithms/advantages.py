"""Advantage estimators: pure functions from the rewards of an update to one advantage per sampled token.

Each registration declares the inputs that its estimator needs in addition to rewards."""

from __future__ import annotations

from collections.abc import Callable
from math import comb
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from agentrl.data.rows import discounted_sums, following, on_mask, spread, whiten_masked, zscores
from agentrl.trainer.algorithms.base import (
    EPS,
    AdvantageInput,
    AdvantageOutput,
    Episodes,
    deviation,
    episode_tokens,
    group_total,
    normalize_by_key,
    row_advantages,
    standardize_in_groups,
    turns_of,
)
from agentrl.utils.errors import ConfigError
from agentrl.utils.registry import Registry

ADVANTAGES: Registry[Callable[..., AdvantageOutput]] = Registry(
    "algorithm.advantage",
    "ADVANTAGES",
    "agentrl.trainer.algorithms.advantages",
    given=1,
    needs={
        "group": "at least two episodes per task",
        "group_over_k": "more than k episodes per task (argument k)",
        "values": "a critic's value of each token",
        "baseline": "the reward of a greedy episode per task",
        "terms": "single values of the reward spec's nodes (argument terms)",
        "anchors": "hashes of the states in which turns were taken",
    },
    traits={"branches": "supports groups whose members share first turns (rollout.branch)"},
)


# Group baselines


def of_episodes(batch: AdvantageInput, rule: Callable[[Episodes], Tensor]) -> AdvantageOutput:
    """Spread a rule's value per episode over the episode's sampled tokens."""
    return AdvantageOutput(on_mask(row_advantages(batch, rule), batch.mask, batch.offsets))


def of_groups(batch: AdvantageInput, rule: Callable[[Tensor], Tensor]) -> AdvantageOutput:
    """Apply a rule to the rewards of each group, then spread values like `of_episodes`."""

    def by_group(e: Episodes) -> Tensor:
        out = torch.zeros_like(e.reward)
        for group in range(e.groups):
            members = (e.group == group).nonzero().squeeze(1)
            out[members] = rule(e.reward[members])
        return out

    return of_episodes(batch, by_group)


@ADVANTAGES.register("grpo", needs={"group"})
def grpo(batch: AdvantageInput, *, eps: Annotated[float, Field(ge=0)] = 1e-6) -> AdvantageOutput:
    """(R - mean) / (std + eps) on every sampled token; 0 in a group of one, or if all rewards are equal.

    std is unbiased and eps 1e-6; the paper specifies neither.
    """
    return of_episodes(batch, lambda e: standardize_in_groups(e.reward, e.group, e.groups, eps))


@ADVANTAGES.register("dr_grpo", needs={"group"})
def dr_grpo(batch: AdvantageInput) -> AdvantageOutput:
    """R - mean on every sampled token. The paper's other change, token sums without a length, is `algorithm.aggregate`."""
    return of_episodes(batch, Episodes.center)


@ADVANTAGES.register("rloo", needs={"group"})
def rloo(batch: AdvantageInput) -> AdvantageOutput:
    """R - mean of the other rewards = n / (n - 1) (R - mean) on every sampled token; 0 in a group of one."""
    return of_episodes(batch, lambda e: e.center() * e.size() / (e.size() - 1).clamp(min=1))


@ADVANTAGES.register("opo", needs={"group"})
def opo(batch: AdvantageInput) -> AdvantageOutput:
    """R - sum(l R) / sum(l) over the group, l = sampled tokens of an episode over all its ledgers.

    As in the paper's simplification, the length approximates the squared norm of the score function.
    """
    return of_episodes(batch, lambda e: e.center(weights=e.tokens))


@ADVANTAGES.register("gpg", needs={"group"})
def gpg(batch: AdvantageInput, *, f_norm: Annotated[float, Field(gt=0)] = 1.0) -> AdvantageOutput:
    """alpha (R - mean) / f_norm, alpha = B / (B - M): of B scored episodes, M are in groups with equal rewards.

    alpha compensates for the M episodes, which the denominators of the loss must count. The paper's F_norm is 1 or the group's
    standard deviation; here it is a constant (for the standard deviation see `grpo`). The paper's threshold for resampling
    groups is `rollout.filter_zero_variance`.
    """

    def rule(e: Episodes) -> Tensor:
        teaching = max(int((deviation(e.reward, e.group, e.groups) > 0).sum()), 1)  # B - M
        return e.center() * len(e.reward) / teaching / f_norm

    return of_episodes(batch, rule)


@ADVANTAGES.register("maxrl", needs={"group"})
def maxrl(batch: AdvantageInput) -> AdvantageOutput:
    """(R - mean) / mean of abs(R) on every sampled token; 0 if all rewards are equal.

    For rewards of 0 and 1 the expected update is that of log p(success), expanded up to the order of the group size."""

    def rule(e: Episodes) -> Tensor:
        size = group_total(e.reward.abs(), e.group, e.groups)[e.group] / e.size()
        return e.center() / torch.where(size > 0, size, 1.0)

    return of_episodes(batch, rule)


@ADVANTAGES.register("max_variance", needs={"group", "group_over_k"})
def max_variance(batch: AdvantageInput, *, k: Annotated[int, Field(ge=2)] = 4) -> AdvantageOutput:
    """n / k (R - mean) / (std + 1e-6) over the k of n episodes with the largest reward variance, 0 for the others.

    Those are the i smallest and k - i largest rewards, for the best i. The factor n / k compensates for the others, which the
    denominators of the loss count. In a group of at most k episodes the result is that of `grpo`.
    """

    def rule(rewards: Tensor) -> Tensor:
        out, order, n = torch.zeros_like(rewards), torch.sort(rewards, stable=True).indices, len(rewards)
        least = min(k, n)
        ends = torch.stack([torch.cat([order[:i], order[n - least + i :]]) for i in range(least + 1)])
        variance = rewards[ends].double().var(1, correction=0)
        kept = ends[int((variance >= (1 - 1e-9) * variance.max()).nonzero()[0])]  # ties: the first, not decided by rounding
        out[kept] = n / least * standardize_in_groups(rewards[kept], torch.zeros_like(kept), 1, 1e-6)
        return out

    return of_groups(batch, rule)


@ADVANTAGES.register("pass_at_k", needs={"group", "group_over_k"})
def pass_at_k(
    batch: AdvantageInput, *, k: Annotated[int, Field(ge=1)] = 4, eps: Annotated[float, Field(ge=0)] = 1e-6
) -> AdvantageOutput:
    """Pass@k: (mean of the maximum over k-subsets with the episode - mean over all k-subsets) / (std + eps).

    A group of at most k episodes has at most one subset, so its advantages are 0: groups must be larger than k.
    """

    def rule(rewards: Tensor) -> Tensor:
        n = len(rewards)
        if n <= k:
            return torch.zeros(n, dtype=torch.float64)
        ordered, order = torch.sort(rewards.double(), stable=True)
        # The shift cancels in exact arithmetic. It makes equal rewards exactly 0, as probabilities sum to 1 only up to rounding.
        above = ordered - ordered[0]
        mean = (_largest(n, k) * above).sum()
        std = (_largest(n, k) * (above - mean).square()).sum().sqrt()
        if std == 0:
            return torch.zeros(n, dtype=torch.float64)
        # With i in the subset, the rest is a (k-1)-subset of the other n-1; the maximum is the larger of its maximum and i.
        inside = torch.empty_like(above)
        for i in range(n):
            rest = torch.cat([above[:i], above[i + 1 :]])
            inside[i] = above[i] if k == 1 else (_largest(n - 1, k - 1) * torch.clamp(rest, min=float(above[i]))).sum()
        out = torch.empty_like(above)
        out[order] = (inside - mean) / (std + eps)
        return out

    return of_groups(batch, rule)


def _largest(n: int, k: int) -> Tensor:
    """Return the probability of each item, in ascending order, to be a random k-subset's maximum: float64 [n]."""
    return torch.tensor([comb(j, k - 1) / comb(n, k) for j in range(n)], dtype=torch.float64)


@ADVANTAGES.register("multi_reward", needs={"group", "terms"})
def multi_reward(
    batch: AdvantageInput,
    *,
    terms: Annotated[list[str], Field(min_length=1)],
    weights: list[float] | None = None,
    eps: Annotated[float, Field(ge=0)] = 1e-6,
    whitened: bool = True,
) -> AdvantageOutput:
    """A = sum over terms of weight * (term - mean) / (std + eps), then A / (std of A + eps), on every sampled token.

    Mean and std of a term are over the group's known values; an unknown value (NaN) adds 0. The last std (`whitened`) is over
    all scored episodes, each counted once, as in the paper (verl: over tokens); their mean of A is 0 by construction.

    `terms`: ids of nodes of the reward spec, the columns of `batch.terms`. Raises ConfigError if the batch lacks these columns,
    or the number of weights differs from that of terms.
    """
    columns = batch.terms
    if columns is None or columns.shape[1] != len(terms):
        raise ConfigError(f'algorithm.advantage "multi_reward" needs a column for each of its terms {terms}')
    scale = weights if weights is not None else [1.0] * len(terms)
    if len(scale) != len(terms):
        raise ConfigError(f"algorithm.advantage.args.weights has {len(scale)} entries for {len(terms)} terms")

    def rule(e: Episodes) -> Tensor:
        total = torch.zeros_like(e.reward)
        for number, factor in enumerate(scale):
            values = columns[e.first, number].double()
            known = ~torch.isnan(values)
            total[known] += factor * standardize_in_groups(values[known], e.group[known], e.groups, eps)
        if not whitened:
            return total
        std = deviation(total, torch.zeros_like(e.group), 1) + eps  # all episodes as one group
        return total / torch.where(std > 0, std, 1.0)

    return of_episodes(batch, rule)


@ADVANTAGES.register("remax", needs={"baseline"})
def remax(batch: AdvantageInput) -> AdvantageOutput:
    """R - R(greedy) on every sampled token. Raises ConfigError without greedy rewards (`baseline`)."""
    baseline = batch.baseline
    if baseline is None:
        raise ConfigError('algorithm.advantage "remax" needs the reward of a greedy rollout of each task')
    return of_episodes(batch, lambda e: e.reward - baseline[e.first].double())


# Batch baselines


@ADVANTAGES.register("reinforce_pp")
def reinforce_pp(batch: AdvantageInput, *, gamma: Annotated[float, Field(ge=0, le=1)] = 1.0) -> AdvantageOutput:
    """G_t = r_t + gamma G_(t+1), then (G - mean) / std over the sampled tokens of all scored episodes.

    t counts sampled tokens, across all ledgers of an episode. The paper has gamma = 1 and subtracts beta times the k1 estimate
    of the KL from each token's reward: `algorithm.kl.where = "reward"`.
    """
    dtype, tokens = batch.reward.dtype, episode_tokens(batch)
    returns = discounted_sums(tokens.credit(batch.token_rewards), tokens.compact, gamma)
    return AdvantageOutput(tokens.put(zscores(returns), dtype), tokens.put(returns, dtype))


@ADVANTAGES.register("reinforce_pp_baseline", needs={"group"})
def reinforce_pp_baseline(batch: AdvantageInput) -> AdvantageOutput:
    """R - group mean, then (A - mean) / std over the sampled tokens of all scored episodes.

    A group of equal rewards is exactly 0 before whitening, which then shifts it, like all tokens, by the mean over tokens.
    """
    rows = row_advantages(batch, Episodes.center)
    scored = batch.mask & spread(~torch.isnan(batch.reward), batch.offsets)
    return AdvantageOutput(whiten_masked(on_mask(rows, batch.mask, batch.offsets), scored))


# Critics


@ADVANTAGES.register("gae", needs={"values"})
def gae(
    batch: AdvantageInput,
    *,
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0,
    lam: Annotated[float, Field(ge=0, le=1)] = 1.0,
    whitened: bool = True,
) -> AdvantageOutput:
    """delta_t = r_t + gamma V_(t+1) - V_t and A_t = delta_t + gamma lam A_(t+1), over the sampled tokens of an episode.

    t counts sampled tokens, across all ledgers of an episode: tool results and a rewritten context are not discounted, and V and
    A are 0 only after the episode's last sampled token. `returns` = A + V before whitening, which is over the sampled tokens of
    scored episodes. Raises ConfigError without a critic's values.
    """
    if batch.values is None:
        raise ConfigError('algorithm.advantage "gae" needs a critic: add a [critic] section to the config')
    dtype, tokens = batch.reward.dtype, episode_tokens(batch)
    values = batch.values[tokens.indices].double()
    delta = tokens.credit(batch.token_rewards) + gamma * following(values, tokens.compact) - values
    raw = discounted_sums(delta, tokens.compact, gamma * lam)
    returns = batch.values.to(dtype) * batch.mask
    returns[tokens.indices] = (raw + values).to(dtype)
    return AdvantageOutput(tokens.put(zscores(raw) if whitened else raw, dtype), returns)


@ADVANTAGES.register("gae_turns", needs={"values"})
def gae_turns(
    batch: AdvantageInput,
    *,
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0,
    lam: Annotated[float, Field(ge=0, le=1)] = 1.0,
    whitened: bool = True,
) -> AdvantageOutput:
    """delta_k = r_k + gamma V_(k+1) - V_k and A_k = delta_k + gamma lam A_(k+1), over the turns of an episode, all ledgers.

    r_k: sum of the rewards of the turn's tokens. V_k: the critic's value at the turn's first sampled token, i.e. of the state
    before the turn. All sampled tokens of a turn have advantage A_k, whitened as in `gae`, and `returns` A_k + V_k before
    whitening: the value within a turn predicts the turn's outcome given its beginning. Departure: the paper's critic has one
    value per turn; here all tokens of a turn train it, and their mean target given the start is the target of the start.
    Raises ConfigError without a critic's values.
    """
    if batch.values is None:
        raise ConfigError('algorithm.advantage "gae_turns" needs a critic: add a [critic] section to the config')
    turns, dtype = turns_of(batch), batch.reward.dtype
    values = batch.values[turns.first].double()
    delta = turns.reward + gamma * following(values, turns.offsets) - values
    raw = discounted_sums(delta, turns.offsets, gamma * lam)
    returns = batch.values.to(dtype) * batch.mask
    returns[turns.tokens.indices] = (raw + values)[turns.segment].to(dtype)
    per_token = raw[turns.segment]
    return AdvantageOutput(turns.tokens.put(zscores(per_token) if whitened else per_token, dtype), returns)


# Turn-level credit


@ADVANTAGES.register("turn_returns", needs={"group"})
def turn_returns(
    batch: AdvantageInput, *, gamma: Annotated[float, Field(ge=0, le=1)] = 1.0, divide: bool = True
) -> AdvantageOutput:
    """(G - mean) / (std + 1e-6), G = discounted sum of the turn rewards from this turn on, over all ledgers.

    Mean and unbiased std are over the group's turns with the same index. A turn that no other member reached gets 0."""
    turns = turns_of(batch)
    returns = discounted_sums(turns.reward, turns.offsets, gamma)  # from turn to turn, over all ledgers of the episode
    advantages = normalize_by_key(returns, torch.stack([turns.group, turns.index], dim=1), divide)
    dtype = batch.reward.dtype
    return AdvantageOutput(turns.put(advantages, dtype), turns.put(returns, dtype))


@ADVANTAGES.register("gigpo", needs={"group", "anchors"})
def gigpo(
    batch: AdvantageInput,
    *,
    gamma: Annotated[float, Field(ge=0, le=1)] = 0.95,
    weight: Annotated[float, Field(ge=0)] = 1.0,
    divide: bool = True,
) -> AdvantageOutput:
    """A(episode) + weight * A(turn), each (value - mean) / F; weight is the paper's omega.

    A(episode) compares the rewards of the group. A(turn) compares the discounted rewards-to-go of the group's turns in the same
    state (equal `anchors`), including several turns of one episode; a turn alone in its state has A(turn) = 0. F is the unbiased
    std + 1e-6, or 1 without `divide`: the paper's two choices of F_norm. Raises ConfigError without anchors.
    """
    if batch.anchors is None:
        raise ConfigError('algorithm.advantage "gigpo" needs the states of turns (column `anchors`)')
    turns = turns_of(batch)
    keys = torch.stack([turns.group, batch.anchors[turns.first].to(torch.int64)], 1)
    returns = discounted_sums(turns.reward, turns.offsets, gamma)
    steps = turns.put(normalize_by_key(returns, keys, divide), batch.reward.dtype)

    def rule(e: Episodes) -> Tensor:
        return standardize_in_groups(e.reward, e.group, e.groups, EPS) if divide else e.center()

    return AdvantageOutput(on_mask(row_advantages(batch, rule), batch.mask, batch.offsets) + weight * steps)

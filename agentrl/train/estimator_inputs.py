"""Row columns that some advantage estimators need in addition to those of `collate`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from tensordict import TensorDict

from agentrl.algorithm import ADVANTAGES
from agentrl.config.schema import Choice
from agentrl.errors import ConfigError, did_you_mean
from agentrl.reward import Scorer
from agentrl.trajectory import Group, Trajectory


def with_estimator_inputs(batch: TensorDict, groups: Sequence[Group], advantage: Choice) -> TensorDict:
    """The batch of the scored members of `groups`, in this order, with the columns that the estimator `advantage` reads:
    `baseline` float32 [N], the reward of the group's greedy episode; `terms` float32 [N, K], the values of K nodes of the
    reward spec, NaN if one could not be scored."""
    row = batch.get("trajectory")
    out: TensorDict = batch.copy()
    needs = ADVANTAGES.entry(advantage.name).needs
    if "baseline" in needs:
        baseline = [_greedy(group) for group in groups for _ in group.scored()]
        out["baseline"] = torch.tensor(baseline)[row]
    if "terms" in needs:
        names: list[str] = advantage.args["terms"]
        terms = [_terms(member, names) for group in groups for member in group.scored()]
        out["terms"] = torch.tensor(terms).reshape(len(terms), len(names))[row]
    return out


def needs_greedy(advantage: Choice) -> bool:
    """Whether each group also gets a greedy episode of its task, whose reward is the estimator's baseline."""
    return "baseline" in ADVANTAGES.entry(advantage.name).needs


def check_estimator_inputs(advantage: Choice, scorer: Scorer) -> None:
    """Raise ConfigError if the estimator needs something that the reward spec does not have.

    Reads: algorithm.advantage, env.reward.
    """
    needs = ADVANTAGES.entry(advantage.name).needs
    if "baseline" in needs and scorer.compares:
        raise ConfigError(
            f'algorithm.advantage "{advantage.name}" compares each group with a greedy episode, but reward spec {scorer.name!r} '
            "compares the members of a group with each other, so it cannot score an episode outside of the group"
        )
    if "terms" not in needs:
        return
    known, terms, weights = scorer.ids, advantage.args["terms"], advantage.args.get("weights")
    if weights is not None and len(weights) != len(terms):
        raise ConfigError(
            f"algorithm.advantage.args.weights: {len(weights)} weights for {len(terms)} terms; expected one per term"
        )
    for name in terms:
        if name not in known:
            hint = did_you_mean(name, known, f"its ids: {', '.join(known) or 'none'}")
            raise ConfigError(f"algorithm.advantage.args.terms: reward spec {scorer.name!r} has no node with id {name!r}; {hint}")


def _greedy(group: Group) -> float:
    if group.baseline is None or group.baseline.reward is None:
        raise ConfigError(f"algorithm.advantage: group {group.index} has no scored greedy episode for a baseline")
    return group.baseline.reward


def _terms(member: Trajectory, names: Sequence[str]) -> list[float]:
    values = [member.metrics.get(name) for name in names]
    return [math.nan if value is None else value for value in values]

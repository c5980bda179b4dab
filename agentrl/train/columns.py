"""Row columns that single advantage estimators need beside those of `collate`."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence

import torch
from tensordict import TensorDict

from agentrl.config.schema import Choice
from agentrl.errors import ConfigError
from agentrl.reward import Scorer
from agentrl.trajectory import Group, Trajectory


def with_columns(batch: TensorDict, groups: Sequence[Group], advantage: Choice) -> TensorDict:
    """The batch of the scored members of `groups`, in this order, with what the estimator `advantage` reads:
    for "remax" `baseline` float32 [N], the reward of the group's greedy episode; for "multi_reward" `terms`
    float32 [N, K], the values of K nodes of the reward spec, NaN where one could not be scored."""
    row = batch.get("trajectory")
    out: TensorDict = batch.copy()
    if advantage.name == "remax":
        baseline = [_greedy(group) for group in groups for _ in group.scored()]
        out["baseline"] = torch.tensor(baseline)[row]
    if advantage.name == "multi_reward":
        names: list[str] = advantage.args["terms"]
        terms = [_terms(member, names) for group in groups for member in group.scored()]
        out["terms"] = torch.tensor(terms).reshape(len(terms), len(names))[row]
    return out


def check_columns(advantage: Choice, scorer: Scorer) -> None:
    """Raise ConfigError where the estimator wants something of the reward spec that it does not have."""
    if advantage.name == "remax" and scorer.compares:
        raise ConfigError(
            f'algorithm.advantage "remax" sets a greedy episode against each group; reward spec {scorer.name!r} '
            "compares the members of a group with each other, which leaves no score for an episode outside"
        )
    if advantage.name != "multi_reward":
        return
    known = scorer.ids
    for name in advantage.args["terms"]:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"ids there: {', '.join(known) or 'none'}"
            raise ConfigError(f"algorithm.advantage.args.terms: reward spec {scorer.name!r} has no node of id {name!r}; {hint}")


def _greedy(group: Group) -> float:
    if group.baseline is None or group.baseline.reward is None:
        raise ConfigError(f'algorithm.advantage "remax": group {group.index} has no scored greedy episode')
    return group.baseline.reward


def _terms(member: Trajectory, names: Sequence[str]) -> list[float]:
    values = [member.metrics.get(name) for name in names]
    return [math.nan if value is None else value for value in values]

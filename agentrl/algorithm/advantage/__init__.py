"""Advantage estimators, one file each. What an estimator needs besides rewards is declared where it is registered."""

from __future__ import annotations

from collections.abc import Callable

from agentrl.algorithm.types import AdvantageOutput
from agentrl.registry import Registry

ADVANTAGES: Registry[Callable[..., AdvantageOutput]] = Registry(
    "algorithm.advantage",
    "ADVANTAGES",
    "agentrl.algorithm.advantage",
    given=1,
    needs={
        "group": "two episodes of a task or more, to compare",
        "group_over_k": "more episodes of a task than its argument k",
        "values": "a critic's value of each token",
        "baseline": "the reward of a greedy episode of each task",
        "terms": "the nodes of the reward spec that its argument `terms` names, each by itself",
        "anchors": "which turns were taken in the same state",
    },
    traits={"branches": "is right for members of a group that share their beginnings (`rollout.branch`)"},
)

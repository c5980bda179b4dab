"""Advantage estimators and policy losses: one small file each, pure functions on flat ragged columns.

The two tables below are all there is: nothing is found by scanning, nothing registers itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from agentrl.algorithm.advantage.dr_grpo import dr_grpo
from agentrl.algorithm.advantage.gae import gae
from agentrl.algorithm.advantage.gigpo import gigpo
from agentrl.algorithm.advantage.gpg import gpg
from agentrl.algorithm.advantage.grpo import grpo
from agentrl.algorithm.advantage.multi_reward import multi_reward
from agentrl.algorithm.advantage.opo import opo
from agentrl.algorithm.advantage.pass_at_k import pass_at_k
from agentrl.algorithm.advantage.reinforce_pp import reinforce_pp
from agentrl.algorithm.advantage.reinforce_pp_baseline import reinforce_pp_baseline
from agentrl.algorithm.advantage.remax import remax
from agentrl.algorithm.advantage.rloo import rloo
from agentrl.algorithm.advantage.turn_returns import turn_returns
from agentrl.algorithm.aggregate import Mode, aggregate
from agentrl.algorithm.correction import correction
from agentrl.algorithm.kl import kl_estimate
from agentrl.algorithm.loss.cispo import cispo
from agentrl.algorithm.loss.covariance import clip_cov, kl_cov
from agentrl.algorithm.loss.decoupled_ppo import decoupled_ppo
from agentrl.algorithm.loss.gmpo import gmpo
from agentrl.algorithm.loss.gspo import gspo
from agentrl.algorithm.loss.ppo_clip import ppo_clip
from agentrl.algorithm.loss.reinforce import reinforce
from agentrl.algorithm.loss.sapo import sapo
from agentrl.algorithm.loss.value import value_loss
from agentrl.algorithm.registry import bind
from agentrl.algorithm.types import AdvantageInput, AdvantageOutput, Denominators, LossInput, LossOutput

ADVANTAGES: dict[str, Callable[..., AdvantageOutput]] = {
    "dr_grpo": dr_grpo,
    "gae": gae,
    "gigpo": gigpo,
    "gpg": gpg,
    "grpo": grpo,
    "multi_reward": multi_reward,
    "opo": opo,
    "pass_at_k": pass_at_k,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "remax": remax,
    "rloo": rloo,
    "turn_returns": turn_returns,
}

POLICY_LOSSES: dict[str, Callable[..., LossOutput]] = {
    "cispo": cispo,
    "clip_cov": clip_cov,
    "decoupled_ppo": decoupled_ppo,
    "gmpo": gmpo,
    "gspo": gspo,
    "kl_cov": kl_cov,
    "ppo_clip": ppo_clip,
    "reinforce": reinforce,
    "sapo": sapo,
}


def advantages(name: str, args: Mapping[str, Any]) -> Callable[[AdvantageInput], AdvantageOutput]:
    """The estimator `name` with its arguments bound. Raises ConfigError and names the nearest one."""
    return bind("algorithm.advantage", ADVANTAGES, name, args)


def policy_loss(name: str, args: Mapping[str, Any]) -> Callable[[LossInput], LossOutput]:
    """The policy loss `name` with its arguments bound. Raises ConfigError and names the nearest one."""
    return bind("algorithm.loss", POLICY_LOSSES, name, args)


__all__ = [
    "ADVANTAGES",
    "POLICY_LOSSES",
    "AdvantageInput",
    "AdvantageOutput",
    "Denominators",
    "LossInput",
    "LossOutput",
    "Mode",
    "advantages",
    "aggregate",
    "correction",
    "kl_estimate",
    "policy_loss",
    "value_loss",
]

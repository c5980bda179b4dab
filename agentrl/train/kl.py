"""The KL penalty against the reference policy: the choice of estimator, the penalty in the reward, the adaptive coefficient."""

from __future__ import annotations

import torch

from agentrl.algorithm import kl_estimate
from agentrl.algorithm.kl import KL
from agentrl.algorithm.ragged import row_ids
from agentrl.batch.rows import Ragged
from agentrl.config.schema import KlConfig
from agentrl.errors import ConfigError
from agentrl.train.minibatch import proximal_of


def kl_kind(cfg: KlConfig) -> str:
    """The estimator that the config names; by default k1 in the reward, whose expectation under the policy is the KL
    itself and which PPO uses there (Ziegler et al. 2019, arXiv:1909.08593; Ouyang et al. 2022, arXiv:2203.02155), and k3
    in the loss (GRPO, Shao et al. 2024, arXiv:2402.03300)."""
    return cfg.kind or ("k1" if cfg.where == "reward" else "k3")


def check_kl(cfg: KlConfig) -> None:
    """Raise ConfigError for a penalty that would not do what its settings say."""
    if cfg.target is not None and cfg.coef == 0:
        raise ConfigError("algorithm.kl.target adapts algorithm.kl.coef, which must be above 0 at the start")
    if cfg.where == "reward" and cfg.straight_through:
        raise ConfigError('algorithm.kl.straight_through changes a gradient, and where = "reward" has none; use where = "loss"')
    idle = "idle_gradient" in KL.entry(kl_kind(cfg)).traits
    if cfg.coef > 0 and cfg.where == "loss" and idle and not cfg.straight_through:
        raise ConfigError(
            f'algorithm.kl.kind = "{kl_kind(cfg)}" in the loss has a gradient of mean 0 (that of log pi), so it does not '
            f'restrain the policy; use {KL.that_are("idle_gradient", False)}, straight_through = true, or where = "reward"'
        )


def reward_penalty(view: Ragged, cfg: KlConfig) -> torch.Tensor:
    """The KL of the proximal policy to the reference (`ref_logprobs`) at each sampled token, float32 [T]; 0 on
    the others. The penalty is `coef` times it: R_t = r_t - coef (log pi_old - log pi_ref) with k1."""
    return kl_estimate(kl_kind(cfg), proximal_of(view), view.tokens("ref_logprobs")) * view.tokens("sampled")


def episode_sums(column: torch.Tensor, view: Ragged) -> torch.Tensor:
    """Sum of a token column over all rows of an episode, on each of its rows: [T] -> [N]."""
    episode = torch.from_numpy(view.episode)
    total = torch.zeros(int(episode.max()) + 1 if len(episode) else 0, dtype=torch.float64)
    total.index_add_(0, episode[row_ids(view.offsets)], column.double())
    return total[episode].to(column.dtype)


def adapted_kl_coef(coef: float, measured: float, episodes: int, cfg: KlConfig) -> float:
    """The next coefficient (Ziegler et al. 2019, arXiv:1909.08593): coef (1 + clip(KL / target - 1, +-0.2) episodes / horizon).

    Departure: their KL is that of a whole episode, ours is the mean over its tokens, and `target` likewise.
    """
    if cfg.target is None:
        return coef
    error = min(max(measured / cfg.target - 1, -0.2), 0.2)
    return coef * (1 + error * episodes / cfg.horizon)

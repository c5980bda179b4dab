"""From token losses to one number, by global counts only: how rows are split changes nothing."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from agentrl.algorithm.ragged import row_sum
from agentrl.algorithm.types import Denominators
from agentrl.errors import ConfigError

Mode = Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"]


def aggregate(
    loss: Tensor,
    mask: Tensor,
    offsets: Tensor,
    mode: Mode,
    denominators: Denominators,
    episode_tokens: Tensor | None = None,
) -> Tensor:
    """This part's share of the global mean, a scalar; the shares of all parts add up to it.

    `loss` [T], `mask` [T], `offsets` [N + 1]; `denominators` count the whole optimizer step. With E episodes of n_e
    masked tokens each, over all of an episode's rows:

    - token_mean: sum / all tokens (DAPO, Yu et al. 2025, arXiv:2503.14476);
    - seq_mean_token_mean: 1/E sum_e (1/n_e sum over the episode's tokens) (GRPO, Shao et al. 2024, arXiv:2402.03300);
    - seq_mean_token_sum: 1/E sum_e sum;
    - seq_mean_token_sum_norm: the same / `denominators.length`, a constant (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783).

    `episode_tokens` [N]: n_e of each row's episode; without it every row is an episode. Raises ConfigError for another
    mode.
    """
    kept = torch.where(mask, loss, torch.zeros_like(loss))
    tokens, episodes = max(denominators.tokens, 1.0), max(denominators.episodes, 1.0)  # no token at all: a sum of zero
    if mode == "token_mean":
        return kept.sum() / tokens
    if mode == "seq_mean_token_sum":
        return kept.sum() / episodes
    if mode == "seq_mean_token_sum_norm":
        return kept.sum() / (episodes * denominators.length)
    if mode == "seq_mean_token_mean":
        count = row_sum(mask.to(loss.dtype), offsets) if episode_tokens is None else episode_tokens.to(loss.dtype)
        return (row_sum(kept, offsets) / count.clamp(min=1)).sum() / episodes
    raise ConfigError(f"algorithm.aggregate = {mode!r}: expected one of {', '.join(get_args(Mode))}")

"""From token losses to one number, by global counts only: how rows are split changes nothing."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from agentrl.algorithm.ragged import row_mean
from agentrl.algorithm.types import Denominators
from agentrl.errors import ConfigError

Mode = Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean"]


def aggregate(loss: Tensor, mask: Tensor, offsets: Tensor, mode: Mode, denominators: Denominators) -> Tensor:
    """This part's share of the global mean, a scalar; the shares of all parts add up to it.

    `loss` [T], `mask` [T], `offsets` [N + 1]; `denominators` count the whole optimizer step.
    """
    if mode == "seq_mean_token_mean":
        return row_mean(loss, mask, offsets).sum() / denominators.sequences
    total = torch.where(mask, loss, torch.zeros_like(loss)).sum()
    if mode == "token_mean":
        return total / denominators.tokens
    if mode == "seq_mean_token_sum":
        return total / denominators.sequences
    raise ConfigError(f"algorithm.aggregate = {mode!r}: expected one of {', '.join(get_args(Mode))}")

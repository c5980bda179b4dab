"""Several reward terms, each normalized within its group before they are added (GDPO, arXiv:2601.05242):
a term with a wide range cannot drown the others."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from agentrl.algorithm.groups import Episodes, row_advantages
from agentrl.algorithm.ragged import on_mask, whiten
from agentrl.algorithm.types import AdvantageInput, AdvantageOutput
from agentrl.errors import ConfigError


def multi_reward(
    batch: AdvantageInput,
    *,
    terms: list[str],
    weights: list[float] | None = None,
    eps: Annotated[float, Field(ge=0)] = 1e-6,
    whitened: bool = True,
) -> AdvantageOutput:
    """sum over terms of weight * (term - mean) / (std + eps) on every sampled token, then whitened over the
    batch. A NaN term counts as its group's mean.

    `terms` names the columns of `batch.terms`: ids of nodes of the reward spec. Raises ConfigError where
    the batch has no such columns, or where there are not as many weights.
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
            total = total + factor * _normalized(e, columns[e.first, number].to(total.dtype), eps)
        return total

    spread = on_mask(row_advantages(batch, rule), batch.mask, batch.offsets)
    return AdvantageOutput(whiten(spread, batch.mask) if whitened else spread)


def _normalized(e: Episodes, values: Tensor, eps: float) -> Tensor:
    known = ~torch.isnan(values)
    filled = torch.where(known, values, torch.zeros_like(values))
    mean = e.total(filled) / e.total(known.to(values.dtype)).clamp(min=1)
    filled = torch.where(known, values, mean[e.group])
    return (filled - e.mean(filled)) / (e.std(filled) + eps)

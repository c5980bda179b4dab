"""Several reward terms, each normalized within its group before they are added (GDPO, Liu et al. 2026,
arXiv:2601.05242): a term with a wide range cannot drown the others."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from agentrl.algorithm.advantage import ADVANTAGES
from agentrl.algorithm.groups import Episodes, deviation, row_advantages, standardized
from agentrl.algorithm.ragged import on_mask
from agentrl.algorithm.types import AdvantageInput, AdvantageOutput
from agentrl.errors import ConfigError


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

    Mean and std of a term are those of the group's known values; an unknown one (NaN) adds 0. The last std
    (`whitened`) is over all scored episodes, each once, as in the paper (verl takes it over tokens);
    the mean of A over them is 0 by construction.

    `terms` names the columns of `batch.terms`: ids of nodes of the reward spec. Raises ConfigError if the batch
    has no such columns, or if the number of weights differs from that of terms.
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
            total = total + factor * _normalized(e, columns[e.first, number].double(), eps)
        if not whitened:
            return total
        std = deviation(total, torch.zeros_like(e.group), 1) + eps  # all episodes as one group
        return total / torch.where(std > 0, std, 1.0)

    return AdvantageOutput(on_mask(row_advantages(batch, rule), batch.mask, batch.offsets))


def _normalized(e: Episodes, values: Tensor, eps: float) -> Tensor:
    known = ~torch.isnan(values)
    out = torch.zeros_like(values)
    out[known] = standardized(values[known], e.group[known], e.groups, eps)
    return out

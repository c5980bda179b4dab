"""GPG (Chu et al. 2025, arXiv:2504.02546): centred rewards, scaled up for the groups that teach nothing."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor

from agentrl.algorithm.groups import Episodes, row_advantages
from agentrl.algorithm.ragged import on_mask
from agentrl.algorithm.types import AdvantageInput, AdvantageOutput


def gpg(batch: AdvantageInput, *, f_norm: Annotated[float, Field(gt=0)] = 1.0) -> AdvantageOutput:
    """alpha (R - mean) / f_norm, alpha = episodes / episodes in groups whose rewards differ."""

    def scaled(e: Episodes) -> Tensor:
        teaching = (e.std(e.reward) > 0).sum().clamp(min=1)
        return (e.reward - e.mean(e.reward)) * (len(e.reward) / teaching) / f_norm

    return AdvantageOutput(on_mask(row_advantages(batch, scaled), batch.mask, batch.offsets))

"""An estimator: the reward relative to the group's median, which one lucky episode does not change."""

from typing import Annotated

import torch
from pydantic import Field

from agentrl.data.rows import on_mask
from agentrl.trainer.algorithms.advantages import ADVANTAGES
from agentrl.trainer.algorithms.base import AdvantageInput, AdvantageOutput, Episodes, row_advantages


@ADVANTAGES.register("median_baseline", needs={"group"})
def median_baseline(batch: AdvantageInput, *, scale: Annotated[float, Field(gt=0)] = 1.0) -> AdvantageOutput:
    """scale * (R - median of the group's rewards) on every sampled token; `scale` is an argument of the config."""

    def against_median(episodes: Episodes) -> torch.Tensor:
        medians = [episodes.reward[episodes.group == group].quantile(0.5) for group in range(episodes.groups)]
        return scale * (episodes.reward - torch.stack(medians)[episodes.group])

    return AdvantageOutput(on_mask(row_advantages(batch, against_median), batch.mask, batch.offsets))

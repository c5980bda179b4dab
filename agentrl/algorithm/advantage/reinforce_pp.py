"""REINFORCE++ (Hu et al. 2025, arXiv:2501.03262): discounted returns, whitened over the whole batch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from agentrl.algorithm.advantage import ADVANTAGES
from agentrl.algorithm.groups import episode_tokens
from agentrl.algorithm.ragged import discounted, zscores
from agentrl.algorithm.types import AdvantageInput, AdvantageOutput


@ADVANTAGES.register("reinforce_pp")
def reinforce_pp(batch: AdvantageInput, *, gamma: Annotated[float, Field(ge=0, le=1)] = 1.0) -> AdvantageOutput:
    """G_t = r_t + gamma G_(t+1), then (G - mean) / std over the sampled tokens of all scored episodes.

    A step goes from one sampled token to the next, across all ledgers of an episode. The paper has gamma = 1 and
    subtracts beta times the k1 estimate of the KL from each token's reward: `algorithm.kl.where = "reward"`.
    """
    dtype, tokens = batch.reward.dtype, episode_tokens(batch)
    returns = discounted(tokens.earned(batch.token_rewards), tokens.compact, gamma)
    return AdvantageOutput(tokens.put(zscores(returns), dtype), tokens.put(returns, dtype))

"""Generalized advantage estimation (Schulman et al. 2016, arXiv:1506.02438) over sampled tokens."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from agentrl.algorithm.advantage import ADVANTAGES
from agentrl.algorithm.groups import episode_tokens
from agentrl.algorithm.ragged import discounted, following, zscores
from agentrl.algorithm.types import AdvantageInput, AdvantageOutput
from agentrl.errors import ConfigError


@ADVANTAGES.register("gae", needs={"values"})
def gae(
    batch: AdvantageInput,
    *,
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0,
    lam: Annotated[float, Field(ge=0, le=1)] = 1.0,
    whitened: bool = True,
) -> AdvantageOutput:
    """delta_t = r_t + gamma V_(t+1) - V_t and A_t = delta_t + gamma lam A_(t+1), over the sampled tokens of an episode.

    A step goes from one sampled token to the next, across all ledgers of an episode: tool results and a
    rewritten context are not discounted, and V and A are 0 only after the episode's last sampled token.
    `returns` = advantage + value, taken before whitening (over the sampled tokens of scored episodes).
    Raises ConfigError without a critic's values.
    """
    if batch.values is None:
        raise ConfigError('algorithm.advantage "gae" needs a critic: add a [critic] section to the config')
    dtype, tokens = batch.reward.dtype, episode_tokens(batch)
    values = batch.values[tokens.indices].double()
    delta = tokens.earned(batch.token_rewards) + gamma * following(values, tokens.compact) - values
    raw = discounted(delta, tokens.compact, gamma * lam)
    returns = batch.values.to(dtype) * batch.mask
    returns[tokens.indices] = (raw + values).to(dtype)
    return AdvantageOutput(tokens.put(zscores(raw) if whitened else raw, dtype), returns)

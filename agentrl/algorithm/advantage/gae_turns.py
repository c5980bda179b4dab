"""GAE whose time steps are turns: one answer of the policy is one action (Turn-PPO, Li et al. 2025, arXiv:2512.17008)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from agentrl.algorithm.advantage import ADVANTAGES
from agentrl.algorithm.ragged import discounted, following, zscores
from agentrl.algorithm.turns import turns_of
from agentrl.algorithm.types import AdvantageInput, AdvantageOutput
from agentrl.errors import ConfigError


@ADVANTAGES.register("gae_turns", needs={"values"})
def gae_turns(
    batch: AdvantageInput,
    *,
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0,
    lam: Annotated[float, Field(ge=0, le=1)] = 1.0,
    whitened: bool = True,
) -> AdvantageOutput:
    """delta_k = r_k + gamma V_(k+1) - V_k and A_k = delta_k + gamma lam A_(k+1), over the turns of an episode, all ledgers.

    r_k is the sum of the rewards of a turn's tokens. V_k is the critic's value at the turn's first sampled token: that of the
    state that the turn answers, before any of it was written. All sampled tokens of a turn have A_k, whitened as those of
    `gae`, and `returns` A_k + V_k, taken before: the value of a token within a turn is what the turn will turn out to be worth,
    given its beginning. (The paper's critic has one value a turn; here the value loss has more tokens than starts to learn
    from, whose mean given the start is the start's own target.) Raises ConfigError without a critic's values.
    """
    if batch.values is None:
        raise ConfigError('algorithm.advantage "gae_turns" needs a critic: add a [critic] section to the config')
    turns, dtype = turns_of(batch), batch.reward.dtype
    values = batch.values[turns.first].double()
    delta = turns.reward + gamma * following(values, turns.offsets) - values
    raw = discounted(delta, turns.offsets, gamma * lam)
    returns = batch.values.to(dtype) * batch.mask
    returns[turns.tokens.indices] = (raw + values)[turns.segment].to(dtype)
    per_token = raw[turns.segment]
    return AdvantageOutput(turns.tokens.put(zscores(per_token) if whitened else per_token, dtype), returns)

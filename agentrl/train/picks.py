"""Which tokens of a minibatch clip_cov and kl_cov treat on their own: one choice over all ranks."""

from __future__ import annotations

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from agentrl.algorithm.loss.covariance import Picks
from agentrl.algorithm.ragged import row_ids
from agentrl.batch.rows import jagged, offsets_of
from agentrl.train.engine import BaseEngine

BISECTIONS = 40


def with_picks(
    engine: BaseEngine, batch: TensorDict, parts: list[np.ndarray], picks: Picks, seed: int
) -> TensorDict:
    """The batch with the ragged bool column `picked`.

    The covariance of a token is (log pi - mean)(A - mean), means over its minibatch on all ranks.
    """
    column = batch.get("sampled")
    offsets = offsets_of(column)
    logprobs, advantages = batch.get("old_logprobs").values(), batch.get("advantages").values()
    noise = token_noise(batch, seed)
    picked = torch.zeros(len(column.values()), dtype=torch.bool)
    owner = row_ids(offsets)
    for rows in parts:
        mine = torch.isin(owner, torch.from_numpy(rows)) & column.values()
        covariance = _covariance(engine, logprobs[mine], advantages[mine])
        picked[mine] = _choose(engine, covariance, noise[mine], picks)
    out: TensorDict = batch.copy()
    return out.update({"picked": jagged(picked, offsets)})


def _covariance(engine: BaseEngine, logprobs: Tensor, advantages: Tensor) -> Tensor:
    sums = torch.stack([torch.tensor(float(len(logprobs))), logprobs.sum(), advantages.sum()]).double()
    count, first, second = engine.reduce(sums, "sum")
    count = count.clamp(min=1)
    covariance: Tensor = (logprobs - first / count) * (advantages - second / count)
    return covariance


def _choose(engine: BaseEngine, covariance: Tensor, noise: Tensor, picks: Picks) -> Tensor:
    total = engine.reduce(torch.tensor([float(len(covariance))]).double(), "sum")[0]
    if picks.low is not None and picks.high is not None:
        inside = (covariance > picks.low) & (covariance < picks.high)
        candidates = engine.reduce(inside.sum().double()[None], "sum")[0]
        return inside & (noise < float(picks.share * total / candidates.clamp(min=1)))
    wanted = max(round(float(picks.share * total)), 1)
    top = covariance.max() if len(covariance) else torch.tensor(-torch.inf)
    bottom = covariance.min() if len(covariance) else torch.tensor(torch.inf)
    low = -engine.reduce(-bottom.double()[None], "max")[0]
    high = engine.reduce(top.double()[None], "max")[0]
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        above = engine.reduce((covariance > middle).sum().double()[None], "sum")[0]
        low, high = (middle, high) if above > wanted else (low, middle)
    return covariance > high


def token_noise(batch: TensorDict, seed: int) -> Tensor:
    """A number in [0, 1) for each token, drawn from what the token is, not from where it lies."""
    column = batch.get("token_ids")
    offsets = offsets_of(column)
    rows = row_ids(offsets)
    place = torch.arange(len(rows)) - offsets[:-1][rows]
    mix = column.values().to(torch.int64) * 2654435761 + place * 40503 + seed * 7919
    mix = mix + batch.get("group")[rows] * 104729 + batch.get("member")[rows] * 1299709
    for shift in (16, 13, 16):
        mix = (mix ^ (mix >> shift)) * 73244475 % (1 << 31)
    noise: Tensor = mix.to(torch.float64) / (1 << 31)
    return noise

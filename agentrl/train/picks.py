"""Which tokens of a minibatch clip_cov and kl_cov treat on their own: chosen on the driver, over all of its rows."""

from __future__ import annotations

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from agentrl.algorithm.loss.covariance import Picks
from agentrl.algorithm.ragged import row_ids
from agentrl.batch.rows import jagged, offsets_of
from agentrl.train.minibatch import proximal_of, trained_tokens


def with_picks(batch: TensorDict, parts: list[np.ndarray], picks: Picks | None, seed: int) -> TensorDict:
    """The batch with the ragged bool column `picked`; as it is where nothing is to be picked.

    The covariance of a token is (log pi - mean)(A - mean), means over the trained tokens of its minibatch, those of rows
    without advantage included; log pi is the proximal policy's.
    """
    if picks is None:
        return batch
    offsets = offsets_of(batch.get("sampled"))
    trained = trained_tokens(batch)
    logprobs, advantages = proximal_of(batch).values().double(), batch.get("advantages").values().double()
    noise = token_noise(batch, seed)
    picked = torch.zeros(len(trained), dtype=torch.bool)
    for rows in parts:
        spans = [torch.arange(int(offsets[row]), int(offsets[row + 1])) for row in rows.tolist()]
        every = torch.cat(spans)
        mine = every[trained[every]]
        if len(mine):
            covariance = (logprobs[mine] - logprobs[mine].mean()) * (advantages[mine] - advantages[mine].mean())
            picked[mine[chosen(covariance, noise[mine], picks)]] = True
    out: TensorDict = batch.copy()
    return out.update({"picked": jagged(picked, offsets)})


def chosen(covariance: Tensor, noise: Tensor, picks: Picks) -> Tensor:
    """The picked of M tokens, int64: `share` of them, at least one and rounded down (as in the authors' code); those with
    the largest covariance, or so many at random (by `noise`) of those that lie within the bounds."""
    wanted = max(int(picks.share * len(covariance)), 1)
    if picks.low is None or picks.high is None:
        return torch.from_numpy(np.lexsort((noise.numpy(), -covariance.numpy()))[:wanted])
    inside = ((covariance > picks.low) & (covariance < picks.high)).nonzero().squeeze(1)
    return inside[noise[inside].argsort(stable=True)[:wanted]]


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

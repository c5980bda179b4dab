"""One forward pass over all rows of a worker: what a model says of every sampled token, as ragged columns."""

from __future__ import annotations

import numpy as np
import torch
from tensordict import TensorDict

from agentrl.batch.rows import Ragged, jagged, unpack
from agentrl.batch.schedule import plan_micro_batches
from agentrl.train.engine import BaseEngine
from agentrl.train.update import Pack


@torch.no_grad()
def compute_logprobs(engine: BaseEngine, view: Ragged, temperature: float, cap: int) -> TensorDict:
    """`logprobs` and `entropy` of the sampled tokens as ragged float32 columns, 0 elsewhere."""
    found = {name: torch.zeros(int(view.offsets[-1])) for name in ("logprobs", "entropy")}
    [micros] = plan_micro_batches(view, [np.arange(len(view))], cap, engine)
    for rows in micros:
        piece = Pack(view, rows, engine.device)
        results = engine.logprobs(piece.micro, temperature, True)
        for name, values in zip(found, results, strict=True):
            unpack(view, rows, piece.spread(values), found[name])
    return TensorDict({name: jagged(values, view.offsets) for name, values in found.items()}, batch_size=[len(view)])


@torch.no_grad()
def compute_values(engine: BaseEngine, view: Ragged, cap: int) -> TensorDict:
    """`values` of the sampled tokens as a ragged float32 column, 0 elsewhere."""
    found = torch.zeros(int(view.offsets[-1]))
    [micros] = plan_micro_batches(view, [np.arange(len(view))], cap, engine)
    for rows in micros:
        piece = Pack(view, rows, engine.device)
        unpack(view, rows, piece.spread(engine.values(piece.micro)), found)
    return TensorDict({"values": jagged(found, view.offsets)}, batch_size=[len(view)])

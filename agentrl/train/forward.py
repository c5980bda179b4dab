"""One forward pass over all rows of a worker: a model's outputs for every sampled token, as ragged columns."""

from __future__ import annotations

import numpy as np
import torch
from tensordict import TensorDict

from agentrl.batch.rows import Ragged, jagged, unpack
from agentrl.batch.schedule import plan_micro_batches
from agentrl.train.engine import BaseEngine
from agentrl.train.update import Pack


@torch.no_grad()
def compute_logprobs(engine: BaseEngine, view: Ragged, temperature: float, cap: int, replay: bool = False) -> TensorDict:
    """`logprobs` and `entropy` of the sampled tokens as ragged float32 columns, 0 elsewhere. `replay`: tokens go to the experts
    that the batch names, if it does."""
    out = {name: torch.zeros(int(view.offsets[-1])) for name in ("logprobs", "entropy")}
    [micros] = plan_micro_batches(view, [np.arange(len(view))], cap, engine)
    for rows in micros:
        # Also for a dummy without rows: the pass takes part in the collectives of ranks that have some, and writes nothing.
        packed = Pack(view, rows, engine.device, replay)
        results = engine.logprobs(packed.micro, temperature, True)
        for name, values in zip(out, results, strict=True):
            unpack(view, rows, packed.spread(values), out[name])
    return TensorDict({name: jagged(values, view.offsets) for name, values in out.items()}, batch_size=[len(view)])


@torch.no_grad()
def compute_values(engine: BaseEngine, view: Ragged, cap: int) -> TensorDict:
    """`values` of the sampled tokens as a ragged float32 column, 0 elsewhere."""
    out = torch.zeros(int(view.offsets[-1]))
    [micros] = plan_micro_batches(view, [np.arange(len(view))], cap, engine)
    for rows in micros:
        packed = Pack(view, rows, engine.device)
        unpack(view, rows, packed.spread(engine.values(packed.micro)), out)
    return TensorDict({"values": jagged(out, view.offsets)}, batch_size=[len(view)])

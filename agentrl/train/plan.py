"""Which row trains in which optimizer step and on which rank: decided on the driver, before the rows part.

So the rows of an optimizer step do not depend on the number of ranks. The two strategies here stand in
the actor's dispatch table; they add the row columns `minibatch` and `dp_rank` and the batch-wide column
`minibatches`, and then shard by `dp_rank`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tensordict import TensorDict

from agentrl.batch.balance import partition
from agentrl.batch.rows import lengths, select, wide
from agentrl.cluster.dispatch import Call, Shard, Shipment
from agentrl.cluster.mesh import Mesh
from agentrl.config.schema import AlgorithmConfig
from agentrl.errors import DispatchError


@dataclass(frozen=True)
class UpdateShard(Shard):
    """For `update(batch, algorithm, step, seed, ...)`: shuffled minibatches, each balanced over the ranks.

    `needs_advantage`: rows whose advantages are all zero teach nothing and are left out.
    """

    needs_advantage: bool = True

    def scatter(self, call: Call, mesh: Mesh) -> Shipment:
        batch, rest = _taken(call, "algorithm")
        algorithm: AlgorithmConfig = rest.kwargs["algorithm"]
        if self.needs_advantage:
            batch = drop_rows_without_gradient(batch, algorithm)
        seed, step = rest.kwargs.get("seed", 0), rest.kwargs.get("step", 0)
        parts = shuffled(len(batch), algorithm.minibatch, seed, step)
        planned = placed(batch, parts, mesh.size(self.mesh))
        return Shard.scatter(self, Call(call.where, call.names, (planned,), rest.kwargs), mesh)


@dataclass(frozen=True)
class StepsShard(Shard):
    """For `sft_steps(batch, count)`: `count` optimizer steps of equal numbers of rows, in the rows' order."""

    def scatter(self, call: Call, mesh: Mesh) -> Shipment:
        batch, rest = _taken(call, "count")
        count: int = rest.kwargs["count"]
        if not 1 <= count <= len(batch):
            raise DispatchError(f"{call.where}: {len(batch)} rows do not make {count} steps")
        planned = placed(batch, np.array_split(np.arange(len(batch)), count), mesh.size(self.mesh))
        return Shard.scatter(self, Call(call.where, call.names, (planned,), rest.kwargs), mesh)


def _taken(call: Call, needed: str) -> tuple[TensorDict, Call]:
    """The batch, and the call without it. Raises DispatchError where one argument is missing."""
    name = call.names[0]
    batch, rest = call.take(name)
    if not isinstance(batch, TensorDict):
        raise DispatchError(f"{call.where}: {name!r} must be a TensorDict, it is a {type(batch).__name__}")
    if needed not in rest.kwargs:
        raise DispatchError(f"{call.where}: no argument given for {needed!r}")
    return batch, rest


def drop_rows_without_gradient(batch: TensorDict, algorithm: AlgorithmConfig) -> TensorDict:
    """Leave out rows whose advantages are all zero, unless another term of the loss needs them."""
    if algorithm.entropy_bonus > 0 or (algorithm.kl.coef > 0 and algorithm.kl.where == "loss"):
        return batch
    column = batch.get("advantages")
    offsets = column.offsets()
    rows = torch.repeat_interleave(torch.arange(len(batch)), offsets.diff())
    alive = torch.zeros(len(batch), dtype=torch.bool)
    alive[rows[column.values() != 0]] = True
    return batch if bool(alive.all()) else select(batch, alive.nonzero().squeeze(1))


def shuffled(rows: int, size: int, seed: int, step: int) -> list[np.ndarray]:
    """All rows in random order, cut into the least number of nearly equal parts of at most `size` rows."""
    order = np.random.default_rng([seed, step]).permutation(rows)
    return np.array_split(order, -(-rows // size)) if rows else []


def placed(batch: TensorDict, parts: Sequence[np.ndarray], ranks: int) -> TensorDict:
    """The batch with `minibatch` (the part of each row), `dp_rank` (balanced by tokens within each part)
    and the batch-wide `minibatches`."""
    minibatch = torch.zeros(len(batch), dtype=torch.int64)
    rank = torch.zeros(len(batch), dtype=torch.int64)
    tokens = lengths(batch).numpy().astype(np.float64)
    for number, rows in enumerate(parts):
        minibatch[torch.from_numpy(rows)] = number
        for owner, mine in enumerate(partition(tokens[rows], ranks)):
            rank[torch.from_numpy(rows[mine])] = owner
    out: TensorDict = batch.copy()
    out.update({"minibatch": minibatch, "dp_rank": rank})
    out.set("minibatches", wide(len(parts), len(batch)))
    return out

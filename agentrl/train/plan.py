"""Which row trains in which optimizer step and on which rank: decided on the driver, before the rows part.

So the rows of an optimizer step do not depend on the number of ranks. The two strategies here stand in
the actor's dispatch table; they add the row columns `minibatch` and `dp_rank` and the batch-wide column
`minibatches`, and then shard by `dp_rank`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from agentrl.batch.balance import partition
from agentrl.batch.rows import lengths, select, wide
from agentrl.cluster.dispatch import Shard, Shipment
from agentrl.cluster.mesh import Mesh
from agentrl.config.schema import AlgorithmConfig
from agentrl.errors import DispatchError


@dataclass(frozen=True)
class UpdateShard(Shard):
    """For `update(batch, algorithm, step, seed, ...)`: shuffled minibatches, each balanced over the ranks."""

    def scatter(
        self, where: str, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mesh
    ) -> Shipment:
        batch, given = _taken(where, names, args, kwargs, "algorithm")
        algorithm: AlgorithmConfig = given["algorithm"]
        batch = drop_rows_without_gradient(batch, algorithm)
        parts = shuffled(len(batch), algorithm.minibatch, given.get("seed", 0), given.get("step", 0))
        planned = placed(batch, parts, mesh.size(self.mesh))
        return Shard.scatter(self, where, names, (planned,), given, mesh)


@dataclass(frozen=True)
class StepsShard(Shard):
    """For `sft_steps(batch, count)`: `count` optimizer steps of equal numbers of rows, in the rows' order."""

    def scatter(
        self, where: str, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mesh
    ) -> Shipment:
        batch, given = _taken(where, names, args, kwargs, "count")
        count: int = given["count"]
        if not 1 <= count <= len(batch):
            raise DispatchError(f"{where}: {len(batch)} rows do not make {count} steps")
        planned = placed(batch, np.array_split(np.arange(len(batch)), count), mesh.size(self.mesh))
        return Shard.scatter(self, where, names, (planned,), given, mesh)


def _taken(
    where: str, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any], needed: str
) -> tuple[TensorDict, dict[str, Any]]:
    """The batch and the other arguments by name. Raises DispatchError where one is missing."""
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    batch = given.pop(names[0], None)
    if not isinstance(batch, TensorDict):
        raise DispatchError(f"{where}: {names[0]!r} must be a TensorDict, it is a {type(batch).__name__}")
    if needed not in given or len(args) > len(names):
        raise DispatchError(f"{where} takes {list(names)}; it was given {[names[0], *given]}")
    return batch, given


def drop_rows_without_gradient(batch: TensorDict, algorithm: AlgorithmConfig) -> TensorDict:
    """Leave out rows whose advantages are all zero, unless another term of the loss needs them."""
    if algorithm.entropy_bonus > 0:
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

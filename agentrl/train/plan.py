"""Which row trains in which optimizer step and on which rank: decided on the driver, before the rows part.

So the rows of an optimizer step do not depend on the number of ranks. The strategies here stand in the
roles' dispatch tables; they add the row columns `minibatch` and `dp_rank` and the batch-wide column
`minibatches`, and then shard by `dp_rank`. Where rows stay together (`algorithm.groups`, or because they
share a prefix, see batch/sharing.py) the columns `together` and `prefix` tell the workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from tensordict import TensorDict

from agentrl.batch.rows import lengths, select, wide
from agentrl.batch.sharing import columns_of, settled
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
        keep = np.asarray(batch.get("group")) if algorithm.groups == "kept" else None
        parts = shuffled(len(batch), algorithm.minibatch, seed, step, keep)
        planned = placed(batch, parts, mesh.size(self.mesh), keep)
        return Shard.scatter(self, Call(call.where, call.names, (planned,), rest.kwargs), mesh)


@dataclass(frozen=True)
class RowsShard(Shard):
    """For one forward pass over all rows: balanced by tokens, those that are shared counted once."""

    balance: Literal["tokens", "column"] | None = "tokens"

    def scatter(self, call: Call, mesh: Mesh) -> Shipment:
        name = call.names[0]
        batch, rest = call.take(name)
        if not isinstance(batch, TensorDict) or columns_of(batch, np.arange(0))[0] is None:
            return Shard.scatter(self, call, mesh)
        planned = placed(batch, [np.arange(len(batch))], mesh.size(self.mesh))
        by_column = Shard(mesh=self.mesh, collect=self.collect, balance="column", argument=name)
        return by_column.scatter(Call(call.where, call.names, (planned, *rest.args), rest.kwargs), mesh)


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


def shuffled(
    rows: int, size: int, seed: int, step: int, groups: np.ndarray | None = None
) -> list[np.ndarray]:
    """All rows in random order, cut into the least number of nearly equal parts of at most `size` rows.

    With `groups` (a number a row) whole groups in random order fill parts of at most `size` rows; only a
    group of more rows than that is cut.
    """
    if rows == 0:
        return []
    rng = np.random.default_rng([seed, step])
    if groups is None:
        return np.array_split(rng.permutation(rows), -(-rows // size))
    order = np.argsort(groups, kind="stable")
    members = np.split(order, np.flatnonzero(np.diff(groups[order])) + 1)
    parts: list[list[int]] = [[]]
    for number in rng.permutation(len(members)):
        for start in range(0, len(members[number]), size):
            piece = members[number][start : start + size].tolist()
            if parts[-1] and len(parts[-1]) + len(piece) > size:
                parts.append([])
            parts[-1] += piece
    return [np.asarray(part, dtype=np.int64) for part in parts]


def placed(
    batch: TensorDict, parts: Sequence[np.ndarray], ranks: int, keep: np.ndarray | None = None
) -> TensorDict:
    """The batch with `minibatch` (the part of each row), `dp_rank` (balanced by tokens within each part),
    the batch-wide `minibatches`, and `together` and `prefix` where any rows stay together.

    `keep` holds the rows' group numbers where groups are kept on one rank.
    """
    columns = {name: np.zeros(len(batch), dtype=np.int64) for name in ("minibatch", "dp_rank", "prefix")}
    columns["together"] = np.full(len(batch), -1, dtype=np.int64)
    tokens = lengths(batch).numpy()
    for number, rows in enumerate(parts):
        columns["minibatch"][rows] = number
        found = settled(tokens[rows], ranks, *columns_of(batch, rows), None if keep is None else keep[rows])
        for owner, mine in enumerate(found.ranks):
            columns["dp_rank"][rows[mine]] = owner
        columns["together"][rows], columns["prefix"][rows] = found.together, found.prefix
    if not (columns["together"] >= 0).any():
        del columns["together"], columns["prefix"]
    out: TensorDict = batch.copy()
    out.update({name: torch.from_numpy(values) for name, values in columns.items()})
    out.set("minibatches", wide(len(parts), len(batch)))
    return out

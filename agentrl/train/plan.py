"""Which row trains in which optimizer step and on which rank: decided on the driver, before the rows part.

So the rows of an optimizer step do not depend on the number of ranks. The strategies here stand in the
roles' dispatch tables; they add the row columns `minibatch`, `episode_tokens` and `dp_rank` and the batch-wide
`counts` (denominators of each minibatch), and then shard by `dp_rank`. Where rows stay together
(`algorithm.groups`, or because they share a prefix, see batch/sharing.py) the columns `together` and `prefix`
tell the workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from tensordict import TensorDict

from agentrl.algorithm import Denominators
from agentrl.algorithm.loss.covariance import picks_of
from agentrl.batch.rows import lengths, wide
from agentrl.batch.sharing import columns_of, settled
from agentrl.cluster.dispatch import Call, Shard, Shipment
from agentrl.cluster.mesh import Mesh
from agentrl.config.schema import AlgorithmConfig
from agentrl.errors import ConfigError, DispatchError
from agentrl.train.minibatch import counted, cut, with_policies, without_idle_rows
from agentrl.train.picks import with_picks

DRIVER_ONLY = ("rewards", "turns", "versions")
"""Token columns that advantages are formed from, on the driver: no role reads them, so they are not sent."""


@dataclass(frozen=True)
class UpdateShard(Shard):
    """For `update(batch, algorithm, step, seed, ...)`: minibatches of episodes, each balanced over the ranks.

    `policy`: for the policy's update, which has a proximal policy, an off-policy correction and picked tokens, and leaves
    out rows that cannot have a gradient. Else every row counts, and is computed.
    """

    policy: bool = True
    stays: tuple[str, ...] = DRIVER_ONLY

    def scatter(self, call: Call, mesh: Mesh) -> Shipment:
        batch, rest = _taken(call, "algorithm")
        algorithm: AlgorithmConfig = rest.kwargs["algorithm"]
        seed, step = rest.kwargs.get("seed", 0), rest.kwargs.get("step", 0)
        if self.policy:
            batch = with_policies(batch, algorithm)
        parts = cut(batch, algorithm, seed, step)
        batch, counts = counted(batch, parts, norm_length(algorithm))
        if self.policy:
            batch = with_picks(batch, parts, picks_of(algorithm.loss.name, algorithm.loss.args), seed + step)
            parts = without_idle_rows(batch, parts, algorithm)
        keep = np.asarray(batch.get("group")) if algorithm.groups == "kept" else None
        planned = placed(batch, parts, mesh.size(self.mesh), keep, counts)
        return Shard.scatter(self, Call(call.where, call.names, (planned,), rest.kwargs), mesh)


@dataclass(frozen=True)
class RowsShard(Shard):
    """For one forward pass over all rows: balanced by tokens, those that are shared counted once."""

    balance: Literal["tokens", "column"] | None = "tokens"
    stays: tuple[str, ...] = DRIVER_ONLY

    def scatter(self, call: Call, mesh: Mesh) -> Shipment:
        name = call.names[0]
        batch, rest = call.take(name)
        if not isinstance(batch, TensorDict) or columns_of(batch, np.arange(0))[0] is None:
            return Shard.scatter(self, call, mesh)
        planned = placed(batch, [np.arange(len(batch))], mesh.size(self.mesh))
        by_column = Shard(mesh=self.mesh, collect=self.collect, balance="column", argument=name, stays=self.stays)
        return by_column.scatter(Call(call.where, call.names, (planned, *rest.args), rest.kwargs), mesh)


@dataclass(frozen=True)
class StepsShard(Shard):
    """For `sft_steps(batch, count)`: `count` optimizer steps of equal numbers of rows, in the rows' order."""

    def scatter(self, call: Call, mesh: Mesh) -> Shipment:
        batch, rest = _taken(call, "count")
        count: int = rest.kwargs["count"]
        if not 1 <= count <= len(batch):
            raise DispatchError(f"{call.where}: {len(batch)} rows do not make {count} steps")
        parts = np.array_split(np.arange(len(batch)), count)
        batch, counts = counted(batch, parts)
        planned = placed(batch, parts, mesh.size(self.mesh), counts=counts)
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


def norm_length(algorithm: AlgorithmConfig) -> int | None:
    """The constant of `aggregate = "seq_mean_token_sum_norm"`, None for another. Raises ConfigError where it is missing."""
    if algorithm.aggregate != "seq_mean_token_sum_norm":
        return None
    if algorithm.length_norm is None:
        raise ConfigError('algorithm.aggregate = "seq_mean_token_sum_norm" needs algorithm.length_norm, a number of tokens')
    return algorithm.length_norm


def placed(
    batch: TensorDict,
    parts: Sequence[np.ndarray],
    ranks: int,
    keep: np.ndarray | None = None,
    counts: tuple[Denominators, ...] = (),
) -> TensorDict:
    """The batch with `minibatch` (the part of each row), `dp_rank` (balanced by tokens within each part; -1 for a
    row of no part), the batch-wide `counts`, and `together` and `prefix` where any rows stay together.

    `keep` holds the rows' group numbers where groups are kept on one rank; `counts` the denominators of each part.
    """
    columns = {name: np.zeros(len(batch), dtype=np.int64) for name in ("minibatch", "prefix")}
    columns |= {name: np.full(len(batch), -1, dtype=np.int64) for name in ("dp_rank", "together")}
    tokens = lengths(batch).numpy()
    for number, rows in enumerate(parts):
        if len(rows) == 0:
            continue
        columns["minibatch"][rows] = number
        found = settled(tokens[rows], ranks, *columns_of(batch, rows), None if keep is None else keep[rows])
        for owner, mine in enumerate(found.ranks):
            columns["dp_rank"][rows[mine]] = owner
        columns["together"][rows], columns["prefix"][rows] = found.together, found.prefix
    if not (columns["together"] >= 0).any():
        del columns["together"], columns["prefix"]
    out: TensorDict = batch.copy()
    out.update({name: torch.from_numpy(values) for name, values in columns.items()})
    out.set("counts", wide(counts, len(batch)))
    return out

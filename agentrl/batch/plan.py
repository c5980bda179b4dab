"""Which rows of a batch run where and when: rank by rank, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tensordict import TensorDict

from agentrl.batch.balance import lower_bound, portfolio
from agentrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Plan:
    """`rows[rank][micro]` are row numbers; every rank has the same number of micro-batches (an empty
    list is a dummy). `cost` = sum over micro-batches of the slowest rank's cost, never below `bound`."""

    rows: list[list[list[int]]]
    cost: float
    bound: float
    winner: str

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @property
    def micros(self) -> int:
        """Micro-batches a rank, the same on all ranks, at least 1."""
        return len(self.rows[0])


def plan(
    lengths: Sequence[int] | np.ndarray | torch.Tensor,
    ranks: int,
    cap: int,
    a: float = 1.0,
    b: float = 0.0,
    *,
    overhead: float = 0.0,
    groups: Sequence[int] | np.ndarray | torch.Tensor | None = None,
    prefix: Sequence[int] | np.ndarray | torch.Tensor | None = None,
) -> Plan:
    """Place every sequence exactly once, at most `cap` tokens a micro-batch, with a small total cost.

    A sequence of n tokens costs a n + b n^2 (`b` = 0: linear layers only; attention adds the square)
    and each micro-batch `overhead` more. The step takes as long as its slowest rank in each row of
    micro-batches, so what is minimized is the sum over rows of the largest micro-batch cost.

    `groups[i]`, where given, is a group number: sequences of one group go into the same micro-batch as
    far as the cap allows. A negative number is no group: that sequence is free. `prefix[i]`: the first
    tokens of the sequence that the members of its group in one micro-batch compute once between them
    (equal within a group; 0: none). They cost, and count against the cap, once.

    Raises ConfigError where a single sequence is longer than the cap.
    """
    tokens = np.asarray(lengths, dtype=np.int64).reshape(-1)
    check_cap(tokens, cap)
    costs = a * tokens.astype(np.float64) + b * tokens.astype(np.float64) ** 2
    once = np.zeros_like(tokens) if prefix is None else np.asarray(prefix, dtype=np.int64)
    unit = np.arange(len(tokens)) if groups is None else group_units(tokens, np.asarray(groups), cap, once)
    size = unit_sums(unit, tokens, once).astype(np.int64)
    price = unit_sums(unit, costs, a * once + b * once.astype(np.float64) ** 2)
    best = portfolio(size, price, ranks, cap, overhead)
    table = _table(best.where[unit], ranks, best.micros)
    return Plan(table, best.cost, lower_bound(size, price, ranks, cap), best.name)


def group_units(tokens: np.ndarray, groups: np.ndarray, cap: float, prefix: np.ndarray | None = None) -> np.ndarray:
    """Unit of each sequence: a group, or the parts of a group that fill the cap one after the other; a
    sequence with a negative group number is a unit alone. See `plan` for `prefix`."""
    unit = np.empty(len(tokens), dtype=np.int64)
    once = np.zeros_like(tokens) if prefix is None else prefix
    last, room, number = -1, 0.0, -1
    for row in np.argsort(groups, kind="stable").tolist():
        joins = groups[row] == last and last >= 0 and room >= tokens[row] - once[row]
        if not joins:
            number, last, room = number + 1, int(groups[row]), float(cap)
        room -= float(tokens[row] - (once[row] if joins else 0))
        unit[row] = number
    return unit


def unit_sums(unit: np.ndarray, values: np.ndarray, once: np.ndarray) -> np.ndarray:
    """Sum of `values` over each unit, where `once` (equal within a unit) counts for one member only."""
    count = int(unit.max()) + 1 if len(unit) else 0
    total = np.bincount(unit, weights=values, minlength=count)
    members = np.bincount(unit, minlength=count)
    spared = np.zeros(count)
    spared[unit] = once
    return np.asarray(total - (members - 1) * spared)


def _table(where: np.ndarray, ranks: int, micros: int) -> list[list[list[int]]]:
    order = np.argsort(where, kind="stable")
    ends = np.cumsum(np.bincount(where, minlength=micros * ranks))
    bins = [part.tolist() for part in np.split(order, ends[:-1])]
    return [[bins[micro * ranks + rank] for micro in range(micros)] for rank in range(ranks)]


def check_cap(tokens: np.ndarray, cap: int) -> None:
    """Raise ConfigError, naming the sequence, where one is longer than the cap."""
    if len(tokens) and int(tokens.max()) > cap:
        worst = int(tokens.argmax())
        raise ConfigError(
            f"sequence {worst} has {int(tokens[worst])} tokens, more than the hard cap of {cap} tokens "
            f"a micro-batch: "
            f"set optim.micro_tokens to at least {int(tokens[worst])}, or lower rollout.max_episode_tokens"
        )


def assign(batch: TensorDict, schedule: Plan) -> TensorDict:
    """The batch with row columns `dp_rank` and `micro` int64 [N], for `Shard(balance="column")`."""
    rank_of = torch.full((len(batch),), -1, dtype=torch.int64)
    micro_of = torch.full((len(batch),), -1, dtype=torch.int64)
    for rank, micros in enumerate(schedule.rows):
        for micro, rows in enumerate(micros):
            rank_of[rows] = rank
            micro_of[rows] = micro
    if len(batch) and int(rank_of.min()) < 0:
        raise ValueError("the plan is of another batch: it leaves rows without a place")
    out: TensorDict = batch.copy()
    return out.update({"dp_rank": rank_of, "micro": micro_of})


def micro_rows(batch: TensorDict, micros: int) -> list[list[int]]:
    """On a worker: the local row numbers of each of its `micros` micro-batches, from column `micro`."""
    micro = np.asarray(batch.get("micro"))
    return [np.flatnonzero(micro == number).tolist() for number in range(micros)]

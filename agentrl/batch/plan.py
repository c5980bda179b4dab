"""Which rows of a batch run where and when: rank by rank, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tensordict import TensorDict

from agentrl.batch.balance import balance_bins
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
    lengths: Sequence[int] | np.ndarray | torch.Tensor, ranks: int, cap: int, a: float = 1.0, b: float = 0.0
) -> Plan:
    """Place every sequence exactly once, at most `cap` tokens a micro-batch, with a small total cost.

    A sequence of n tokens costs a n + b n^2 (`b` = 0: linear layers only; attention adds the square).
    The step takes as long as its slowest rank in each micro-batch row, so what is minimized is the sum
    over rows of the largest micro-batch cost.

    Raises ConfigError where a single sequence is longer than the cap.
    """
    tokens = np.asarray(lengths, dtype=np.int64).reshape(-1)
    check_cap(tokens, cap)
    costs = a * tokens.astype(np.float64) + b * tokens.astype(np.float64) ** 2
    best = balance_bins(tokens, costs, ranks, cap)
    table = [[best.bins[micro * ranks + rank] for micro in range(best.micros)] for rank in range(ranks)]
    return Plan(table, best.cost, best.bound, best.name)


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

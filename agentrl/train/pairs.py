"""Optimizer steps of losses over pairs of episodes (agentrl/algorithm/preference.py).

Such a loss depends on an episode only through one number: the sum of its tokens' log probabilities, or its score. So a step
first computes these numbers for all episodes, without gradient, and adds them up over rows and ranks; then the loss and its
derivative by each number, d; and then, micro-batch by micro-batch, the gradient of d times the number. By the chain rule that is
the gradient of the loss. The rows of a pair may therefore be in different micro-batches and on different ranks, for one more
forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from agentrl.algorithm.preference import bradley_terry, dpo
from agentrl.algorithm.ragged import row_ids
from agentrl.batch.rows import Ragged
from agentrl.batch.schedule import plan_micro_batches
from agentrl.train.engine import BaseEngine
from agentrl.train.minibatch import minibatches
from agentrl.train.update import Pack, Steps

RowValues = Callable[[BaseEngine, Pack], Tensor]
"""One number a row, float32 [N] (of a dummy without rows: [1]), with gradient if grad mode is on."""


class PairLoss(Protocol):
    """`totals` float64 [P, 2]: what the chosen and the rejected episode of each pair came to; `reference`: the same of the column
    of that name. Returns the losses [P], and metrics."""

    def __call__(self, totals: Tensor, reference: Tensor) -> tuple[Tensor, dict[str, Tensor]]: ...


@dataclass(frozen=True, slots=True)
class Dpo:
    """`dpo` at its `beta`. Metrics: `accuracy` (pairs of which the chosen one's implicit reward is higher), and the rewards,
    beta (log pi - log ref)."""

    beta: float

    def __call__(self, totals: Tensor, reference: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        losses = dpo(totals[:, 0], totals[:, 1], reference[:, 0], reference[:, 1], self.beta)
        return losses, _compared(self.beta * (totals.detach() - reference))


@dataclass(frozen=True, slots=True)
class BradleyTerry:
    """`bradley_terry`. Metrics: `accuracy` (pairs of which the chosen one has the higher score), and the scores."""

    def __call__(self, totals: Tensor, reference: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return bradley_terry(*totals.unbind(1)), _compared(totals.detach())


def _compared(rewards: Tensor) -> dict[str, Tensor]:
    chosen, rejected = rewards.unbind(1)
    return {
        "accuracy": (chosen > rejected).double(),
        "reward_chosen": chosen,
        "reward_rejected": rejected,
        "reward_margin": chosen - rejected,
    }


def means(losses: Tensor, found: dict[str, Tensor]) -> dict[str, float]:
    """The mean over pairs of the loss and of each metric."""
    return {"loss": float(losses.detach().mean()), **{name: float(values.mean()) for name, values in found.items()}}


def policy_totals(engine: BaseEngine, piece: Pack) -> Tensor:
    """The sum of the log probabilities of each row's sampled tokens."""
    logprobs, _ = engine.logprobs(piece.micro, 1.0, False)
    rows = row_ids(piece.compact).to(logprobs.device)
    return torch.zeros(len(piece.compact) - 1, device=logprobs.device).index_add(0, rows, logprobs)


def scores(engine: BaseEngine, piece: Pack) -> Tensor:
    """The score of each row."""
    return engine.scores(piece.micro)


def pair_step(engine: BaseEngine, view: Ragged, cap: int, pairs: int, values: RowValues, loss: PairLoss) -> dict[str, float]:
    """One optimizer step over the mean of `loss`; every rank calls it with its own rows. Row columns: `trajectory` (2 i: chosen,
    2 i + 1: rejected), `reference`, and `whole` (bool: whether the row's number is part of its episode's).

    Raises NonFiniteError if the weights are not finite afterwards.
    """
    [micros] = plan_micro_batches(view, minibatches(view), cap, engine)
    place, part = view.row("trajectory"), view.row("whole").double()
    with torch.no_grad():
        own = [values(engine, Pack(view, rows, engine.device)).double().cpu() for rows in micros]
    totals, reference = torch.zeros(2 * pairs, dtype=torch.float64), torch.zeros(2 * pairs, dtype=torch.float64)
    for rows, numbers in zip(micros, own, strict=True):
        if rows:
            totals.index_add_(0, place[rows], numbers * part[rows])
    totals = engine.reduce(totals, "sum").view(pairs, 2).requires_grad_(True)
    every = np.concatenate([np.asarray(rows, dtype=np.int64) for rows in micros])
    reference.index_add_(0, place[every], (view.row("reference").double() * part)[every])
    reference = engine.reduce(reference, "sum").view(pairs, 2)
    losses, found = loss(totals, reference)
    [slopes] = torch.autograd.grad(losses.mean(), totals)
    by_row = slopes.flatten()[place] * part

    def share(rows: list[int]) -> Tensor:
        now = values(engine, Pack(view, rows, engine.device))
        weights = by_row[rows] if rows else torch.zeros(len(now), dtype=torch.float64)
        return (now * weights.to(now)).sum()

    steps = Steps(engine, view, "a step of pairs")
    steps.take(0, micros, share)
    steps.check()
    return {**steps.metrics(), **means(losses, found)}

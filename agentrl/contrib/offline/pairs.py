"""Optimizer steps of losses over pairs of episodes, one chosen and one rejected.

Such a loss depends on an episode only through one number: the sum of its tokens' log probabilities, or its score. So a step
first computes these numbers for all episodes, without gradient, and adds them up over rows and ranks; then the loss and its
derivative by each number, d; and then, micro-batch by micro-batch, the gradient of d times the number. By the chain rule that is
the gradient of the loss. The rows of a pair may therefore be in different micro-batches and on different ranks, for one more
forward pass."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from agentrl.data.rows import Ragged, row_ids
from agentrl.data.schedule import plan_micro_batches
from agentrl.trainer.minibatch import minibatches
from agentrl.trainer.train_engine import BaseEngine
from agentrl.trainer.update import Pack, Steps

RowValues = Callable[[BaseEngine, Pack], Tensor]
"""One number a row, float32 [N] (of a dummy without rows: [1]), with gradient if grad mode is on."""
PairLoss = Callable[[Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]
"""(`totals` float64 [P, 2]: the numbers of the chosen and the rejected episode of each pair; `reference` [P, 2]: those of the
column of that name) -> the losses [P], and metrics."""


def dpo(totals: Tensor, reference: Tensor, *, beta: float) -> tuple[Tensor, dict[str, Tensor]]:
    """-log sigmoid(beta ((log pi - log ref)(chosen) - (log pi - log ref)(rejected))): Rafailov et al. 2023, arXiv:2305.18290,
    eq. 7. Metrics: `accuracy` (share of pairs whose chosen side has the higher implicit reward), and the rewards,
    beta (log pi - log ref)."""
    chosen, rejected = (totals - reference).unbind(1)
    return -logsigmoid(beta * (chosen - rejected)), _compare_pairs(beta * (totals.detach() - reference))


def bradley_terry(totals: Tensor, reference: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """-log sigmoid(score(chosen) - score(rejected)): Bradley and Terry 1952; Ouyang et al. 2022, arXiv:2203.02155, eq. 1.
    Metrics: `accuracy` (share of pairs whose chosen side has the higher score), and the scores."""
    chosen, rejected = totals.unbind(1)
    return -logsigmoid(chosen - rejected), _compare_pairs(totals.detach())


def _compare_pairs(rewards: Tensor) -> dict[str, Tensor]:
    chosen, rejected = rewards.unbind(1)
    return {
        "accuracy": (chosen > rejected).double(),
        "reward_chosen": chosen,
        "reward_rejected": rejected,
        "reward_margin": chosen - rejected,
    }


def mean_metrics(losses: Tensor, found: dict[str, Tensor]) -> dict[str, float]:
    """The mean over pairs of the loss and of each metric."""
    return {"loss": float(losses.detach().mean()), **{name: float(values.mean()) for name, values in found.items()}}


def policy_totals(engine: BaseEngine, piece: Pack) -> Tensor:
    """The sum of the log probabilities of each row's sampled tokens."""
    logprobs, _ = engine.logprobs(piece.micro, 1.0, False)
    rows = row_ids(piece.compact).to(logprobs.device)
    return torch.zeros(len(piece.compact) - 1, device=logprobs.device).index_add(0, rows, logprobs)


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
    return {**steps.metrics(), **mean_metrics(losses, found)}

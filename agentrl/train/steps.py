"""Optimizer steps that are taken only where everything in them is finite."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import torch
from tensordict import TensorDict

from agentrl.errors import NonFiniteError
from agentrl.train.engine import BaseEngine
from agentrl.train.finite import named_rows

log = logging.getLogger(__name__)


class Steps:
    """The optimizer steps of one update: `norms` holds the gradient norm of each before clipping, `skipped` counts
    those that were not taken.

    A step with a loss or a gradient norm that is not finite is skipped on all ranks alike: its gradients are dropped,
    weights and optimizer stay as they are.
    """

    def __init__(self, engine: BaseEngine, batch: TensorDict, where: str) -> None:
        self._engine, self._batch, self._where = engine, batch, where
        self.norms: list[float] = []
        self._taken: list[float] = []
        self.skipped = 0

    def take(self, number: int, micros: list[list[int]], loss: Callable[[list[int]], torch.Tensor]) -> None:
        """Backward passes over the micro-batches (row numbers) of minibatch `number`, and its optimizer step."""
        broken: list[list[int]] = []
        for index, rows in enumerate(micros):
            share = loss(rows)
            if not bool(torch.isfinite(share.detach())):
                broken.append(rows)
            self._engine.backward(share, last=index == len(micros) - 1)
        sound = not float(self._engine.reduce(torch.tensor([float(len(broken))]), "max"))
        norm = self._engine.step(sound)
        self.norms.append(norm)
        if sound and math.isfinite(norm):
            self._taken.append(norm)
            return
        self.skipped += 1
        if broken:
            self._say(number, "the loss is not finite in a micro-batch", broken)
        elif sound:
            self._say(number, f"the gradient norm is {norm}; it is that", micros)

    def _say(self, number: int, what: str, micros: list[list[int]]) -> None:
        rows = named_rows(self._batch, [row for micro in micros for row in micro])
        log.error("%s: optimizer step %d is not taken: %s of %s", self._where, number, what, rows)

    def check(self) -> None:
        """Raise NonFiniteError, on all ranks alike, where the weights are not finite any more."""
        if not self._engine.finite():
            raise NonFiniteError(f"{self._where}: the weights are not finite any more; they are neither published nor saved")

    def metrics(self) -> dict[str, float]:
        """`grad_norm`, the mean over the steps that were taken, `skipped_optimizer_steps` and `optimizer_steps` (taken)."""
        return {
            "grad_norm": sum(self._taken) / max(len(self._taken), 1),
            "skipped_optimizer_steps": float(self.skipped),
            "optimizer_steps": float(len(self._taken)),
        }

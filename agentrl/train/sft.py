"""Supervised steps: cross entropy on the assistant's tokens of packed transcripts."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from agentrl.batch.rows import Ragged
from agentrl.batch.schedule import plan_micro_batches
from agentrl.config.schema import SftConfig
from agentrl.train.engine import BaseEngine
from agentrl.train.meter import Meter
from agentrl.train.minibatch import counts_of, minibatches
from agentrl.train.optim import rate
from agentrl.train.update import Pack, Steps

FLOOR = 0.1
"""The cosine falls to this share of the learning rate at step `sft.min_steps`, and stays there."""


def sft_rate(step: int, cfg: SftConfig) -> float:
    """The learning rates at `step` (from 0) as a fraction of their base."""
    return rate(step, cfg.warmup, "cosine", cfg.min_steps, floor=FLOOR)


def sft_steps(engine: BaseEngine, view: Ragged, rate_at: Callable[[int], float], first: int, cap: int) -> list[dict[str, float]]:
    """One optimizer step per minibatch, numbered from `first`, at the share `rate_at(number)` of the learning rates; every rank
    calls it with its own rows. Returns the metrics of each step.

    The loss of a step is the mean over its assistant tokens (column `sampled`) on all ranks. Raises NonFiniteError if
    the weights are not finite after a step.
    """
    micros = plan_micro_batches(view, minibatches(view), cap, engine)
    counts, found = counts_of(view), list[dict[str, float]]()
    for number, bins in enumerate(micros):
        meter, step = Meter(), Steps(engine, view, f"supervised steps from {first}")
        engine.set_rate(rate_at(first + number))

        def loss(rows: list[int], tokens: float = max(counts[number].tokens, 1.0), meter: Meter = meter) -> Tensor:
            logprobs, _ = engine.logprobs(Pack(view, rows, engine.device).micro, 1.0, False)
            share = -logprobs.sum() / tokens
            meter.add("loss", share)
            return share

        step.take(number, bins, loss)
        step.check()
        sums, _ = meter.totals(engine)
        own = {"loss": sums["loss"], "tokens_trained": counts[number].tokens, "lr_factor": rate_at(first + number)}
        found.append(step.metrics() | own)
    return found

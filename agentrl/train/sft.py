"""Supervised steps: cross entropy on the assistant's tokens of packed transcripts."""

from __future__ import annotations

from tensordict import TensorDict
from torch import Tensor

from agentrl.config.schema import SftConfig
from agentrl.train.engine import BaseEngine
from agentrl.train.micro import Meter, Pack, split
from agentrl.train.optim import rate
from agentrl.train.steps import Steps
from agentrl.train.update import counts_of, minibatches

FLOOR = 0.1
"""The cosine falls to this share of the learning rate at step `sft.min_steps`, and stays there."""


def sft_rate(step: int, cfg: SftConfig) -> float:
    """The share of the base learning rates at `step`, from 0."""
    return rate(step, cfg.warmup, "cosine", cfg.min_steps, floor=FLOOR)


def sft_steps(engine: BaseEngine, batch: TensorDict, cfg: SftConfig, first: int, cap: int) -> dict[str, float]:
    """One optimizer step a minibatch, numbered from `first`; every rank calls it with its own rows.

    The loss of a step is the mean over its assistant tokens (column `sampled`) on all ranks. Raises NonFiniteError where
    the weights are not finite afterwards.
    """
    parts = minibatches(batch)
    micros = split(engine, batch, parts, cap)
    counts = counts_of(batch)
    meter, steps = Meter(), Steps(engine, batch, f"supervised steps from {first}")
    for number, bins in enumerate(micros):
        engine.set_rate(sft_rate(first + number, cfg))

        def loss(rows: list[int], tokens: float = max(counts[number].tokens, 1.0)) -> Tensor:
            logprobs, _ = engine.logprobs(Pack(batch, rows, engine.device).micro, 1.0, False)
            share = -logprobs.sum() / tokens
            meter.add("loss", share)
            return share

        steps.take(number, bins, loss)
    steps.check()
    sums, _ = meter.totals(engine)
    return {
        **steps.metrics(),
        "loss": sums["loss"] / len(parts),
        "tokens_trained": sum(part.tokens for part in counts),
        "lr_factor": sft_rate(first + len(parts) - 1, cfg),
    }

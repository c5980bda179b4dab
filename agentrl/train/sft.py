"""Supervised steps: cross entropy on the assistant's tokens of packed transcripts."""

from __future__ import annotations

from tensordict import TensorDict

from agentrl.config.schema import SftConfig
from agentrl.train.engine import BaseEngine
from agentrl.train.micro import Meter, Pack, split
from agentrl.train.optim import rate
from agentrl.train.update import denominators, minibatches

FLOOR = 0.1
"""The cosine falls to this share of the learning rate at step `sft.min_steps`, and stays there."""


def sft_rate(step: int, cfg: SftConfig) -> float:
    """The share of the base learning rates at `step`, from 0."""
    return rate(step, cfg.warmup, "cosine", cfg.min_steps, floor=FLOOR)


def sft_steps(
    engine: BaseEngine, batch: TensorDict, cfg: SftConfig, first: int, cap: int
) -> dict[str, float]:
    """One optimizer step a minibatch, numbered from `first`; every rank calls it with its own rows.

    The loss of a step is the mean over its assistant tokens (column `sampled`) on all ranks.
    """
    parts = minibatches(batch)
    micros = split(engine, batch, parts, cap)
    counts = denominators(engine, batch, parts)
    meter = Meter()
    norms: list[float] = []
    for number, bins in enumerate(micros):
        engine.set_rate(sft_rate(first + number, cfg))
        for index, rows in enumerate(bins):
            piece = Pack(batch, rows, engine.device)
            logprobs, _ = engine.logprobs(piece.micro, 1.0, False)
            loss = -logprobs.sum() / counts[number].tokens
            meter.add("loss", loss)
            engine.backward(loss, last=index == len(bins) - 1)
        norms.append(engine.step())
    sums, _ = meter.totals(engine)
    return {
        "loss": sums["loss"] / len(parts),
        "grad_norm": sum(norms) / len(norms),
        "tokens_trained": sum(part.tokens for part in counts),
        "lr_factor": sft_rate(first + len(parts) - 1, cfg),
    }

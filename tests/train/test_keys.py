"""Every key of [optim] and [sft] that the trainer reads changes the weights; micro_tokens must not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from train_batches import make_batch, toy_optim, toy_sft, trajectories

from agentrl.batch import collate
from agentrl.cluster.launch import launch
from agentrl.config.schema import AlgorithmConfig, ModelConfig
from agentrl.train.actor import Actor
from agentrl.train.optim import rate

OPTIM: dict[str, Any] = {
    "lr": 2e-3,
    "weight_decay": 0.5,
    "betas": (0.5, 0.9),
    "max_grad_norm": 0.01,
    "warmup": 4,
    "schedule": "linear",
}
SFT: dict[str, Any] = {"lr": 1e-4, "matrix_lr": 1e-3, "warmup": 7, "min_steps": 5}


def flat(group: Any) -> torch.Tensor:
    buckets = group.run(Actor.export_weights)
    return torch.cat([tensor.flatten() for bucket in buckets for tensor in bucket.values()])


def trained(tiny: str, **optim: Any) -> torch.Tensor:
    group = launch(Actor, backend="inline", world_size=1)
    group.run(Actor.init_model, tiny, ModelConfig(), toy_optim(**optim), total_steps=4)
    for step in range(3):
        group.run(Actor.update, make_batch(8, seed=step), AlgorithmConfig(minibatch=4), step=step)
    return flat(group)


@pytest.fixture(scope="module")
def plain(tiny: str) -> torch.Tensor:
    return trained(tiny)


@pytest.mark.parametrize("key", OPTIM)
def test_optim_keys(tiny: str, plain: torch.Tensor, key: str) -> None:
    assert not torch.allclose(trained(tiny, **{key: OPTIM[key]}), plain, atol=1e-6)


def test_micro_tokens_changes_rounding_only(tiny: str, plain: torch.Tensor) -> None:
    # Adam divides by the gradient's own size, so rounding shows where a gradient is nearly zero
    assert (trained(tiny, micro_tokens=64) - plain).abs().mean() < 1e-6


def supervised(tiny: str, **sft: Any) -> torch.Tensor:
    group = launch(Actor, backend="inline", world_size=1)
    group.run(Actor.init_model, tiny, ModelConfig(), toy_optim())
    group.run(Actor.begin_sft, toy_sft(**{"warmup": 2, "min_steps": 20, **sft}))
    group.run(Actor.sft_steps, collate(trajectories(20)), 10)
    return flat(group)


def test_sft_keys(tiny: str) -> None:
    found = [supervised(tiny), *(supervised(tiny, **{key: value}) for key, value in SFT.items())]
    for index, weights in enumerate(found):
        assert not any(torch.equal(weights, other) for other in found[:index]), index


def test_schedules() -> None:
    assert [rate(s, 2, "constant", None) for s in range(4)] == [0.5, 1.0, 1.0, 1.0]
    assert [rate(s, 0, "linear", 4) for s in range(6)] == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert rate(7, 2, "cosine", 12) == pytest.approx(0.5)
    assert rate(99, 2, "cosine", 12, floor=0.1) == pytest.approx(0.1)

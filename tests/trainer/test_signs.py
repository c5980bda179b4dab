"""Which way an update pulls, and by how much: what a flipped sign or a forgotten step would leave "changed" all the same."""

from __future__ import annotations

import math
from pathlib import Path
from typing import cast

import pytest
import torch

from agentrl.cluster.group import WorkerGroup
from agentrl.cluster.launch import launch
from agentrl.config.schema import AlgorithmConfig, Choice, ModelConfig
from agentrl.data.rows import nested_tensor, offsets_of
from agentrl.trainer.actor import Actor
from agentrl.trainer.train_engine import BaseEngine
from agentrl.trainer.update import Meter
from tests.publishing import weights_of as weights
from tests.trainer.train_batches import make_batch, toy_optim, train_batch

REINFORCE = AlgorithmConfig(minibatch=64, loss=Choice(name="reinforce"))


def start(tiny: str, total: int | None = None, **optim: object) -> WorkerGroup[Actor]:
    group = launch(Actor, backend="inline", world_size=1)
    group.run(Actor.init_model, tiny, ModelConfig(), toy_optim(**optim), total)
    return group


def mean_of(group: WorkerGroup[Actor], name: str, batch: object) -> float:
    found = group.run(Actor.compute_logprob, batch)[name].values()
    return float(found[batch["sampled"].values()].mean())  # type: ignore[index]


def without_advantages(batch: object) -> object:
    sampled = batch["sampled"]  # type: ignore[index]
    return batch.update({"advantages": nested_tensor(torch.zeros(len(sampled.values())), offsets_of(sampled))})  # type: ignore[attr-defined]


def test_an_entropy_bonus_raises_entropy(tiny: str) -> None:
    batch = without_advantages(make_batch(8))
    group = start(tiny, lr=1e-3)
    entropy = [mean_of(group, "entropy", batch)]
    for step in range(3):
        train_batch(group, Actor.update, batch, REINFORCE.model_copy(update={"entropy_bonus": 1.0}), step=step)
        entropy.append(mean_of(group, "entropy", batch))
    assert entropy == sorted(entropy) and entropy[3] > entropy[0] + 0.003, entropy


def test_tokens_with_a_positive_advantage_become_likelier_and_the_others_less(tiny: str) -> None:
    batch = make_batch(8)
    group = start(tiny)
    before = group.run(Actor.compute_logprob, batch)["logprobs"].values()
    for step in range(3):
        train_batch(group, Actor.update, batch, REINFORCE, step=step)
    moved = group.run(Actor.compute_logprob, batch)["logprobs"].values() - before
    assert float((moved * batch["advantages"].values()).sum()) > 0.1


def test_weight_decay_shrinks_matrices_by_its_rate_and_leaves_norms(tiny: str) -> None:
    """Without a gradient AdamW leaves w (1 - lr decay)."""
    group = start(tiny, lr=1e-2, weight_decay=0.5)
    before = weights(group)
    train_batch(group, Actor.update, without_advantages(make_batch(8)), AlgorithmConfig(minibatch=64))
    for name, after in weights(group).items():
        factor = 1.0 if after.ndim <= 1 else 1 - 1e-2 * 0.5
        assert torch.allclose(after, before[name] * factor, atol=1e-7), name
    assert {tensor.ndim for tensor in before.values()} == {1, 2}


def test_a_step_takes_its_own_gradient_and_none_of_the_step_before(tiny: str) -> None:
    """At a rate of next to nothing the weights stay, so the same batch has the same gradient norm every time."""
    group = start(tiny, lr=1e-12)
    norms = [train_batch(group, Actor.update, make_batch(8), REINFORCE, step=step)["grad_norm"] for step in range(3)]
    assert norms[1:] == pytest.approx([norms[0]] * 2, rel=1e-4)


def test_the_gradient_is_cut_to_its_largest_norm(tiny: str) -> None:
    """Adam does not see the length of a gradient that is always cut alike, so the second one is much longer."""
    plain, cut = (start(tiny, lr=1e-3, max_grad_norm=norm) for norm in (1e6, 1e-3))
    for group in (plain, cut):
        for step, scale in enumerate((1.0, 100.0)):
            batch = make_batch(8, seed=step)
            sampled = batch["sampled"]
            batch.update({"advantages": nested_tensor(batch["advantages"].values() * scale, offsets_of(sampled))})
            train_batch(group, Actor.update, batch, REINFORCE, step=step)
    one, two = (_after_adam(tiny, norm) for norm in (1e6, 1e-3))
    assert distance(one, two) > 1e-4
    assert distance(weights(plain), one) < 1e-6 and distance(weights(cut), two) < 1e-6


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Mean absolute difference over all weights."""
    return float(torch.cat([(one[name] - other[name]).abs().flatten() for name in one]).mean())


def _after_adam(tiny: str, most: float) -> dict[str, torch.Tensor]:
    """The same two steps with plain transformers and torch."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny, attn_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0)
    for step, scale in enumerate((1.0, 100.0)):
        batch = make_batch(8, seed=step)
        total, tokens = torch.zeros(()), int(batch["sampled"].values().sum())
        for row in range(8):
            ids, advantage = batch["token_ids"][row], batch["advantages"][row] * scale
            table = torch.log_softmax(model(ids[None]).logits[0], -1)
            total = total - (table[:-1].gather(1, ids[1:, None]).squeeze(1) * advantage[1:]).sum() / tokens
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), most)
        optimizer.step()
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


def test_every_epoch_takes_every_minibatch_once(tiny: str) -> None:
    algorithm = AlgorithmConfig(minibatch=4, epochs=3, loss=Choice(name="reinforce"))
    metrics = train_batch(start(tiny), Actor.update, make_batch(8), algorithm)
    assert metrics["optimizer_steps"] == 6


def test_an_off_policy_correction_weighs_the_loss(tiny: str) -> None:
    """Proximal less behaviour is log 1.5 on every token: loss and gradient are 1.5 times those without a correction."""
    plain = AlgorithmConfig(minibatch=64, loss=Choice(name="reinforce"), proximal="recompute")
    corrected = plain.model_copy(update={"correction": Choice(name="truncated", args={"cap": 2.0})})
    found = []
    for algorithm in (plain, corrected):
        batch = make_batch(8)
        sampled = batch["sampled"]
        old = batch["logprobs"].values() + math.log(1.5) * sampled.values()
        batch.update({"old_logprobs": nested_tensor(old, offsets_of(sampled))})
        found.append(train_batch(start(tiny), Actor.update, batch, algorithm))
    assert found[1]["loss"] == pytest.approx(1.5 * found[0]["loss"], rel=1e-5)
    assert found[1]["grad_norm"] == pytest.approx(1.5 * found[0]["grad_norm"], rel=1e-5)


def test_a_resume_goes_on_with_the_schedule_and_the_random_numbers(tiny: str, tmp_path: Path) -> None:
    group = start(tiny, total=4, schedule="linear")
    rates = [train_batch(group, Actor.update, make_batch(4, seed=step), REINFORCE, step=step)["lr"] for step in range(2)]
    torch.manual_seed(5)
    group.run(Actor.save, str(tmp_path / "c"))
    expected = torch.rand(3)
    torch.manual_seed(6)
    resumed = start(tiny, total=4, schedule="linear")
    resumed.run(Actor.load, str(tmp_path / "c"))
    assert torch.equal(torch.rand(3), expected)
    rates.append(train_batch(resumed, Actor.update, make_batch(4, seed=2), REINFORCE, step=2)["lr"])
    assert rates == pytest.approx([1e-3, 0.75e-3, 0.5e-3])


def test_a_rank_without_tokens_sends_its_maxima_in_the_precision_of_the_others() -> None:
    """All ranks reduce together: one float32 buffer among those of float64 is read as other numbers."""
    sent: list[torch.Tensor] = []

    class Engine:
        def reduce(self, values: torch.Tensor, how: str) -> torch.Tensor:
            sent.append(values)
            return values

    meter = Meter()
    meter.top("ratio", torch.zeros(0))
    assert meter.totals(cast(BaseEngine, Engine())) == ({}, {"ratio": 0.0})
    assert [values.dtype for values in sent] == [torch.float64]

"""The actor in one process: updates, supervised steps, save and load, export."""

import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.config.schema import AlgorithmConfig, Choice, LoraSection, ModelConfig
from agentrl.data.rows import collate, nested_tensor, offsets_of
from agentrl.trainer.actor import Actor
from agentrl.trainer.train_engine import BaseEngine
from agentrl.trainer.update import Meter
from agentrl.utils.errors import AgentrlError, CheckpointError, ConfigError, ModelError, WorkerError
from tests.publishing import weights_of as weights
from tests.trainer.learners import start
from tests.trainer.plain_trainer import Batch, aggregated, load, norm_of, tokens_of
from tests.trainer.train_batches import make_batch, toy_sft, train_batch, trajectories

PLAIN = AlgorithmConfig(minibatch=8, loss=Choice(name="reinforce"))


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("lora", [None, LoraSection(rank=4, alpha=8.0)], ids=["whole", "adapters"])
def test_save_and_resume_is_an_unbroken_run(tiny: str, tmp_path: Path, lora: LoraSection | None) -> None:
    algorithm = AlgorithmConfig(minibatch=4)
    straight, broken, resumed = (start(tiny, ModelConfig(lora=lora), warmup=3) for _ in range(3))
    for step in range(4):
        train_batch(straight, Actor.update, make_batch(8, seed=step), algorithm, step=step)
    for step in range(2):
        train_batch(broken, Actor.update, make_batch(8, seed=step), algorithm, step=step)
    torch.manual_seed(5)
    broken.run(Actor.save, str(tmp_path / "c"))
    drawn = torch.rand(3)
    torch.manual_seed(6)
    resumed.run(Actor.load, str(tmp_path / "c"))
    assert torch.equal(torch.rand(3), drawn), "the random numbers go on too"
    for step in range(2, 4):
        metrics = train_batch(resumed, Actor.update, make_batch(8, seed=step), algorithm, step=step)
    assert metrics["lr"] == pytest.approx(1e-3)
    assert same(weights(straight), weights(resumed))
    assert not same(weights(straight), weights(broken))


def test_supervised_steps_learn_and_end_with_a_model_on_disk(tiny: str, tmp_path: Path) -> None:
    group = start(tiny)
    group.run(Actor.begin_sft, toy_sft(warmup=2, min_steps=64))
    batch = collate(trajectories(16, seed=5))
    losses = [train_batch(group, Actor.sft_steps, batch, 4)[-1]["loss"] for _ in range(16)]
    assert losses[-1] < 0.7 * losses[0]
    group.run(Actor.end_sft, str(tmp_path / "warm"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "warm")
    exported = weights(group)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, exported[name])
    assert "lm_head.weight" not in exported
    again = start(str(tmp_path / "warm"))
    assert same(weights(again), exported)


def test_clear_errors(tiny: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such model folder"):
        start(str(tmp_path / "tinny"))
    (tmp_path / "tiny").mkdir()
    with pytest.raises(ModelError, match=r"no such model folder; did you mean .*/tiny\?"):
        start(str(tmp_path / "tinny"))
    with pytest.raises(ConfigError, match="hard cap of 10 tokens"):
        train_batch(start(tiny, micro_tokens=10), Actor.update, make_batch(4), PLAIN)
    with pytest.raises(ConfigError, match="number of steps"):
        start(tiny, schedule="cosine")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        start(tiny).run(Actor.load, str(tmp_path / "nothing"))
    with pytest.raises(WorkerError, match="begin_sft"):
        train_batch(start(tiny), Actor.sft_steps, make_batch(4), 1)


def test_a_rank_computes_in_as_many_threads_as_it_is_given_or_as_is_said_or_in_one(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    try:
        for said, given, wanted in (("2", "auto", 2), (None, "auto", 1), ("2", 3, 3)):
            monkeypatch.delenv("OMP_NUM_THREADS") if said is None else monkeypatch.setenv("OMP_NUM_THREADS", said)
            group = start(tiny, ModelConfig(threads=given))  # type: ignore[arg-type]
            assert torch.get_num_threads() == wanted
            torch.set_num_threads(4)  # as another thread may have it, which calls next
            group.run(Actor.drop_gradients)
            assert torch.get_num_threads() == wanted
            group.run(Actor.begin_sft, toy_sft(), wanted + 1)
            assert torch.get_num_threads() == wanted + 1, "the engine rests"
            group.run(Actor.end_sft, str(tmp_path / str(wanted)))
            group.run(Actor.drop_gradients)
            assert torch.get_num_threads() == wanted
    finally:
        torch.set_num_threads(before)


def test_an_off_policy_correction_weighs_the_loss(tiny: str) -> None:
    """Proximal less behaviour is log 1.5 on every token: loss and gradient are 1.5 times those without a correction."""
    plain = PLAIN.model_copy(update={"proximal": "recompute"})
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


def test_a_rank_without_tokens_sends_its_maxima_in_the_precision_of_the_others() -> None:
    """All ranks reduce together: one float32 buffer among those of float64 is read as other numbers."""
    sent: list[torch.Tensor] = []

    class Engine:
        def reduce(self, values: torch.Tensor, how: str) -> torch.Tensor:
            sent.append(values)
            return values

    meter = Meter()
    meter.add("ratio", torch.zeros(0), how="max")
    assert meter.totals(cast(BaseEngine, Engine())) == ({}, {"ratio": 0.0})
    assert [values.dtype for values in sent] == [torch.float64]


# -- a training step in pieces: gradients of several calls add up to those of one batch ---------------


@pytest.mark.parametrize("more", [{}, {"entropy_bonus": 0.1, "aggregate": "seq_mean_token_mean", "groups": "kept"}])
def test_the_pieces_of_an_update_are_the_update_bit_for_bit(tiny: str, more: dict[str, Any]) -> None:
    algorithm = AlgorithmConfig(minibatch=3, **more)
    whole, pieces = start(tiny), start(tiny)
    for step in range(2):
        batch = make_batch(8, seed=step)
        count = int(train_batch(whole, Actor.update, batch, algorithm, step=step, seed=5)["minibatches"])
        assert count > 1
        for part in range(count):
            train_batch(pieces, Actor.forward_backward, batch, algorithm, step=step, seed=5, part=part)
            assert pieces.run(Actor.optim_step)["optimizer_steps"] == 1.0
        pieces.run(Actor.end_update)
    expected, found = weights(whole), weights(pieces)
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    assert any(not torch.equal(tensor, weights(start(tiny))[name]) for name, tensor in found.items())


@pytest.mark.parametrize("aggregate", ["token_mean", "seq_mean_token_mean"])
def test_gradients_of_two_calls_are_those_of_the_batch_that_joins_them(tiny: str, aggregate: str) -> None:
    """Two unequal batches against plain transformers: the mean over the tokens (or episodes) of both."""
    batches = [make_batch(2, seed=1), make_batch(5, seed=2)]
    algorithm = AlgorithmConfig(minibatch=9, loss=Choice(name="reinforce"), aggregate=aggregate)  # type: ignore[arg-type]
    actor = start(tiny, max_grad_norm=1e9)
    model, rows, losses = load(tiny), list[torch.Tensor](), []
    for batch in batches:
        losses.append(train_batch(actor, Actor.forward_backward, batch, algorithm)["loss"])
        plain = Batch(batch)
        rows += [-logprobs * own for logprobs, own in zip(tokens_of(model, plain)[0], plain.column("advantages"), strict=True)]
    apart = [aggregated(part, algorithm).item() for part in (rows[:2], rows[2:])]
    assert losses == pytest.approx(apart, rel=1e-4)  # each by itself
    aggregated(rows, algorithm).backward()
    assert actor.run(Actor.optim_step)["grad_norm"] == pytest.approx(norm_of(model), rel=1e-4)


def test_a_rate_of_ones_own_and_the_schedules(tiny: str) -> None:
    """Warm-up over 4 training steps: 1/4 and then 2/4 of lr, however many optimizer steps each of them has; or what is given."""
    actor, batch, algorithm = start(tiny, warmup=4), make_batch(2), AlgorithmConfig(minibatch=4)
    found = []
    for lr in (None, None, "end", None, 5e-4):
        if lr == "end":
            actor.run(Actor.end_update)
            continue
        train_batch(actor, Actor.forward_backward, batch, algorithm)
        found.append(actor.run(Actor.optim_step, lr)["lr"])
    assert found == pytest.approx([0.25e-3, 0.25e-3, 0.5e-3, 5e-4])


def test_what_is_not_finite_takes_no_step_and_dropped_gradients_leave_nothing(tiny: str) -> None:
    actor, algorithm = start(tiny), AlgorithmConfig(minibatch=4)
    before = weights(actor)
    batch = make_batch(4)
    batch["advantages"].values()[batch["sampled"].values()] = float("nan")
    train_batch(actor, Actor.forward_backward, make_batch(4, seed=3), algorithm)
    train_batch(actor, Actor.forward_backward, batch, algorithm)
    assert actor.run(Actor.optim_step)["optimizer_steps"] == 0.0
    train_batch(actor, Actor.forward_backward, make_batch(4), algorithm)
    actor.run(Actor.drop_gradients)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(actor).items())
    with pytest.raises(AgentrlError, match="no gradients wait"):
        actor.run(Actor.optim_step)

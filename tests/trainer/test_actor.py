"""The actor in one process: updates, supervised steps, save and load, export."""

import math
from pathlib import Path
from typing import cast

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.config.schema import AlgorithmConfig, Choice, LoraSection, ModelConfig
from agentrl.data.rows import collate, nested_tensor, offsets_of, select
from agentrl.trainer.actor import Actor
from agentrl.trainer.train_engine import BaseEngine
from agentrl.trainer.update import Meter
from agentrl.utils.errors import CheckpointError, ConfigError, ModelError, WorkerError
from tests.publishing import weights_of as weights
from tests.trainer.learners import start
from tests.trainer.train_batches import make_batch, toy_sft, train_batch, trajectories

PLAIN = AlgorithmConfig(minibatch=8, loss=Choice(name="reinforce"))


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_logprobs_are_those_of_plain_transformers(tiny: str) -> None:
    batch = make_batch(6)
    found = start(tiny).run(Actor.compute_logprob, batch, temperature=0.7)
    model = AutoModelForCausalLM.from_pretrained(tiny, attn_implementation="eager")
    for row in range(6):
        ids, sampled = batch["token_ids"][row], batch["sampled"][row]
        with torch.no_grad():
            table = torch.log_softmax(model(ids[None]).logits[0] / 0.7, -1)
        expected = torch.zeros(len(ids))
        expected[1:] = table[:-1].gather(1, ids[1:, None]).squeeze(1)
        entropy = torch.zeros(len(ids))
        entropy[1:] = -(table.exp() * table).sum(-1)[:-1]
        assert torch.allclose(found["logprobs"][row], expected * sampled, atol=2e-6)
        assert torch.allclose(found["entropy"][row], entropy * sampled, atol=2e-5)


@pytest.mark.parametrize("aggregate", ["token_mean", "seq_mean_token_sum", "seq_mean_token_mean"])
def test_micro_batching_changes_nothing(tiny: str, aggregate: str) -> None:
    batch = make_batch(12)
    algorithm = AlgorithmConfig(minibatch=6, aggregate=aggregate)
    runs = [start(tiny, micro_tokens=cap) for cap in (4096, 150, 120)]
    metrics = [train_batch(group, Actor.update, batch, algorithm) for group in runs]
    for other in metrics[1:]:
        assert other["minibatches"] == 2
        assert other["loss"] == pytest.approx(metrics[0]["loss"], abs=1e-5)
        assert other["grad_norm"] == pytest.approx(metrics[0]["grad_norm"], rel=1e-5)


def test_row_order_of_a_minibatch_changes_nothing_but_rounding(tiny: str) -> None:
    batch = make_batch(8)
    turned = select(batch, list(range(7, -1, -1)))
    found = [train_batch(start(tiny), Actor.update, b, PLAIN)["grad_norm"] for b in (batch, turned)]
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_rows_without_advantage_are_not_computed_but_under_an_entropy_bonus_they_are(tiny: str) -> None:
    batch = make_batch(8)
    end = int(batch["advantages"].offsets()[4])
    batch["advantages"].values()[:end] = 0.0
    sampled = batch["sampled"].values()
    assert train_batch(start(tiny), Actor.update, batch, PLAIN)["tokens_computed"] == int(sampled[end:].sum())
    bonus = PLAIN.model_copy(update={"entropy_bonus": 0.1})
    metrics = train_batch(start(tiny), Actor.update, batch, bonus)
    assert metrics["tokens_computed"] == metrics["tokens_trained"] == int(sampled.sum())


def test_a_batch_without_any_advantage_leaves_the_weights(tiny: str) -> None:
    group = start(tiny)
    before = weights(group)
    batch = make_batch(4)
    batch["advantages"].values().zero_()
    metrics = train_batch(group, Actor.update, batch, PLAIN)
    assert metrics["minibatches"] == 1 and metrics["grad_norm"] == 0 and metrics["lr"] > 0
    assert same(before, weights(group))


def test_same_inputs_same_bits_and_another_seed_another_order(tiny: str) -> None:
    batch = make_batch(12)
    algorithm = AlgorithmConfig(minibatch=4, epochs=2)
    found = []
    for seed in (1, 1, 2):
        group = start(tiny)
        train_batch(group, Actor.update, batch, algorithm, step=3, seed=seed)
        found.append(weights(group))
    assert same(found[0], found[1])
    assert not same(found[0], found[2])


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


def test_load_refuses_what_does_not_fit(tiny: str, tmp_path: Path) -> None:
    group = start(tiny)
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        group.run(Actor.load, str(tmp_path / "nothing"))


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


def test_sft_loss_is_the_mean_over_assistant_tokens(tiny: str) -> None:
    group = start(tiny)
    group.run(Actor.begin_sft, toy_sft())
    batch = make_batch(6)
    expected = -group.run(Actor.compute_logprob, batch)["logprobs"].values().sum() / batch["sampled"].values().sum()
    [metrics] = train_batch(group, Actor.sft_steps, batch, 1)
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-5)


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
    meter.top("ratio", torch.zeros(0))
    assert meter.totals(cast(BaseEngine, Engine())) == ({}, {"ratio": 0.0})
    assert [values.dtype for values in sent] == [torch.float64]

"""What an update says of the cards it runs on: FLOPs by hand, the peak of a card, and the columns of a row."""

from pathlib import Path

import pytest
import torch

from agentrl.config.schema import AlgorithmConfig, InitModelConfig, LoraSection, ModelConfig
from agentrl.data.rows import collate, offsets_of
from agentrl.run.metrics import info_of
from agentrl.trainer import train_engine as usage
from agentrl.trainer.actor import Actor
from agentrl.trainer.memory import shell
from agentrl.trainer.pretrained import init_model
from agentrl.trainer.train_engine import Card, flops_of, peak_of
from tests.trainer.learners import start
from tests.trainer.train_batches import make_batch, toy_sft, train_batch, trajectories

SHAPE = InitModelConfig(layers=3, hidden=32, mlp=48, heads=4, kv_heads=2, head_dim=16, context=64)


def test_the_operations_of_a_model_are_those_of_its_matrices_its_attention_and_its_head(tmp_path: Path) -> None:
    cfg = ModelConfig(path=str(init_model(SHAPE, tmp_path / "m", seed=0)), dtype="bfloat16")
    module = shell(cfg)
    found = flops_of(module, module.hf.config)
    matrices = 3 * (32 * 16 * (2 * 4 + 2 * 2) + 3 * 32 * 48)
    vocab = module.hf.config.vocab_size
    assert found is not None and found.passes == 3
    assert (found.token, found.pair, found.head) == (2 * matrices, 2 * 4 * 16 * 3, 2 * 32 * vocab)
    # Two rows of which four tokens are predicted, forward and twice that backward.
    assert found.of([5, 3], 4) == 3 * (2 * matrices * 8 + 2 * 64 * 3 * (25 + 9) + 2 * 32 * vocab * 4)
    frozen = shell(cfg.model_copy(update={"lora": LoraSection(rank=2)}))
    adapted = flops_of(frozen, frozen.hf.config)
    assert adapted is not None and adapted.passes == 2 and adapted.token > found.token  # the adapters are matrices too
    value = shell(cfg, "value")
    assert flops_of(value, value.hf.config).head == 0


@pytest.mark.parametrize(
    ("card", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5), ("NVIDIA H200", 989.5), ("NVIDIA H20", 148), ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA A10G", 70), ("NVIDIA L40S", 362), ("NVIDIA L4", 121), ("Quadro K620", None),
    ],
)  # fmt: skip
def test_the_speed_of_a_card_is_that_of_the_longest_name_that_fits(card: str, tera: float | None) -> None:
    assert peak_of(card) == (None if tera is None else tera * 1e12)


def test_every_row_of_a_card_has_memory_speed_and_utilization(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an update and of supervised steps, on a made-up card whose clock goes by two seconds a question."""
    group = start(tiny)
    batch, algorithm = make_batch(6), AlgorithmConfig(minibatch=3, epochs=2)
    assert not [key for key in train_batch(group, Actor.update, batch, algorithm) if key.startswith("gpu/")]  # there is none
    clock = iter(range(0, 1000, 2))
    monkeypatch.setattr(usage, "card_of", lambda device: Card("NVIDIA H100", 3 * 2**30))
    monkeypatch.setattr(usage.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(ModelConfig, "computes_in", lambda self, cuda: "bfloat16")
    row = train_batch(group, Actor.update, batch, algorithm)
    lengths, sampled = offsets_of(batch["token_ids"]).diff(), batch["sampled"].values()
    module = shell(ModelConfig(path=tiny, dtype="bfloat16"))
    flops = flops_of(module, module.hf.config)
    assert flops is not None
    work = 2 * flops.of(lengths.tolist(), float(sampled.sum()))  # in two epochs
    assert row["gpu/memory_gib"] == 3 and row["gpu/tokens_per_s"] == 2 * int(lengths.sum()) / 2
    assert row["gpu/mfu"] == pytest.approx(work / 2 / 989.5e12)
    group.run(Actor.begin_sft, toy_sft())
    [found] = train_batch(group, Actor.sft_steps, collate(trajectories(4)), 1)
    assert {key for key in found if key.startswith("gpu/")} == {"gpu/memory_gib", "gpu/tokens_per_s", "gpu/mfu"}
    assert all(info_of(key) is not None for key in found if key.startswith("gpu/")) and isinstance(sampled, torch.Tensor)
    monkeypatch.setattr(ModelConfig, "computes_in", lambda self, cuda: "float32")  # the peak is of bfloat16
    assert "gpu/mfu" not in train_batch(group, Actor.update, batch, algorithm)

"""Ways to spread or thin the training of one model: each gives the results of the plain one."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.config.schema import AlgorithmConfig, LoraSection, ModelConfig
from agentrl.data.rows import Ragged
from agentrl.trainer import memory as by_size
from agentrl.trainer.actor import Actor
from agentrl.trainer.fsdp import FsdpEngine
from agentrl.trainer.memory import LARGE
from agentrl.trainer.update import Pack
from agentrl.utils.errors import ConfigError, ModelError
from tests.publishing import weights_of as weights
from tests.trainer.learners import agree
from tests.trainer.learners import start as any_start
from tests.trainer.train_batches import make_batch, train_batch

ALGORITHM = AlgorithmConfig(minibatch=6)
start = partial(any_start, micro_tokens=150)


def test_activation_checkpointing_changes_nothing(tiny: str) -> None:
    plain, thin = start(tiny, ModelConfig()), start(tiny, ModelConfig(activation_checkpointing=True))
    for step in range(2):
        batch = make_batch(8, seed=step)
        agree(train_batch(plain, Actor.update, batch, ALGORITHM), train_batch(thin, Actor.update, batch, ALGORITHM))
    mine, theirs = weights(plain), weights(thin)
    assert max((mine[n] - theirs[n]).abs().max().item() for n in mine) < 1e-5


def test_activation_checkpointing_keeps_less(tiny: str) -> None:
    """Count what autograd saves during a forward pass."""
    batch = make_batch(8)
    kept = []
    for thin in (False, True):
        engine = FsdpEngine(tiny, ModelConfig(activation_checkpointing=thin), 1.0)
        sizes: list[int] = []

        def note(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            engine.logprobs(Pack(Ragged.of(batch), list(range(8)), engine.device).micro, 1.0, True)
        kept.append(sum(sizes))
    assert kept[1] < 0.5 * kept[0]


def test_what_a_size_decides(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpointing by all of a model's parameters, sharded gradients by those that are trained; a key decides if it is set."""

    def found(**keys: Any) -> tuple[bool, bool]:
        engine = FsdpEngine(tiny, ModelConfig(**keys), 1.0)
        return engine.checkpoints, engine.shards_gradients

    size = sum(p.numel() for p in FsdpEngine(tiny, ModelConfig(), 1.0).module.parameters())
    assert LARGE == 1_000_000_000
    monkeypatch.setattr(by_size, "LARGE", size + 1)
    assert found() == (False, False)
    assert found(activation_checkpointing=True, shard_gradients=True) == (True, True)
    monkeypatch.setattr(by_size, "LARGE", size)
    assert found() == (True, True)
    assert found(activation_checkpointing=False, shard_gradients=False) == (False, False)
    assert found(lora=LoraSection(rank=2)) == (True, False)


LORA = ModelConfig(lora=LoraSection(rank=4, alpha=8.0))


LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def test_lora_trains_adapters_alone_and_publishes_merged(tiny: str, tmp_path: Path) -> None:
    group = start(tiny, LORA)
    before = weights(group)
    plain = weights(start(tiny, ModelConfig()))
    assert before.keys() == plain.keys() and all(torch.equal(before[n], plain[n]) for n in plain)
    for step in range(3):
        train_batch(group, Actor.update, make_batch(8, seed=step), ALGORITHM, step=step)
    after = weights(group)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {n for n in before if n.split(".")[-2] in LINEAR}
    for name in changed:
        assert torch.linalg.matrix_rank(after[name] - before[name], rtol=1e-3) <= 4
    group.run(Actor.export_hf, str(tmp_path / "merged"))
    batch = make_batch(4, seed=9)
    adapted = group.run(Actor.compute_logprob, batch)["logprobs"].values()
    merged = start(str(tmp_path / "merged"), ModelConfig()).run(Actor.compute_logprob, batch)["logprobs"].values()
    assert torch.allclose(adapted, merged, atol=1e-5)
    control = start(tiny, ModelConfig()).run(Actor.compute_logprob, batch)["logprobs"].values()
    assert not torch.allclose(adapted, control, atol=1e-4)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").num_parameters() > 0


def test_what_cannot_be(tiny: str) -> None:
    with pytest.raises(ConfigError, match="no GPU"):
        start(tiny, ModelConfig(offload="always"))
    with pytest.raises(ConfigError, match="replicas = 2 does not divide"):
        start(tiny, ModelConfig(replicas=2))
    with pytest.raises(ConfigError, match="sequence_parallel = 3 does not divide"):
        start(tiny, ModelConfig(sequence_parallel=3))
    with pytest.raises(ModelError, match="nothing_proj"):
        start(tiny, ModelConfig(lora=LoraSection(modules=["nothing_proj"])))

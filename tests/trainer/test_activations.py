"""What is counted on the meta device is what a real pass saves, and the peak of a real pass and its backward pass."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.config.schema import AlgorithmConfig, InitModelConfig, LoraSection, ModelConfig
from agentrl.data.rows import collate, offsets_of
from agentrl.run.metrics import info_of
from agentrl.trainer import train_engine as usage
from agentrl.trainer import update
from agentrl.trainer.actor import Actor
from agentrl.trainer.attention import packed_rows
from agentrl.trainer.fsdp import FsdpEngine
from agentrl.trainer.language_model import Micro, Role
from agentrl.trainer.memory import count, count_activations, shell, token_bytes
from agentrl.trainer.pretrained import init_model
from agentrl.trainer.train_engine import Card, flops_of, peak_of
from tests.conftest import proof
from tests.tiny_families import build_family
from tests.trainer.bytes_held import BytesHeld
from tests.trainer.learners import start
from tests.trainer.train_batches import make_batch, toy_optim, toy_sft, train_batch, trajectories

TOKENS = 512
LORA = LoraSection(rank=4)
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    sizes = InitModelConfig(layers=4, hidden=128, mlp=384, heads=8, kv_heads=2, head_dim=32, context=2048)
    return str(init_model(sizes, tmp_path_factory.mktemp("model"), 0))


def one_row() -> Micro:
    ids, offsets = torch.randint(5, 400, (TOKENS,)), torch.tensor([0, TOKENS])
    return Micro(ids, torch.arange(TOKENS), packed_rows(offsets), torch.arange(TOKENS - 1), ids[1:], offsets[1:] - 1)


def output(engine: FsdpEngine, micro: Micro, role: Role) -> torch.Tensor:
    return engine.logprobs(micro, 1.0, True)[0] if role == "policy" else engine.values(micro)


def saved_bytes(engine: FsdpEngine, micro: Micro, role: Role) -> int:
    """What a pass saves for its backward pass, without the parameters."""
    kept: dict[int, Any] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output(engine, micro, role)
    own = {p.untyped_storage()._cdata for p in engine.module.parameters()}
    return sum(storage.nbytes() for key, storage in kept.items() if key not in own)


@pytest.mark.parametrize(
    ("role", "thin", "lora"),
    [("policy", False, None), ("policy", True, None), ("policy", False, LORA), ("value", True, LORA)],
    ids=["all kept", "checkpointed", "adapters", "values of adapters, checkpointed"],
)
def test_the_count_is_what_a_real_pass_saves_and_needs(folder: str, role: Role, thin: bool, lora: LoraSection | None) -> None:
    cfg = ModelConfig(path=folder, dtype="float32", activation_checkpointing=thin, lora=lora)
    found = count_activations(shell(cfg, role, grouped=False), TOKENS, torch.float32)
    saved = found.saved - found.layers + found.inputs if thin else found.saved
    engine, micro = FsdpEngine(folder, cfg, 1.0, role), one_row()
    assert saved == pytest.approx(real := saved_bytes(engine, micro, role), rel=0.01) and real > 1 << 20
    with BytesHeld() as held:
        output(engine, micro, role).sum().backward()
    gradients = sum(p.grad.nbytes for p in engine.module.parameters() if p.grad is not None)
    estimate = saved + found.working(thin)
    assert held.peak - gradients < estimate * 1.1 and estimate < 1.1 * held.peak


QWEN3 = {"0.6B": (1024, 28, 3072, 16, True), "4B": (2560, 36, 9728, 32, True), "8B": (4096, 36, 12288, 32, False)}


@proof
@pytest.mark.parametrize(("size", "gigabytes"), [("0.6B", 17), ("4B", 54), ("8B", 67)])
def test_the_activations_of_real_models_are_those_that_were_measured(tmp_path: Path, size: str, gigabytes: int) -> None:
    """8,192 tokens in bfloat16 without checkpointing, keys and values repeated for each query head, as that kernel wanted."""
    hidden, layers, mlp, heads, tied = QWEN3[size]
    shape = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": mlp, "num_attention_heads": heads}
    more = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": tied}
    kind = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 40_960}
    (tmp_path / "config.json").write_text(json.dumps({**kind, **shape, **more}))
    cfg = ModelConfig(path=str(tmp_path), dtype="bfloat16", activation_checkpointing=False)
    memory = count(shell(cfg, grouped=False), cfg, 8, 8192, [toy_optim()])
    assert memory.activations / 1e9 == pytest.approx(gigabytes, rel=0.03)
    # Checkpointed, what each layer starts from is left, beside the head's: two bytes a number.
    inputs = layers * 8192 * hidden * 2
    thin = cfg.model_copy(update={"activation_checkpointing": True})
    assert count(shell(thin), thin, 8, 8192, [toy_optim()]).activations == pytest.approx(inputs, rel=0.2)
    # A kernel that reads a key head once for its whole group saves the difference, in each layer and for keys and values.
    repeated = layers * 8192 * 2 * (heads - 8) * 128 * 2
    assert memory.activations - count(shell(cfg), cfg, 8, 8192, [toy_optim()]).activations == repeated


def test_the_count_of_a_mixture_of_experts_is_what_a_real_pass_saves(tmp_path: Path) -> None:
    path = build_family(tmp_path, "qwen3_moe", tie_word_embeddings=False)
    cfg = ModelConfig(path=path, dtype="float32", activation_checkpointing=False)
    found = count_activations(shell(cfg, grouped=False), TOKENS, torch.float32)
    real = saved_bytes(FsdpEngine(path, cfg, 1.0, "policy"), one_row(), "policy")
    assert found.saved == pytest.approx(real, rel=0.02) and real > 1 << 20


def test_a_token_in_the_cache_takes_what_the_layers_hand_to_their_attention(tmp_path: Path) -> None:
    """Latent attention names its widths otherwise than others do: keys of 8 + 8, values of 16 numbers, 4 heads, 2 layers."""
    latent = build_family(tmp_path / "latent", "deepseek_v3", **LATENT)
    plain = build_family(tmp_path / "plain", "qwen3_moe")
    assert token_bytes(shell(ModelConfig(path=latent)), "float32") == 2 * 2 * 4 * 16 * 4
    assert token_bytes(shell(ModelConfig(path=plain)), "bfloat16") == 2 * 2 * 2 * 8 * 2


# -- operations and cards --------------------------------------------------------------------------


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


@pytest.mark.parametrize(("card", "tera"), [
    ("NVIDIA H100 80GB HBM3", 989.5), ("NVIDIA H200", 989.5), ("NVIDIA H20", 148), ("NVIDIA H100 PCIe", 756),
    ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA A10G", 70), ("NVIDIA L40S", 362), ("NVIDIA L4", 121), ("Quadro K620", None),
])  # fmt: skip
def test_the_speed_of_a_card_is_that_of_the_longest_name_that_fits(card: str, tera: float | None) -> None:
    assert peak_of(card) == (None if tera is None else tera * 1e12)


def test_every_row_of_a_card_has_memory_speed_and_utilization(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an update and of supervised steps, on a made-up card whose clock goes by two seconds a question."""
    group = start(tiny)
    batch, algorithm = make_batch(6), AlgorithmConfig(minibatch=3, epochs=2)
    assert not [key for key in train_batch(group, Actor.update, batch, algorithm) if key.startswith("gpu/")]  # there is none
    clock = iter(range(0, 1000, 2))
    for module in (usage, update):
        monkeypatch.setattr(module, "card_of", lambda device: Card("NVIDIA H100", 3 * 2**30))
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

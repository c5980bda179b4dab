"""Weights of mixtures of experts on their way: under the names that checkpoints have, and whole in an engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from agentrl.config.schema import ModelConfig, WeightsConfig
from agentrl.engines.embedded.embedded_engine import EmbeddedEngine
from agentrl.engines.weights.parameters import Saving, expected_parameters
from agentrl.rollout.engine import Sampling
from agentrl.trainer.fsdp import FsdpEngine
from tests import moe
from tests.publishing import holder, publish

NAMES = {  # one expert's weight, as the family's checkpoints name it; None: they have all of a layer in one tensor
    "qwen3_moe": "model.layers.1.mlp.experts.7.gate_proj.weight",
    "mixtral": "model.layers.1.block_sparse_moe.experts.7.w3.weight",
    "glm4_moe": "model.layers.1.mlp.experts.7.down_proj.weight",
    "deepseek_v3": "model.layers.1.mlp.experts.7.up_proj.weight",
    "granitemoe": None,
    "gpt_oss": None,
}


@pytest.mark.parametrize("family", NAMES)
def test_saved_tensors_are_those_of_a_checkpoint(family: str, tmp_path: Path) -> None:
    model = moe.model(family)
    model.save_pretrained(tmp_path)
    want = load_file(tmp_path / "model.safetensors")
    # each as it comes: a module's tensors in the same memory, one after the other
    found = {name: tensor.clone() for name, tensor in Saving(model).tensors(iter(model.state_dict().items()))}
    assert found.keys() == want.keys() and all(torch.equal(found[name], want[name]) for name in want)
    expected = expected_parameters(str(tmp_path), saved=True)
    assert expected.shapes == {name: tuple(tensor.shape) for name, tensor in want.items()}
    if (name := NAMES[family]) is not None:
        fused = model.model.layers[1].mlp.experts
        part = {"gate_proj": fused.gate_up_proj[7, :64], "up_proj": fused.gate_up_proj[7, 64:], "down_proj": fused.down_proj[7]}
        kind = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(name.split(".")[-2], name.split(".")[-2])
        assert torch.equal(found[name], part[kind])


def test_tied_weights_have_the_names_of_checkpoints_too(tmp_path: Path) -> None:
    path = moe.build("mixtral", tmp_path, tie_word_embeddings=True)
    assert expected_parameters(path, saved=True).tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in expected_parameters(path, saved=True).shapes


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
async def test_the_embedded_engine_has_all_of_a_publish(family: str, tmp_path: Path) -> None:
    """A router's bias is a buffer: it decides which experts a token goes to, and is published like a parameter."""
    engine = EmbeddedEngine(moe.build(family, tmp_path), kv_cache_mib=64)
    await engine.start()
    model = moe.model(family)
    await publish(engine, 1, moe.shaken(model.state_dict(), seed=1))
    prompt = [(7 * at + 3) % moe.VOCAB for at in range(20)]
    answer = await engine.generate(prompt, Sampling(8, seed=1), "a")
    await engine.close()

    def gap() -> float:
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *answer.token_ids]]), use_cache=False).logits[0, 19:-1]
        found = logits.float().log_softmax(-1).gather(1, torch.tensor(answer.token_ids)[:, None]).squeeze(1)
        return float((found - torch.tensor(answer.logprobs)).abs().max())

    assert gap() > 0.1  # control: the model before
    model.load_state_dict(moe.shaken(model.state_dict(), seed=1))
    assert gap() < 1e-4


def test_a_routers_bias_is_published_as_it_is_computed_with(tmp_path: Path) -> None:
    """In float32: rounded to bfloat16 it would choose other experts than the trainer's."""
    engine = FsdpEngine(moe.build("glm4_moe", tmp_path), ModelConfig(), 1.0)
    engine.compute_dtype = torch.bfloat16
    types = {name: tensor.dtype for name, tensor in engine.tensors()}
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert types.pop(bias) == torch.float32 and set(types.values()) == {torch.bfloat16}
    held = dict(engine.tensors())
    assert torch.equal(held[bias], load_file(tmp_path / "model.safetensors")[bias].float())
    assert {name: tensor.dtype for name, tensor in engine.saving().expected.items() if "bias" in name} == {bias: torch.float32}


def test_every_family_can_be_exported(tmp_path: Path) -> None:
    """gpt-oss has no attention of torch's, which a skeleton was made with."""
    engine = FsdpEngine(moe.build("gpt_oss", tmp_path), ModelConfig(), 1.0)
    assert engine.saving().expected.keys() == load_file(tmp_path / "model.safetensors").keys()


async def test_a_target_says_which_names_it_loads(tmp_path: Path) -> None:
    from agentrl.engines.vllm.vllm_engine import VllmEngine

    path = moe.build("qwen3_moe", tmp_path)
    source = holder(FsdpEngine(path, ModelConfig(), 1.0), 0)
    names = {}
    for saved in (EmbeddedEngine.loads_saved, VllmEngine.loads_saved):
        offer = source.open_route("memory", WeightsConfig(bucket_mib=0.25), 1, saved)
        source.route_attached()
        names[saved], first = set(), True
        while (bucket := source.next_bucket(first)) is not None:
            names[saved] |= {entry.name for entry in bucket.entries}
            first = False
        # the bucket is as large as asked for, as no expert is larger; all experts of a layer together are
        assert offer.slot_bytes == 256 << 10
    source.close_route()
    assert names[False] == set(expected_parameters(path).shapes)
    assert names[True] == set(expected_parameters(path, saved=True).shapes)
    assert len(names[True]) - len(names[False]) == 2 * (3 * moe.EXPERTS - 2)

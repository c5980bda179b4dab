"""The probe tells a family that is computed right from others, and what differed (docs/families.json)."""

import json
import math
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import agentrl.contrib.families as probing
from agentrl.config import TrainConfig
from agentrl.config.load import config_from
from agentrl.contrib.families import Sample, cut, keep_layers, kinds_needed, small
from agentrl.trainer import attention as mixers
from agentrl.trainer import families as choice
from agentrl.trainer import language_model as logprobs
from agentrl.trainer.attention import Block, PackedSequences, row_blocks
from agentrl.trainer.families import TOLERANCE, Measured, packing_of
from agentrl.trainer.language_model import layers_of
from agentrl.trainer.parallel import layout
from agentrl.utils.errors import ConfigError, ModelError
from agentrl.utils.search_path import load_module
from tests.conftest import PROOFS
from tests.trainer.family_models import config_of

GEMMA = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "attn_logit_softcapping": 2.0}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_probed", {})


def run_of(family: str, folder: Path, *overrides: str, **keys: Any) -> TrainConfig:
    """A run from a folder that holds no more than the config of a model."""
    config = config_of(family) if family in ("lfm2", "qwen3_next") else AutoConfig.for_model(family, **keys)
    for name, value in keys.items():
        setattr(config, name, value)
    config.save_pretrained(folder)
    return config_from({"env": {"id": "key_value"}, "model": {"path": str(folder)}}, list(overrides))


def leaking(backbone: Any) -> list[str]:
    """In place of `keep_rows_apart`: forgets the first mixer."""
    found = list(mixers.mixers_of(backbone).values())[1:]
    for module in found:
        module.forward = partial(mixers._forward_by_rows, module.forward)
    return []


@pytest.mark.parametrize("family", ["lfm2", "qwen3_next"])
def test_a_family_that_is_right_is_packed_with_shared_prefixes(family: str, tmp_path: Path) -> None:
    config = run_of(family, tmp_path, "model.sequence_parallel=2", "optim.prefix_sharing=on")
    found = packing_of(config)
    assert (found.way, found.shares) == ("packed", True) and f"the family {family}" in found.reason
    assert layout() is None, "none is left behind"
    assert not Measured(math.nan).right and not Measured(math.inf).right and Measured(1e-5).right
    with pytest.raises(ConfigError, match=r"sequence_parallel = 3 does not divide the 4 attention heads of model.path"):
        packing_of(run_of(family, tmp_path, "model.sequence_parallel=3"))
    made = found.sections(config.model, config.optim)
    assert made["model"].packing == "packed" and made["optim"].prefix_sharing == "on"


def test_a_leak_is_found_named_and_avoided_by_one_row_a_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "keep_rows_apart", leaking)
    config = run_of("lfm2", tmp_path)
    found = packing_of(config)
    assert found.way == "one_row" and not found.shares
    error = float(found.reason.split("off by ")[1])
    assert error > 0.1 and found.reason.startswith("one row a pass: with packed rows model.path: the family lfm2 is off by")
    made = found.sections(config.model, config.optim)
    assert (made["model"].packing, made["optim"].prefix_sharing) == ("one_row", "off")
    for refused, said in (
        ("model.packing=packed", 'model.packing = "packed": with packed rows model.path: the family lfm2 is off.*take another'),
        ("model.sequence_parallel=2", "model.sequence_parallel = 2: one row a pass"),
        ("optim.prefix_sharing=on", 'optim.prefix_sharing = "on": rows are computed one a pass'),
    ):
        with pytest.raises((ModelError, ConfigError), match=said):
            packing_of(run_of("lfm2", tmp_path, refused))


def test_a_prefix_that_leaks_only_when_it_is_shared_turns_sharing_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A suffix of which the mixers do not see the prefix."""

    def forgetful(packed: PackedSequences) -> list[Block]:
        return list(row_blocks(packed.spans[:, 2:], torch.device("cpu")))

    monkeypatch.setattr(mixers, "mixer_blocks", forgetful)
    config = run_of("lfm2", tmp_path)
    found = packing_of(config)
    assert (found.way, found.shares) == ("packed", False)
    assert float(found.reason.split("off by ")[1]) > 0.1
    assert found.sections(config.model, config.optim)["optim"].prefix_sharing == "off"
    with pytest.raises(ConfigError, match=r'optim.prefix_sharing = "on": with shared prefixes'):
        packing_of(run_of("lfm2", tmp_path, "optim.prefix_sharing=on"))


def test_what_is_wrong_in_every_way_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that computes at another temperature than it is asked for: every logprob is off, also of one row a pass."""
    kept = logprobs.logits_stats
    other = logprobs.HeadKernels(lambda logits, targets, _, *rest: kept(logits, targets, 1.0, *rest), logprobs.logits_gradient)
    make = probing.PolicyModule

    def made(model: Any) -> Any:
        module = make(model)
        module.kernels = other
        return module

    monkeypatch.setattr(probing, "PolicyModule", made)
    said = r"with packed rows model.path: the family lfm2 is off by .*; with one row a pass .* is off by"
    with pytest.raises(ModelError, match=said):
        packing_of(run_of("lfm2", tmp_path))


def test_attention_that_ignores_a_cap_is_replaced_by_the_eager_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers computes Gemma 2 by sdpa if it is not told otherwise, which drops the cap of its attention."""
    monkeypatch.setattr(probing, "PACKED", "sdpa")  # our own attention out of the way
    found = packing_of(run_of("gemma2", tmp_path, **GEMMA))
    assert found.way == "one_row_eager" and "one row a pass, with eager attention: with packed rows" in found.reason
    assert packing_of(run_of("gemma2", tmp_path, "model.packing=one_row", **GEMMA)).way == "one_row_eager"
    with pytest.raises(ModelError, match="with packed rows"):
        packing_of(run_of("gemma2", tmp_path, "model.packing=packed", **GEMMA))


@pytest.mark.parametrize(("family", "kind"), [("phi3", "longrope"), ("llama", "dynamic")])
def test_rows_that_change_their_rotary_frequencies_as_they_grow_are_refused(family: str, kind: str, tmp_path: Path) -> None:
    """Above the length that the model was first trained at, all rows of a pass have other frequencies."""
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 4096}
    factors = {"short_factor": [1.0] * 4, "long_factor": [9.0] * 4} if kind == "longrope" else {}
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 99, "pad_token_id": 0}
    more = {"rope_parameters": {**rope, **factors}, "max_position_embeddings": 32768, **sizes}
    with pytest.raises(ConfigError, match=rf"max_episode_tokens = 4097: .*'{kind}'.* of more than 4096 tokens"):
        packing_of(run_of(family, tmp_path, "rollout.max_episode_tokens=4097", **more))
    with pytest.raises(ConfigError, match=r"optim.micro_tokens = 16384: .*more than 4096 tokens"):
        packing_of(run_of(family, tmp_path, "rollout.max_episode_tokens=4096", "sft.max_steps=2000", **more))
    assert packing_of(run_of(family, tmp_path, "rollout.max_episode_tokens=4096", **more)).way == "packed"
    data = 'data={path=["x"]}'  # plays no episodes
    assert packing_of(run_of(family, tmp_path, data, "optim.micro_tokens=4096", **more)).way == "packed"
    with pytest.raises(ConfigError, match=r"optim.micro_tokens = 4097: .*more than 4096 tokens"):
        packing_of(run_of(family, tmp_path, data, "optim.micro_tokens=4097", **more))
    if kind == "longrope":  # it changes nothing
        more["rope_parameters"] |= {"long_factor": [1.0] * 4}
        assert packing_of(run_of(family, tmp_path, **more)).way == "packed"


@pytest.mark.parametrize(("family", "keys", "said"), [
    ("gpt2", {}, r"gpt2.* drops activations at random in training.*set resid_pdrop = 0.1, .*attn_pdrop = 0.1 to 0"),
    ("cpmant", {"dropout_p": 0.0}, r"cpmant.* is not causal: .* at the beginning is off by [0-9.]+e[+-]"),
    ("reformer", {"hidden_dropout_prob": 0.0, "local_attention_probs_dropout_prob": 0.0}, "reformer.* cannot be tried"),
])  # fmt: skip
def test_what_cannot_be_trained_at_all(family: str, keys: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=said):
        packing_of(run_of(family, tmp_path, **keys))


def test_critic_and_reward_model_are_tried_with_what_is_on_top_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Noted(Sample):
        def __init__(self, config: Any, kind: Any = "policy") -> None:
            asked.append((config.model_type, kind))
            super().__init__(config, kind)

    monkeypatch.setattr(probing, "Sample", Noted)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 32, "vocab_size": 99}
    AutoConfig.for_model("llama", **sizes, pad_token_id=0, num_labels=1).save_pretrained(tmp_path / "judge")
    roles = ["critic.lr=1e-5", f"reward_model.path={tmp_path / 'judge'}"]
    config = run_of("qwen3_next", tmp_path / "policy", *roles)
    assert packing_of(config).reason.count("the family") == 3
    assert asked == [("qwen3_next", "policy"), ("qwen3_next", "value"), ("llama", "score")]
    packing_of(config)
    assert len(asked) == 3, "one decision: the same models are not tried again"


def test_a_run_of_the_packaged_model_is_tried_in_no_time() -> None:
    """Nothing is said of seconds: two layers of 16 wide MLPs, as many as the tiny model's sizes allow."""
    config = choice.model_config(config_from({"env": {"id": "key_value"}, "model": {"init": {}}}, []).model)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small(config, "policy"))
    assert sum(p.numel() for p in model.parameters()) < 100_000 and len(layers_of(model)) == 2


def test_a_huge_model_is_cut_to_few_layers_of_every_kind() -> None:
    """DeepSeek-V3: three dense layers, then sparse ones. Qwen3-Next: three recurrent layers, then attention."""
    for family, layers, kinds in (("deepseek_v3", 4, 2), ("qwen3_next", 4, 2), ("jamba", 5, 3)):
        config = AutoConfig.for_model(family)
        found = small(config, "policy")
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(found)
        parts = layers_of(model)
        assert len(parts) == layers, family
        shapes = {tuple(sorted(f"{n} {tuple(p.shape)}" for n, p in layer.named_parameters())) for layer in parts}
        assert len(shapes) == kinds, family
        assert sum(p.numel() for p in model.parameters()) < 10_000_000
        text = found.get_text_config()
        assert text.vocab_size == 96
        assert config.num_hidden_layers >= 32, "the config that was given stays as it is"


def test_layers_are_cut_with_their_lists() -> None:
    config = cut(AutoConfig.for_model("gpt_oss"))
    few = keep_layers(config, 2, 36)
    assert few.num_hidden_layers == 2 and few.layer_types == ["sliding_attention", "full_attention"] and few.sliding_window == 8
    with torch.device("meta"):
        assert kinds_needed(layers_of(AutoModelForCausalLM.from_config(config))) == 2


def test_without_the_probe_well_known_families_are_packed_and_others_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "PROBE", "none")
    assert packing_of(run_of("lfm2", tmp_path)).way == "packed"
    with pytest.raises(ModelError, match=r"qwen3_next.* cannot be tried: agentrl.contrib.families is missing. Install it"):
        packing_of(run_of("qwen3_next", tmp_path))


# -- the table of families

ROOT = Path(__file__).resolve().parents[3]
RECORD = ROOT / "docs" / "families.json"
SOME = ("deepseek_v3", "gpt_oss", "lfm2", "llama", "mistral")


@pytest.fixture(scope="module")
def table() -> ModuleType:
    sys.path.insert(0, str(ROOT / ".ci"))
    return load_module(ROOT / ".ci" / "families.py")


def test_every_family_of_transformers_has_a_row(table: ModuleType) -> None:
    record = json.loads(RECORD.read_text())
    assert list(record) == list(table.families())
    assert all(entry["mode"] == "packed" or entry["why"] for entry in record.values())


@pytest.mark.parametrize("family", [*json.loads(RECORD.read_text())] if PROOFS else SOME)
def test_a_row_is_what_the_probe_finds(table: ModuleType, family: str) -> None:
    """Its mode and its reason; and errors of the same size, which rounding decides."""
    found, recorded = table.in_time(lambda: table.measured(family)), json.loads(RECORD.read_text())[family]
    assert found["mode"] == recorded["mode"], found
    for key in ("packed", "shared", "one_row"):
        one, other = (entry.get(key, "") for entry in (found, recorded))
        try:
            assert (float(one) > TOLERANCE) == (float(other) > TOLERANCE)
        except ValueError:
            assert one == other

"""Sizes that do not fit are refused before the run, those that do pass; a toy's learning rate on a real model is warned of."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.envs import each
from agentrl.config.load import config_from
from agentrl.data.trajectory import StopReason, Trajectory
from agentrl.engines.vllm import vllm_maker as make
from agentrl.env.catalog import EnvRef
from agentrl.render.base import Renderer
from agentrl.reward import compile_spec
from agentrl.rollout.episode import EpisodeSpec, Limits, Policy, run_episode
from agentrl.run.checks import size_checks as sizes
from agentrl.trainer.pretrained import count_parameters, model_context
from agentrl.utils.errors import ConfigError, ModelError
from tests.rollout.conftest import FaultyEngine, renderer  # noqa: F401 - a fixture

BASE: dict[str, Any] = {"env": {"id": "key_value"}, "model": {"init": {"context": 4096}}, "cluster": {"backend": "inline"}}


def config_of(*overrides: str, **sections: Any) -> Any:
    return config_from({**BASE, **sections}, list(overrides))


@pytest.mark.parametrize(
    ("episode", "cap", "engine", "model_len", "needed"),
    [
        (3000, 3000, "embedded", 100, None),
        (3000, 2999, "embedded", 100, 3000),
        (9000, 4096, "embedded", 100, None),
        (9000, 4095, "embedded", 100, 4096),
        (9000, 100, "vllm", 100, None),
        (9000, 99, "vllm", 100, 100),
    ],
)
def test_the_cap_must_hold_the_longest_row_that_can_come(
    episode: int, cap: int, engine: str, model_len: int, needed: int | None
) -> None:
    """The least of the episode's budget, the model's 4096 tokens, and for vLLM its max_model_len."""
    config = config_of(f"rollout.max_episode_tokens={episode}", f"optim.micro_tokens={cap}", f"vllm.max_model_len={model_len}")
    if needed is None:
        sizes.check_sizes(config, engine)
        return
    with pytest.raises(ConfigError, match=f"optim.micro_tokens = {cap}.*max_episode_tokens = {episode}.*at least {needed},"):
        sizes.check_sizes(config, engine)


@pytest.mark.parametrize(("weight", "refused"), [(0.0, False), ([[0, 0.0], [5, 0.0]], False), ([[0, 0.0], [5, 1.0]], True)])
def test_rows_of_an_environment_that_is_only_evaluated_need_no_room_in_a_micro_batch(weight: Any, refused: bool) -> None:
    other = {"id": "key_value", "name": "long", "weight": weight, "limits": {"max_episode_tokens": 1001}}
    envs = [{"id": "key_value", "name": "short"}, other]
    short, long = each(config_of("rollout.max_episode_tokens=1000", "optim.micro_tokens=1000", env=envs))
    sizes.check_sizes(short, "embedded")
    with pytest.raises(ConfigError, match="at least 1001") if refused else nullcontext():
        sizes.check_sizes(long, "embedded")


@pytest.mark.parametrize(("episode", "same", "refused"), [(64, False, False), (65, False, True), (65, True, False)])
def test_rows_are_not_longer_than_a_rotary_embedding_stays_the_same(
    tmp_path: Path, episode: int, same: bool, refused: bool
) -> None:
    """A row of 65 tokens would change the frequencies of the others of its micro-batch."""
    shape = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 512, "vocab_size": 64, "pad_token_id": 0}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [1.0 if same else 3.0] * 4}
    more = {"original_max_position_embeddings": 64, "rope_parameters": rope, **shape}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], **more}))
    config = config_of(f"rollout.max_episode_tokens={episode}", model={"path": str(tmp_path)})
    said = rf"max_episode_tokens: rows may have {episode} tokens.*model.path \(phi3\) changes at 64 tokens.*at most 64"
    with pytest.raises(ConfigError, match=said) if refused else nullcontext():
        sizes.check_sizes(config, "embedded")


def test_heads_without_a_kernel_in_vllms_cpu_build_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its attention answers 16 with "Unsupported CPU attention configuration: head_dim=16" at the first request."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    good = set(make.CPU_HEADS)
    for size in (16, 32, 33, 48, 64, 128, 512):
        init = {**BASE, "model": {"init": {"head_dim": size}}}
        refused = pytest.raises(ConfigError, match=rf"model.init.head_dim = {size}: .*engine=vllm supports head sizes 32, 64, 80")
        with nullcontext() if size in good else refused:
            sizes.check_sizes(config_from({**init, "rollout": {"max_episode_tokens": 512}}, []), "vllm")
        sizes.check_sizes(config_from({**init, "rollout": {"max_episode_tokens": 512}}, []), "embedded")
    for stated, derived in (({"head_dim": 16}, 16), ({}, 64 // 4), ({"head_dim": 64}, None)):
        folder = tmp_path / f"{stated}"
        folder.mkdir()
        shape = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 4096, **stated}
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **shape}))
        config = config_of(model={"path": str(folder)})
        said = rf"model.path = {re.escape(str(folder))}: its attention heads have size {derived}"
        with nullcontext() if derived is None else pytest.raises(ConfigError, match=said):
            sizes.check_heads(config, "vllm")
    monkeypatch.setattr("agentrl.run.engine_choice.has_gpus", lambda cluster, role: role == "rollout")
    sizes.check_heads(config_of(model={"init": {"head_dim": 16}}), "vllm")


def test_the_sizes_of_heads_are_those_of_vllms_cpu_build() -> None:
    found = find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("vLLM is not installed here")
    source = (Path(found.origin).parent / "v1" / "attention" / "backends" / "cpu_attn.py").read_text()
    listed = re.search(r"def get_supported_head_sizes\(cls\)[^\[]*\[int\]:\s*return \[([\d, ]+)\]", source)
    assert listed is not None and tuple(map(int, listed[1].split(","))) == make.CPU_HEADS


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "dr_grpo", "gigpo", "turn_returns", "pass_at_k", "multi_reward"])
def test_one_episode_a_group_is_refused_where_it_would_teach_nothing(advantage: str) -> None:
    with pytest.raises(ConfigError, match=f'rollout.group_size = 1: algorithm.advantage "{advantage}"'):
        sizes.check_sizes(config_of("rollout.group_size=1", f"algorithm.advantage.name={advantage}"), "embedded")


@pytest.mark.parametrize(("size", "args", "k"), [(4, {}, 4), (3, {}, 4), (2, {"k": 2}, 2)])
def test_pass_at_k_needs_groups_larger_than_k(size: int, args: dict[str, int], k: int) -> None:
    """A group of k has one subset of k: the best of it is the mean, and every advantage 0."""

    def config(group_size: int) -> Any:
        return config_of(f"rollout.group_size={group_size}", algorithm={"advantage": {"name": "pass_at_k", "args": args}})

    with pytest.raises(ConfigError, match=rf"rollout.group_size = {size}: .*k = {k}.*at least {k + 1}"):
        sizes.check_sizes(config(size), "embedded")
    sizes.check_sizes(config(k + 1), "embedded")


@pytest.mark.parametrize("advantage", ["gae", "gae_turns", "reinforce_pp", "remax"])
def test_one_episode_a_group_is_enough_for_others(advantage: str) -> None:
    sizes.check_sizes(config_of("rollout.group_size=1", f"algorithm.advantage.name={advantage}"), "embedded")


@pytest.mark.parametrize(("context", "budget", "stop"), [(4096, 20, StopReason.MAX_TOKENS), (20, 4096, StopReason.CONTEXT_FULL)])
def test_a_prompt_that_alone_passes_the_budget_makes_no_longer_row(
    renderer: Renderer,  # noqa: F811
    context: int,
    budget: int,
    stop: StopReason,
) -> None:
    async def play() -> Trajectory:
        limits = Limits(4, 8, budget, 10.0, 10.0, context)
        spec = EpisodeSpec(0, "train", 0, 0, "g0.m0.a0")
        scorer = compile_spec({"agentrl_reward": 1, "name": "n", "root": {"use": "cost.tokens", "args": {"max": 4}}})
        engine = FaultyEngine(renderer.stop_token_ids[0])
        return await run_episode(EnvRef("key_value").build(), Policy(engine, renderer), spec, limits, scorer)

    found = asyncio.run(play())
    assert found.stop is stop and [len(ledger) for ledger in found.ledgers] == [20] and not found.ledgers[0].sampled.any()


def model(folder: Path, layers: int) -> str:
    """Qwen3 of 4,096 x 16,384 MLPs: only its config is written, since only that is read. A layer has 3 x 4096 x 16384
    (MLP) + 2 x 4096 x 64 (q, o) + 2 x 4096 x 64 (k, v) + 2 x 4096 + 2 x 64 (norms) parameters; then 4096 + 16 x 4096."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 16, "hidden_size": 4096,
        "intermediate_size": 16384, "num_hidden_layers": layers, "num_attention_heads": 1, "num_key_value_heads": 1,
        "head_dim": 64, "tie_word_embeddings": True, "max_position_embeddings": 4096}))  # fmt: skip
    return str(folder)


def test_parameters_are_counted_from_the_config(tmp_path: Path) -> None:
    layer = 3 * 4096 * 16384 + 4 * 4096 * 64 + 2 * 4096 + 2 * 64
    assert count_parameters(model(tmp_path, 2)) == 2 * layer + 4096 + 16 * 4096


def test_a_learning_rate_of_a_toy_is_warned_of_on_a_real_model_and_only_there(tmp_path: Path) -> None:
    path = model(tmp_path, 1)  # 202M

    def said(*more: str, **sections: Any) -> list[str]:
        return sizes.advice(config_of(*more, model={"path": path}, **sections))

    assert said() == said("critic={}", "sft={}") == said("optim.lr=1e-7") == said("optim.lr=2.9e-5") == []
    [line] = said("optim.lr=1e-3")
    assert line.startswith("optim.lr = 0.001 is high for reinforcement learning of 202M parameters: 1e-06 is a good start")
    assert said("optim.lr=9e-8")[0].startswith("optim.lr = 9e-08 is low for reinforcement learning")
    data = "data.path=['x']"  # the same rate is right or wrong by what is trained
    assert said(data, "optim.lr=1e-4") == said(data) == []
    assert said(data, "optim.lr=1e-6")[0].startswith("optim.lr = 1e-06 is low for supervised training of 202M parameters: 2e-05")
    assert said(data, "data.loss=dpo", "optim.lr=1e-6") == said("optim.name=sgd", "optim.lr=0.1") == []
    lines = said("optim.lr=1e-3", "critic.lr=1e-3", "sft.lr=3e-3", "sft.matrix_lr=0.02")
    assert [line.split()[0] for line in lines] == ["optim.lr", "critic.lr", "sft.lr", "sft.matrix_lr"]
    assert said("optim.lr=1e-4", "model.lora.rank=4") == []
    assert "with LoRA: 1e-05" in said("optim.lr=1e-3", "model.lora.rank=4")[0]
    assert sizes.advice(config_of("optim.lr=1e-3")) == []
    [line] = sizes.advice(config_of("optim.lr=1e-6"))
    assert line.startswith("optim.lr = 1e-06 is low for reinforcement learning of a model of random weights: 0.001 is")
    small = json.loads((tmp_path / "config.json").read_text()) | {"intermediate_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(small))
    assert said("optim.lr=1e-3") == []


@pytest.mark.parametrize(("asked", "given"), [(16384, 4096), (100, 100)])
def test_vllm_is_asked_for_no_longer_sequences_than_the_model_takes(
    asked: int, given: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import agentrl.engines.vllm.vllm_engine as backend
    from agentrl.run.engine_choice import make_engine

    seen: dict[str, Any] = {}
    monkeypatch.setattr(backend, "VllmEngine", lambda model, cfg, **options: seen.update(cfg))
    make_engine("vllm", model(tmp_path, 1), config_of(f"vllm.max_model_len={asked}"))
    assert seen["max_model_len"] == given


def test_the_defaults_hold_one_another() -> None:
    """A micro-batch holds an episode, a sequence of vLLM too, and an update is one optimizer step."""
    config = config_of(model={"init": {"context": 1 << 20}})
    rollout = config.rollout
    assert config.optim.micro_tokens >= rollout.max_episode_tokens <= config.vllm.max_model_len
    assert config.algorithm.minibatch == rollout.groups * rollout.group_size


def test_a_models_context_is_what_its_config_says_or_an_error(tmp_path: Path) -> None:
    path = Path(model(tmp_path, 1))
    assert model_context(str(path)) == 4096
    (path / "config.json").write_text(json.dumps({"model_type": "bloom", "n_layer": 1}))  # a family without a longest sequence
    with pytest.raises(ModelError, match=r"its config\.json has no max_position_embeddings"):
        model_context(str(path))

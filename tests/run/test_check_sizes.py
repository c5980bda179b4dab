"""Sizes that do not fit are refused before the run, those that do pass; a toy's learning rate on a real model is warned of."""

import json
import re
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.cluster.placement import planned_elsewhere
from agentrl.config.load import config_from, load_config
from agentrl.data.trajectory import StopReason
from agentrl.engines.vllm import vllm_maker as make
from agentrl.env.catalog import EnvRef, find_config
from agentrl.render.base import Renderer
from agentrl.reward import compile_spec
from agentrl.rollout.episode import EpisodeSpec, Limits, Policy, run_episode
from agentrl.run.assembly import RunStart
from agentrl.run.checks import size_checks as sizes
from agentrl.run.engine_choice import EngineChoice
from agentrl.trainer.algorithms import policy_loss
from agentrl.trainer.algorithms.base import LossInput, LossOutput
from agentrl.trainer.algorithms.losses import POLICY_LOSSES
from agentrl.trainer.optim import optims_of
from agentrl.trainer.pretrained import count_parameters
from agentrl.utils.errors import ConfigError
from agentrl.utils.registry import Entry
from tests.conftest import Agentrl
from tests.rollout.conftest import FaultyEngine, renderer  # noqa: F401 - a fixture
from tests.run.starts import start_of

BASE: dict[str, Any] = {"env": {"id": "key_value"}, "model": {"init": {"context": 4096}}, "cluster": {"backend": "inline"}}


def config_of(*overrides: str, **sections: Any) -> Any:
    return config_from({**BASE, **sections}, list(overrides))


@pytest.mark.parametrize(("episode", "cap", "engine", "model_len", "needed"), [
    (3000, 3000, "embedded", 100, None),
    (3000, 2999, "embedded", 100, 3000),
    (9000, 4096, "embedded", 100, None),
    (9000, 4095, "embedded", 100, 4096),
    (9000, 100, "vllm", 100, None),
    (9000, 99, "vllm", 100, 100),
])  # fmt: skip
def test_the_cap_must_hold_the_longest_row_that_can_come(
    episode: int, cap: int, engine: str, model_len: int, needed: int | None
) -> None:
    """The least of the episode's budget, the model's 4096 tokens, and for vLLM its max_model_len."""
    config = config_of(f"rollout.max_episode_tokens={episode}", f"optim.micro_tokens={cap}", f"vllm.max_model_len={model_len}")
    refusal = pytest.raises(ConfigError, match=f"optim.micro_tokens = {cap}.*max_episode_tokens = {episode}.*at least {needed},")
    with nullcontext() if needed is None else refusal:
        sizes.check_sizes(start_of(config, engine))


@pytest.mark.parametrize(("weight", "refused"), [(0.0, False), ([[0, 0.0], [5, 0.0]], False), ([[0, 0.0], [5, 1.0]], True)])
def test_rows_of_an_environment_that_is_only_evaluated_need_no_room_in_a_micro_batch(weight: Any, refused: bool) -> None:
    other = {"id": "key_value", "name": "long", "weight": weight, "limits": {"max_episode_tokens": 1001}}
    envs = [{"id": "key_value", "name": "short"}, other]
    short, long = config_of("rollout.max_episode_tokens=1000", "optim.micro_tokens=1000", env=envs).each()
    sizes.check_sizes(start_of(short, "embedded"))
    with pytest.raises(ConfigError, match="at least 1001") if refused else nullcontext():
        sizes.check_sizes(start_of(long, "embedded"))


def test_heads_without_a_kernel_in_vllms_cpu_build_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its attention answers 16 with "Unsupported CPU attention configuration: head_dim=16" at the first request."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    good = set(make.CPU_HEADS)
    for size in (16, 32, 33, 48, 64, 128, 512):
        init = {**BASE, "model": {"init": {"head_dim": size}}}
        refused = pytest.raises(ConfigError, match=rf"model.init.head_dim = {size}: .*engine=vllm supports head sizes 32, 64, 80")
        with nullcontext() if size in good else refused:
            sizes.check_sizes(start_of(config_from({**init, "rollout": {"max_episode_tokens": 512}}, []), "vllm"))
        sizes.check_sizes(start_of(config_from({**init, "rollout": {"max_episode_tokens": 512}}, []), "embedded"))
    for stated, derived in (({"head_dim": 16}, 16), ({}, 64 // 4), ({"head_dim": 64}, None)):
        folder = tmp_path / f"{stated}"
        folder.mkdir()
        shape = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 4096, **stated}
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **shape}))
        config = config_of(model={"path": str(folder)})
        said = rf"model.path = {re.escape(str(folder))}: its attention heads have size {derived}"
        with nullcontext() if derived is None else pytest.raises(ConfigError, match=said):
            sizes.check_heads(EngineChoice(config, "vllm"))
    monkeypatch.setattr("agentrl.run.engine_choice.has_gpus", lambda cluster, role: role == "rollout")
    sizes.check_heads(EngineChoice(config_of(model={"init": {"head_dim": 16}}), "vllm"))


def test_the_sizes_of_heads_are_those_of_vllms_cpu_build() -> None:
    found = find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("vLLM is not installed here")
    source = (Path(found.origin).parent / "v1" / "attention" / "backends" / "cpu_attn.py").read_text()
    listed = re.search(r"def get_supported_head_sizes\(cls\)[^\[]*\[int\]:\s*return \[([\d, ]+)\]", source)
    assert listed is not None and tuple(map(int, listed[1].split(","))) == make.CPU_HEADS


COMPARE = ["grpo", "rloo", "dr_grpo", "gigpo", "turn_returns", "pass_at_k", "multi_reward"]


@pytest.mark.parametrize("advantage", [*COMPARE, "gae", "gae_turns", "reinforce_pp", "remax"])
def test_one_episode_a_group_is_refused_where_it_would_teach_nothing(advantage: str) -> None:
    refusal = pytest.raises(ConfigError, match=f'rollout.group_size = 1: algorithm.advantage "{advantage}"')
    with refusal if advantage in COMPARE else nullcontext():
        sizes.check_sizes(start_of(config_of("rollout.group_size=1", f"algorithm.advantage.name={advantage}"), "embedded"))


@pytest.mark.parametrize(("size", "args", "k"), [(4, {}, 4), (3, {}, 4), (2, {"k": 2}, 2)])
def test_pass_at_k_needs_groups_larger_than_k(size: int, args: dict[str, int], k: int) -> None:
    """A group of k has one subset of k: the best of it is the mean, and every advantage 0."""
    chosen = {"advantage": {"name": "pass_at_k", "args": args}}
    few, enough = (config_of(f"rollout.group_size={n}", algorithm=chosen) for n in (size, k + 1))
    with pytest.raises(ConfigError, match=rf"rollout.group_size = {size}: .*k = {k}.*at least {k + 1}"):
        sizes.check_sizes(start_of(few, "embedded"))
    sizes.check_sizes(start_of(enough, "embedded"))


@pytest.mark.parametrize(("context", "budget", "stop"), [(4096, 20, StopReason.MAX_TOKENS), (20, 4096, StopReason.CONTEXT_FULL)])
async def test_a_prompt_that_alone_passes_the_budget_makes_no_longer_row(
    renderer: Renderer,  # noqa: F811
    context: int,
    budget: int,
    stop: StopReason,
) -> None:
    limits = Limits(4, 8, budget, 10.0, 10.0, context)
    spec = EpisodeSpec(0, "train", 0, 0, "g0.m0.a0")
    scorer = compile_spec({"agentrl_reward": 1, "name": "n", "root": {"use": "cost.tokens", "args": {"max": 4}}})
    engine = FaultyEngine(renderer.stop_token_ids[0])
    found = await run_episode(EnvRef("key_value").build(), Policy(engine, renderer), spec, limits, scorer)
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


def rates(config: Any) -> list[str]:
    return sizes.rate_notes(config.model, config.data, optims_of(config))


def test_a_learning_rate_of_a_toy_is_warned_of_on_a_real_model_and_only_there(tmp_path: Path) -> None:
    path = model(tmp_path, 1)  # 202M

    def said(*more: str, **sections: Any) -> list[str]:
        return rates(config_of(*more, model={"path": path}, **sections))

    assert said() == said("critic={}", "sft={}") == said("optim.lr=1.1e-7") == said("optim.lr=2.9e-5") == []
    [line] = said("optim.lr=1e-3")
    assert line.startswith("optim.lr = 0.001 is high for reinforcement learning of 202M parameters: 1e-06 is a good start")
    assert said("optim.lr=1e-7")[0].startswith("optim.lr = 1e-07 is low for reinforcement learning")
    data = "data.path=['x']"  # the same rate is right or wrong by what is trained
    assert said(data, "optim.lr=1e-4") == said(data) == []
    assert said(data, "optim.lr=1e-6")[0].startswith("optim.lr = 1e-06 is low for supervised training of 202M parameters: 1e-05")
    assert said(data, "data.loss=dpo", "optim.lr=1e-6") == said("optim.name=sgd", "optim.lr=0.1") == []
    lines = said("optim.lr=1e-3", "critic.lr=1e-3", "sft.lr=3e-3", "sft.matrix_lr=0.02")
    assert [line.split()[0] for line in lines] == ["optim.lr", "critic.lr", "sft.lr", "sft.matrix_lr"]
    assert said("optim.lr=1e-4", "model.lora.rank=4") == []
    assert "with LoRA: 1e-05" in said("optim.lr=1e-3", "model.lora.rank=4")[0]
    assert rates(config_of("optim.lr=1e-3")) == []
    [line] = rates(config_of("optim.lr=1e-6"))
    assert line.startswith("optim.lr = 1e-06 is low for reinforcement learning of a model of random weights: 0.001 is")
    small = json.loads((tmp_path / "config.json").read_text()) | {"intermediate_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(small))
    assert said("optim.lr=1e-3") == []


def test_a_warm_up_longer_than_its_training_is_warned_of() -> None:
    def said(*more: str) -> list[str]:
        return [note.partition(":")[0] for note in sizes.warmup_notes(config_of("steps=20", "optim.warmup=21", *more))]

    assert said() == ["optim.warmup = 21 is above steps = 20"]
    assert said("steps=21") == said("optim.warmup=20", "sft={min_steps=10}") == said("data.path=['x']") == []
    with pytest.raises(ConfigError, match=r"model\.init\.layers"):  # a model of as many was built first, for hours
        config_of("model.init.layers=100000000")


def test_stale_tokens_that_nothing_corrects_are_warned_of() -> None:
    def said(*more: str) -> list[str]:
        return [note for note in sizes.start_notes(RunStart(config_of("rollout.max_staleness=1", *more))) if "stale" in note]

    corrected = said("algorithm.proximal=recompute", "algorithm.correction.name=truncated")
    assert said() == corrected == said("rollout.max_staleness=0", "algorithm.loss.name=reinforce") == []
    assert "max_staleness = 1: tokens of older weights are trained as new ones" in said("algorithm.loss.name=reinforce")[0]
    assert "nothing corrects" in said("algorithm.proximal=recompute")[0]


def test_the_defaults_hold_one_another() -> None:
    """A micro-batch holds an episode, a sequence of vLLM too, and an update is one optimizer step."""
    config = config_of(model={"init": {"context": 1 << 20}})
    rollout = config.rollout
    assert config.optim.micro_tokens >= rollout.max_episode_tokens <= config.vllm.max_model_len
    assert config.algorithm.minibatch == rollout.groups * rollout.group_size


BF16 = ["algorithm.proximal=behaviour", "model.dtype=bfloat16"]
SHORT = ["rollout.max_turns=8", "rollout.max_turn_tokens=64", "rollout.max_episode_tokens=512"]


def share_without_gradient(loss: str, args: dict[str, float], tokens: int, kl: float = 2e-4) -> float:
    """Tokens without a gradient, by the loss itself, of sequences that the engine sampled: d = log trainer - log engine is
    normal, with the variance 2 kl and a mean of -kl, since exp(d) must have the mean 1."""
    rows, generator = 2**22 // tokens, torch.Generator().manual_seed(0)
    d = -kl + (2 * kl) ** 0.5 * torch.randn(rows * tokens, generator=generator, dtype=torch.float64)
    assert d.exp().mean() == pytest.approx(1.0, abs=1e-4) and (torch.expm1(-d) + d).mean() == pytest.approx(kl, rel=0.01)
    now, advantage = d.requires_grad_(), torch.tensor([1.0, -1.0]).double().repeat(rows // 2 + 1)[:rows].repeat_interleave(tokens)
    engine, mask = torch.zeros_like(d), torch.ones(len(d), dtype=torch.bool)
    offsets = torch.arange(0, len(d) + 1, tokens)
    policy_loss(loss, args)(LossInput(now, engine, engine, advantage, mask, offsets, None)).loss.sum().backward()
    assert now.grad is not None
    return float((now.grad == 0).double().mean())


@pytest.mark.parametrize(("loss", "args", "lengths"), [
    ("gspo", {"clip_low": 3e-4, "clip_high": 4e-4}, [32, 512]),
    ("gspo", {"clip_low": 1.0, "clip_high": 4e-4}, [32, 512]),  # no lower bound
    ("gspo", {"clip_low": 1e-3, "clip_high": 2e-3}, [32, 512]),
    ("gmpo", {"clip_low": 0.01, "clip_high": 0.02}, [1]),  # whose bounds are on each token
])  # fmt: skip
def test_bounds_narrower_than_the_engine_s_mismatch_are_warned_of_with_the_share(
    loss: str, args: dict[str, float], lengths: list[int]
) -> None:
    words = ",".join(f"{key}={value}" for key, value in args.items())
    [note] = sizes.sequence_ratio_notes(
        RunStart(config_of(*BF16, *SHORT, f"algorithm.loss.name={loss}", f"algorithm.loss.args={{{words}}}"))
    )
    found = [int(share) / 100 for share in re.findall(r"(\d+)% of", note)]
    assert found == pytest.approx([share_without_gradient(loss, args, tokens) for tokens in lengths], abs=0.015)
    assert [f"sequences of {n} " in note for n in lengths] == [loss == "gspo"] * len(lengths)
    assert f'"{loss}"' in note and 'Set algorithm.proximal = "recompute"' in note


@pytest.mark.parametrize("keys", [
    ["algorithm.loss.name=gspo", "algorithm.loss.args={clip_low=0.2,clip_high=0.2}"],
    ["algorithm.loss.name=gspo", "algorithm.proximal=recompute"],
    ["algorithm.loss.name=gspo", "model.dtype=float32"],
    ["algorithm.loss.name=gmpo"],  # 0.4 is 20 deviations of a token
    ["algorithm.loss.name=ppo_clip"],
    ["algorithm.loss.name=cispo"],
])  # fmt: skip
def test_wide_bounds_or_a_recomputed_policy_are_not_warned_of(keys: list[str]) -> None:
    assert sizes.sequence_ratio_notes(RunStart(config_of(*BF16, *SHORT, *keys))) == []


def test_a_plug_in_with_a_sequence_ratio_is_warned_of_by_its_trait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under any name, also if one of its bounds may be None."""

    def mine(batch: LossInput, *, clip_high: float = 1e-4, clip_low: float | None = None) -> LossOutput:
        return LossOutput(-batch.advantages)

    monkeypatch.setitem(
        POLICY_LOSSES._entries, ("mine", __name__), Entry("mine", mine, frozenset(), frozenset({"sequence_ratio"}))
    )
    [note] = sizes.sequence_ratio_notes(RunStart(config_of(*BF16, *SHORT, "algorithm.loss.name=mine")))
    assert '"mine" (-inf, +0.0001)' in note


def test_the_recipe_of_a_mixture_of_experts_recomputes_and_replays_its_routers() -> None:
    path = Path(__file__).resolve().parents[2] / "configs/recipes/qwen3_30b_a3b.toml"
    config = load_config(path, find=find_config)
    assert (config.algorithm.proximal, config.rollout.router_replay) == ("recompute", True)
    with planned_elsewhere((1, 8)):
        assert sizes.sequence_ratio_notes(RunStart(config)) == []
        [note] = sizes.sequence_ratio_notes(RunStart(load_config(path, ["algorithm.proximal=behaviour"], find=find_config)))
    assert "30% of sequences of 1,024 sampled tokens and 13% of sequences of 16,384 sampled tokens have no gradient" in note


def test_a_dry_run_for_other_machines_has_the_warnings_of_a_start(agentrl: Agentrl, here: Path) -> None:
    keys = ["algorithm.loss={name='gspo'}", "optim.lr=1e-6", "sft=false", "model.dtype=bfloat16", "engine=embedded"]
    said = agentrl("train", "quickstart", "--dry-run", "--gpu-memory", "80", *keys).out
    assert (
        'warning: algorithm.proximal = "behaviour": the bounds of "gspo"' in said and "warning: optim.lr = 1e-06 is low" in said
    )

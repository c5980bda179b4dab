"""`agentrl train --dry-run`: the memory that it prints is that of a computation by hand, and what cannot fit is refused."""

import importlib.util
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from agentrl.cluster.placement import planned_elsewhere
from agentrl.cluster.ray_cluster import stop_ray
from agentrl.config import TrainConfig
from agentrl.config.load import config_from
from agentrl.run.checks import check_config
from agentrl.run.engine_choice import EngineChoice
from agentrl.run.plan import Planner, lines
from agentrl.run.role_placement import GIB, Peak, RolePlacement, RunMemory, host_lines, peaks
from agentrl.trainer import memory as by_size
from agentrl.trainer.memory import RoleMemory
from agentrl.utils.errors import ConfigError, ModelError
from tests.conftest import Agentrl

LAYERS, HIDDEN, MLP, HEADS, KV, SIZE, WORDS = 4, 64, 96, 4, 2, 16, 1000
LAYER = HIDDEN * (2 * HEADS * SIZE + 2 * KV * SIZE) + 3 * HIDDEN * MLP + 2 * HIDDEN + 2 * SIZE
ROOT = WORDS * HIDDEN + HIDDEN  # tied embeddings and the last norm
ALL = LAYERS * LAYER + ROOT


@pytest.fixture
def architecture(tmp_path: Path) -> Path:
    """A model folder with nothing but config.json."""
    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "intermediate_size": MLP, "num_attention_heads": HEADS}
    more = {"num_key_value_heads": KV, "head_dim": SIZE, "vocab_size": WORDS, "tie_word_embeddings": True}
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 4096, **sizes, **more}
    (tmp_path / "architecture").mkdir()
    (tmp_path / "architecture/config.json").write_text(json.dumps(config))
    return tmp_path / "architecture"


def config_of(path: Path, *overrides: str) -> TrainConfig:
    return config_from({"env": {"id": "key_value"}, "engine": "embedded", "model": {"path": str(path)}}, list(overrides))


def placed(path: Path, *overrides: str) -> dict[str, RolePlacement]:
    return {one.role: one for one in RunMemory(EngineChoice(config_of(path, *overrides)), 80 * GIB).roles()}


def test_the_weights_of_the_actor_and_the_engine_are_counted_from_the_architecture_alone(architecture: Path) -> None:
    found = placed(architecture, "model.dtype=float32", "rollout.max_episodes=8", "rollout.max_episode_tokens=100")
    assert (found["actor"].memory.weights, found["actor"].memory.optimizer) == (4 * ALL, 8 * ALL)
    assert (found["rollout"].memory.weights, found["rollout"].memory.cache) == (4 * ALL, 8 * 100 * 2 * LAYERS * KV * SIZE * 4)
    # Two ranks: every first dimension is even, so each has half. In bf16, the default on cards, the masters stay float32 and the
    # engine's are halved.
    halves = placed(architecture, "cluster.actors=2")
    assert (halves["actor"].memory.weights, halves["actor"].memory.optimizer) == (2 * ALL, 4 * ALL)
    assert (halves["rollout"].memory.weights, halves["actor"].ranks) == (2 * ALL, 2)


def test_gradients_are_kept_whole_or_sharded_and_layers_are_gathered(architecture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = ("cluster.actors=4", "model.dtype=bfloat16")
    found = placed(architecture, *many)["actor"].memory
    # bfloat16: three layers and what is outside of them; the gradients of a layer, cast to float32 once, and those outside.
    gathered = 2 * (ROOT + 3 * LAYER) + (2 + 4) * LAYER + 2 * ROOT
    assert (found.gradients, found.gathered) == (4 * ALL, gathered)
    assert placed(architecture, *many, "model.shard_gradients=true")["actor"].memory.gradients == ALL
    monkeypatch.setattr(by_size, "LARGE", ALL)  # left open, from that size on
    assert placed(architecture, *many)["actor"].memory.gradients == ALL
    assert placed(architecture, *many)["actor"].memory.checkpoints
    # With replicas each has a whole model; in the driver's process nothing is sharded or gathered.
    assert placed(architecture, *many, "model.replicas=4")["actor"].memory.weights == 4 * ALL
    assert placed(architecture, "cluster.backend=inline", "model.dtype=float32")["actor"].memory.gathered == 0
    assert placed(architecture, *many, "model.offload=always")["actor"].memory.resident == 0


def test_adapters_leave_one_model_and_little_to_train(architecture: Path) -> None:
    found = placed(architecture, "model.lora.rank=2", "algorithm.kl.coef=0.1", "model.dtype=float32")
    assert found.keys() == {"actor", "rollout"}
    adapters = LAYERS * 2 * (2 * (HIDDEN + HEADS * SIZE) + 2 * (HIDDEN + KV * SIZE) + 3 * (HIDDEN + MLP))
    assert found["actor"].memory.weights == 4 * (ALL + adapters)
    assert (found["actor"].memory.optimizer, found["actor"].memory.gradients) == (8 * adapters, 4 * adapters)


def test_each_of_several_environments_is_named() -> None:
    """The second has half the weight, and limits and an estimator of its own."""
    envs = [
        {"id": "key_value", "name": "a", "weight": 2.0},
        {"id": "key_value", "name": "b", "limits": {"max_turns": 3}, "eval": {"tasks": 7}, "advantage": {"name": "rloo"}},
    ]
    plan = Planner(config_from({"env": envs, "engine": "embedded", "model": {"init": {}}})).plan(False)
    one, other = plan.environments
    assert one.startswith("a (agentrl/KeyValue-v0), reward key_value") and "66.7% of the groups" in one
    assert "33.3% of the groups" in other and "3 turns of 2048 tokens" in other and other.endswith("rloo")
    text = "\n".join(lines(plan))
    assert one in text and other in text and "b: 7 tasks of heldout" in text
    (alone,) = Planner(config_from({"env": envs[0], "engine": "embedded", "model": {"init": {}}})).plan(False).environments
    assert "of the groups" not in alone


def test_a_device_holds_what_its_largest_turn_needs_beside_those_that_keep_their_memory() -> None:
    actor = RoleMemory(weights=10, optimizer=20, gradients=5, activations=7)
    critic = RoleMemory(weights=9, optimizer=18, gradients=4, activations=9)
    engine = RoleMemory(weights=3, cache=30)

    def found(rests: bool, engine_rests: bool) -> list[Peak]:
        trained = [RolePlacement("actor", "a", 2, actor, rests), RolePlacement("critic", "a", 2, critic, rests)]
        return peaks([*trained, RolePlacement("rollout", "a", 2, engine, engine_rests)], 100)

    assert found(False, False) == [Peak("a", "critic", 30 + 27 + 33 + 13, 100)]
    assert found(False, True) == [Peak("a", "rollout", 30 + 27 + 33, 100)]
    assert found(True, False) == [Peak("a", "actor", 30 + 12 + 33, 100)]
    assert found(True, True) == [Peak("a", "actor", 30 + 12, 100)]
    # In a publish a colocated engine has its weights beside the actor's, and no cache yet; layers are gathered one by one.
    large = RoleMemory(weights=40, cache=1)
    both = [RolePlacement("actor", "a", 2, replace(actor, gathered=2), True), RolePlacement("rollout", "a", 2, large, True)]
    assert peaks(both, 100) == [Peak("a", "publish", 30 + 2 + 40, 100)]
    alone = [RolePlacement("actor", "a", 2, actor, False), RolePlacement("rollout", "b", 3, engine, False)]
    assert [peak.size for peak in peaks(alone, 100)] == [42, 33]
    idle = [RolePlacement("actor", "a", 2, RoleMemory(weights=GIB), True), RolePlacement("rollout", "a", 2, engine, True)]
    assert host_lines(idle) == ["actor: 1.0 GiB of pinned host memory per rank between its turns"] and host_lines(alone) == []
    away = [RolePlacement("actor", "a", 2, RoleMemory(host=3 * GIB), False)]
    assert host_lines(away) == ["actor: 3.0 GiB of host memory per rank (model.offload)"]
    [host] = peaks(alone, None)  # without cards all ranks of all roles are in one memory
    assert (host.device, host.size) == ("host memory", 2 * 42 + 3 * 33)


def test_what_does_not_fit_is_told_with_the_keys_that_help(architecture: Path) -> None:
    def told(*overrides: str, card: int | None = GIB, place: int = 0) -> str:
        memory = RunMemory(EngineChoice(config_of(architecture, *overrides)), card)
        placed = memory.roles()
        return memory.advice(placed, peaks(placed, card)[place])

    first, *rest = told("cluster.actors=2", "critic.lr=1e-3", "rollout.max_episodes=1").split("; ")
    assert first == "set model.activation_checkpointing = true, lower optim.micro_tokens = 16384"
    assert any("model.shard_gradients = true" in way for way in rest)
    assert any("raise cluster.actors = 2" in way for way in rest)
    assert any('rollout.colocate = true, model.offload = "idle"' in way for way in rest)
    thin = told("model.activation_checkpointing=true", "model.shard_gradients=true", 'model.offload="idle"', "critic.lr=1e-3")
    assert "checkpointing" not in thin and "shard_gradients" not in thin
    # A way that the run has taken already, or that its backend does not have, is none.
    one = told("cluster.backend=inline", "model.lora.rank=8", "model.offload=always")
    assert not any(way in one for way in ("cluster.actors", "model.lora", 'offload = "always"'))
    host = told("cluster.actors=2", card=None)
    assert 'offload = "always"' not in host and "cluster.actors" not in host and host.endswith("--gpu-memory GIB")
    engine = ("engine=vllm", "vllm.replicas=2")
    with planned_elsewhere():
        assert told(*engine, place=1) == "lower vllm.args.gpu_memory_utilization = 0.92"
        assert told(*engine, "vllm.kv_cache_mib=900", place=1) == "lower vllm.kv_cache_mib = 900"


def test_the_command_needs_no_weights_and_refuses_what_does_not_fit(
    architecture: Path, agentrl: Agentrl, monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    asked = ["train", "quickstart", "--dry-run", "sft=false", "model.init=false", f"model.path={architecture}", "engine=embedded"]
    said = agentrl(*asked, "--gpu-memory", "1").out
    assert "actor" in said and "of 1.0 GiB" in said
    said = agentrl(*asked, "--gpu-memory", "0.001", code=2).err
    assert "of 0.0 GiB, in the turn of actor: it does not fit; " in said and "activations" in said
    stop_ray()  # of an earlier file, whose nodes would be asked what they have
    # Planned for another machine, it needs neither vLLM nor a card here; and does not start Ray.
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "vllm" else real(name, *rest))
    there = [*asked, "engine=vllm", "vllm.tensor_parallel=2", "vllm.kv_cache_mib=512"]
    said = agentrl(*there, "--gpu-memory", "1").out
    assert "engine vllm" in said and "rollout: 0.5 of 1.0 GiB" in said
    # Of this model, and not of the one that stands in for it.
    assert "vllm.kv_cache_mib = 1 holds" in agentrl(*there, "vllm.kv_cache_mib=1", "--gpu-memory", "1", code=2).err
    assert not ray.is_initialized()
    assert "vLLM is not installed" in agentrl(*there, code=2).err
    assert "optim.micro_tokens = 7" in agentrl(*asked, "optim.micro_tokens=7", code=2).err  # the checks of a run
    assert 'model.offload = "always": there is no GPU' in agentrl(*asked, "model.offload=always", code=2).err
    for more in ([], ["--gpu-memory", "80"]):  # of other cards it was a plan
        said = agentrl(*asked, "data.path=['chats.jsonl']", *more, code=2).err
        assert "data: agentrl train learns only from episodes that it plays" in said
    for none in ("0", "-3", "nan"):
        assert f"--gpu-memory = {none}: expected the GiB of a card" in agentrl(*asked, "--gpu-memory", none, code=2).err
    assert "--dry-run" in agentrl("train", "quickstart", "--gpu-memory", "80", code=2).err
    assert [path.name for path in here.iterdir()] == ["architecture"]  # nothing was started


def test_a_folder_without_a_tokenizer_is_split_as_its_own_sizes_allow(architecture: Path) -> None:
    """The model that stands in for it in other checks has no experts, and fewer heads."""
    file = architecture / "config.json"
    sizes = json.loads(file.read_text()) | {"num_attention_heads": 8, "num_key_value_heads": 8, "tie_word_embeddings": False}
    experts = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
    file.write_text(json.dumps(sizes | experts | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}))

    def tried(*overrides: str) -> str:
        return Planner(config_of(architecture, "cluster.actors=8", *overrides)).dry_run(80.0).text()

    assert "of 80.0 GiB, in the turn of actor" in tried("model.tensor_parallel=8", "model.expert_parallel=4")
    with pytest.raises(ConfigError, match="tensor_parallel = 8: the experts of the family 'qwen3_moe'"):
        tried("model.tensor_parallel=8")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_key_value_heads": 4}))
    with pytest.raises(ConfigError, match="tensor_parallel = 8 does not divide the model's 4 key heads"):
        tried("model.tensor_parallel=8", "model.expert_parallel=4")


KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "sparse": {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "tie_word_embeddings": False,
    },
    "conv": {"layer_types": ["conv", "full_attention"] * 2, "model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"]},
}  # fmt: skip


@pytest.mark.parametrize(("kind", "override", "refused"), [
    ("sparse", "rollout.router_replay=true model.expert_parallel=2", None),
    ("sparse", "model.expert_parallel=4", "does not divide cluster.actors = 2"),
    ("dense", "rollout.router_replay=true", "is a dense model, which has no routers"),
    ("dense", "model.expert_parallel=2", "no expert-parallel plan for the family 'qwen3'"),
    # A KV cache holds no state of a convolution; without a cache there is nothing to hold.
    ("conv", "engine_args={}", r"its layers are of the types conv, .*engine_args = \{ cache = false \}"),
    ("conv", "engine_args={cache=false}", None),
])  # fmt: skip
def test_an_architecture_is_checked_and_not_the_tiny_model_in_its_place(
    architecture: Path, kind: str, override: str, refused: str | None
) -> None:
    file = architecture / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | KINDS[kind]))
    config = config_of(architecture, *override.split(), *([] if kind == "conv" else ["cluster.actors=2"]))
    if refused is None:
        assert "in the turn of actor" in Planner(config).dry_run(80.0).text()
        return
    with pytest.raises((ConfigError, ModelError), match=refused):
        Planner(config).dry_run(80.0)


def test_what_the_checks_log_is_in_the_plan_and_in_a_start_once_and_not_lost_if_they_fail(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's own log begins after its checks."""
    env = {"id": "key_value", "params": {"calls": 2, "set_share": 0.0, "max_value": 1, "keys": 4}}
    pool = "rollout.sampler={name='uniform',args={pool=500}}"
    model = {"init": {}, "packing": "packed"}
    config = config_from(
        {"env": env, "engine": "embedded", "model": model, "cluster": {"backend": "inline"}}, [pool, "eval.split=train"]
    )
    said = [line for line in check_config(config, planned=True) if "different tasks, not the 500 of args.pool" in line]
    assert len(said) == 1 and f"warning: {said[0]}" in Planner(config).dry_run().notes
    assert "args.pool" not in capfd.readouterr().err
    monkeypatch.setattr(logging.getLogger("agentrl"), "propagate", False)  # as without pytest's handlers
    monkeypatch.setattr("agentrl.run.checks.check_lint", lambda start: (_ for _ in ()).throw(ConfigError("no")))
    with pytest.raises(ConfigError, match=r"^no$"):
        check_config(config, planned=True)
    assert said[0] in capfd.readouterr().err

"""Every config key changes something: here, at the function that reads it, or in a test named below.

A leaf key of the schema must stand in exactly one of the two tables; one that stands in neither fails.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from pydantic import BaseModel

from agentrl.config import TrainConfig, schema
from agentrl.config.load import config_from

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = [
    value for value in vars(schema).values()
    if isinstance(value, type) and issubclass(value, BaseModel) and value.__module__ == schema.__name__
]
Observe = Callable[[TrainConfig, Path], Any]


def made(overrides: list[str]) -> TrainConfig:
    base = {"env": {"id": "key_value"}, "cluster": {"backend": "inline"}, "engine": "embedded",
            "model": {"init": {"layers": 1, "hidden": 16, "mlp": 16, "heads": 2, "kv_heads": 1, "head_dim": 8}}}
    return config_from(base, overrides)


# -- what the functions that read the config make of it -------------------------------------------


def built_model(config: TrainConfig, out: Path) -> Any:
    from safetensors.torch import load_file

    from agentrl.train.init_model import init_model

    assert config.model.init is not None
    folder = init_model(config.model.init, out / "model", seed=config.seed)
    weight = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    return (folder / "config.json").read_text(), float(weight.std())


def environment(config: TrainConfig, out: Path) -> Any:
    from agentrl.catalog import EnvRef
    from agentrl.run.session import build_scorer

    ref = EnvRef.of(config)
    env = ref.build()
    env.reset(seed=3)
    found = type(env).__name__, env.task.data, build_scorer(config, ref).spec
    env.close()
    return json.dumps(found, default=str)


def episodes(config: TrainConfig, out: Path) -> Any:
    """Limits, sampling and the collector's bookkeeping, as a session makes them."""
    from agentrl.catalog import EnvRef
    from agentrl.rollout.collect import Collector
    from agentrl.run.policy import make_policy

    policy: Any = make_policy(config, SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]

    async def body() -> Any:
        collector = Collector(EnvRef("key_value"), policy, SimpleNamespace(), config.rollout, context=100_000, seed=0)  # type: ignore[arg-type]
        admitted = 0
        while collector.ledger.admit() is not None:
            admitted += 1
        running = 0
        while not collector._slots.locked():
            await collector._slots.acquire()
            running += 1
        return collector.limits, admitted, running, policy.temperature, policy.top_p, policy.top_k

    return repr(asyncio.run(body()))


def attempts(config: TrainConfig, out: Path) -> Any:
    """Episodes that one group asks for where each of them meets an outage."""
    import agentrl.rollout.collect as module
    from agentrl.catalog import EnvRef
    from agentrl.trajectory import StopReason, Task, Trajectory

    asked: list[str] = []

    async def play(env: Any, policy: Any, spec: Any, *args: Any) -> Trajectory:
        asked.append(spec.key)
        return Trajectory("made-up", Task("t", 0), stop=StopReason.ENGINE_ERROR)

    async def body() -> None:
        collector = module.Collector(EnvRef("key_value"), SimpleNamespace(), SimpleNamespace(), config.rollout,  # type: ignore[arg-type]
                                     context=1000, seed=0)
        await collector._members(0, 0, EnvRef("key_value"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "run_episode", play)
        asyncio.run(body())
    return sorted(asked)


def vllm_options(config: TrainConfig, out: Path) -> Any:
    import agentrl.backends.vllm as backend
    from agentrl.run import engines
    from agentrl.run.engines import make_engine

    seen: dict[str, Any] = {}
    kept, backend.VllmEngine = backend.VllmEngine, lambda model, **options: seen.update(options)  # type: ignore[misc, assignment]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "model_context", lambda model: 4096)
        make_engine("vllm", "model", config)
    backend.VllmEngine = kept  # type: ignore[misc]
    return seen


def api_engine(config: TrainConfig, out: Path) -> Any:
    import agentrl.backends.litellm as backend
    from agentrl.run.engines import make_api_engine

    seen: dict[str, Any] = {}
    kept, backend.LiteLlmEngine = backend.LiteLlmEngine, lambda name, **options: seen.update(options)  # type: ignore[misc, assignment]
    try:
        asked = config.model_copy(update={"model": schema.ModelConfig(path="api:x")})
        make_api_engine(asked, SimpleNamespace())  # type: ignore[arg-type]
    finally:
        backend.LiteLlmEngine = kept  # type: ignore[misc]
    return {key: value for key, value in seen.items() if key != "transcript"}


class Course:
    """A session without models: what a phase of a run calls, in order."""

    def __init__(self, config: TrainConfig, out: Path) -> None:
        from agentrl.catalog import EnvRef
        from agentrl.rollout.ledger import GroupLedger
        from agentrl.trajectory import Group, Task, TokenLedger, Trajectory

        self.calls: list[Any] = []
        ledger = GroupLedger(1, 0)
        tokens = TokenLedger()
        tokens.append_context([5], 0)
        tokens.append_sampled([6], [-1.0], [0], 0)
        member = Trajectory("made-up", Task("t", 0), ledgers=[tokens], turns=[], reward=0.5)

        async def collect() -> list[Group]:
            return [Group(ledger.version, 0, [member])]

        def trained(groups: list[Group]) -> None:
            ledger.version += 1

        self.member = member
        self.session: Any = SimpleNamespace(
            config=config, env=EnvRef("key_value"), limits=None, engine=SimpleNamespace(forget=self.waited("forget", None)),
            scorer=SimpleNamespace(range=(0.0, 1.0)), display=SimpleNamespace(phase=self.noted("phase"), step=self.quiet),
            collector=SimpleNamespace(ledger=ledger, collect=collect, trained=trained, metrics=dict,
                                      rest=self.waited("rest", None)),
            learner=SimpleNamespace(step=self.waited("update", {})), publish=self.waited("publish", None),
            saver=SimpleNamespace(check=self.waited("check", None), wait=self.waited("wait", None), wanted=lambda found: False,
                                  save=self.waited("save", None)),
            folder=SimpleNamespace(warm_start=out / "warm"),
            actors=SimpleNamespace(arun=self.worker),
            policy=SimpleNamespace(at=lambda temperature: f"at {temperature}", renderer=None),
        )
        self.recorder: Any = SimpleNamespace(
            row=self.quiet, evaluation=self.waited("evaluation", None), trajectories=self.waited("write", None),
            writes=SimpleNamespace(check=self.waited("written", None), wait=self.waited("written", None)),
        )
        self.interrupt: Any = SimpleNamespace(requested=False, in_step=False)

    def quiet(self, *args: Any, **kwargs: Any) -> None:
        pass

    def noted(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: self.calls.append((name, repr(args)))

    def waited(self, name: str, value: Any) -> Callable[..., Any]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, self.session.collector.ledger.version))
            return dict(value) if isinstance(value, dict) else value

        return call

    async def worker(self, method: Any, *args: Any) -> Any:
        self.calls.append((method.__name__, len(args[0]) if method.__name__ == "sft_steps" else None))
        return {"loss": 1.0}

    async def evaluated(self, env: Any, policy: Any, *args: Any, **kwargs: Any) -> Any:
        from agentrl.rollout.evaluate import Evaluation

        self.calls.append(("evaluate", policy, env.params, sorted(kwargs.items())))
        return Evaluation(0.5, 0.5, 1, 0, {}, [])


def loop(config: TrainConfig, out: Path) -> Any:
    import agentrl.loop as module

    course = Course(config, out)

    class Meter:
        def __init__(self, engine: Any) -> None:
            pass

        async def read(self) -> dict[str, float]:
            return {}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "evaluate", course.evaluated)
        patch.setattr(module, "EngineMeter", Meter)
        asyncio.run(module.train_loop(course.session, course.recorder, course.interrupt))
    return course.calls


def warming_up(config: TrainConfig, out: Path) -> Any:
    import agentrl.run.sft as module
    from agentrl.errors import AgentrlError

    course = Course(config, out)

    class Source:
        def __init__(self, env: Any, renderer: Any, teacher: Any, seed: int) -> None:
            course.calls.append(("teacher", env.params, teacher))

        async def take(self, first: int, count: int) -> list[Any]:
            return [course.member] * count

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "evaluate", course.evaluated)
        patch.setattr(module, "Transcripts", Source)
        try:
            asyncio.run(module.warm_start(course.session, course.recorder, course.interrupt))
        except AgentrlError as problem:
            course.calls.append(str(problem))
    return course.calls


def folder(config: TrainConfig, out: Path) -> Any:
    from agentrl.run.folder import RunFolder

    made = config.model_copy(update={"out": str(out / config.out)})
    return str(RunFolder.create(made).path.relative_to(out))


def chosen_engine(config: TrainConfig, out: Path) -> Any:
    from agentrl.errors import DependencyError
    from agentrl.run.engines import resolve_engine

    try:
        return resolve_engine(config.engine)
    except DependencyError as problem:
        return str(problem)


SHUT = "sft={min_steps=10,max_steps=40,gate_every=20,gate=0.6}"  # evaluations say 0.5
LOOP = "steps=4 trajectories_every=2 eval.every=2 checkpoint.every=3"
# key -> what observes it, further overrides, two values
FLIPS: dict[str, tuple[Observe, str, str, str]] = {
    **{f"InitModelConfig.{key}": (built_model, "", f"model.init.{key}={a}", f"model.init.{key}={b}")
       for key, a, b in [("layers", 1, 2), ("hidden", 16, 32), ("mlp", 16, 32), ("heads", 2, 4), ("kv_heads", 1, 2),
                         ("head_dim", 8, 16), ("context", 128, 256), ("init_std", 0.05, 0.5)]},
    "EnvConfig.id": (environment, "", "env.id=key_value", "env.id=python"),
    "EnvConfig.params": (environment, "", "env.params={calls=2}", "env.params={calls=4}"),
    "EnvConfig.reward": (environment, "", "env.reward=key_value", "env.reward=key_value_exact"),
    "EnvConfig.wrappers": (environment, "", "env.wrappers=[]", 'env.wrappers=[{name="keep_recent",args={tokens=50,turns=2}}]'),
    **{f"RolloutConfig.{key}": (episodes, "", f"rollout.{key}={a}", f"rollout.{key}={b}")
       for key, a, b in [("groups", 2, 3), ("oversample", 1.0, 2.0), ("max_staleness", 0, 1), ("max_episodes", 4, 5),
                         ("max_turns", 2, 3), ("max_turn_tokens", 8, 9), ("max_episode_tokens", 90, 91),
                         ("temperature", 1.0, 0.5), ("top_p", 1.0, 0.5), ("top_k", 0, 5), ("turn_timeout", 1.0, 2.0),
                         ("episode_timeout", 1.0, 2.0), ("env_timeout", 1.0, 2.0)]},
    "RolloutConfig.colocate": (loop, LOOP, "rollout.colocate=false", "rollout.colocate=true"),
    **{f"RolloutConfig.{key}": (attempts, "rollout.group_size=2", f"rollout.{key}={a}", f"rollout.{key}={b}")
       for key, a, b in [("retries", 0, 1), ("group_size", 2, 3), ("oversample_members", 1.0, 2.0)]},
    **{f"VllmConfig.{key}": (vllm_options, "", f"vllm.{key}={a}", f"vllm.{key}={b}")
       for key, a, b in [("replicas", 1, 2), ("max_respawns", 1, 2), ("call_timeout", 1.0, 2.0), ("tensor_parallel", 1, 2),
                         ("kv_cache_mib", 64, 65), ("max_model_len", 64, 65), ("enforce_eager", "true", "false")]},
    "ModelConfig.dtype": (vllm_options, "", "model.dtype=float32", "model.dtype=bfloat16"),
    **{f"ApiConfig.{key}": (api_engine, "", f"api.{key}={a}", f"api.{key}={b}")
       for key, a, b in [("base", '"http://a"', '"http://b"'), ("concurrency", 1, 2), ("timeout", 1.0, 2.0),
                         ("retries", 1, 2), ("max_wait", 1.0, 2.0), ("usd_per_million", "[1.0, 2.0]", "[1.0, 3.0]")]},
    **{f"TrainConfig.{key}": (loop, LOOP, f"{key}={a}", f"{key}={b}")
       for key, a, b in [("steps", 4, 5), ("stop_at_success", 0.4, 0.6), ("trajectories_every", 1, 2), ("seed", 0, 1)]},
    "EvalConfig.tasks": (loop, LOOP, "eval.tasks=3", "eval.tasks=4"),
    "EvalConfig.every": (loop, LOOP, "eval.every=0", "eval.every=1"),
    "EvalConfig.temperature": (loop, LOOP, "eval.temperature=0.0", "eval.temperature=1.0"),
    "CheckpointConfig.every": (loop, LOOP, "checkpoint.every=1", "checkpoint.every=3"),
    "TrainConfig.name": (folder, "", "name=a", "name=b"),
    "TrainConfig.out": (folder, "", "out=a", "out=b"),
    "TrainConfig.engine": (chosen_engine, "", "engine=embedded", "engine=vllm"),
    **{f"SftConfig.{key}": (warming_up, SHUT, f"sft.{key}={a}", f"sft.{key}={b}")
       for key, a, b in [("max_steps", 20, 40), ("batch", 2, 3), ("teacher", "{}", "{wrong=0.5}"), ("params", "{}", "{calls=2}"),
                         ("gate", 0.4, 0.6), ("gate_params", "{}", "{calls=2}"), ("gate_tasks", 3, 4), ("gate_every", 10, 20)]},
}

# key -> the test that flips it
WARM, LEARNER, PARALLEL = "train/test_keys.py", "train/test_learner.py", "train/test_parallel.py"
ELSEWHERE: dict[str, str] = {
    **{f"SftConfig.{key}": f"{WARM}::test_sft_keys" for key in ("lr", "matrix_lr", "warmup", "min_steps")},
    **{f"OptimConfig.{key}": f"{WARM}::test_optim_keys"
       for key in ("lr", "weight_decay", "betas", "max_grad_norm", "warmup", "schedule")},
    "OptimConfig.micro_tokens": f"{WARM}::test_micro_tokens_changes_rounding_only",
    "OptimConfig.prefix_sharing": "train/test_prefix_training.py::test_auto_shares_where_it_wins_and_not_where_it_does_not",
    **{f"AlgorithmConfig.{key}": f"{LEARNER}::test_every_key_of_the_algorithm_changes_the_weights"
       for key in ("aggregate", "epochs", "minibatch", "entropy_bonus", "proximal", "length_norm")},
    "AlgorithmConfig.groups": "train/test_prefix_training.py::test_groups_are_kept_or_split_and_trees_stay_together",
    **{f"KlConfig.{key}": f"{LEARNER}::test_every_key_of_the_algorithm_changes_the_weights"
       for key in ("coef", "kind", "where", "straight_through")},
    "KlConfig.target": f"{LEARNER}::test_steering", "KlConfig.horizon": f"{LEARNER}::test_steering",
    **{f"CriticConfig.{key}": f"{LEARNER}::test_every_key_of_the_critic_changes_its_values" for key in ("lr", "clip", "epochs")},
    "CriticConfig.warmup": f"{LEARNER}::test_critic_warm_up_leaves_the_policy",
    "CriticConfig.path": f"{LEARNER}::test_a_critic_of_another_model",
    "RewardModelConfig.path": "train/test_reward_model.py::test_a_causal_model_is_no_reward_model",
    "RewardModelConfig.weight": "train/test_reward_model.py::test_the_weight_decides",
    **{f"LoraSection.{key}": f"{PARALLEL}::test_every_key_of_lora_changes_something" for key in ("rank", "alpha", "modules")},
    "ModelConfig.path": "e2e/test_train.py::test_two_ranks_learn_the_same",
    "ModelConfig.tool_parser": "run/test_tool_parser.py::test_a_named_parser_is_used_where_it_fits_and_refused_where_not",
    "ModelConfig.activation_checkpointing": f"{PARALLEL}::test_activation_checkpointing_keeps_less",
    "ModelConfig.replicas": f"{PARALLEL}::test_against_one_rank", "ModelConfig.cpu_offload": f"{PARALLEL}::test_what_cannot_be",
    "ModelConfig.sequence_parallel": f"{PARALLEL}::test_against_one_rank",
    **{f"McpServerConfig.{key}": "env/test_mcp.py::test_the_tools_section_of_a_config_reaches_the_environment"
       for key in ("command", "env", "tools", "prefix", "timeout", "max_output")},
    "McpServerConfig.url": "env/test_mcp.py::test_over_http_and_through_a_config",
    "ToolsConfig.sets": "env/test_mcp.py::test_over_http_and_through_a_config",
    "ToolsConfig.mcp": "env/test_mcp.py::test_over_http_and_through_a_config",
    "RolloutConfig.summary_model": "rollout/test_context_policies.py::test_the_config_chooses_the_policy_and_who_writes",
    "RolloutConfig.stall_timeout": "rollout/test_collect.py::test_the_watchdog_names_what_it_waits_for",
    "RolloutConfig.min_survivors": "rollout/test_collect.py::test_a_group_lives_with_min_survivors_and_not_with_one_fewer",
    "RolloutConfig.filter_zero_variance": "rollout/test_collect.py::test_groups_without_variance_are_replaced_and_only_those",
    "RolloutConfig.max_filtered":
        "rollout/test_collect.py::test_the_bound_on_filtering_is_per_update_and_leaves_groups_that_teach",
    **{f"PoolConfig.{key}": "cluster/test_pool.py::test_every_size_of_a_pool_changes_its_place"
       for key in ("nodes", "per_node", "cpus", "gpus")},
    "ClusterConfig.backend": "e2e/test_train.py::test_inline_and_ray_give_the_same_numbers",
    "ClusterConfig.address": "cluster/test_two_nodes.py::test_two_ray_nodes_on_one_machine",
    "ClusterConfig.actors": "e2e/test_train.py::test_two_ranks_learn_the_same",
    "ClusterConfig.startup_timeout": "cluster/test_ray_group.py::test_workers_that_do_not_fit_are_refused_and_none_is_left",
    "ClusterConfig.call_timeout": "cluster/test_ray_group.py::test_hung_and_dead_workers_are_named_and_the_group_restarts",
    "ClusterConfig.max_restarts": "cluster/test_restarts.py::test_the_limit_bounds_how_often_a_run_starts_again",
    "ClusterConfig.pools": "cluster/test_pool.py::test_roles_share_a_pool",
    "ClusterConfig.roles": "cluster/test_pool.py::test_roles_share_a_pool",
    **{f"WeightsConfig.{key}": "train/test_publish_routes.py::test_each_route_brings_the_weights_and_only_it_does"
       for key in ("route", "bucket_mib", "folder")},
    "WeightsConfig.lora": "train/test_publish_routes.py::test_an_adapter_alone_is_published_in_place_of_the_one_before",
    **{f"CheckpointConfig.{key}": "train/test_async_save.py::test_every_key_of_keeping_changes_what_is_left"
       for key in ("keep", "keep_best", "best")},
    "CheckpointConfig.asynchronous":
        "train/test_async_save.py::test_save_returns_before_the_checkpoint_is_whole_only_when_asynchronous",
    **{f"JudgeConfig.{key}": "reward/test_reward_context.py::test_every_judge_key_reaches_the_judge"
       for key in ("api_base", "cache", "usd", "usd_per_million", "concurrency", "timeout", "retries")},
    "JudgeConfig.calls": "run/test_reward_checks.py::test_a_budget_that_ends_before_the_run_is_refused_with_the_numbers",
    "RewardConfig.python": "reward/test_reward_context.py::test_a_python_leaf_runs_only_where_the_config_allows_it_by_name",
}


def leaves() -> list[str]:
    """Keys that hold a value, not a section; a Choice counts by its name and arguments, which the estimators',
    losses', samplers' and wrappers' own tests flip."""
    found = []
    for section in SECTIONS:
        for key, field in section.model_fields.items():
            inside = re.findall(r"\b(\w+Config|\w+Section|Choice)\b", str(field.annotation))
            if section.__name__ not in ("Choice", "Frozen") and (not inside or key in ("mcp", "pools", "wrappers")):
                found.append(f"{section.__name__}.{key}")
    return found


@pytest.mark.parametrize("key", leaves())
def test_the_key_is_in_one_table(key: str) -> None:
    assert (key in FLIPS) != (key in ELSEWHERE), "add the key to FLIPS, or name the test that flips it in ELSEWHERE"


def test_the_tables_hold_no_key_that_is_gone() -> None:
    assert set(FLIPS) | set(ELSEWHERE) <= set(leaves())


@pytest.mark.parametrize("key", FLIPS)
def test_two_values_differ(key: str, tmp_path: Path) -> None:
    observe, more, first, second = FLIPS[key]
    found = []
    for number, value in enumerate((first, second)):
        out = tmp_path / str(number)
        out.mkdir()
        found.append(observe(made([*more.split(), value]), out))
    assert found[0] != found[1]


@pytest.mark.parametrize("key", ELSEWHERE)
def test_the_test_that_is_named_exists(key: str) -> None:
    file, _, name = ELSEWHERE[key].partition("::")
    text = (ROOT / "tests" / file).read_text()
    assert re.search(rf"def {name}\b", text), f"{ELSEWHERE[key]} is not there"
    assert re.search(rf"\b{key.partition('.')[2]}\b", text), f"{file} does not speak of {key}"

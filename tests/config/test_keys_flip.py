"""What every config key does: here, at the function that reads it, or in a test named below.

A leaf key of the schema must stand in exactly one of the two tables; one that stands in neither fails. An entry says what
is observed (tests/config/observed.py) and what that is for each value, as a number that was worked out beforehand.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from pydantic import BaseModel

from agentrl.config import TrainConfig, schema
from agentrl.config.load import config_from
from tests.config import observed as see

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = [value for value in vars(schema).values() if isinstance(value, type) and issubclass(value, BaseModel)]
Observe = Callable[[TrainConfig, Path], Any]


def made(overrides: list[str]) -> TrainConfig:
    base = {
        "env": {"id": "key_value"},
        "cluster": {"backend": "inline"},
        "engine": "embedded",
        "model": {"init": {"layers": 1, "hidden": 16, "mlp": 16, "heads": 2, "kv_heads": 1, "head_dim": 8}},
    }
    return config_from(base, overrides)


def vllm(*names: str) -> Observe:
    return see.only(see.vllm_arguments, *names)


def sglang(*names: str) -> Observe:
    return see.only(see.sglang_client, *names)


def warm(*names: str) -> Observe:
    return see.only(see.warming_up, *names)


PLAY = "rollout.group_size=2 rollout.max_turns=3"
LOOP = "steps=4 trajectories_every=2 eval.every=2 checkpoint.every=3"  # evaluations find 0.5
SHUT = "sft={min_steps=10,max_steps=40,gate_every=20,gate=0.6}"
GATE = {"temperature": 0.0, "tasks": 64, "seed": 0, "split": "train", "params": {}}
EVAL = {"temperature": 1.0, "tasks": 100, "seed": 0, "split": "heldout", "params": {}}
ASKED = (2048, 1.0, 1.0, 0)  # max_tokens, temperature, top_p, top_k

OFFLINE = "contrib/offline/test_offline.py"
OWN_JUDGE = "run/test_own_judge.py"
# the test of a run on data -> the keys whose effect it sees
DATA = {
    "chats_of_both_layouts_and_files_are_learned_and_the_loss_on_held_out_ones_falls": ("path", "batch", "epochs", "heldout"),
    "rejection_sampling_keeps_the_best_of_each_task_with_their_tokens_as_they_are": ("min_reward", "per_task", "split"),
    "successes_alone_and_messages_rendered_anew_are_the_same_rows": ("success", "rerender"),
    "pairs_of_a_run_are_learned": ("loss", "margin"),
    "beta_is_what_the_margin_is_multiplied_by": ("beta",),
    "too_many_bad_rows_refuse_the_run_and_few_are_named": ("max_bad",),
}

# key -> what observes it, further overrides, and what is observed for each value
Effects = dict[str, Any]
EFFECTS: dict[str, tuple[Observe, str, Effects]] = {
    **{
        f"InitModelConfig.{key}": (
            see.built_model,
            "",
            {f"model.init.{key}={value}": see.sizes(**{name: value}) for value in two},
        )
        for key, name, two in [
            ("layers", "layers", (1, 2)),
            ("hidden", "hidden", (16, 32)),
            ("mlp", "mlp", (16, 48)),
            ("heads", "heads", (2, 4)),
            ("kv_heads", "kv_heads", (1, 2)),
            ("head_dim", "head_dim", (8, 16)),
            ("context", "context", (128, 256)),
            ("init_std", "std", (0.05, 0.5)),
        ]
    },
    "InitModelConfig.vision": (
        see.architecture,
        "model.init={heads=2,kv_heads=1,head_dim=16,hidden=32}",
        {"model.init.vision=false": "Qwen3ForCausalLM", "model.init.vision=true": "Qwen2_5_VLForConditionalGeneration"},
    ),
    "EnvConfig.id": (
        see.only(see.environment, "id"),
        "",
        {"env.id=key_value": "agentrl/KeyValue-v0", "env.id=python": "agentrl/Python-v0"},
    ),
    "EnvConfig.params": (see.only(see.environment, "calls"), "", {"env.params={calls=2}": 2, "env.params={calls=5}": 5}),
    "EnvConfig.max_output": (see.only(see.environment, "max_output"), "", {"env.max_output=64": 64, "~env.max_output": 2048}),
    "EnvConfig.reward": (
        see.only(see.environment, "reward"),
        "",
        {"env.reward=key_value_dapo": "key_value_dapo", "env.reward=key_value_exact": "key_value_exact"},
    ),
    "EnvConfig.wrappers": (
        see.only(see.environment, "wrappers"),
        "",
        {"env.wrappers=[]": [], 'env.wrappers=[{name="token_limit",args={tokens=50}}]': ["TokenLimit over 50"]},
    ),
    "RolloutConfig.groups": (see.admitted, "", {"rollout.groups=2": 2, "rollout.groups=3": 3}),
    "RolloutConfig.oversample": (
        see.admitted,
        "rollout.groups=4",
        {"rollout.oversample=1.0": 4, "rollout.oversample=1.25": 5, "rollout.oversample=2.0": 8},
    ),
    "RolloutConfig.max_staleness": (
        see.admitted,
        "rollout.groups=4",  # Eq. 3 of AReaL: (staleness + 1) x groups at version 0
        {"rollout.max_staleness=0": 4, "rollout.max_staleness=1": 8, "rollout.max_staleness=3": 16},
    ),
    "RolloutConfig.max_episodes": (
        see.most_at_once,
        "rollout.group_size=6",
        {"rollout.max_episodes=2": 2, "rollout.max_episodes=5": 5, "rollout.max_episodes=9": 6},
    ),
    "RolloutConfig.max_turns": (
        see.ends,
        PLAY,
        {"rollout.max_turns=1": [(1, "max_turns")] * 2, "rollout.max_turns=4": [(4, "max_turns")] * 2},
    ),
    "RolloutConfig.max_turn_tokens": (
        see.asked,
        PLAY,
        {"rollout.max_turn_tokens=8": {(8, 1.0, 1.0, 0)}, "rollout.max_turn_tokens=99": {(99, 1.0, 1.0, 0)}},
    ),
    "RolloutConfig.max_episode_tokens": (
        see.tokens,
        "rollout.group_size=2 rollout.max_turns=90",
        {f"rollout.max_episode_tokens={n}": ({"max_tokens"}, True) for n in (600, 601, 1000)},
    ),
    "RolloutConfig.temperature": (
        see.asked,
        PLAY,
        {
            "rollout.temperature=1.0": {ASKED},
            "rollout.temperature=0.5": {(2048, 0.5, 1.0, 0)},
            "rollout.temperature=[[0,0.75]]": {(2048, 0.75, 1.0, 0)},
        },
    ),
    "RolloutConfig.top_p": (see.asked, PLAY, {"rollout.top_p=1.0": {ASKED}, "rollout.top_p=0.5": {(2048, 1.0, 0.5, 0)}}),
    "RolloutConfig.top_k": (see.asked, PLAY, {"rollout.top_k=0": {ASKED}, "rollout.top_k=5": {(2048, 1.0, 1.0, 5)}}),
    "RolloutConfig.router_replay": (
        see.told,
        PLAY,
        {"rollout.router_replay=false": {None}, "rollout.router_replay=true": {0}},
    ),
    "RolloutConfig.group_size": (see.members, "", {"rollout.group_size=2": (2, 2, 0), "rollout.group_size=3": (3, 3, 0)}),
    "RolloutConfig.oversample_members": (
        see.members,
        "rollout.group_size=4",  # started, back, cancelled
        {"rollout.oversample_members=1.0": (4, 4, 0), "rollout.oversample_members=1.5": (6, 4, 2)},
    ),
    "RolloutConfig.grow": (
        see.members,
        "rollout.group_size=4",  # none of them wins
        {"rollout.grow=1.0": (4, 4, 0), "rollout.grow=1.5": (6, 6, 0), "rollout.grow=2.5": (10, 10, 0)},
    ),
    "RolloutConfig.retries": (
        see.attempts,
        PLAY,
        {"rollout.retries=0": (2, 2), "rollout.retries=1": (4, 4), "rollout.retries=3": (8, 8)},
    ),
    "RolloutConfig.slow_loop": (
        see.blocks_told,
        "",
        {"rollout.slow_loop=0.05": 1, "rollout.slow_loop=2.0": 0, "rollout.slow_loop=0": 0},
    ),
    "RolloutConfig.colocate": (see.at("rest"), LOOP, {"rollout.colocate=false": [], "rollout.colocate=true": [0, 1, 2, 3]}),
    "SglangConfig.servers": (
        sglang("servers"),
        "",
        {
            'sglang.servers=["http://a:1"]': ["http://a:1"],
            'sglang.servers=["http://a:1/","http://b:2"]': ["http://a:1", "http://b:2"],
        },
    ),
    "SglangConfig.update": (
        sglang("update"),
        "weights.folder=/w",
        {"sglang.update=files": "FileUpdate in /w", "sglang.update=http": "HttpUpdate"},
    ),
    "SglangConfig.seeds": (sglang("refused"), "", {"sglang.seeds=true": "ignores seeds", "sglang.seeds=false": None}),
    "SglangConfig.timeout": (sglang("timeout"), "", {"sglang.timeout=1.5": 1.5, "sglang.timeout=2.0": 2.0}),
    "SglangConfig.load_timeout": (sglang("load"), "", {"sglang.load_timeout=1.5": 1.5, "sglang.load_timeout=2.0": 2.0}),
    "SglangConfig.api_key_env": (
        sglang("key"),
        "",
        {"seed=0": None, "sglang.api_key_env=AGENTRL_TEST_A": "Bearer a", "sglang.api_key_env=AGENTRL_TEST_B": "Bearer b"},
    ),
    "VllmConfig.replicas": (vllm("replicas"), "", {"vllm.replicas=1": 1, "vllm.replicas=3": 3}),
    "VllmConfig.max_replicas": (vllm("most"), "", {"vllm.replicas=1": None, "vllm.max_replicas=4": 4}),
    "VllmConfig.max_respawns": (vllm("respawns"), "", {"vllm.max_respawns=0": 0, "vllm.max_respawns=2": 2}),
    "VllmConfig.call_timeout": (vllm("call_timeout"), "", {"vllm.call_timeout=1.5": 1.5, "vllm.call_timeout=2.0": 2.0}),
    "VllmConfig.keep_weights": (vllm("keep_weights"), "", {"vllm.keep_weights=true": True, "vllm.keep_weights=false": False}),
    "VllmConfig.startup_timeout": (
        vllm("startup_timeout"),
        "",
        {"vllm.startup_timeout=1.5": 1.5, "vllm.startup_timeout=2.0": 2.0},
    ),
    "VllmConfig.max_num_seqs": (vllm("max_num_seqs"), "", {"vllm.max_num_seqs=3": 3, "vllm.max_num_seqs=5": 5}),
    "VllmConfig.max_num_batched_tokens": (
        vllm("max_num_batched_tokens"),
        "",  # on a CPU at least a whole prompt
        {"vllm.max_num_batched_tokens=5000": 5000, "vllm.max_num_batched_tokens=6000": 6000},
    ),
    "VllmConfig.args": (vllm("block_size"), "", {"vllm.args={seed=1}": 32, "vllm.args={block_size=64}": 64}),
    "VllmConfig.tensor_parallel": (
        vllm("tensor_parallel_size", "distributed_executor_backend", "gpus"),
        "",
        {
            f"vllm.tensor_parallel={n}": {"tensor_parallel_size": n, "distributed_executor_backend": how, "gpus": n}
            for n, how in ((1, "uni"), (2, "mp"))
        },
    ),
    "VllmConfig.kv_cache_mib": (
        vllm("kv_cache_memory_bytes"),
        "",
        {"vllm.kv_cache_mib=64": 67_108_864, "vllm.kv_cache_mib=65": 68_157_440},
    ),
    "VllmConfig.max_model_len": (
        vllm("max_model_len"),
        "",  # the model's own is 4096
        {"vllm.max_model_len=64": 64, "vllm.max_model_len=9999": 4096},
    ),
    "VllmConfig.enforce_eager": (vllm("enforce_eager"), "", {"vllm.enforce_eager=true": True, "vllm.enforce_eager=false": False}),
    "TrainConfig.steps": (see.at("update"), LOOP, {"steps=4": [0, 1, 2, 3], "steps=5": [0, 1, 2, 3, 4]}),
    "TrainConfig.stop_at_success": (
        see.at("update"),
        LOOP,
        {"stop_at_success=0.5": [0, 1], "stop_at_success=0.51": [0, 1, 2, 3]},
    ),
    "TrainConfig.trajectories_every": (
        see.at("write"),
        LOOP,
        {"trajectories_every=1": [1, 2, 3, 4], "trajectories_every=2": [2, 4], "trajectories_every=3": [3, 4]},
    ),
    "EvalConfig.tasks": (see.first_evaluation, LOOP, {f"eval.tasks={n}": {**EVAL, "tasks": n} for n in (3, 4)}),
    "EvalConfig.split": (see.first_evaluation, LOOP, {f"eval.split={name}": {**EVAL, "split": name} for name in ("train", "x")}),
    "EvalConfig.every": (
        see.at("evaluation"),
        LOOP,
        {"eval.every=0": [], "eval.every=1": [1, 2, 3], "eval.every=2": [2], "eval.every=3": [3]},
    ),
    "EvalConfig.temperature": (
        see.first_evaluation,
        LOOP,
        {"eval.temperature=0.0": {**EVAL, "temperature": 0.0}, "eval.temperature=0.7": {**EVAL, "temperature": 0.7}},
    ),
    "CheckpointConfig.every": (
        see.at("save"),
        LOOP,
        {"checkpoint.every=1": [1, 2, 3, 4], "checkpoint.every=3": [3, 4], "checkpoint.every=9": [4]},
    ),
    "TrainConfig.name": (see.folder, "", {"name=a": "runs/a", "name=b": "runs/b"}),
    "TrainConfig.out": (see.folder, "", {"out=a": "a/run", "out=b/c": "b/c/run"}),
    "TrainConfig.engine": (
        see.chosen_engine,
        "",
        {"engine=embedded": "SimpleNamespace", "engine=vllm": "VllmEngine", "engine=auto": "SimpleNamespace"},
    ),  # no GPU is seen here
    "SftConfig.max_steps": (
        warm("rows", "end"),
        SHUT,
        {f"sft.max_steps={n}": {"rows": rows, "end": "shut"} for n, rows in ((20, [8] * 20), (40, [8] * 40), (13, [8] * 13))},
    ),
    "SftConfig.batch": (
        warm("rows", "firsts"),
        SHUT,
        {
            "sft.batch=2": {"rows": [2] * 40, "firsts": list(range(0, 80, 2))},
            "sft.batch=3": {"rows": [3] * 40, "firsts": list(range(0, 120, 3))},
        },
    ),
    "SftConfig.teacher": (warm("transcripts"), SHUT, {"sft.teacher={wrong=0.5}": ({}, {"wrong": 0.5})}),
    "SftConfig.params": (
        warm("transcripts", "gate"),
        SHUT,
        {"sft.params={calls=2}": {"transcripts": ({"calls": 2}, {}), "gate": GATE}},
    ),
    "SftConfig.gate": (
        warm("gates", "end"),
        SHUT,
        {"sft.gate=0.5": {"gates": [20], "end": "open"}, "sft.gate=0.51": {"gates": [20, 40], "end": "shut"}},
    ),
    "SftConfig.min_steps": (warm("gates"), SHUT, {"sft.min_steps=10": [20, 40], "sft.min_steps=30": [40]}),  # the rate: STARTS
    "SftConfig.gate_params": (
        warm("transcripts", "gate"),
        SHUT,
        {"sft.gate_params={calls=2}": {"transcripts": ({}, {}), "gate": {**GATE, "params": {"calls": 2}}}},
    ),
    "SftConfig.gate_tasks": (warm("gate"), SHUT, {f"sft.gate_tasks={n}": {**GATE, "tasks": n} for n in (3, 4)}),
    "SftConfig.gate_every": (
        warm("gates"),
        SHUT,
        {"sft.gate_every=10": [10, 20, 30, 40], "sft.gate_every=30": [30, 40], "sft.gate_every=15": [15, 30, 40]},
    ),
}

# key -> the test that says what it does
OPTIMIZERS = "train/test_optimizers.py"
KEYS, STARTS, PARALLEL = "train/test_keys.py", "train/test_adapter_and_sft_keys.py", "train/test_parallel.py"
ACTOR = f"{KEYS}::test_a_key_moves_the_weights_as_the_plain_trainer_does"
CRITIC = f"{KEYS}::test_a_key_of_the_critic_moves_its_values_as_the_plain_critic_does"
REASONS = "run/test_api_reasoning.py"
JUDGE, API, BLAME, MCP = "reward/test_reward_judge.py", "run/test_api_eval.py", "rollout/test_blame.py", "env/test_mcp.py"
ENVS, START, EXPERIENCE = "config/test_envs.py", "rollout/test_start.py", "train/test_experience.py"
PROGRAMS, TRACING = "contrib/agents/test_programs.py", "contrib/trackers/test_tracing.py"
PLACEMENT, RANKS, SESSION = "run/test_placement.py", "train/test_meshes.py", "run/test_session_keys.py"
ELSEWHERE: dict[str, str] = {
    **{f"DataConfig.{key}": f"{OFFLINE}::test_{name}" for name, of in DATA.items() for key in of},
    "SandboxConfig.provider": "contrib/sandboxes/test_pool.py::test_the_config_says_which_sandbox_an_environment_gets",
    "SandboxConfig.args": "contrib/sandboxes/test_pool.py::test_the_config_says_which_sandbox_an_environment_gets",
    "SandboxConfig.warm": "contrib/sandboxes/test_pool.py::test_warm_ones_are_taken_at_once_and_started_again_behind",
    "SandboxConfig.limit": "contrib/sandboxes/test_pool.py::test_never_more_than_the_limit_run_and_all_get_their_turn",
    **{f"SftConfig.{key}": f"{STARTS}::test_a_key_of_sft_scales_the_first_step_of_its_weights" for key in ("lr", "matrix_lr")},
    "SftConfig.warmup": f"{STARTS}::test_sft_warmup_and_min_steps_are_where_the_rate_rises_and_where_it_ends",
    **{
        f"LoraSection.{key}": f"{STARTS}::test_rank_alpha_and_modules_are_the_shape_the_scale_and_the_place_of_the_adapters"
        for key in ("rank", "alpha", "modules")
    },
    **{
        f"EnvConfig.{key}": f"{ENVS}::test_what_an_environment_sets_itself_takes_the_place_of_the_runs"
        for key in ("limits", "eval", "sft", "system")
    },
    **{
        f"EnvLimits.{key}": f"{ENVS}::test_what_an_environment_sets_itself_takes_the_place_of_the_runs"
        for key in ("max_turns", "max_turn_tokens", "max_episode_tokens", "turn_timeout", "episode_timeout", "env_timeout")
    },
    **{
        f"EnvEval.{key}": f"{ENVS}::test_what_an_environment_sets_itself_takes_the_place_of_the_runs"
        for key in ("tasks", "split", "temperature")
    },
    "EnvEval.weight": f"{ENVS}::test_evaluations_of_several_environments_are_averaged_by_their_weights",
    **{
        f"EnvSft.{key}": f"{ENVS}::test_what_an_environment_sets_itself_takes_the_place_of_the_runs"
        for key in ("teacher", "params", "gate", "gate_params")
    },
    "EnvConfig.name": f"{ENVS}::test_an_override_calls_an_environment_by_name_or_number",
    "EnvConfig.weight": "rollout/test_mixtures.py::test_shares_converge_to_the_weights_and_a_weight_of_0_is_never_drawn",
    "SftConfig.envs": f"{ENVS}::test_the_warm_start_is_of_those_named_or_of_those_with_a_weight",
    "TrainConfig.seed": ACTOR,
    "TrainConfig.engine_args": "test_plugins.py::test_a_run_of_plugins_alone",
    **{f"TracesConfig.{key}": f"{TRACING}::test_every_and_episodes_say_what_is_exported" for key in ("every", "episodes")},
    **{
        f"PrometheusConfig.{key}": f"{TRACING}::test_a_port_that_is_taken_and_a_host_that_is_none_are_refused"
        for key in ("port", "host")
    },
    "ProfileConfig.steps": f"{TRACING}::test_a_timeline_has_every_episode_and_its_parts_lie_in_the_step",
    **{f"ProfileConfig.{key}": f"{TRACING}::test_torch_and_max_events_say_what_ranks_record" for key in ("torch", "max_events")},
    "TrainConfig.trackers": "test_plugins.py::test_a_run_of_plugins_alone",
    "TrainConfig.callbacks": "python/test_callbacks.py::test_callbacks_and_a_filter_by_name_from_a_config",
    "RolloutConfig.accept": "python/test_callbacks.py::test_callbacks_and_a_filter_by_name_from_a_config",
    "ModelConfig.engine": "test_plugins.py::test_a_run_of_plugins_alone",
    **dict.fromkeys(("OptimConfig.name", "SftConfig.optimizer"), f"{OPTIMIZERS}::test_a_config_names_every_optimizer"),
    "OptimConfig.matrix_lr": f"{OPTIMIZERS}::test_muon_steps_by_its_own_rate_or_as_long_as_adamw",
    **{f"OptimConfig.{key}": ACTOR for key in ("lr", "weight_decay", "betas", "max_grad_norm", "warmup", "schedule")},
    "OptimConfig.micro_tokens": f"{KEYS}::test_micro_tokens_bounds_every_micro_batch_and_changes_no_weight",
    "OptimConfig.prefix_sharing": "train/test_prefix_training.py::test_prefix_sharing_by_the_config_gives_the_same_step",
    **{
        f"AlgorithmConfig.{key}": ACTOR
        for key in ("aggregate", "epochs", "minibatch", "entropy_bonus", "proximal", "length_norm")
    },
    **{
        f"AlgorithmConfig.{key}": "train/test_entropy_target.py::test_the_coefficient_rises_below_the_target_and_falls_above_it"
        for key in ("entropy_target", "entropy_step", "entropy_max")
    },
    "AlgorithmConfig.truncated": "train/test_dropping.py::test_masked_episodes_are_trained_as_if_they_were_not_there",
    "AlgorithmConfig.groups": "train/test_prefix_training.py::test_the_key_groups_keeps_a_group_in_one_minibatch_and_on_one_rank",
    **{f"KlConfig.{key}": ACTOR for key in ("coef", "kind", "where", "straight_through")},
    **{
        f"KlConfig.{key}": "train/test_moving_reference.py::test_the_kl_is_to_the_average_and_less_than_to_the_start"
        for key in ("reference", "decay")
    },
    **{f"KlConfig.{key}": "train/test_learner.py::test_steering" for key in ("target", "horizon")},
    **{f"CriticConfig.{key}": CRITIC for key in ("lr", "clip", "epochs")},
    "CriticConfig.warmup": "train/test_learner.py::test_critic_warm_up_leaves_the_policy",
    "CriticConfig.path": "train/test_learner.py::test_a_critic_of_another_model",
    **{
        f"RewardModelConfig.{key}": "train/test_reward_model.py::test_the_advantages_are_those_of_the_reward_and_weight_times_the_score"  # noqa: E501
        for key in ("path", "weight")
    },
    "ModelConfig.path": f"{SESSION}::test_the_model_is_the_warmed_up_one_the_given_one_or_one_built_by_the_seed",
    "RolloutConfig.workers": "rollout/test_workers.py::test_the_same_seeds_give_the_same_groups_for_any_number_of_workers",
    "RolloutConfig.worker_timeout": "rollout/test_workers.py::test_a_worker_that_is_not_heard_of_counts_as_dead",
    "RolloutConfig.worker_respawns": "rollout/test_workers.py::test_with_no_worker_left_the_run_ends_with_a_typed_error",
    "ModelConfig.chat_template": "run/test_chat_template.py::test_a_name_or_a_file_makes_tools_usable",
    "ModelConfig.date": "render/test_dates.py::test_a_prompt_has_the_day_that_the_renderer_was_given",
    "ModelConfig.tool_parser": "run/test_tool_parser.py::test_a_named_parser_is_used_where_it_fits_and_refused_where_not",
    "ModelConfig.threads": "test_processor.py::test_the_threads_of_a_run",
    "ModelConfig.dtype": f"{RANKS}::test_dtype_is_what_the_engine_gets_and_what_the_trainer_computes_in",
    "ModelConfig.activation_checkpointing": f"{PARALLEL}::test_activation_checkpointing_keeps_less",
    "ModelConfig.shard_gradients": "train/test_ranks.py::test_gradients_sharded_after_every_micro_batch_are_the_same_and_take_a_ranks_share",  # noqa: E501
    "ModelConfig.replicas": f"{RANKS}::test_the_meshes_of_replicas_and_sequence_parallel",
    "ModelConfig.sequence_parallel": f"{RANKS}::test_the_meshes_of_replicas_and_sequence_parallel",
    **{
        f"ModelConfig.{key}": "train/test_split.py::test_each_rank_holds_its_share"
        for key in ("tensor_parallel", "expert_parallel")
    },
    "ModelConfig.offload": "train/test_offload.py::test_each_role_has_the_device_to_itself_in_its_turn_and_all_learn_the_same",
    "ModelConfig.cpu_offload": f"{PARALLEL}::test_what_cannot_be",
    "ModelConfig.packing": "train/families/test_packing.py::test_one_row_a_pass_gives_the_update_of_packed_rows",
    "ModelConfig.compile": "train/test_kernels.py::test_compiled_layers_give_the_same_update",
    **{
        f"McpServerConfig.{key}": f"{MCP}::test_the_tools_section_of_a_config_reaches_the_environment"
        for key in ("command", "env", "tools", "prefix", "timeout", "max_output", "check")
    },
    "EnvConfig.url": "contrib/remote_envs/test_remote_env.py::test_the_dry_run_tells_what_the_server_says",
    "EnvConfig.protocol": "contrib/remote_envs/test_remote_env.py::test_what_cannot_be_played_there_is_refused_before_the_run",
    "EnvConfig.token_env": "contrib/remote_envs/test_remote_env.py::test_what_cannot_be_played_there_is_refused_before_the_run",
    "McpServerConfig.late": f"{MCP}::test_the_config_says_whose_doing_a_late_call_is",
    "McpServerConfig.url": f"{MCP}::test_over_http_and_through_a_config",
    **{
        f"AgentConfig.{key}": f"{PROGRAMS}::test_{test}"
        for key, test in {
            "command": "a_command_plays_the_built_in_loop_s_episodes_and_its_output_is_kept",
            "python": "an_agent_that_is_not_there_is_refused_by_name",
            "url": "a_url_gets_everything_in_a_post_and_answers_when_it_is_done",
            "blame": "an_exit_code_is_a_fault_with_its_words_or_the_policy_s_if_the_run_says_so",
            "pass_env": "a_command_gets_the_variables_that_it_is_given_and_no_others",
            "env": "a_command_gets_the_variables_that_it_is_given_and_no_others",
            "concurrency": "concurrency_bounds_the_agents_that_run_at_once",
            "host": "an_agent_reaches_the_run_on_the_host_that_it_is_told",
        }.items()
    },
    **{
        f"AgentConfig.{key}": f"contrib/agents/test_episode.py::test_{test}"
        for key, test in {
            "tools": "the_calls_of_tools_of_the_agent_s_own_are_read_from_its_requests",
            "user": "an_environment_s_user_talks_with_an_agent_that_says_so",
            "answer": "the_last_word_is_the_policy_s_or_the_agent_s",
            "idle_timeout": "what_ends_an_episode_is_why_it_ended",
        }.items()
    },
    "ModelConfig.trust_remote_code": "e2e/test_own_code.py::test_it_is_trained_saved_and_evaluated_where_it_is_trusted",
    "ToolsConfig.sets": f"{MCP}::test_over_http_and_through_a_config",
    "ToolsConfig.args": "tool/test_tool_sets.py::test_the_arguments_of_a_config_reach_the_set_and_its_files_the_identity",
    "ToolsConfig.mcp": f"{MCP}::test_over_http_and_through_a_config",
    "RolloutConfig.turn_timeout": f"{BLAME}::test_a_run_whose_engine_is_silent_ends_with_its_speed_and_the_key",
    "RolloutConfig.episode_timeout": f"{BLAME}::test_who_used_an_episodes_time_decides",
    "RolloutConfig.env_timeout": f"{BLAME}::test_a_setup_that_hangs_is_a_fault_that_names_the_environment",
    "RolloutConfig.stall_timeout": f"{BLAME}::test_a_stall_says_which_episode_waits_for_what_since_when",
    "RolloutConfig.summary_model": "rollout/test_context_policies.py::test_the_config_chooses_the_policy_and_who_writes",
    "RolloutConfig.min_survivors": "rollout/test_collect.py::test_a_group_lives_with_min_survivors_and_not_with_one_fewer",
    "RolloutConfig.filter_zero_variance": "rollout/test_collect.py::test_groups_without_variance_are_replaced_and_only_those",
    "RolloutConfig.max_filtered": "rollout/test_collect.py::test_the_bound_on_filtering_is_per_update_and_leaves_groups_that_teach",  # noqa: E501
    **{
        f"PoolConfig.{key}": "cluster/test_pool.py::test_a_pool_is_held_in_one_bundle_a_process_with_consecutive_ranks_on_a_node"
        for key in ("nodes", "per_node", "cpus", "gpus")
    },
    **{
        f"ClusterConfig.{key}": f"{PLACEMENT}::test_what_starts_a_role_gets_the_keys_of_the_cluster"
        for key in ("backend", "actors", "startup_timeout", "call_timeout")
    },
    "ClusterConfig.address": "cluster/test_two_nodes.py::test_two_ray_nodes_on_one_machine",
    "ClusterConfig.max_restarts": "run/test_restarts.py::test_the_limit_bounds_how_often_a_run_starts_again",
    "ClusterConfig.pools": "cluster/test_pool.py::test_roles_share_a_pool",
    "ClusterConfig.roles": f"{PLACEMENT}::test_vllm_replicas_run_where_the_role_rollout_is_placed",
    "WeightsConfig.route": "weights/test_publish_routes.py::test_each_route_brings_the_weights_and_only_it_does",
    **{
        f"WeightsConfig.{key}": "weights/test_publish_routes.py::test_bucket_mib_bounds_each_bucket_and_folder_is_where_it_lies"
        for key in ("bucket_mib", "folder")
    },
    "WeightsConfig.lora": "weights/test_publish_routes.py::test_an_adapter_alone_is_published_in_place_of_the_one_before",
    **{
        f"CheckpointConfig.{key}": "train/test_async_save.py::test_every_key_of_keeping_changes_what_is_left"
        for key in ("keep", "keep_best", "best")
    },
    "CheckpointConfig.asynchronous": "train/test_async_save.py::test_save_returns_before_the_checkpoint_is_whole_only_when_asynchronous",  # noqa: E501
    "KeepConfig.trajectories": "run/test_damage.py::test_of_the_newest_steps_so_many_keep_their_episodes",
    "KeepConfig.trajectories_mib": "run/test_damage.py::test_episodes_stay_up_to_a_size_and_the_newest_always",
    "KeepConfig.log_mib": "run/test_damage.py::test_the_log_begins_anew_at_its_size_and_so_many_older_ones_stay",
    "KeepConfig.log_files": "run/test_damage.py::test_the_log_begins_anew_at_its_size_and_so_many_older_ones_stay",
    "HealthConfig.lint": "run/test_check_lint.py::test_a_typo_in_a_pointer_is_refused_before_the_run",
    "HealthConfig.preflight": "run/test_preflight.py::test_a_dead_server_is_refused_with_what_it_wrote_in_a_dry_run_too",
    "HealthConfig.preflight_timeout": "run/test_preflight.py::test_a_server_that_does_not_answer_is_waited_for_as_long_as_the_key_says",  # noqa: E501
    "HealthConfig.idle_updates": "run/test_health.py::test_each_key_of_health_moves_its_limit",
    **{
        f"StartConfig.{key}": f"{START}::test_more_is_left_once_the_window_of_a_horizon_mostly_succeeds"
        for key in ("left", "step", "threshold", "window")
    },
    "StartConfig.whole": f"{START}::test_choices_are_resumed_to_the_digit_and_the_curriculum_learns_from_whole_tasks_alone",
    **{f"BranchConfig.{key}": "rollout/test_branching.py::test_where_an_episode_branches" for key in ("at", "width", "turns")},
    "BranchConfig.roots": "rollout/test_branching.py::test_branches_are_dealt_out_evenly",
    **{
        f"ExperienceConfig.{key}": f"{EXPERIENCE}::test_loss_and_gradient_of_a_step_are_those_by_hand" for key in ("term", "coef")
    },
    **{
        f"ExperienceConfig.{key}": f"{EXPERIENCE}::test_the_newest_are_kept_and_none_beyond_its_age_and_they_are_saved"
        for key in ("size", "share", "max_age")
    },
    **{
        f"DistillationConfig.{key}": "train/test_distillation.py::"
        "test_advantages_are_the_estimators_and_the_teachers_log_probabilities_less_the_policys"
        for key in ("path", "coef", "reward_coef")
    },
    "ExperienceConfig.rare": f"{EXPERIENCE}::test_successes_of_groups_in_which_few_succeeded_are_marked",
    "DemonstrationsConfig.coef": f"{EXPERIENCE}::test_loss_and_gradient_of_a_step_are_those_by_hand",
    "DemonstrationsConfig.episodes": "run/test_demonstrations.py::test_the_gold_of_failed_groups_is_shown_up_to_so_many_episodes",
    "TrainConfig.next": "run/test_say_end.py::test_a_solved_run_is_advised_the_config_that_its_own_names",
    "HealthConfig.max_unsolvable": "run/test_solvable.py::test_too_many_tasks_without_room_are_refused_by_name",
    "HealthConfig.max_unscored": "run/test_health.py::test_each_key_of_health_moves_its_limit",
    **{
        f"ApiConfig.{key}": f"{API}::test_every_key_of_the_api_section_is_kept_at_the_server"
        for key in ("base", "concurrency", "timeout", "retries", "max_wait", "usd_per_million")
    },
    "ApiConfig.args": f"{REASONS}::test_the_preflight_asks_with_the_parameters_of_the_run",
    "JudgeConfig.args": f"{REASONS}::test_a_judge_has_arguments_too_and_is_asked_with_them_before_a_run",
    "JudgeConfig.api_base": f"{JUDGE}::test_a_verdict_becomes_a_value_with_its_reason",
    "JudgeConfig.cache": f"{JUDGE}::test_the_cache_on_disk_is_keyed_by_content",
    "JudgeConfig.calls": f"{JUDGE}::test_a_budget_in_calls",
    "JudgeConfig.usd": f"{JUDGE}::test_a_budget_in_money_is_not_overspent",
    "JudgeConfig.usd_per_million": f"{JUDGE}::test_a_budget_in_money_is_not_overspent",
    "JudgeConfig.concurrency": f"{JUDGE}::test_awaited_judges_run_together_up_to_the_limit",
    "JudgeConfig.timeout": f"{JUDGE}::test_a_slow_judge_is_cut_off",
    "JudgeConfig.retries": f"{JUDGE}::test_retries_bounds_the_attempts",
    "JudgeEngineConfig.path": f"{OWN_JUDGE}::test_the_reward_of_a_run_is_what_its_own_judge_says",
    "JudgeEngineConfig.engine": f"{OWN_JUDGE}::test_what_cannot_work_is_refused_by_name",
    "JudgeEngineConfig.engine_args": f"{OWN_JUDGE}::test_what_cannot_work_is_refused_by_name",
    "JudgeEngineConfig.concurrency": f"{OWN_JUDGE}::test_as_many_verdicts_are_sampled_at_once_as_concurrency_says",
    "JudgeEngineConfig.reasoning": f"{OWN_JUDGE}::test_reasoning_may_come_first_only_if_the_config_says_so",
    "JudgeEngineConfig.max_model_len": f"{OWN_JUDGE}::test_what_cannot_work_is_refused_by_name",
    "RewardConfig.python": "reward/test_reward_context.py::test_a_python_leaf_runs_only_where_the_config_allows_it_by_name",
}


def leaves() -> list[str]:
    """Keys that hold a value, not a section; a Choice counts by its name and arguments, which the estimators',
    losses', samplers' and wrappers' own tests flip."""
    found = []
    for section in SECTIONS:
        for key, field in section.model_fields.items():
            inside = re.findall(r"\b(\w+Config|\w+Section|Choice)\b", str(field.annotation))
            listed = key in ("mcp", "pools", "wrappers", "trackers", "callbacks", "accept")
            if section.__name__ not in ("Choice", "Frozen") and (not inside or listed):
                found.append(f"{section.__name__}.{key}")
    return found


@pytest.mark.parametrize("key", leaves())
def test_the_key_is_in_one_table(key: str) -> None:
    assert (key in EFFECTS) != (key in ELSEWHERE), "add the key to EFFECTS, or name the test of its effect in ELSEWHERE"


def test_the_tables_hold_no_key_that_is_gone() -> None:
    assert set(EFFECTS) | set(ELSEWHERE) <= set(leaves())


CASES = [(key, value) for key, (_, _, effects) in EFFECTS.items() for value in effects]


@pytest.mark.parametrize(("key", "value"), CASES, ids=[value for _, value in CASES])
def test_a_value_does_what_it_says(key: str, value: str, tmp_path: Path) -> None:
    observe, more, effects = EFFECTS[key]
    assert observe(made([*more.split(), value]), tmp_path) == effects[value]


@pytest.mark.parametrize("key", ELSEWHERE)
def test_the_test_that_is_named_exists(key: str) -> None:
    file, _, name = ELSEWHERE[key].partition("::")
    text = (ROOT / "tests" / file).read_text()
    assert re.search(rf"def {name}\b", text), f"{ELSEWHERE[key]} is not there"
    assert re.search(rf"\b{key.partition('.')[2]}\b", text), f"{file} does not speak of {key}"

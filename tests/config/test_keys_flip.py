"""Config keys at the function that reads them: what observed.py sees against numbers worked out beforehand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import TrainConfig
from agentrl.config.load import config_from
from tests.config import observed as see

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
    return lambda config, out: [see.vllm_arguments(config)[name] for name in names]


PLAY = "rollout.group_size=2 rollout.max_turns=3"
LOOP = "steps=4 trajectories_every=2 eval.every=2 checkpoint.every=3"  # evaluations find 0.5
EVAL = {"temperature": 1.0, "tasks": 100, "seed": 0, "split": "heldout", "params": {}}
ASKED = (2048, 1.0, 1.0, 0)  # max_tokens, temperature, top_p, top_k

INIT: dict[str, tuple[Any, Any]] = {
    "layers": (1, 2), "hidden": (16, 32), "mlp": (16, 48), "heads": (2, 4), "kv_heads": (1, 2), "head_dim": (8, 16),
    "context": (128, 256), "init_std": (0.05, 0.5),
}  # fmt: skip
# key -> what observes it, further overrides, and what is observed for each value
Effects = dict[str, Any]
EFFECTS: dict[str, tuple[Observe, str, Effects]] = {
    **{f"InitModelConfig.{key}": (see.built_model, "",
        {f"model.init.{key}={value}": see.sizes(**{"std" if key == "init_std" else key: value}) for value in two})
        for key, two in INIT.items()},
    "EnvConfig.max_output": (see.longest_answer, "", {"env.max_output=64": 64, "~env.max_output": 2048}),
    "RolloutConfig.groups": (see.admitted, "", {"rollout.groups=2": 2, "rollout.groups=3": 3}),
    "RolloutConfig.oversample": (see.admitted, "rollout.groups=4",
        {"rollout.oversample=1.0": 4, "rollout.oversample=1.25": 5, "rollout.oversample=2.0": 8}),
    "RolloutConfig.max_staleness": (see.admitted, "rollout.groups=4",  # Eq. 3 of AReaL: (staleness + 1) x groups at version 0
        {"rollout.max_staleness=0": 4, "rollout.max_staleness=1": 8, "rollout.max_staleness=3": 16}),
    "RolloutConfig.max_episodes": (see.most_at_once, "rollout.group_size=6",
        {"rollout.max_episodes=2": 2, "rollout.max_episodes=5": 5, "rollout.max_episodes=9": 6}),
    "RolloutConfig.max_turns": (see.ends, PLAY,
        {"rollout.max_turns=1": [(1, "max_turns")] * 2, "rollout.max_turns=4": [(4, "max_turns")] * 2}),
    "RolloutConfig.max_turn_tokens": (see.asked, PLAY,
        {"rollout.max_turn_tokens=8": {(8, 1.0, 1.0, 0)}, "rollout.max_turn_tokens=99": {(99, 1.0, 1.0, 0)}}),
    "RolloutConfig.max_episode_tokens": (see.tokens, "rollout.group_size=2 rollout.max_turns=90",
        {f"rollout.max_episode_tokens={n}": ({"max_tokens"}, True) for n in (600, 601, 1000)}),
    "RolloutConfig.temperature": (see.asked, PLAY, {"rollout.temperature=1.0": {ASKED},
        "rollout.temperature=0.5": {(2048, 0.5, 1.0, 0)}, "rollout.temperature=[[0,0.75]]": {(2048, 0.75, 1.0, 0)}}),
    "RolloutConfig.top_p": (see.asked, PLAY, {"rollout.top_p=1.0": {ASKED}, "rollout.top_p=0.5": {(2048, 1.0, 0.5, 0)}}),
    "RolloutConfig.top_k": (see.asked, PLAY, {"rollout.top_k=0": {ASKED}, "rollout.top_k=5": {(2048, 1.0, 1.0, 5)}}),
    "RolloutConfig.router_replay": (see.told, PLAY, {"rollout.router_replay=false": {None}, "rollout.router_replay=true": {0}}),
    "RolloutConfig.group_size": (see.members, "", {"rollout.group_size=2": (2, 2, 0), "rollout.group_size=3": (3, 3, 0)}),
    "RolloutConfig.oversample_members": (see.members, "rollout.group_size=4",  # started, back, cancelled
        {"rollout.oversample_members=1.0": (4, 4, 0), "rollout.oversample_members=1.5": (6, 4, 2)}),
    "RolloutConfig.retries": (see.attempts, PLAY,
        {"rollout.retries=0": (2, 2), "rollout.retries=1": (4, 4), "rollout.retries=3": (8, 8)}),
    "RolloutConfig.colocate": (see.at("rest"), LOOP, {"rollout.colocate=false": [], "rollout.colocate=true": [0, 1, 2, 3]}),
    "VllmConfig.args": (vllm("block_size"), "", {"vllm.args={seed=1}": [32], "vllm.args={block_size=64}": [64]}),
    "VllmConfig.tensor_parallel": (vllm("tensor_parallel_size", "distributed_executor_backend"), "",
        {f"vllm.tensor_parallel={n}": [n, how] for n, how in ((1, "uni"), (2, "mp"))}),
    "VllmConfig.max_model_len": (vllm("max_model_len"), "",  # the model's own is 4096
        {"vllm.max_model_len=64": [64], "vllm.max_model_len=9999": [4096]}),
    "TrainConfig.steps": (see.at("update"), LOOP, {"steps=4": [0, 1, 2, 3], "steps=5": [0, 1, 2, 3, 4]}),
    "TrainConfig.stop_at_success": (see.at("update"), LOOP,
        {"stop_at_success=0.5": [0, 1], "stop_at_success=0.51": [0, 1, 2, 3]}),
    "TrainConfig.trajectories_every": (see.at("write"), LOOP,
        {"trajectories_every=1": [1, 2, 3, 4], "trajectories_every=2": [2, 4], "trajectories_every=3": [3, 4]}),
    "EvalConfig.tasks": (see.first_evaluation, LOOP, {f"eval.tasks={n}": {**EVAL, "tasks": n} for n in (3, 4)}),
    "EvalConfig.split": (see.first_evaluation, LOOP,
        {f"eval.split={name}": {**EVAL, "split": name} for name in ("train", "x")}),
    "EvalConfig.every": (see.at("evaluation"), LOOP,
        {"eval.every=0": [], "eval.every=1": [1, 2, 3], "eval.every=2": [2], "eval.every=3": [3]}),
    "EvalConfig.temperature": (see.first_evaluation, LOOP,
        {"eval.temperature=0.0": {**EVAL, "temperature": 0.0}, "eval.temperature=0.7": {**EVAL, "temperature": 0.7}}),
    "CheckpointConfig.every": (see.at("save"), LOOP,
        {"checkpoint.every=1": [1, 2, 3, 4], "checkpoint.every=3": [3, 4], "checkpoint.every=9": [4]}),
}  # fmt: skip

CASES = [(key, value) for key, (_, _, effects) in EFFECTS.items() for value in effects]


@pytest.mark.parametrize(("key", "value"), CASES, ids=[value for _, value in CASES])
def test_a_value_does_what_it_says(key: str, value: str, tmp_path: Path) -> None:
    observe, more, effects = EFFECTS[key]
    assert observe(made([*more.split(), value]), tmp_path) == effects[value]

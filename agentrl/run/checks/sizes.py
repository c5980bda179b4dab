"""Checks of sizes: those in the config fit each other and the model. Errors, and warnings about learning rates."""

from __future__ import annotations

from typing import Any

from agentrl.algorithm import ADVANTAGES
from agentrl.cluster.devices import card_bytes, has_gpus, is_planned, joins
from agentrl.config import Choice, TrainConfig
from agentrl.config.models import other_models
from agentrl.errors import ConfigError
from agentrl.rollout.engine_maker import ENGINES
from agentrl.run.assembly import context_length
from agentrl.run.engines import maker_of
from agentrl.run.memory import engine_memory
from agentrl.train.engines import check_on_host
from agentrl.train.pretrained import count_parameters, head_dim, load_model_config
from agentrl.train.rates import MATRIX, Task, optims_of, usual_rate

LARGE = 100_000_000
"""Models with at least this many parameters get a warning about learning rates meant for tiny models."""

HIGH, LOW = 30.0, 10.0
"""A rate that is so many times the usual one, or a part of it, gives a warning; working recipes are within a factor of ten."""
WORDS: dict[Task, str] = {
    "rl": "reinforcement learning",
    "critic": "a critic",
    "sft": "supervised training",
    "dpo": "training on pairs",
    "reward": "a reward model",
}


def check_sizes(config: TrainConfig, engine_name: str) -> None:
    """Raise ConfigError for groups that are too small to compare, for rows longer than a micro-batch or than a model computes
    whatever other rows are with them, and for attention heads that the engine cannot compute; and for keys that free GPUs where
    there are none.

    Reads: rollout.group_size, rollout.max_episode_tokens, optim.micro_tokens, algorithm.advantage, model.path, model.init, vllm,
    model.trust_remote_code, model.cpu_offload, model.offload, critic, reward_model, algorithm.distillation,
    cluster; and as `check_heads`.
    """
    check_heads(config, engine_name)
    if not has_gpus(config.cluster, "actor"):
        check_on_host(config.model)
    rollout = config.rollout
    taught = config.algorithm.distillation
    if taught is None or taught.reward_coef > 0:
        _check_groups(rollout.group_size, config.algorithm.advantage)
    context = context_length(config, engine_name)
    longest = min(rollout.max_episode_tokens, context)
    if config.optim.micro_tokens < longest:
        raise ConfigError(
            f"optim.micro_tokens = {config.optim.micro_tokens}: an episode may have {longest} tokens (rollout.max_episode_tokens "
            f"= {rollout.max_episode_tokens}, the model takes {context}), and a row is never cut: set optim.micro_tokens to "
            f"at least {longest}, or lower rollout.max_episode_tokens"
        )
    own = {} if config.model.path is None else {"model.path": config.model.path}
    for key, path in {**own, **other_models(config)}.items():
        _check_rotary(key, load_model_config(path, config.model.trust_remote_code), longest)


def _check_rotary(key: str, model: Any, longest: int) -> None:
    """Rotary embeddings of the kind "longrope" (Phi-3 and 4, MiniCPM) have other frequencies from a length on, for all that is
    computed with a row of that length: other rows of a micro-batch, and keys that a cache holds; vLLM decides by its limit."""
    text = model.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    for part in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        turn = part.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
        if (
            part.get("rope_type") == "longrope"
            and turn
            and longest > turn
            and part.get("short_factor") != part.get("long_factor")
        ):
            raise ConfigError(
                f"rollout.max_episode_tokens: rows may have {longest} tokens, but the rotary embedding of {key} "
                f"({text.model_type}) changes at {turn} tokens for all rows that are computed together; set "
                f"rollout.max_episode_tokens to at most {turn}"
            )


def _check_groups(size: int, advantage: Choice) -> None:
    needs = ADVANTAGES.entry(advantage.name).needs
    if size == 1 and "group" in needs:
        raise ConfigError(
            f'rollout.group_size = 1: algorithm.advantage "{advantage.name}" compares the episodes of a group, so every '
            f"advantage would be 0; set rollout.group_size to 2 or more, or use one of {ADVANTAGES.that_need('group', False)}"
        )
    k = ADVANTAGES.arguments(advantage.name, advantage.args)["k"] if "group_over_k" in needs else 0
    if size <= k:
        raise ConfigError(
            f'rollout.group_size = {size}: algorithm.advantage "{advantage.name}" compares the subsets of k = {k} '
            f"episodes of a group, so every advantage would be 0; set rollout.group_size to at least {k + 1}"
        )


def check_heads(config: TrainConfig, engine_name: str) -> None:
    """Raise ConfigError if the engine has no attention kernel for the model's head size on the nodes that run it.

    Reads: engine_args, model.path, model.init, cluster.
    """
    sizes = maker_of(engine_name, config).heads()
    if sizes is None:
        return
    init = config.model.init
    key, size = (
        ("model.path", head_dim(str(config.model.path), config.model.trust_remote_code))
        if init is None
        else ("model.init.head_dim", init.head_dim)
    )
    if size is not None and size not in sizes:
        what = f"{key} = {size}" if init is not None else f"{key} = {config.model.path}: its attention heads have size {size}"
        fine = [e.name for e in ENGINES.own() if "messages" not in e.traits and e.make(config).heads() is None]
        others = " or ".join(f"engine={name}" for name in fine)
        raise ConfigError(
            f"{what}: on the nodes that run it, engine={engine_name} supports head sizes {', '.join(map(str, sizes))}, and dies "
            f"at the first request with others; use {others}, or a model with such heads"
        )


def check_cache(config: TrainConfig) -> None:
    """Raise ConfigError or ResourceError if the engine's cache holds no sequence: beside its weights on this machine's GPUs, or
    as `engine_args` says. A cluster's are not asked: they may be in use until the run has them.

    Reads: engine_args, vllm, model, cluster, rollout, optim, sft, critic, reward_model, reward, algorithm, env, data.
    """
    if is_planned():
        return  # the cards of another machine are counted by the plan
    cards = not joins(config.cluster) and has_gpus(config.cluster, "rollout")
    card = card_bytes(config.cluster) if cards else None
    if card is not None or "kv_cache_mib" in config.engine_args:
        engine_memory(config, card)


def advice(config: TrainConfig) -> list[str]:
    """Warnings (key, value, recommendation) for learning rates that are far from those usual for what is trained."""
    model, scratch = config.model, config.model.init is not None
    if not scratch and model.path is None:
        return []
    task: Task = "rl" if config.data is None else config.data.loss
    tasks: dict[str, Task] = {"optim": task, "critic": "critic", "sft": "sft"}
    rates = [
        (f"{at}.{key}", lr, tasks[at], usual_rate(tasks[at], model) * (1.0 if key == "lr" else MATRIX))
        for at, optim in optims_of(config).items()
        if optim.name != "sgd"  # whose steps are as long as the gradient
        for key, lr in (("lr", optim.lr), ("matrix_lr", optim.matrix_lr))
        if lr is not None
    ]
    far = [one for one in rates if one[1] > HIGH * one[3] or one[1] < one[3] / LOW]
    size = 0
    # Only then, because counting builds the model's skeleton. Between a tiny model and LARGE, rates of either kind are right.
    if not far or (not scratch and (size := count_parameters(str(model.path), model.trust_remote_code)) < LARGE):
        return []
    kind = "" if model.lora is None else " with LoRA"
    what = f"a model of random weights{kind}" if scratch else f"{size / 1e6:,.0f}M parameters{kind}"
    return [
        f"{key} = {lr:g} is {'high' if lr > usual else 'low'} for {WORDS[task]} of {what}: {usual:g} is a good start "
        "(docs/hyperparameters.md)"
        for key, lr, task, usual in far
    ]

"""The training engine that a config names, against what the config asks of it."""

from __future__ import annotations

from collections.abc import Callable

from agentrl.config.models import other_models
from agentrl.config.schema import ModelConfig, TrainConfig
from agentrl.errors import ConfigError
from agentrl.train.engine import TRAIN_ENGINES

ASKED: dict[str, tuple[str, Callable[[TrainConfig], bool]]] = {
    "lora": ("[model.lora]", lambda config: config.model.lora is not None),
    "critic": ("[critic]", lambda config: config.critic is not None),
    "reward_model": ("[reward_model]", lambda config: config.reward_model is not None),
    "sft": ("[sft]", lambda config: config.sft is not None),
    "moving_reference": ('algorithm.kl.reference = "moving"', lambda config: config.algorithm.kl.reference == "moving"),
    "prefix_sharing": ('optim.prefix_sharing = "on"', lambda config: config.optim.prefix_sharing == "on"),
    "router_replay": ("rollout.router_replay", lambda config: config.rollout.router_replay),
    "replicas": ("model.replicas > 1", lambda config: config.model.replicas > 1),
    "sequence_parallel": ("model.sequence_parallel > 1", lambda config: config.model.sequence_parallel > 1),
    "tensor_parallel": ("model.tensor_parallel > 1", lambda config: config.model.tensor_parallel > 1),
    "expert_parallel": ("model.expert_parallel > 1", lambda config: config.model.expert_parallel > 1),
    "cpu_offload": ("model.cpu_offload", lambda config: config.model.cpu_offload),
    "offload": ('model.offload = "idle"', lambda config: config.model.offload != "never"),
    "compile": ("model.compile", lambda config: config.model.compile),
    "liger": ('model.kernels = "liger"', lambda config: config.model.kernels == "liger"),
    "families": ('model.packing = "one_row"', lambda config: config.model.packing.startswith("one_row")),
    "shard_gradients": ("model.shard_gradients = true", lambda config: config.model.shard_gradients is True),
    "activation_checkpointing": (
        "model.activation_checkpointing = true",
        lambda config: config.model.activation_checkpointing is True,
    ),
}
"""By trait: what asks for it, in the words of a config, and whether a config does. (A run without a process group asks for
"alone", which is given one instead; see train/role.py.)"""


def check_train_engine(config: TrainConfig) -> None:
    """Raise ConfigError for an unknown training engine and for what the chosen one cannot do, DependencyError if a package of
    its is missing.

    Reads: model, critic, reward_model, sft, algorithm.kl.reference, algorithm.distillation, optim.prefix_sharing,
    rollout.router_replay, cluster.actors.
    """
    entry = TRAIN_ENGINES.entry(config.model.engine)
    for trait, (words, asks) in ASKED.items():
        if trait not in entry.traits and asks(config):
            able = TRAIN_ENGINES.that_are(trait)
            raise ConfigError(f'{words}: model.engine = "{entry.name}" does not support it; engines that do: {able}')
    entry.make.check(config.model, config.cluster.actors)
    for key, path in other_models(config).items():
        try:
            entry.make.check(config.model.model_copy(update={"path": path, "init": None}), config.cluster.actors)
        except ConfigError as problem:
            raise ConfigError(f"{key} = {path}, which is computed as the policy is ([model]): {problem}") from problem


def shares_prefixes(cfg: ModelConfig) -> bool:
    """Whether the training engine computes a prefix that rows share once."""
    return "prefix_sharing" in TRAIN_ENGINES.entry(cfg.engine).traits


def check_on_host(cfg: ModelConfig) -> None:
    """Raise ConfigError for keys that free a GPU's memory, of a role that has no GPU."""
    if cfg.cpu_offload or cfg.offload != "never":
        key = "model.cpu_offload = true" if cfg.cpu_offload else f'model.offload = "{cfg.offload}"'
        raise ConfigError(f"{key}: there is no GPU, so everything is in host memory already; unset it")

"""The optimizer of each training that a config asks for, with the learning rates that it leaves open.

The rates are those that TRL and verl use (docs/hyperparameters.md has the sources); they differ by what is learned and by
whether all weights learn, an adapter, or a model of random weights.
"""

from __future__ import annotations

from typing import Literal

from agentrl.config.schema import CriticConfig, ModelConfig, OptimConfig, SftConfig, TrainConfig
from agentrl.config.unread import check_unread
from agentrl.errors import ConfigError
from agentrl.train.optim import check_installed

Task = Literal["rl", "critic", "sft", "dpo", "reward"]

RATES: dict[Task, tuple[float, float, float]] = {
    "rl": (1e-6, 1e-5, 1e-3),
    "critic": (1e-5, 1e-4, 1e-3),
    "sft": (2e-5, 2e-4, 3e-3),
    "dpo": (1e-6, 1e-5, 1e-3),
    "reward": (1e-5, 1e-4, 1e-3),
}
"""AdamW's learning rate of all weights, of an adapter, and of a model of random weights."""
MATRIX = 10.0
"""So many times AdamW's rate is Muon's, as Jordan scales it, for a step as long: 0.2 sqrt(width), of widths around 2,500."""
SFT_BETAS, SFT_DECAY = (0.9, 0.95), 0.1
"""Of a warm start; the decay is Muon's."""


def usual_rate(task: Task, model: ModelConfig) -> float:
    """The learning rate that is usual for AdamW."""
    full, adapter, scratch = RATES[task]
    return scratch if model.init is not None else adapter if model.lora is not None else full


def optim_of(optim: OptimConfig, model: ModelConfig, task: Task = "rl", key: str = "optim.lr") -> OptimConfig:
    """[optim] with a learning rate. Raises ConfigError if the optimizer has no usual one."""
    if optim.lr is not None:
        return optim
    if optim.name == "sgd":
        raise ConfigError(f'{key}: "sgd" has no usual learning rate. Set one.')
    return optim.model_copy(update={"lr": usual_rate(task, model)})


def critic_optim(optim: OptimConfig, critic: CriticConfig, model: ModelConfig) -> OptimConfig:
    """The optimizer of a critic: [optim] with one learning rate for all of its weights."""
    return optim_of(optim.model_copy(update={"lr": critic.lr, "matrix_lr": None}), model, "critic", "critic.lr")


def sft_optim(optim: OptimConfig, sft: SftConfig, model: ModelConfig) -> OptimConfig:
    """The optimizer of a warm start, for the rest [optim]."""
    name = sft.optimizer or ("muon" if sft.matrix_lr is not None else optim.name)
    own = {"name": name, "lr": sft.lr, "matrix_lr": sft.matrix_lr, "betas": SFT_BETAS}
    decay = SFT_DECAY if name == "muon" else 0.0
    return optim_of(optim.model_copy(update={**own, "weight_decay": decay}), model, "sft", "sft.lr")


def optims_of(config: TrainConfig) -> dict[str, OptimConfig]:
    """By section, the optimizer of each training of a config. Raises as `optim_of`."""
    found = {"optim": optim_of(config.optim, config.model, "rl" if config.data is None else config.data.loss)}
    if config.critic is not None:
        found["critic"] = critic_optim(config.optim, config.critic, config.model)
    if config.sft is not None:
        found["sft"] = sft_optim(config.optim, config.sft, config.model)
    return found


def check_optims(config: TrainConfig) -> None:
    """Raise ConfigError for a rate that the chosen optimizer lacks or does not read, DependencyError if its package is missing.

    Reads: optim, critic, sft, data.loss, model.init, model.lora.
    """
    found = optims_of(config)
    for section, key in (("optim", "optim.name"), ("sft", "sft.optimizer")):
        if section in found and found[section].name != "muon":
            check_unread(section, getattr(config, section), ("matrix_lr",), f'{key} = "muon"')
        if section in found:
            check_installed(found[section].name, key)

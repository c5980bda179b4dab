"""Typed, frozen, validated configuration: TOML files plus `a.b=c` overrides. Never imports torch."""

from agentrl.config.load import load_config, parse_overrides
from agentrl.config.origin import to_toml
from agentrl.config.schema import (
    AlgorithmConfig,
    CheckpointConfig,
    Choice,
    ClusterConfig,
    EnvConfig,
    EvalConfig,
    InitModelConfig,
    ModelConfig,
    OptimConfig,
    RolloutConfig,
    SftConfig,
    TrainConfig,
    VllmConfig,
)

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "Choice",
    "ClusterConfig",
    "EnvConfig",
    "EvalConfig",
    "InitModelConfig",
    "ModelConfig",
    "OptimConfig",
    "RolloutConfig",
    "SftConfig",
    "TrainConfig",
    "VllmConfig",
    "load_config",
    "parse_overrides",
    "to_toml",
]

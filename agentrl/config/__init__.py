"""Typed, frozen, validated configuration: TOML files plus `a.b=c` overrides. Never imports torch."""

from agentrl.config.load import load_config, parse_overrides
from agentrl.config.origin import to_toml
from agentrl.config.schema import (
    Choice,
    ClusterConfig,
    EvalConfig,
    ModelConfig,
    RolloutConfig,
    TrainConfig,
)

__all__ = [
    "Choice",
    "ClusterConfig",
    "EvalConfig",
    "ModelConfig",
    "RolloutConfig",
    "TrainConfig",
    "load_config",
    "parse_overrides",
    "to_toml",
]

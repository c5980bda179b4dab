"""Typed, frozen, validated configuration: TOML files plus `a.b=c` overrides. Does not import torch."""

from agentrl.config.load import load_config as load_config
from agentrl.config.load import parse_overrides as parse_overrides
from agentrl.config.origin import to_toml as to_toml
from agentrl.config.schema import Choice as Choice
from agentrl.config.schema import ClusterConfig as ClusterConfig
from agentrl.config.schema import EvalConfig as EvalConfig
from agentrl.config.schema import ModelConfig as ModelConfig
from agentrl.config.schema import RolloutConfig as RolloutConfig
from agentrl.config.schema import TrainConfig as TrainConfig

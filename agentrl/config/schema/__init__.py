"""The config of a run, section by section. `tests/config/test_keys_flip.py` says what each key does, or names the test that does.

Defaults suit a real model at `model.path` (docs/hyperparameters.md has their sources). Configs that build a tiny one
with `[model.init]` carry its values themselves.
"""

from agentrl.config.schema.base import Choice, Frozen, Weight
from agentrl.config.schema.cluster import ClusterConfig, PoolConfig, Role
from agentrl.config.schema.data import DataConfig
from agentrl.config.schema.engines import ApiConfig, SglangConfig, VllmConfig, WeightsConfig
from agentrl.config.schema.env import ONE, SEVERAL, EnvConfig, EnvEval, EnvLimits, EnvSft, Steps, WeightAt
from agentrl.config.schema.learning import (
    AlgorithmConfig,
    CriticConfig,
    DemonstrationsConfig,
    DistillationConfig,
    ExperienceConfig,
    KlConfig,
    OptimConfig,
    SftConfig,
)
from agentrl.config.schema.model import InitModelConfig, LoraSection, ModelConfig
from agentrl.config.schema.observe import ProfileConfig, PrometheusConfig, TracesConfig
from agentrl.config.schema.reward import JudgeConfig, JudgeEngineConfig, RewardConfig, RewardModelConfig
from agentrl.config.schema.rollout import BranchConfig, RolloutConfig, StartConfig
from agentrl.config.schema.run import CheckpointConfig, EvalConfig, HealthConfig, KeepConfig, TrainConfig
from agentrl.config.schema.tools import AgentConfig, McpServerConfig, SandboxConfig, ToolsConfig

__all__ = [
    "ONE",
    "SEVERAL",
    "AgentConfig",
    "AlgorithmConfig",
    "ApiConfig",
    "BranchConfig",
    "CheckpointConfig",
    "Choice",
    "ClusterConfig",
    "CriticConfig",
    "DataConfig",
    "DemonstrationsConfig",
    "DistillationConfig",
    "EnvConfig",
    "EnvEval",
    "EnvLimits",
    "EnvSft",
    "EvalConfig",
    "ExperienceConfig",
    "Frozen",
    "HealthConfig",
    "InitModelConfig",
    "JudgeConfig",
    "JudgeEngineConfig",
    "KeepConfig",
    "KlConfig",
    "LoraSection",
    "McpServerConfig",
    "ModelConfig",
    "OptimConfig",
    "PoolConfig",
    "ProfileConfig",
    "PrometheusConfig",
    "RewardConfig",
    "RewardModelConfig",
    "Role",
    "RolloutConfig",
    "SandboxConfig",
    "SftConfig",
    "SglangConfig",
    "StartConfig",
    "Steps",
    "ToolsConfig",
    "TracesConfig",
    "TrainConfig",
    "VllmConfig",
    "Weight",
    "WeightAt",
    "WeightsConfig",
]

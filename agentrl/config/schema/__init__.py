"""The config of a run, section by section. `tests/config/test_keys_flip.py` shows the effect of keys.

Defaults fit a real model at `model.path` (sources in docs/hyperparameters.md). Configs that build a tiny model with
`[model.init]` set their own values.
"""

from agentrl.config.schema.base import Choice as Choice
from agentrl.config.schema.base import Frozen as Frozen
from agentrl.config.schema.episodes import ONE as ONE
from agentrl.config.schema.episodes import SEVERAL as SEVERAL
from agentrl.config.schema.episodes import AgentConfig as AgentConfig
from agentrl.config.schema.episodes import ApiConfig as ApiConfig
from agentrl.config.schema.episodes import BranchConfig as BranchConfig
from agentrl.config.schema.episodes import EnvConfig as EnvConfig
from agentrl.config.schema.episodes import EnvEval as EnvEval
from agentrl.config.schema.episodes import EnvLimits as EnvLimits
from agentrl.config.schema.episodes import EnvSft as EnvSft
from agentrl.config.schema.episodes import JudgeConfig as JudgeConfig
from agentrl.config.schema.episodes import JudgeEngineConfig as JudgeEngineConfig
from agentrl.config.schema.episodes import McpServerConfig as McpServerConfig
from agentrl.config.schema.episodes import RewardConfig as RewardConfig
from agentrl.config.schema.episodes import RewardModelConfig as RewardModelConfig
from agentrl.config.schema.episodes import RolloutConfig as RolloutConfig
from agentrl.config.schema.episodes import SandboxConfig as SandboxConfig
from agentrl.config.schema.episodes import SglangConfig as SglangConfig
from agentrl.config.schema.episodes import StartConfig as StartConfig
from agentrl.config.schema.episodes import Steps as Steps
from agentrl.config.schema.episodes import ToolsConfig as ToolsConfig
from agentrl.config.schema.episodes import VllmConfig as VllmConfig
from agentrl.config.schema.episodes import WeightsConfig as WeightsConfig
from agentrl.config.schema.learning import AlgorithmConfig as AlgorithmConfig
from agentrl.config.schema.learning import CriticConfig as CriticConfig
from agentrl.config.schema.learning import DataConfig as DataConfig
from agentrl.config.schema.learning import DemonstrationsConfig as DemonstrationsConfig
from agentrl.config.schema.learning import DistillationConfig as DistillationConfig
from agentrl.config.schema.learning import ExperienceConfig as ExperienceConfig
from agentrl.config.schema.learning import InitModelConfig as InitModelConfig
from agentrl.config.schema.learning import KlConfig as KlConfig
from agentrl.config.schema.learning import LoraSection as LoraSection
from agentrl.config.schema.learning import ModelConfig as ModelConfig
from agentrl.config.schema.learning import OptimConfig as OptimConfig
from agentrl.config.schema.learning import SftConfig as SftConfig
from agentrl.config.schema.run import CheckpointConfig as CheckpointConfig
from agentrl.config.schema.run import ClusterConfig as ClusterConfig
from agentrl.config.schema.run import EvalConfig as EvalConfig
from agentrl.config.schema.run import HealthConfig as HealthConfig
from agentrl.config.schema.run import KeepConfig as KeepConfig
from agentrl.config.schema.run import PoolConfig as PoolConfig
from agentrl.config.schema.run import ProfileConfig as ProfileConfig
from agentrl.config.schema.run import PrometheusConfig as PrometheusConfig
from agentrl.config.schema.run import TracesConfig as TracesConfig
from agentrl.config.schema.run import TrainConfig as TrainConfig

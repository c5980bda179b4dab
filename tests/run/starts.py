"""The start of a command, as checks read it."""

from __future__ import annotations

from agentrl.config import TrainConfig
from agentrl.reward import Scorer
from agentrl.run.assembly import RunStart, scorer_of
from agentrl.run.engine_choice import EngineChoice


def start_of(config: TrainConfig, engine: str) -> RunStart:
    """A start with an engine by name, whatever the machine has."""
    start = RunStart(config)
    vars(start)["engine"] = EngineChoice(config, engine)
    return start


def scored(config: TrainConfig, scorer: Scorer | None = None) -> RunStart:
    """A start of one environment, with its scorer."""
    return RunStart(config, {config.the_env.called: scorer or scorer_of(config)})

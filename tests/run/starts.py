"""The start of a command, as checks read it: with an engine by name, whatever the machine has, or with the scorer."""

from agentrl.config import TrainConfig
from agentrl.reward import Scorer
from agentrl.run.assembly import RunStart, scorer_of
from agentrl.run.engine_choice import EngineChoice


def start_of(config: TrainConfig, engine: str) -> RunStart:
    start = RunStart(config)
    vars(start)["engine"] = EngineChoice(config, engine)
    return start


def scored(config: TrainConfig, scorer: Scorer | None = None) -> RunStart:
    return RunStart(config, {config.the_env.called: scorer or scorer_of(config)})

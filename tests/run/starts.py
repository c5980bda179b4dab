"""The start of a command, as checks read it: with an engine by name, whatever the machine has, or with the scorer."""

from agentrl.config import TrainConfig
from agentrl.env.catalog import EnvRef, find_spec, make_scorer
from agentrl.reward import Scorer
from agentrl.run.assembly import RunStart
from agentrl.run.engine_choice import EngineChoice


def start_of(config: TrainConfig, engine: str) -> RunStart:
    start = RunStart(config)
    vars(start)["engine"] = EngineChoice(config, engine)
    return start


def scorer_of(config: TrainConfig) -> Scorer:
    ref, spec = EnvRef.of(config.the_env, config.tools), config.the_env.reward
    return make_scorer(find_spec(ref, spec), config.reward, ref, timeout=config.rollout.env_timeout)


def scored(config: TrainConfig, scorer: Scorer | None = None) -> RunStart:
    return RunStart(config, {config.the_env.called: scorer or scorer_of(config)})

"""Checks of the parts that play and score episodes: each can be built, and they fit each other."""

from __future__ import annotations

from agentrl.catalog import EnvRef
from agentrl.config import TrainConfig
from agentrl.errors import ConfigError, ModelError, RenderError
from agentrl.reward import Scorer
from agentrl.run.assembly import read_inputs, renderer_of, scorer_of
from agentrl.run.checks.reward import check_scoring_time
from agentrl.run.checks.rollout import check_rollout
from agentrl.run.engines import engine_name, engine_of, maker_of
from agentrl.train.publish import check_takes_weights
from agentrl.trajectory import Message


def check_engine(config: TrainConfig) -> None:
    """Raise ConfigError if the config's engine cannot be trained, or does not accept its `engine_args`.

    Reads: engine, engine_args, model.path, cluster, rollout.colocate.
    """
    entry = engine_of(config)
    claimed = entry.make.claims(config.model.path)
    setting = f"model.path = {config.model.path}" if claimed else f"engine = {entry.name}"
    check_takes_weights(maker_of(entry.name, config).engine(), setting)


def check_model(config: TrainConfig) -> None:
    """Raise ConfigError unless there is exactly one source of the model.

    Reads: model.path, model.init.
    """
    if (config.model.path is None) == (config.model.init is None):
        raise ConfigError("model: set one of model.path (a folder or hub name) and [model.init] (build a tiny one)")


def check_assembly(config: TrainConfig) -> tuple[EnvRef, Scorer]:
    """Raise a UserError if a part cannot be built or does not fit the others. Nothing is started.

    Reads: env, tools, engine, engine_args, cluster, api, vllm, model.path, model.init, model.tool_parser, model.chat_template,
    model.date, reward, rollout.env_timeout, rollout.router_replay; and as `check_rollout`.
    """
    env = EnvRef.of(config)
    built = env.build()
    tools = built.toolbox.schemas()
    built.close()
    maker_of(engine_name(config), config).check()
    inputs = read_inputs(config)
    scorer = scorer_of(config, inputs.specs[0])
    check_scoring_time(config, scorer)
    check_rollout(config, env)
    if inputs.tokenizer is not None:
        try:
            renderer = renderer_of(config.model, inputs.tokenizer)
            opening = [Message("system", "Instructions")] if renderer.tools_need_system else []
            renderer.start([*opening, Message("user", "Question")], tools)
        except (ModelError, RenderError) as problem:
            raise ModelError(f"model.path = {config.model.path}: {problem}") from problem
    return env, scorer

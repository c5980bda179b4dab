"""Checks of the judges on a run's own engines: leaves and engines fit together, the models are there, and prompts have room."""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.config import TrainConfig
from agentrl.errors import ConfigError, ModelError, RenderError
from agentrl.render import make_renderer
from agentrl.render.base import Renderer
from agentrl.reward import Scorer
from agentrl.rollout.engine_maker import EngineMaker
from agentrl.rollout.judge import NO_LIBRARY, can_constrain
from agentrl.run.checks.model import check_judge_model
from agentrl.run.checks.sizes import check_heads
from agentrl.run.judges import OwnLeaf, check_names, judge_config, judge_makers, own_leaves, told
from agentrl.train.pretrained import load_model_config, load_tokenizer, model_context
from agentrl.trajectory import Message
from agentrl.vision import takes_images


def check_judges(config: TrainConfig, scorers: Mapping[str, Scorer], trains: bool = True, planned: bool = False) -> list[str]:
    """Raise ConfigError for a leaf whose judge is not in the config, for a judge that no leaf asks (if `trains`: an evaluation
    may be of other environments), for an engine that cannot be a judge's, and for a prompt that leaves no room for a verdict;
    ModelError for a model that cannot be used. `scorers`: of each environment; `planned`: a folder may lack its weights. Returns
    what is worth a warning.

    Reads: reward.judge.engines, env.reward, model.trust_remote_code, cluster.
    """
    engines = config.reward.judge.engines
    check_names(scorers.values(), engines)
    leaves = [found for scorer in scorers.values() for found in own_leaves(scorer)]
    if trains and (idle := sorted(set(engines) - {found.name for found in leaves})):
        raise ConfigError(
            f'reward.judge.engines.{idle[0]}: no judge leaf of this run asks it, with "model": "engine:{idle[0]}"; '
            "remove it, or set env.reward to a spec that does"
        )
    for name, maker in judge_makers(config).items():
        asked = [found for found in leaves if found.name == name]
        if asked:
            _check_one(config, name, maker, asked, planned)
    return [] if not leaves or can_constrain() else [f"reward.judge.engines: {NO_LIBRARY}"]


def _check_one(config: TrainConfig, name: str, maker: EngineMaker, leaves: list[OwnLeaf], planned: bool) -> None:
    own, key = judge_config(config, name), f"reward.judge.engines.{name}"
    path, trust = config.reward.judge.engines[name].path, config.model.trust_remote_code
    check_judge_model(own, f"{key}.path", planned)
    if takes_images(load_model_config(path, trust)):
        raise ConfigError(f"{key}.path = {path}: it takes images, and a judge reads text: an image is a line; take a text model")
    with told(key):
        maker.check_installed()
        maker.check()
        check_heads(own, own.engine)
    context = maker.context(min(model_context(path, trust), own.rollout.max_episode_tokens))
    try:
        renderer = make_renderer(load_tokenizer(path, trust))
        for found in leaves:
            _check_room(found, renderer, context, key)
    except (ModelError, RenderError) as problem:
        raise ModelError(f"{key}.path = {path}: {problem}") from problem


def _check_room(found: OwnLeaf, renderer: Renderer, context: int, key: str) -> None:
    """With nothing in its placeholders a prompt is as short as it can be."""
    prompt = len(renderer.start([Message("system", found.leaf.system()), Message("user", found.leaf.args["prompt"])], []))
    most = found.leaf.max_tokens
    if prompt + most > context:
        raise ConfigError(
            f"{key}: the judge takes {context} tokens (its model's context, {key}.max_model_len), and {found.at} needs {prompt} "
            f"for its prompt alone and max_tokens = {most} for the verdict; lower max_tokens, raise {key}.max_model_len, or take "
            "a model with a longer context"
        )

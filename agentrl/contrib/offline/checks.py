"""All checks of a run on data (`agentrl sft` with [data]); the data itself is read, and refused, when they are done."""

from __future__ import annotations

from agentrl.config import TrainConfig
from agentrl.config.identity import check_references
from agentrl.config.load import check_unread
from agentrl.contrib.offline.data_run import ENGINE, data_of, only_data
from agentrl.contrib.offline.store import sources
from agentrl.run.assembly import renderer_of, tokenizer_of
from agentrl.run.checks.model_checks import check_models, check_vision
from agentrl.run.checks.rollout_checks import check_model
from agentrl.run.checks.size_checks import check_capacity, check_placement
from agentrl.run.trackers import check_trackers
from agentrl.trainer.families import packing_of
from agentrl.trainer.learner import check_learner
from agentrl.trainer.train_engine import TRAIN_ENGINES, check_train_engine
from agentrl.utils.errors import ConfigError
from agentrl.utils.terminal import quiet_libraries


def check_data(config: TrainConfig, *, prepared: bool = False) -> list[str]:
    """Raise a UserError for a config that cannot be trained on its data; returns what is worth a warning. `prepared`: the run has
    all of its data already, wherever that came from.

    Reads: data, model, optim, cluster, trackers, out.
    """
    quiet_libraries()
    view = only_data(config)
    check_references(view)
    check_trackers(view)
    check_model(view)
    check_models(view)
    check_vision(view)
    check_capacity(view)
    _check_loss(view)
    check_train_engine(view)
    check_learner(view)
    packing_of(view)
    check_placement(view, ENGINE)
    if not prepared:
        sources(data_of(view).path)
    renderer_of(view.model, tokenizer_of(view))
    if config.sft is not None:
        return ["[sft] says how a teacher's transcripts are trained on, and is not read: [data] is trained with [optim]"]
    return []


def _check_loss(config: TrainConfig) -> None:
    data, model = data_of(config), config.model
    traits = TRAIN_ENGINES.entry(model.engine).traits
    if data.loss != "dpo":
        check_unread("data", data, ("beta",), 'data.loss = "dpo"')
    if data.loss == "sft":
        check_unread("data", data, ("margin",), "a data.loss of pairs")
    else:
        for key, given in (("min_reward", data.min_reward is not None), ("success", data.success)):
            if given:
                raise ConfigError(
                    f'data.{key} leaves episodes out before pairs are made of them, so data.loss = "{data.loss}" would find no '
                    "worse one; set data.margin, and leave it out"
                )
    if data.loss != "reward":
        return
    if model.lora is not None:
        raise ConfigError(
            'model.lora: data.loss = "reward" trains a new head besides, which adapters do not hold; leave it out '
            "(model.lora=false)"
        )
    for key in ("sequence_parallel", "tensor_parallel", "expert_parallel"):
        if getattr(model, key) > 1:
            raise ConfigError(f'model.{key}: data.loss = "reward" reads scores of whole rows; use 1')
    if "reward_model" not in traits:
        able = TRAIN_ENGINES.that_are("reward_model")
        raise ConfigError(f'data.loss = "reward": model.engine = "{model.engine}" does not support it; engines that do: {able}')

"""All checks before a run, in order.

A check raises a UserError that names the key, its value and the expected one. No folder is created and no process started before
the last check. Files in `trainer/` check what they compute with; features of contrib and plug-ins register in `RUN_CHECKS`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from logging.handlers import MemoryHandler
from typing import Any

from agentrl.config.envs import warm_start_envs
from agentrl.config.identity import check_references
from agentrl.config.keys import section_at
from agentrl.config.schema import TrainConfig
from agentrl.env.catalog import EnvRef
from agentrl.reward import Scorer
from agentrl.rollout.mixtures import make_mixture
from agentrl.run.assembly import Purpose as Purpose
from agentrl.run.assembly import RunStart as RunStart
from agentrl.run.callbacks import CALLBACKS
from agentrl.run.checks.env_checks import check_named, check_start, suite_notes
from agentrl.run.checks.model_checks import check_models, check_other_models, check_prompts, check_router_replay, check_vision
from agentrl.run.checks.reward_checks import check_decided, check_gold, check_lint, check_success
from agentrl.run.checks.rollout_checks import check_assembly, check_held_out, check_warm_start
from agentrl.run.checks.size_checks import check_cache, check_capacity, check_heads, check_placement, check_sizes, check_workers
from agentrl.run.engine_choice import EngineChoice
from agentrl.run.trackers import check_trackers
from agentrl.trainer.estimator_inputs import check_estimator_inputs
from agentrl.trainer.families import packing_of
from agentrl.trainer.learner import check_learner
from agentrl.trainer.publish import check_takes_weights, check_weights
from agentrl.trainer.train_engine import check_train_engine
from agentrl.trainer.update_hooks import SECTIONS
from agentrl.utils.errors import ConfigError
from agentrl.utils.registry import Registry
from agentrl.utils.terminal import quiet_libraries

RUN_CHECKS: Registry[Callable[[RunStart], Sequence[str]]] = Registry(
    "check",
    "RUN_CHECKS",
    "agentrl.run.checks",
    traits={
        "first": "runs before all other checks, without scorers",
        "start": "its lines describe a run, at its start and in its plan, and are not warnings",
        "plan": "as start, but only in the plan",
    },
)
"""Checks of features and plug-ins before every start: each raises a UserError or returns warnings. A check registered under the
key of a section ("rollout.branch") runs only in training, once per environment whose config (`alone`) has the section."""
OPTIONAL = ("rollout.branch", *(f"algorithm.{name}" for name in SECTIONS))
"""Sections of features in contrib: a config with such a section is refused if the feature's folder is missing."""


def run_checks(start: RunStart, trait: str = "") -> list[str]:
    """Call the checks with a trait, or those without traits; returns their lines."""
    found = [RUN_CHECKS.entry(name) for name in RUN_CHECKS if section_at(name.split(".")) is None]
    return [line for one in found if one.traits == ({trait} if trait else set()) for line in one.make(start)]


@contextmanager
def logged_too(notes: list[str]) -> Iterator[None]:
    """Add each warning that is logged meanwhile to `notes`, once: a run's log begins after its checks. If they fail, it is
    printed as ever."""
    kept, logger = MemoryHandler(1 << 20, logging.CRITICAL + 1, logging.lastResort), logging.getLogger("agentrl")
    kept.setLevel(logging.WARNING)
    logger.addHandler(kept)
    try:
        yield
        notes += dict.fromkeys(record.getMessage() for record in kept.buffer)
        kept.buffer.clear()
    finally:
        logger.removeHandler(kept)
        if not logger.hasHandlers():
            kept.flush()


def check_config(config: TrainConfig, *, planned: bool = False, capacity: bool = False) -> list[str]:
    """Run all checks of `agentrl train` and `agentrl sft`: models, config, with `capacity` this machine; returns warnings.
    `planned`: only plan, so a model folder may lack its weights, and nothing that costs money is tried."""
    if config.data is not None:
        raise ConfigError(
            "data: agentrl train learns only from episodes that it plays; train on data by agentrl sft CONFIG, and continue "
            "from the result: data=false model.path=RUN/final"
        )
    quiet_libraries()  # because the checks of a model trace it
    check_references(config)
    notes: list[str] = []
    with logged_too(notes):
        found = _check(config, planned, capacity)
    return [*notes, *found]


def _check(config: TrainConfig, planned: bool, capacity: bool) -> list[str]:
    scorers: dict[str, Scorer] = {}
    start = RunStart(config, scorers, planned=planned)
    notes = run_checks(start, "first")
    maker, path = start.engine.maker(), config.model.path
    check_takes_weights(maker.engine(), f"model.path = {path}" if maker.claims(path) else f"engine = {start.engine.name}")
    check_trackers(start)
    for choice in config.callbacks:
        CALLBACKS.bind(choice.name, choice.args)
    check_named(start)
    check_models(start)
    check_vision(start)
    if capacity:
        check_capacity(start)
    # In this order, because later checks rely on parts that earlier ones have built. Settings of environments are checked in a
    # config with that environment only.
    sections = sorted({*OPTIONAL, *(name for name in RUN_CHECKS if section_at(name.split(".")) is not None)})
    for env in config.envs:
        with start.alone(env) as one:
            scorers[env.called] = check_assembly(one)
            check_start(one)
            for name in sections:
                section: Any = one.config
                for key in name.split("."):
                    section = getattr(section, key, None)
                if section is not None and name not in RUN_CHECKS:
                    raise ConfigError(
                        f"{name}: its code is missing here. Restore its folder of agentrl/contrib, or remove the section"
                    )
                if section is not None:
                    notes += RUN_CHECKS.entry(name).make(one)
    check_held_out(start)
    make_mixture(config.rollout.mixture)
    check_router_replay(start)
    check_train_engine(config)
    check_learner(config)
    lora, sft = config.model.lora is not None, config.sft is not None
    check_weights(config.weights, config.cluster, colocated=config.rollout.colocate, lora=lora, sft=sft)
    check_other_models(start)
    packing_of(config)
    for env in config.envs:
        with start.alone(env) as one:
            if env.trains:
                check_estimator_inputs(one.config.algorithm.advantage, one.scorer)
            check_sizes(one)
            check_prompts(one)
    check_cache(start)
    check_placement(start)
    check_workers(start)
    notes += run_checks(start)
    notes += suite_notes(EnvRef.of(env, config.tools) for env in config.envs)
    for env in config.envs:
        with start.alone(env) as one:
            check_gold(one)
            check_success(one)
            at = f"{env.called}: " if len(config.envs) > 1 else ""
            if env.trains:  # lint only rewards that are trained on
                notes += [at + line for line in check_lint(one)]
    for env in warm_start_envs(config.envs, config.sft):
        with start.alone(env) as one:
            check_warm_start(one)
    return notes


def check_eval(config: TrainConfig, purpose: Purpose = "eval") -> RunStart:
    """Run all checks of `agentrl eval` and `agentrl rollout`, before a folder is created; returns the start with its engine.
    Not for a replay, which needs neither engine nor environment."""
    config = EngineChoice(config).without_trainer()
    quiet_libraries()
    check_references(config)
    scorers: dict[str, Scorer] = {}
    start = RunStart(config, scorers, purpose)
    run_checks(start, "first")
    check_models(start)
    check_vision(start)
    check_workers(start)
    for env in config.envs:
        with start.alone(env) as one:
            scorers[env.called] = check_assembly(one)
            check_decided(one.scorer)
            check_prompts(one)
    check_heads(start.engine)
    run_checks(start)
    return start

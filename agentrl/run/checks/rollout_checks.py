"""Checks of episodes: held-out tasks, assembly, limits, and the warm start."""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Iterator
from contextlib import closing
from dataclasses import replace

from agentrl.config.envs import check_temperatures, warm_start_envs
from agentrl.data.trajectory import Message, Task
from agentrl.env.catalog import EnvRef, make_scorer
from agentrl.env.spaces import run_sync
from agentrl.env.wrappers import WRAPPERS
from agentrl.reward import Scorer
from agentrl.reward.nodes import LeafNode, walk
from agentrl.rollout.collector import FILTERS
from agentrl.rollout.context import CONTEXTS, make_context_policy
from agentrl.rollout.engine import ENGINES
from agentrl.rollout.mixtures import TaskSource
from agentrl.rollout.samplers import make_sampler
from agentrl.rollout.warm_start import Transcripts
from agentrl.run.assembly import RunStart, agents_of, longest_row, renderer_of, tokenizer_of
from agentrl.run.checks.reward_checks import tasks_of
from agentrl.trainer.algorithms.advantages import ADVANTAGES
from agentrl.utils.errors import AgentrlError, ConfigError, ModelError, RenderError, TaskDataError

# The held-out split

TRAIN = "train"


def check_held_out(start: RunStart) -> None:
    """Raise ConfigError if a training task is also evaluated on, in any environment of the run, or if a split is empty.

    Compares the contents of finitely many tasks of local environments; others split tasks by content
    (`agentrl.env.authoring.draw`), or cannot be read here.
    """
    config = start.config
    warm = warm_start_envs(config.envs, config.sft)
    trained: dict[str, tuple[str, Task]] = {}
    for env, one in zip(config.envs, config.each(), strict=True):
        # With each set of parameters in training: those of the sampler if it is trained on, and those of the warm start.
        ref = EnvRef.of(env, config.tools)
        sampler = make_sampler(one.rollout.sampler)
        refs = [ref, *(ref.with_params(params) for params in sampler.variants())] if env.trains else []
        refs += [ref.with_params(one.sft.params)] if one.sft is not None and env in warm else []
        if refs and env.params.get("split", TRAIN) != TRAIN:
            raise ConfigError(
                f"env.params.split = {env.params['split']!r} ({env.called}): a run trains only on the split {TRAIN!r}; "
                "eval.split sets the split of evaluations"
            )
        for ref in refs:
            for task in _tasks(ref, TRAIN, env.called):
                trained.setdefault(_content(task), (env.called, task))
    for env in config.envs:
        called, split = env.called, config.alone(env).eval.split
        tasks = _tasks(EnvRef.of(env, config.tools), split, called)
        if not trained or split == TRAIN:
            next(tasks, None)  # raises if the split is empty
            continue
        for task in tasks:
            if (found := trained.get(_content(task))) is not None:
                trains, other = found
                where = "" if trains == called else f" by {trains}"
                raise ConfigError(
                    f"env ({called}): task {task.id!r} of the split {split!r} is also trained on{where}, as {other.id!r}: "
                    "the run would be evaluated on training tasks. Choose env.params that separate them, or eval.split = "
                    '"train" if that is intended'
                )


def _tasks(ref: EnvRef, split: str, called: str) -> Iterator[Task]:
    """Yield the tasks of a split; none of an endless split or a remote environment. Raises ConfigError if it is empty."""
    if ref.at is not None:
        return
    with closing(replace(ref, wrappers=()).build()) as env:
        count, cause = env.task_count(split), ""
        if not count:
            try:
                env.make_task(0, split)
            except Exception as problem:  # other errors of its code are reported when gold is played
                cause = f": {problem}" if isinstance(problem, TaskDataError) else ""
        if count == 0 or cause:
            ways = "" if split == TRAIN else ', or eval.split = "train" if the run may be evaluated on training tasks'
            raise ConfigError(f"env ({called}): the split {split!r} has no task{cause}. Choose other env.params{ways}")
        yield from tasks_of(env, split, endless=0)


def _content(task: Task) -> str:
    return json.dumps([dict(task.data), dict(task.gold)], sort_keys=True, default=str)


# The section [rollout]


def check_rollout(start: RunStart) -> None:
    """Raise ConfigError if the sampler, its environment parameters, or another setting of [rollout] cannot work."""
    config, rollout, env = start.config, start.config.rollout, start.env
    check_temperatures(rollout, config.eval, config.algorithm.experience is not None)
    if rollout.accept is not None:
        FILTERS.bind(rollout.accept.name, rollout.accept.args)
    source = TaskSource(env, make_sampler(rollout.sampler), rollout.sampler.name, config.seed)
    for params in source.variants():
        try:
            env.with_params(params).build().close()
        except AgentrlError as problem:
            raise ConfigError(f"rollout.sampler: with env.params = {dict(params)!r}: {problem}") from problem
    if rollout.colocate and rollout.max_staleness > 0:
        raise ConfigError("rollout.colocate: an engine that sleeps during updates needs rollout.max_staleness = 0")
    if rollout.colocate and "sleeps" not in start.engine.traits:
        raise ConfigError(f"rollout.colocate: only engine = {ENGINES.that_are('sleeps')} can free its memory")
    if rollout.colocate and config.weights.lora == "adapter" and "keeps" not in start.engine.traits:
        raise ConfigError(
            'rollout.colocate: an engine loses the base weights of the adapter when it sleeps; use weights.lora = "merged", or '
            f"engine = {ENGINES.that_are('keeps')}, which keeps them"
        )
    if rollout.filter_zero_variance and config.reward_model is not None:
        raise ConfigError(
            "rollout.filter_zero_variance drops groups by the spec's rewards, before [reward_model] has scored "
            "them, so it would drop groups that the reward model distinguishes; unset one of the two"
        )
    if rollout.filter_zero_variance and "terms" in ADVANTAGES.entry(config.algorithm.advantage.name).needs:
        raise ConfigError(
            f"rollout.filter_zero_variance drops groups of equal rewards, whose single terms algorithm.advantage "
            f'"{config.algorithm.advantage.name}" may tell apart; unset it, or use another estimator'
        )
    make_context_policy(rollout.context)
    if rollout.summary_model is not None and "summarizes" not in CONTEXTS.entry(rollout.context.name).traits:
        names = CONTEXTS.that_are("summarizes")
        raise ConfigError(f"rollout.summary_model: only rollout.context.name = {names} uses summaries")


# Parts


def check_assembly(start: RunStart) -> Scorer:
    """Raise a UserError if a part cannot be built or does not fit the others; returns the scorer. Starts nothing."""
    config, built = start.config, start.env.build()
    tools = built.toolbox.schemas()
    built.close()
    start.engine.maker().check()
    inputs = start.inputs()
    agents_of(config.agent, inputs.tokenizer)
    scorer = make_scorer(inputs.specs[0], config.reward, start.env, timeout=config.rollout.env_timeout)
    # Otherwise a policy whose output takes leaves longer than scoring may take would be unscored instead of getting 0.
    takes: dict[Hashable, tuple[LeafNode, float]] = {}
    for node in (node for top in scorer.tops for node in walk(top) if isinstance(node, LeafNode)):
        if (longest := node.leaf.longest()) is not None:
            takes.setdefault(longest[0], (node, longest[1]))
    total, limit = sum(seconds for _, seconds in takes.values()), config.rollout.env_timeout
    if total > limit:
        parts = ", ".join(f"{node.leaf.kind} at {node.pointer} {seconds:g} s" for node, seconds in takes.values())
        raise ConfigError(
            f"rollout.env_timeout = {limit:g} s: scoring an episode by reward spec {scorer.name!r} may take {total:g} s by the "
            f"limits of its leaves ({parts}), and an episode whose scoring takes longer has no reward instead of 0; "
            f"raise it to {math.ceil(total)}, or lower total_seconds or seconds in the spec"
        )
    check_rollout(start)
    if inputs.tokenizer is not None:
        try:
            renderer = renderer_of(config.model, inputs.tokenizer)
            opening = [Message("system", "Instructions")] if renderer.tools_need_system else []
            renderer.start([*opening, Message("user", "Question")], tools)
        except (ModelError, RenderError) as problem:
            source = "[model.init]" if config.model.path is None else f"model.path = {config.model.path}"
            raise ModelError(f"{source}: {problem}") from problem
    if start.purpose == "train" and config.the_env.trains:
        temperatures = config.rollout.temperature
        if 0 in ([value for _, value in temperatures] if isinstance(temperatures, list) else [temperatures]):
            raise ConfigError(
                "rollout.temperature = 0: greedy episodes of a task are all the same, so nothing can be learned from them; "
                "training needs at least 0.01 (eval.temperature = 0 makes evaluations greedy)"
            )
        for choice in config.the_env.wrappers:
            if "wall_clock" in WRAPPERS.entry(choice.name).traits:
                raise ConfigError(
                    f"env.wrappers: {choice.name} counts wall-clock time (queues and publishes too), and episodes that it cuts "
                    "are unscored, so a policy could escape a bad reward by being slow; use rollout.episode_timeout"
                )
    return scorer


# The warm start


def check_warm_start(start: RunStart) -> None:
    """Raise ConfigError if the warm start cannot run.

    Causes: max_steps below min_steps, adapters, no teacher, or only overlong transcripts for the first step."""
    config, sft = start.config, start.config.sft
    assert sft is not None
    if sft.min_steps > sft.max_steps:
        raise ConfigError(
            f"sft.min_steps = {sft.min_steps} is above sft.max_steps = {sft.max_steps}: the gate could not open before the end"
        )
    if config.model.lora is not None:
        raise ConfigError(
            "model.lora: the warm start of [sft] trains whole weights, not adapters; make it a separate run (agentrl sft "
            "CONFIG model.lora=false), and train from its result (sft=false model.path=runs/NAME/warm_start)"
        )
    source = Transcripts(
        start.env.with_params(sft.params),
        renderer_of(config.model, tokenizer_of(config.model)),
        sft.teacher,
        config.seed,
        longest_row(config.optim, config.model),
    )
    run_sync(source.take(0, sft.batch))

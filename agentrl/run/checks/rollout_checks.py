"""Checks of episodes: held-out tasks, assembly, limits, and the warm start."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest

import numpy as np

from agentrl.config.envs import alone, check_temperatures, each, the_env, trained_at_all, warm_start_envs
from agentrl.config.envs import trained_envs as trained
from agentrl.config.schema import EnvConfig, ModelConfig, TrainConfig
from agentrl.data.trajectory import Message, Task, Trajectory
from agentrl.env import ToolEnv
from agentrl.env.catalog import EnvRef
from agentrl.env.wrappers import WRAPPERS
from agentrl.render.base import Renderer
from agentrl.reward import Scorer
from agentrl.rollout.collector import FILTERS
from agentrl.rollout.context import CONTEXTS, Stop, make_context_policy
from agentrl.rollout.engine import ENGINES
from agentrl.rollout.mixtures import TaskSource
from agentrl.rollout.samplers import fresh_seed, make_sampler
from agentrl.rollout.warm_start import Transcripts, gold_transcript, without_chance
from agentrl.run.assembly import context_length, longest_row, read_inputs, renderer_of, scorer_of, tokenizer_of
from agentrl.run.checks.reward_checks import check_scoring_time, in_daemon_thread
from agentrl.run.engine_choice import engine_name, engine_of, maker_of, resolve_engine
from agentrl.run.outcomes import label_of
from agentrl.trainer.publish import check_takes_weights
from agentrl.utils.errors import AgentrlError, ConfigError, ModelError, RenderError, TaskDataError

# The held-out split

TRAIN = "train"
MOST = 20_000
"""Tasks of a split that are compared."""


def check_held_out(config: TrainConfig) -> None:
    """Raise ConfigError if a task that an environment of the run trains on is also one of those that it, or another of the run,
    is evaluated on. Compared by content, of environments with finitely many tasks that are played here; others make them by
    content (`agentrl.env.authoring.draw`), or are beyond reach. Also if one of the two splits has no task at all.

    Reads: env, tools, eval.split, rollout.sampler, sft.params, sft.envs.
    """
    trained: dict[str, tuple[str, Task]] = {}
    for env in config.envs:
        refs = _trained_on(config, env)
        if refs and env.params.get("split", TRAIN) != TRAIN:
            raise ConfigError(
                f"env.params.split = {env.params['split']!r} ({env.called}): a run trains on the split {TRAIN!r} and on no other"
                "; eval.split says what it is evaluated on"
            )
        for ref in refs:
            for task in _tasks(ref, TRAIN, env.called):
                trained.setdefault(_content(task), (env.called, task))
    for env in config.envs if trained else ():
        one = alone(config, env)
        split = one.eval.split
        for task in () if split == TRAIN else _tasks(EnvRef.of(one), split, env.called):
            if (found := trained.get(_content(task))) is not None:
                trains, other = found
                where = "" if trains == env.called else f" by {trains}"
                raise ConfigError(
                    f"env ({env.called}): task {task.id!r} of the split {split!r} is also trained on{where}, as {other.id!r}: "
                    "the run would be evaluated on what it trains on. Choose env.params that keep them apart, or eval.split = "
                    '"train" if that is meant'
                )


def _trained_on(config: TrainConfig, env: EnvConfig) -> list[EnvRef]:
    """The environment under each set of parameters that training gives it: the sampler's if an update draws its tasks, and the
    warm start's if it takes part in that; none if it is only evaluated."""
    one = alone(config, env)
    ref = EnvRef.of(one)
    sampler = make_sampler(one.rollout.sampler)
    drawn = [ref, *(ref.with_params(params) for params in sampler.variants())] if trained(one.envs) else []
    sft = one.sft if config.sft is not None and env in warm_start_envs(config.envs, config.sft) else None
    return drawn if sft is None else [*drawn, ref.with_params(sft.params)]


def _tasks(ref: EnvRef, split: str, called: str) -> Iterator[Task]:
    """The tasks of a split; none if they have no end, or are elsewhere. Raises ConfigError if it has none at all."""
    if ref.at is not None:
        return
    env = replace(ref, wrappers=()).build()
    try:
        count = env.task_count(split)
        if count == 0:
            try:
                env.make_task(0, split)
                said = ""
            except TaskDataError as problem:
                said = f": {problem}"
            ways = "" if split == TRAIN else ', or eval.split = "train" if the run may be evaluated on what it trains on'
            raise ConfigError(f"env ({called}): the split {split!r} has no task{said}. Choose other env.params{ways}")
        for seed in range(min(count or 0, MOST)):
            yield env.make_task(seed, split)
    finally:
        env.close()


def _content(task: Task) -> str:
    return json.dumps([dict(task.data), dict(task.gold)], sort_keys=True, default=str)


# The section [rollout]


def check_rollout(config: TrainConfig, env: EnvRef) -> None:
    """Raise ConfigError if the sampler, the environment parameters that it sets, or the context policy cannot work.

    Reads: rollout.temperature, rollout.sampler, rollout.accept, rollout.context, rollout.summary_model, rollout.colocate,
    rollout.max_staleness, rollout.filter_zero_variance, rollout.grow, rollout.group_size, rollout.oversample_members,
    eval.temperature, algorithm.experience, reward_model, weights.lora, engine, env, seed.
    """
    rollout = config.rollout
    check_temperatures(config)
    if rollout.accept is not None:
        FILTERS.bind(rollout.accept.name, rollout.accept.args)
    source = TaskSource(env, make_sampler(rollout.sampler), rollout.sampler.name, config.seed)
    for params in source.sampler.variants():
        try:
            env.with_params(params).build().close()
        except AgentrlError as problem:
            raise ConfigError(f"rollout.sampler: with env.params = {dict(params)!r}: {problem}") from problem
    if rollout.colocate and rollout.max_staleness > 0:
        raise ConfigError("rollout.colocate: an engine that sleeps during updates needs rollout.max_staleness = 0")
    if rollout.colocate and "sleeps" not in engine_of(config).traits:
        raise ConfigError(f"rollout.colocate: only engine = {ENGINES.that_are('sleeps')} can free its memory")
    if rollout.colocate and config.weights.lora == "adapter" and "keeps" not in engine_of(config).traits:
        raise ConfigError(
            'rollout.colocate: an engine that slept has lost the base weights of the adapter; use weights.lora = "merged", or '
            f"engine = {ENGINES.that_are('keeps')}, which keeps them"
        )
    if rollout.filter_zero_variance and config.reward_model is not None:
        raise ConfigError(
            "rollout.filter_zero_variance drops groups by the spec's rewards, before [reward_model] has scored "
            "them, so it would drop groups that the reward model tells apart; unset one of the two"
        )
    if rollout.grow > 1 and rollout.oversample_members > 1:
        raise ConfigError(
            "rollout.grow looks at the scores of all members of a group, and rollout.oversample_members drops the slowest of "
            "them unseen; set one of the two to 1"
        )
    if rollout.grow > 1 and config.reward_model is not None:
        raise ConfigError(
            "rollout.grow gives groups more members by the spec's rewards, before [reward_model] has scored them; unset one "
            "of the two"
        )
    if rollout.grow > 1 and rollout.group_size == 1:
        raise ConfigError("rollout.grow: with rollout.group_size = 1 every group would grow; set it to 2 or more")
    make_context_policy(rollout.context)
    traits = CONTEXTS.entry(rollout.context.name).traits
    if rollout.summary_model is not None and "summarizes" not in traits:
        names = CONTEXTS.that_are("summarizes")
        raise ConfigError(f"rollout.summary_model: only rollout.context.name = {names} uses summaries")


def check_trainable(config: TrainConfig) -> None:
    """Raise ConfigError if sampling is greedy, or if the policy could escape a reward.

    Reads: rollout.temperature, env.wrappers.
    """
    given = config.rollout.temperature
    if 0 in ([value for _, value in given] if isinstance(given, list) else [given]):
        raise ConfigError(
            "rollout.temperature = 0: greedy episodes of a task are all the same, so there is nothing to learn "
            "from them; training needs at least 0.01 (eval.temperature = 0 makes evaluations greedy)"
        )
    for choice in the_env(config.envs).wrappers:
        if "wall_clock" not in WRAPPERS.entry(choice.name).traits:
            continue
        raise ConfigError(
            f"env.wrappers: {choice.name} counts wall-clock time (queues and publishes too), and episodes that it cuts are "
            "unscored, so a policy could escape a bad reward by being slow; use rollout.episode_timeout"
        )


# Parts


def check_engine(config: TrainConfig) -> None:
    """Raise ConfigError if the config's engine cannot be trained, or does not accept its `engine_args`.

    Reads: engine, engine_args, model.path, cluster, rollout.colocate.
    """
    entry = engine_of(config)
    claimed = entry.make.claims(config.model.path)
    setting = f"model.path = {config.model.path}" if claimed else f"engine = {entry.name}"
    check_takes_weights(maker_of(entry.name, config).engine(), setting)


def check_model(model: ModelConfig) -> None:
    """Raise ConfigError unless there is exactly one source of the model.

    Reads: model.path, model.init.
    """
    if (model.path is None) == (model.init is None):
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
    check_scoring_time(config.rollout, scorer)
    check_rollout(config, env)
    if inputs.tokenizer is not None:
        try:
            renderer = renderer_of(config.model, inputs.tokenizer)
            opening = [Message("system", "Instructions")] if renderer.tools_need_system else []
            renderer.start([*opening, Message("user", "Question")], tools)
        except (ModelError, RenderError) as problem:
            raise ModelError(f"model.path = {config.model.path}: {problem}") from problem
    return env, scorer


# Room for the solution

SOLVABLE_SECONDS = 3.0
"""No solution of an environment is begun after this many seconds."""
TASKS = 24
"""Tasks of each set of parameters, and held-out ones, that are played."""
NAMED = 5
"""Tasks that are named."""
OFF = "AGENTRL_SURVEY"
"""With this variable set to 0 no gold is played here: for suites of tests, whose limits are often tiny on purpose."""


@dataclass(frozen=True, slots=True)
class TaskNeed:
    """Needs of a task's gold solution, by the keys of limits; `over`: key, need and limit, where the limit is less."""

    task: str
    seed: int
    horizon: int
    needs: dict[str, int]
    over: tuple[tuple[str, int, int], ...] = ()

    def __str__(self) -> str:
        why = ", ".join(f"{needed:,} of {key} = {given:,}" for key, needed, given in self.over)
        return f"{self.task} (seed {self.seed}, {self.horizon} calls) needs {why}"


@dataclass(slots=True)
class TaskKind:
    """Tasks of one kind: those that were played, how many were to be, and why others could not be, by task."""

    name: str
    wanted: int
    needs: list[TaskNeed] = field(default_factory=list)
    unplayed: dict[str, str] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Of the tasks whose gold was played, those that have no room for it."""
        return sum(bool(need.over) for need in self.needs) / max(len(self.needs), 1)


@dataclass(frozen=True, slots=True)
class Survey:
    """Findings about one environment. `skipped`: why nothing was played; `limits`: what an episode has, by key."""

    env: str
    limits: dict[str, int]
    parts: list[TaskKind]
    seconds: float = 0.0
    skipped: str = ""

    def lines(self) -> list[str]:
        """A table by horizon, and a line for each task that has no room for its solution, up to `NAMED`."""
        if self.skipped:
            return [f"gold solutions of {self.env} are not played before the start: {self.skipped}"]
        needs = [need for part in self.parts for need in part.needs]
        parts = "; ".join(f"{part.name}: {len(part.needs)} of {part.wanted} tasks" for part in self.parts)
        lost = Counter(why for part in self.parts for why in part.unplayed.values())
        said = "".join(f"; {count} could not be played ({why})" for why, count in lost.most_common(1))
        head = f"room for the gold solutions of {self.env}, played in {self.seconds:.1f} s ({parts}{said}):"
        over = [str(need) for need in needs if need.over]
        more = f"; and {len(over) - NAMED} more" if len(over) > NAMED else ""
        return [
            head,
            *_table(needs, self.limits),
            *(f"  no room: {line}" for line in over[:NAMED]),
            *([f"  no room{more}"] if more else []),
        ]


_surveys: dict[str, Survey] = {}


def check_solvable(one: TrainConfig) -> None:
    """Raise ConfigError if more than `health.max_unsolvable` of the tasks of a kind have no room for their gold solution, with
    what they need and the keys that say what there is. An environment without gold, an agent that plays, and an environment
    elsewhere are left out, and `survey_lines` says so.

    Reads: health.max_unsolvable, env, tools, agent, rollout, eval, seed, model, engine.
    """
    survey = survey_of(one)
    bad = [part for part in survey.parts if part.share > one.health.max_unsolvable]
    if not bad:
        return
    needs = [need for part in bad for need in part.needs if need.over]
    most: dict[str, tuple[int, int]] = {}
    for need in needs:
        for key, needed, given in need.over:
            most[key] = max(most.get(key, (0, given)), (needed, given))
    raise ConfigError(
        "; ".join(f"{part.share:.0%} of the tasks of {part.name}" for part in bad)
        + f" ({len(needs)} of {sum(len(part.needs) for part in bad)} that were played) have no room for their gold solution: "
        + "; ".join(str(need) for need in needs[:NAMED])
        + (f"; and {len(needs) - NAMED} more" if len(needs) > NAMED else "")
        + ". Set "
        + ", ".join(f"{key} to at least {needed:,}" for key, (needed, _) in most.items())
        + ", make tasks shorter (env.params), or start all the same with health.max_unsolvable = 1"
    )


def survey_lines(config: TrainConfig) -> list[str]:
    """Lines about each environment of a run, for its reader; the survey is made once in a process."""
    return [line for one in each(config) for line in survey_of(one).lines()]


def survey_of(one: TrainConfig) -> Survey:
    """The survey of a config's only environment: that of this process, or a new one."""
    key = one.model_dump_json()
    if key not in _surveys:
        while len(_surveys) >= 16:
            _surveys.pop(next(iter(_surveys)))
        _surveys[key] = _make_survey(one)
    return _surveys[key]


def _make_survey(one: TrainConfig) -> Survey:
    called = one.envs[0].called
    why = f"{OFF} = 0" if os.environ.get(OFF) == "0" else ""
    if one.envs[0].url is not None:
        why = why or f"the environment is at {one.envs[0].url}"
    elif one.agent is not None:
        why = why or "an agent plays, which renders its own prompts"
    elif one.model.path is not None and "messages" in engine_of(one).traits:
        why = why or "the engine takes messages, so nothing is known of its tokens"
    if why:
        return Survey(called, {}, [], skipped=why)
    limits = limits_of(one)
    renderer, began = renderer_of(one.model, tokenizer_of(one.model)), time.monotonic()
    limit = one.rollout.env_timeout + one.rollout.episode_timeout
    try:
        parts = in_daemon_thread(
            lambda: asyncio.run(_survey(one, renderer, limits, began + SOLVABLE_SECONDS)), limit + SOLVABLE_SECONDS
        )
    except NotImplementedError:
        return Survey(called, {}, [], skipped="it has no gold solutions")
    except Exception as fault:  # the environment's own code; where gold is played for its score, `check_success` names its fault
        return Survey(called, {}, [], skipped=f"its gold cannot be played: {type(fault).__name__}: {fault}")
    if not any(part.needs for part in parts):
        why = next((why for part in parts for why in part.unplayed.values()), "there was no time for one")
        return Survey(called, {}, [], skipped=f"its gold cannot be played: {why}")
    return Survey(called, limits, parts, time.monotonic() - began)


def limits_of(one: TrainConfig) -> dict[str, int]:
    """Limits of an episode, by config key. With a context policy the model's context is no limit: history is rewritten."""
    rollout = one.rollout
    found = {
        "rollout.max_turns": rollout.max_turns,
        "rollout.max_turn_tokens": rollout.max_turn_tokens,
        "rollout.max_episode_tokens": rollout.max_episode_tokens,
    }
    if not isinstance(make_context_policy(rollout.context), Stop):
        return found
    return {**found, "the context": context_length(one, resolve_engine(one))}


async def _survey(one: TrainConfig, renderer: Renderer, limits: dict[str, int], until: float) -> list[TaskKind]:
    """In turn of each kind of tasks, so that each has some when the time is over. Raises NotImplementedError without gold."""
    parts, todo, opened = [], [], list[ToolEnv]()
    for name, ref, split, seeds in variants_of(one):
        env = without_chance(ref).build()
        opened.append(env)
        chosen = seeds_in(env, split, seeds)
        parts.append(part := TaskKind(name, len(chosen)))
        todo.append([(part, env, split, seed) for seed in chosen])
    try:
        for task in filter(None, chain.from_iterable(zip_longest(*todo))):
            if time.monotonic() > until:
                break
            part, env, split, seed = task
            try:
                part.needs.append(need_of(await gold_transcript(env, renderer, seed, split), limits))
            except NotImplementedError:
                raise
            except Exception as fault:  # of one task: the others say what there is room for
                part.unplayed[f"{split} {seed}"] = f"{type(fault).__name__}: {fault}"
    finally:
        for env in opened:
            await env.aclose()
    return parts


def variants_of(one: TrainConfig) -> list[tuple[str, EnvRef, str, Sequence[int]]]:
    """The tasks of an environment's run: in words, the environment with its parameters, the split, and the seeds of the first
    tasks. Of training for each `params` of the sampler (none with a weight of 0 throughout), and the held-out ones."""
    ref, sampler = EnvRef.of(one), make_sampler(one.rollout.sampler)
    fresh = [fresh_seed(one.seed, index) for index in range(TASKS)]
    held = range(min(one.eval.tasks, TASKS))
    variants = list(sampler.variants()) if trained_at_all(one.envs[0].weight) else []
    named = [
        ", ".join(f"{key} = {value}" for key, value in params.items()) if len(variants) > 1 else "training" for params in variants
    ]
    trained = [(name, ref.with_params(params), "train", fresh) for name, params in zip(named, variants, strict=True)]
    return [*trained, ("held-out", ref, one.eval.split, held)]


def seeds_in(env: ToolEnv, split: str, seeds: Sequence[int]) -> Sequence[int]:
    """The seeds as tasks of a split that may have an end: as many of its tasks, spread over it."""
    count = env.task_count(split)
    if count is None:
        return seeds
    return [int(at) for at in np.linspace(0, count - 1, min(count, len(seeds)))] if count else []


def need_of(played: Trajectory, limits: dict[str, int]) -> TaskNeed:
    """Needs of an episode with these very turns, against its limits."""
    turns = [int(np.bincount(ledger.turns[ledger.sampled]).max()) for ledger in played.ledgers if ledger.sampled_tokens]
    needs = {
        "rollout.max_turns": len(played.turns),
        "rollout.max_turn_tokens": max(turns, default=0),
        "rollout.max_episode_tokens": played.tokens,
        "the context": max((len(ledger) for ledger in played.ledgers), default=0),
    }
    over = tuple((key, needs[key], given) for key, given in limits.items() if needs[key] > given)
    return TaskNeed(played.task.id, played.task.seed, played.horizon or 0, needs, over)


def _table(needs: Sequence[TaskNeed], limits: dict[str, int]) -> list[str]:
    """By horizon: the tasks, the most that one of them needs against what there is, and how many fit."""
    rows = [["calls", "tasks", *(key.removeprefix("rollout.").removeprefix("the ") for key in limits), "fit"]]
    labels = {need.horizon: label_of(need.horizon) for need in sorted(needs, key=lambda need: need.horizon)}
    for label in dict.fromkeys(labels.values()):
        members = [need for need in needs if labels[need.horizon] == label]
        most = [f"{max(need.needs[key] for need in members):,} of {given:,}" for key, given in limits.items()]
        rows.append([label, str(len(members)), *most, f"{1 - sum(bool(n.over) for n in members) / len(members):.0%}"])
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return ["  " + "  ".join(cell.rjust(size) for cell, size in zip(row, widths, strict=True)) for row in rows]


# The warm start


def check_warm_start(config: TrainConfig, env: EnvRef) -> None:
    """Raise ConfigError if the warm start cannot run: max_steps is below min_steps, the model has adapters, there is no
    teacher, or a transcript of the first step is longer than a row may be (and so are those that could replace it).

    Reads: sft, env, tools, seed, model.path, model.init, model.lora, model.tool_parser, model.chat_template,
    model.date, optim.micro_tokens.
    """
    sft = config.sft
    if sft is None:
        return
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
        replace(env, params={**env.params, **sft.params}),
        renderer_of(config.model, tokenizer_of(config.model)),
        sft.teacher,
        config.seed,
        longest_row(config),
    )
    # In another thread, so that this can be called while an event loop is running (in a notebook).
    with ThreadPoolExecutor(max_workers=1) as pool:
        pool.submit(asyncio.run, source.take(0, sft.batch)).result()

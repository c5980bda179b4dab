"""Survey of gold solutions before a run: whether an episode has room for them."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest

import numpy as np

from agentrl.config import TrainConfig
from agentrl.env import ToolEnv
from agentrl.env.catalog import EnvRef
from agentrl.render.base import Renderer
from agentrl.rollout.context import Stop, make_context_policy
from agentrl.rollout.samplers import fresh_seed, make_sampler
from agentrl.rollout.warm_start import transcript, without_random_faults
from agentrl.run.assembly import model_length, renderer_of, tokenizer_of
from agentrl.run.checks import RUN_CHECKS, RunStart
from agentrl.run.checks.reward_checks import in_daemon_thread
from agentrl.run.engine_choice import EngineChoice
from agentrl.run.outcomes import label_of
from agentrl.utils.errors import ConfigError, fault_text
from agentrl.utils.terminal import columns

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


@RUN_CHECKS.register("solvable")
def check_solvable(start: RunStart) -> list[str]:
    """Raise ConfigError if more than `health.max_unsolvable` of the tasks of a kind have no room for their gold solution, with
    what they need and the keys that say what there is. An environment without gold, an agent that plays, and an environment
    elsewhere are left out, and `survey_lines` says so. An evaluation takes whatever tasks there are.
    """
    for env in start.config.envs if start.purpose == "train" else ():
        with start.config.name_entry_in_errors(env) as one:
            bad = [part for part in survey_of(one).parts if part.share > one.health.max_unsolvable]
            if not bad:
                continue
            needs = [need for part in bad for need in part.needs if need.over]
            most: dict[str, tuple[int, int]] = {}
            for need in needs:
                for key, needed, given in need.over:
                    most[key] = max(most.get(key, (0, given)), (needed, given))
            raise ConfigError(
                "; ".join(f"{part.share:.0%} of the tasks of {part.name}" for part in bad)
                + f" ({len(needs)} of {sum(len(part.needs) for part in bad)} that were played) have no room for their gold "
                + "solution: "
                + "; ".join(str(need) for need in needs[:NAMED])
                + (f"; and {len(needs) - NAMED} more" if len(needs) > NAMED else "")
                + ". Set "
                + ", ".join(f"{key} to at least {needed:,}" for key, (needed, _) in most.items())
                + ", make tasks shorter (env.params), or start all the same with health.max_unsolvable = 1"
            )
    return []


@RUN_CHECKS.register("survey_lines", traits={"start"})
def survey_lines(start: RunStart) -> list[str]:
    """Lines about the room in each environment of a run; the survey is made once in a process."""
    return [line for one in start.config.each() for line in survey_of(one).lines()]


def survey_of(one: TrainConfig) -> Survey:
    """The survey of a config's only environment: that of this process, or a new one."""
    key = one.model_dump_json()
    if key not in _surveys:
        while len(_surveys) >= 16:
            _surveys.pop(next(iter(_surveys)))
        _surveys[key] = _survey(one, EnvRef.of(one.the_env, one.tools))
    return _surveys[key]


def _survey(one: TrainConfig, ref: EnvRef) -> Survey:
    """Play gold solutions for a few seconds; what cannot be played says why."""
    called, rollout, why = one.envs[0].called, one.rollout, ""
    if os.environ.get(OFF) == "0":
        why = f"{OFF} = 0"
    elif one.envs[0].url is not None:
        why = f"the environment is at {one.envs[0].url}"
    elif one.agent is not None:
        why = "an agent plays, which renders its own prompts"
    elif one.model.path is not None and "messages" in EngineChoice(one).traits:
        why = "the engine takes messages, so nothing is known of its tokens"
    if why:
        return Survey(called, {}, [], skipped=why)
    limits = {f"rollout.{key}": getattr(rollout, key) for key in ("max_turns", "max_turn_tokens", "max_episode_tokens")}
    if isinstance(make_context_policy(rollout.context), Stop):  # with another policy history is rewritten
        limits["the context"] = EngineChoice(one).maker().context(model_length(one.model))
    renderer, began = renderer_of(one.model, tokenizer_of(one.model)), time.monotonic()
    try:
        parts = in_daemon_thread(
            lambda: asyncio.run(_play(_kinds(one, ref), renderer, limits, began + SOLVABLE_SECONDS)),
            rollout.env_timeout + rollout.episode_timeout + SOLVABLE_SECONDS,
        )
    except NotImplementedError:
        return Survey(called, {}, [], skipped="it has no gold solutions")
    except Exception as fault:  # the environment's own code; where gold is played for its score, its check names the fault
        return Survey(called, {}, [], skipped=f"its gold cannot be played: {fault_text(fault)}")
    if not any(part.needs for part in parts):
        why = next((why for part in parts for why in part.unplayed.values()), "there was no time for one")
        return Survey(called, {}, [], skipped=f"its gold cannot be played: {why}")
    return Survey(called, limits, parts, time.monotonic() - began)


Kind = tuple[str, EnvRef, str, Sequence[int]]
"""Tasks of a run: in words, the environment with its parameters, the split, and the seeds of the first tasks."""


def _kinds(one: TrainConfig, ref: EnvRef) -> list[Kind]:
    """The tasks of training for each `params` of the sampler (none with a weight of 0 throughout), and the held-out ones."""
    fresh = [fresh_seed(one.seed, index) for index in range(TASKS)]
    variants = list(make_sampler(one.rollout.sampler).variants()) if one.envs[0].trains else []
    kinds: list[Kind] = []
    for params in variants:
        name = ", ".join(f"{key} = {value}" for key, value in params.items()) if len(variants) > 1 else "training"
        kinds.append((name, ref.with_params(params), "train", fresh))
    return [*kinds, ("held-out", ref, one.eval.split, range(min(one.eval.tasks, TASKS)))]


async def _play(kinds: list[Kind], renderer: Renderer, limits: dict[str, int], until: float) -> list[TaskKind]:
    """In turn of each kind of tasks, so that each has some when the time is over. Raises NotImplementedError without gold."""
    parts, todo, opened = [], [], list[ToolEnv]()
    for name, ref, split, seeds in kinds:
        env = without_random_faults(ref).build()
        opened.append(env)
        if (count := env.task_count(split)) is not None:  # as many of its tasks, spread over it
            seeds = [int(at) for at in np.linspace(0, count - 1, min(count, len(seeds)))] if count else []
        parts.append(part := TaskKind(name, len(seeds)))
        todo.append([(part, env, split, seed) for seed in seeds])
    try:
        for task in filter(None, chain.from_iterable(zip_longest(*todo))):
            if time.monotonic() > until:
                break
            part, env, split, seed = task
            try:
                # The needs of an episode with these very turns, against its limits.
                played = await transcript(env, renderer, seed, split)
                sampled = [ledger.turns[ledger.sampled] for ledger in played.ledgers if ledger.sampled_tokens]
                turns = [int(np.bincount(numbers).max()) for numbers in sampled]
                needs = {
                    "rollout.max_turns": len(played.turns),
                    "rollout.max_turn_tokens": max(turns, default=0),
                    "rollout.max_episode_tokens": played.tokens,
                    "the context": max((len(ledger) for ledger in played.ledgers), default=0),
                }
                over = tuple((key, needs[key], given) for key, given in limits.items() if needs[key] > given)
                part.needs.append(TaskNeed(played.task.id, played.task.seed, played.horizon or 0, needs, over))
            except NotImplementedError:
                raise
            except Exception as fault:  # of one task: the others say what there is room for
                part.unplayed[f"{split} {seed}"] = fault_text(fault)
    finally:
        for env in opened:
            await env.aclose()
    return parts


def _table(needs: Sequence[TaskNeed], limits: dict[str, int]) -> list[str]:
    """By horizon: the tasks, the most that one of them needs against what there is, and how many fit."""
    rows = [["calls", "tasks", *(key.removeprefix("rollout.").removeprefix("the ") for key in limits), "fit"]]
    labels = {need.horizon: label_of(need.horizon) for need in sorted(needs, key=lambda need: need.horizon)}
    for label in dict.fromkeys(labels.values()):
        members = [need for need in needs if labels[need.horizon] == label]
        most = [f"{max(need.needs[key] for need in members):,} of {given:,}" for key, given in limits.items()]
        rows.append([label, str(len(members)), *most, f"{1 - sum(bool(n.over) for n in members) / len(members):.0%}"])
    return ["  " + line for line in columns(rows, str.rjust)]

"""Whether an episode has room for the solution of its task: gold is played, rendered as the run renders it, and counted, before
the run starts.

A sample of the tasks, for a few seconds: the first that training draws with each `params` of its sampler, and the held-out ones.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest

import numpy as np

from agentrl.config import TrainConfig
from agentrl.config.envs import each
from agentrl.env import ToolEnv
from agentrl.errors import ConfigError
from agentrl.render.base import Renderer
from agentrl.rollout.context.base import Stop, make_context_policy
from agentrl.run.assembly import context_length, renderer_of, tokenizer_of
from agentrl.run.checks.reward import in_daemon_thread
from agentrl.run.engines import resolve_engine
from agentrl.run.horizon import Bins, order, seeds_in, variants_of
from agentrl.trajectory import Trajectory
from agentrl.warm_start import gold_transcript, without_chance

SECONDS = 3.0
"""No solution of an environment is begun after so many seconds."""
NAMED = 5
"""Tasks that are named."""
OFF = "AGENTRL_SURVEY"
"""With this variable set to 0 no gold is played here: for suites of tests, whose limits are often tiny on purpose."""


@dataclass(frozen=True, slots=True)
class TaskNeed:
    """What the gold solution of a task takes. `limits`: by key, what the episode has of it, where that is less."""

    task: str
    seed: int
    horizon: int
    turns: int
    turn_tokens: int
    episode_tokens: int
    context: int
    over: tuple[tuple[str, int, int], ...] = ()

    def told(self) -> str:
        """The task and why its solution does not fit, in words."""
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
    """What was found of one environment. `skipped`: why nothing was played; `limits`: what an episode has, by key."""

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
        found = [f"room for the gold solutions of {self.env}, {self._sampled()}:", *_table(needs, self.limits)]
        over = [need.told() for need in needs if need.over]
        more = f"; and {len(over) - NAMED} more" if len(over) > NAMED else ""
        return [*found, *(f"  no room: {line}" for line in over[:NAMED]), *([f"  no room{more}"] if more else [])]

    def _sampled(self) -> str:
        parts = "; ".join(f"{part.name}: {len(part.needs)} of {part.wanted} tasks" for part in self.parts)
        lost = Counter(why for part in self.parts for why in part.unplayed.values())
        said = "".join(f"; {count} could not be played ({why})" for why, count in lost.most_common(1))
        return f"played in {self.seconds:.1f} s ({parts}{said})"


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
        + "; ".join(need.told() for need in needs[:NAMED])
        + (f"; and {len(needs) - NAMED} more" if len(needs) > NAMED else "")
        + ". Set "
        + ", ".join(f"{key} to at least {needed:,}" for key, (needed, _) in most.items())
        + ", make tasks shorter (env.params), or start all the same with health.max_unsolvable = 1"
    )


def survey_lines(config: TrainConfig) -> list[str]:
    """What was found of each environment of a run, for its reader; the survey is made once in a process."""
    return [line for one in each(config) for line in survey_of(one).lines()]


def survey_of(one: TrainConfig) -> Survey:
    """The survey of a config's only environment: that of this process, or a new one."""
    key = one.model_dump_json()
    if key not in _surveys:
        while len(_surveys) >= 16:
            _surveys.pop(next(iter(_surveys)))
        _surveys[key] = _made(one)
    return _surveys[key]


def _made(one: TrainConfig) -> Survey:
    called = one.envs[0].called
    if (why := _skipped(one)) is not None:
        return Survey(called, {}, [], skipped=why)
    limits = limits_of(one)
    renderer, began = renderer_of(one.model, tokenizer_of(one)), time.monotonic()
    limit = one.rollout.env_timeout + one.rollout.episode_timeout
    try:
        parts = in_daemon_thread(lambda: asyncio.run(_survey(one, renderer, limits, began + SECONDS)), limit + SECONDS)
    except NotImplementedError:
        return Survey(called, {}, [], skipped="it has no gold solutions")
    except Exception as fault:  # the environment's own code; where gold is played for its score, `check_success` names its fault
        return Survey(called, {}, [], skipped=f"its gold cannot be played: {type(fault).__name__}: {fault}")
    if not any(part.needs for part in parts):
        why = next((why for part in parts for why in part.unplayed.values()), "there was no time for one")
        return Survey(called, {}, [], skipped=f"its gold cannot be played: {why}")
    return Survey(called, limits, parts, time.monotonic() - began)


def _skipped(one: TrainConfig) -> str | None:
    if os.environ.get(OFF) == "0":
        return f"{OFF} = 0"
    if one.envs[0].url is not None:
        return f"the environment is at {one.envs[0].url}"
    if one.agent is not None:
        return "an agent plays, which renders its own prompts"
    if one.model.path is not None and "messages" in _traits(one):
        return "the engine takes messages, so nothing is known of its tokens"
    return None


def _traits(one: TrainConfig) -> Iterable[str]:
    from agentrl.run.engines import engine_of

    return engine_of(one).traits


def limits_of(one: TrainConfig) -> dict[str, int]:
    """What an episode has, by config key. With a context policy the model's context is no limit: history is rewritten."""
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
        for task in chain.from_iterable(zip_longest(*todo)):
            if time.monotonic() > until:
                break
            if task is not None:
                await _add(*task, renderer=renderer, limits=limits)
    finally:
        for env in opened:
            await env.aclose()
    return parts


async def _add(part: TaskKind, env: ToolEnv, split: str, seed: int, *, renderer: Renderer, limits: dict[str, int]) -> None:
    try:
        played = await gold_transcript(env, renderer, seed, split)
    except NotImplementedError:
        raise
    except Exception as fault:  # of one task: the others say what there is room for
        part.unplayed[f"{split} {seed}"] = f"{type(fault).__name__}: {fault}"
        return
    part.needs.append(need_of(played, limits))


def need_of(played: Trajectory, limits: dict[str, int]) -> TaskNeed:
    """What an episode with these very turns takes, against what there is."""
    turns = [int(np.bincount(ledger.turns[ledger.sampled]).max()) for ledger in played.ledgers if ledger.sampled_tokens]
    taken = {
        "rollout.max_turns": len(played.turns),
        "rollout.max_turn_tokens": max(turns, default=0),
        "rollout.max_episode_tokens": played.tokens,
        "the context": max((len(ledger) for ledger in played.ledgers), default=0),
    }
    over = tuple((key, taken[key], given) for key, given in limits.items() if taken[key] > given)
    sizes = {key.rpartition(".")[2].removeprefix("the ").removeprefix("max_"): needed for key, needed in taken.items()}
    return TaskNeed(played.task.id, played.task.seed, played.horizon or 0, **sizes, over=over)


def _table(needs: Sequence[TaskNeed], limits: dict[str, int]) -> list[str]:
    """By horizon: the tasks, the most that one of them needs against what there is, and how many fit."""
    bins = Bins.of({need.horizon for need in needs})
    rows = [["calls", "tasks", *(key.removeprefix("rollout.").removeprefix("the ") for key in limits), "fit"]]
    by_label: dict[str, list[TaskNeed]] = {}
    for need in needs:
        by_label.setdefault(bins.label(need.horizon), []).append(need)
    for label in sorted(by_label, key=order):
        members = by_label[label]
        each_most = (max(getattr(need, key.rpartition(".")[2].removeprefix("the ").removeprefix("max_")) for need in members)
                     for key in limits)  # fmt: skip
        most = [f"{needed:,} of {given:,}" for needed, given in zip(each_most, limits.values(), strict=True)]
        rows.append([label, str(len(members)), *most, f"{1 - sum(bool(n.over) for n in members) / len(members):.0%}"])
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return ["  " + "  ".join(cell.rjust(size) for cell, size in zip(row, widths, strict=True)) for row in rows]

"""What a run would do, in numbers: batches, what is trained, how often it evaluates, what it writes. `--dry-run` prints it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.batch.schedule import shuffled
from agentrl.catalog import EnvRef
from agentrl.catalog.scoring import find_spec
from agentrl.config import TrainConfig
from agentrl.config.envs import each, trained, widest
from agentrl.rollout.grow import largest
from agentrl.run.checks.reward import evaluations_of
from agentrl.run.engines import computed, engine_name, with_threads
from agentrl.train.estimator_inputs import needs_greedy
from agentrl.train.memory import numbers, shell
from agentrl.train.modules import Role
from agentrl.train.role_layout import mesh_of

TRAINED: dict[str, Role] = {"actor": "policy", "critic": "value"}


@dataclass(frozen=True, slots=True)
class Batches:
    """One update. Episodes, minibatches and optimizer steps are exact as long as all episodes are scored. Tokens and `micros`
    (micro-batches of a data rank in a minibatch) are what they are at most: if every episode were as long as it may be. `kept`,
    `shown`: episodes and demonstrations that are added at most (`algorithm.experience`, `algorithm.demonstrations`)."""

    groups: int
    group_size: int
    started: int
    grown: int
    episodes: int
    minibatches: list[int]
    epochs: int
    optimizer_steps: int
    data_ranks: int
    episode_tokens: int
    sampled_tokens: int
    tokens: int
    micro_tokens: int
    micros: int
    kept: int = 0
    shown: int = 0


@dataclass(frozen=True, slots=True)
class Parameters:
    """Of a role that learns: all its parameters, and those that an optimizer changes."""

    role: str
    all: int
    trained: int


@dataclass(frozen=True, slots=True)
class Evaluations:
    """How often it is evaluated, after which updates (0: before the first), on how many tasks each time."""

    after: list[int]
    tasks: int
    environments: dict[str, str]


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A run. `threads`: of each process, None on GPUs. `episodes`: those of all updates, without what is played again, filtered
    or cancelled; `transcripts`: of the warm start, at least and at most; `checkpoints`: the updates after which one is saved if
    nothing else happens."""

    name: str
    folder: str
    environments: list[str]
    algorithm: str
    engine: str
    model: str
    dtype: str
    threads: int | str | None
    parameters: list[Parameters]
    updates: int
    stops_at: float | None
    batches: Batches
    evaluations: Evaluations
    episodes: int
    evaluation_episodes: int
    transcripts: tuple[int, int] | None
    checkpoints: list[int]
    kept: int
    trajectories: list[int]
    trackers: list[str]

    def json(self) -> dict[str, Any]:
        """The plan as JSON has it."""
        return asdict(self)


def plan_of(config: TrainConfig, cuda: bool) -> RunPlan:
    """The plan of a config whose packing is settled. Raises UserError as the parts do that it asks."""
    steps, folder = config.steps, Path(config.out) / config.name
    batches = batches_of(config)
    every = config.eval.every
    evaluated = [0, *(step for step in range(1, steps) if every and step % every == 0), steps]
    assert len(evaluated) == evaluations_of(config)
    tasks = sum(one.eval.tasks for one in each(config))
    sft = config.sft
    return RunPlan(
        name=config.name,
        folder=str(folder),
        environments=[_environment(one) for one in each(config)],
        algorithm=f"{config.algorithm.advantage.name}, {config.algorithm.loss.name}, {config.algorithm.aggregate}",
        engine=engine_name(config),
        model=config.model.path or "a tiny model of random weights ([model.init])",
        dtype=config.model.computes_in(cuda),
        threads=None if cuda else with_threads(config).model.threads,
        parameters=_parameters(config),
        updates=steps,
        stops_at=config.stop_at_success if every else None,
        batches=batches,
        evaluations=Evaluations(
            evaluated, tasks, {env.called: _how(one) for env, one in zip(config.envs, each(config), strict=True)}
        ),
        episodes=steps * batches.episodes,
        evaluation_episodes=len(evaluated) * tasks,
        transcripts=None if sft is None else (min(sft.min_steps, sft.max_steps) * sft.batch, sft.max_steps * sft.batch),
        checkpoints=sorted({*range(config.checkpoint.every, steps + 1, config.checkpoint.every), steps}),
        kept=config.checkpoint.keep + config.checkpoint.keep_best,
        trajectories=sorted({*range(config.trajectories_every, steps + 1, config.trajectories_every), steps}),
        trackers=[tracker.name for tracker in config.trackers],
    )


def batches_of(config: TrainConfig) -> Batches:
    """The arithmetic of an update."""
    rollout, algorithm = config.rollout, config.algorithm
    episodes = rollout.groups * rollout.group_size
    members = np.repeat(np.arange(rollout.groups), rollout.group_size) if algorithm.groups == "kept" else None
    parts = [len(part) for part in shuffled(episodes, algorithm.minibatch, config.seed, 0, members)]
    greedy = needs_greedy(algorithm.advantage)  # an episode a group that is no member
    pool = config.cluster.pools.get(str(config.cluster.roles.get("actor")))
    ranks = mesh_of(config, None if pool is None else pool.nodes * pool.per_node)["dp"]
    wide = widest(config, trained(config)).rollout
    longest = min(wide.max_episode_tokens, config.optim.micro_tokens)
    at_once = config.optim.micro_tokens // longest if config.model.packing == "packed" else 1
    again, gold = algorithm.experience, algorithm.demonstrations
    kept = 0 if again is None else min(int(again.share * episodes + 0.5), again.size)
    shown = 0 if gold is None else gold.episodes
    most = max(parts) + math.ceil((kept + shown) / len(parts))
    return Batches(
        groups=rollout.groups,
        group_size=rollout.group_size,
        started=more(rollout.groups, rollout.oversample) * (more(rollout.group_size, rollout.oversample_members) + greedy),
        grown=rollout.groups * largest(rollout),
        episodes=episodes,
        minibatches=parts,
        epochs=algorithm.epochs,
        optimizer_steps=len(parts) * algorithm.epochs,
        data_ranks=ranks,
        episode_tokens=wide.max_episode_tokens,
        sampled_tokens=min(wide.max_turns * wide.max_turn_tokens, wide.max_episode_tokens),
        tokens=rollout.groups * largest(rollout) * wide.max_episode_tokens,
        micro_tokens=config.optim.micro_tokens,
        micros=math.ceil(math.ceil(most / ranks) / at_once),
        kept=kept,
        shown=shown,
    )


def more(count: int, factor: float) -> int:
    """As many as an oversampling factor starts instead of `count` (as rollout/collect.py rounds)."""
    return count + math.ceil(count * (factor - 1.0) - 1e-9)


def lines(plan: RunPlan) -> list[str]:
    """The plan as a person reads it, a line for each question."""
    b, ev = plan.batches, plan.evaluations
    cut = f"{len(b.minibatches)} minibatches of {_span(b.minibatches)}" if len(b.minibatches) > 1 else "1 minibatch"
    passes = f" x {b.epochs} passes" if b.epochs > 1 else ""
    more = f" ({b.started:,} are started)" if b.started > b.episodes else ""
    added = [f"{count:,} {what}" for count, what in ((b.kept, "kept"), (b.shown, "demonstrations")) if count]
    beside = f", and at most {' and '.join(added)} beside them" if added else ""
    more += f" (up to {b.grown:,} where groups grow)" if b.grown > b.episodes else ""
    early = "" if plan.stops_at is None else f", or until an evaluation finds {plan.stops_at:.0%} success"
    rows = [
        ("run", f"{plan.name}: {plan.updates:,} updates with {plan.algorithm}{early}"),
        *(("environment", line) for line in plan.environments if len(plan.environments) == 1),
        ("model", f"{plan.model}, {computed(plan.dtype, plan.threads)}; engine {plan.engine}"),
        *(("trained", _trained(one)) for one in plan.parameters),
        ("an update", f"{b.groups:,} groups x {b.group_size:,} = {b.episodes:,} episodes{more} -> {cut}{passes} -> "
         f"{_count(b.optimizer_steps, 'optimizer step')}{beside}"),
        ("tokens", f"an episode at most {b.sampled_tokens:,} sampled and {b.episode_tokens:,} in all, an update {b.tokens:,}"),
        ("a minibatch", f"over {_count(b.data_ranks, 'rank')}, in micro-batches of at most {b.micro_tokens:,} tokens: at most "
         f"{b.micros:,} on each, if every episode is as long as it may be"),
        ("in all", f"{plan.episodes:,} episodes of training, {plan.evaluation_episodes:,} of evaluation, "
         f"{_count(plan.updates * b.optimizer_steps, 'optimizer step')}"),
    ]  # fmt: skip
    if plan.transcripts is not None:
        rows.append(("warm start", f"{plan.transcripts[0]:,} to {plan.transcripts[1]:,} transcripts of the teacher before it"))
    rows += [("evaluated", f"{name}: {how}, {_when(ev.after)}") for name, how in ev.environments.items()]
    rows += [
        ("written", f"{plan.folder}: config.toml, metrics.jsonl, the final model; {', '.join(plan.trackers) or 'no tracker'}"),
        ("checkpoints", f"{_when(plan.checkpoints)}, of which {_kept(plan)}"),
        ("episodes", f"in trajectories/, {_when(plan.trajectories)}"),
    ]
    width = max(len(name) for name, _ in rows)
    return [f"{name:{width}}  {text}" for name, text in rows]


def _environment(one: TrainConfig) -> str:
    ref, limits = EnvRef.of(one), one.rollout
    reward = find_spec(ref, one.envs[0].reward)["name"]
    turns = f"{_count(limits.max_turns, 'turn')} of {limits.max_turn_tokens} tokens"
    return f"{one.envs[0].called} ({ref.entry.id}), reward {reward}, {turns}"


def _how(one: TrainConfig) -> str:
    kind = "greedily" if one.eval.temperature == 0 else f"at temperature {one.eval.temperature:g}"
    return f"{one.eval.tasks:,} tasks of {one.eval.split} {kind}"


def _parameters(config: TrainConfig) -> list[Parameters]:
    found = []
    for name, role in TRAINED.items():
        if name == "actor" or config.critic is not None:
            path = config.critic.path if name == "critic" and config.critic is not None else None
            parameters = list(shell(config.model, role, path).parameters())
            found.append(Parameters(name, numbers(parameters), numbers(p for p in parameters if p.requires_grad)))
    return found


def _trained(one: Parameters) -> str:
    if one.trained == one.all:
        return f"{one.role}: all {one.all:,} parameters"
    return f"{one.role}: {one.trained:,} of {one.all:,} parameters ({one.trained / one.all:.2%}); the others are frozen"


def _span(sizes: list[int]) -> str:
    return f"{max(sizes):,}" if min(sizes) == max(sizes) else f"{min(sizes):,} to {max(sizes):,}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _kept(plan: RunPlan) -> str:
    """A checkpoint may be one of the newest and of the best, so it is "at most"."""
    return "all stay" if plan.kept >= len(plan.checkpoints) else f"at most {plan.kept} stay"


def _when(updates: list[int]) -> str:
    """ "before, after 10, 20, ... 40 updates"."""
    named = [str(step) for step in updates if step]
    shown = ", ".join(named) if len(named) <= 4 else f"{named[0]}, {named[1]}, ... {named[-1]}"
    return f"{'before, ' if 0 in updates else ''}after {shown} {'update' if named == ['1'] else 'updates'}"

"""The plan of a run (`agentrl train --dry-run`): values derived from the config, batches, memory and places."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.cluster.placement import Location, card_bytes, has_gpus, is_planned, joins, planned_elsewhere
from agentrl.config.keys import inline
from agentrl.config.schema import InitModelConfig, TrainConfig
from agentrl.data.schedule import shuffle_parts
from agentrl.env.catalog import EnvRef, find_spec
from agentrl.rollout.group_ledger import extra_count
from agentrl.rollout.mixtures import MixedTasks, parts_of
from agentrl.run.checks import RunStart, check_config, run_checks
from agentrl.run.checks.model_checks import check_router_replay
from agentrl.run.checks.reward_checks import evaluations_of
from agentrl.run.checks.size_checks import start_notes
from agentrl.run.engine_choice import AUTO, EngineChoice, computation_text
from agentrl.run.role_placement import (
    GIB,
    Peak,
    RolePlacement,
    RunMemory,
    RunRoles,
    host_lines,
    memory_text,
    peaks,
    placement_table,
    table_of,
)
from agentrl.trainer.estimator_inputs import needs_greedy
from agentrl.trainer.families import packing_of
from agentrl.trainer.memory import MASTER, numel, shell, width
from agentrl.trainer.minibatch import kl_kind
from agentrl.trainer.optim import optims_of, state_bytes
from agentrl.trainer.pretrained import head_dim, model_context, shape_folder
from agentrl.trainer.train_engine import check_train_engine, mesh_of
from agentrl.trainer.weight_files import has_weights
from agentrl.utils.terminal import columns

# The plan


@dataclass(frozen=True, slots=True)
class Batches:
    """Sizes of one update. Episodes, minibatches and optimizer steps are exact if all episodes are scored. Tokens and `micros`
    (micro-batches of a data-parallel rank per minibatch) are maxima, for episodes of maximum length. `kept`, `shown`: maximum
    episodes and demonstrations added by `algorithm.experience` and `algorithm.demonstrations`."""

    groups: int
    group_size: int
    started: int
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
    """Parameter counts of a role that learns: all, and those that an optimizer changes."""

    role: str
    all: int
    trained: int


@dataclass(frozen=True, slots=True)
class Evaluations:
    """Schedule of evaluations: `after` how many updates (0: before the first), and on how many tasks each time.
    `environments`: description of the evaluation by environment name."""

    after: list[int]
    tasks: int
    environments: dict[str, str]


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Plan of a run. `threads`: per process, None on GPUs. `episodes`: of all updates, without retried, filtered and cancelled
    ones. `transcripts`: minimum and maximum of the warm start. `checkpoints`: updates after which one is certainly saved (0:
    before the first). `checkpoint_bytes`: of weights and optimizers; `model_bytes`: of all models written: a first one that the
    run makes, the warm start's, and the last."""

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
    rates: dict[str, float]
    temperature: str
    top_p: float
    checkpoint_bytes: int
    model_bytes: int


@dataclass(frozen=True, slots=True)
class Planner:
    config: TrainConfig

    def derived_values(self) -> dict[str, str]:
        """Map keys that the config leaves open to their derived values as TOML.

        Values that need the model or the cluster's nodes are in `dry_run`. Raises UserError as the choice of an engine.
        """
        config, several = self.config, isinstance(self.config.env, list)
        called = {
            f"env.{number}.name" if several else "env.name": env for number, env in enumerate(config.envs) if env.name is None
        }
        found = {key: inline(env.called) for key, env in called.items()}
        algorithm = config.algorithm
        if algorithm.length_norm is None and (settled := config.settled_algorithm().length_norm) is not None:
            found["algorithm.length_norm"] = inline(settled)
        if algorithm.kl.kind is None and algorithm.kl.coef > 0:
            found["algorithm.kl.kind"] = inline(kl_kind(algorithm.kl))
        given = {"optim": config.optim, "critic": config.critic, "sft": config.sft}
        rates = {f"{at}.lr": optim.lr for at, optim in optims_of(config).items() if getattr(given[at], "lr") is None}  # noqa: B009
        found |= {key: inline(lr) for key, lr in rates.items()}
        if config.sft is not None and config.sft.optimizer is None:
            found["sft.optimizer"] = inline(optims_of(config)["sft"].name)
        if joins(config.cluster):  # the hardware of its nodes is not known here
            return found
        if config.engine == AUTO:
            found["engine"] = inline(EngineChoice(config).name)
        if config.model.dtype == "auto":
            found["model.dtype"] = inline(config.model.computes_in(has_gpus(config.cluster, "actor")))
        return found

    def dry_run(self, gpu_memory: float | None = None, nodes: tuple[int, int] | None = None) -> DryRun:
        """Check the config as its run would, and compute the plan, the places of processes with GPUs and the memory.

        Rehearses one episode if an agent program plays. `gpu_memory`: GiB per card, for another machine or a cluster whose cards
        do not report it; by default that of the nodes' cards, or host memory without cards. `nodes`: (nodes, cards per node) to
        plan for, whether or not the run would join a cluster; by default one node with as many cards as needed.

        Raises a UserError as the run would, and ResourceError with the memory table if a device cannot hold its roles.
        """
        config, name = self.config, self.config.model.path
        if gpu_memory is None or (nodes is None and joins(config.cluster)):
            return self._dry_run(gpu_memory)
        with planned_elsewhere(nodes), shape_folder(name) as folder:  # for a model of which only the shape is known
            model = config.model if folder is None else config.model.model_copy(update={"path": folder})
            found = Planner(config.model_copy(update={"model": model}))._dry_run(gpu_memory)
        used = {(one.address, card) for role in found.locations.values() for one in role for card in one.cards}
        if nodes is None:
            size = max(len(used), 1)
            where = f"planned for one node of {size} card{'s' if size > 1 else ''} (for others: --nodes {-(-size // 8)}x8):"
        else:
            where = f"planned for --nodes {nodes[0]}x{nodes[1]}, of whose {nodes[0] * nodes[1]} cards {len(used)} are used:"
        why = f"model.path = {name}: only its shape is known here, not its files; the packaged tokenizer counts the prompts"
        notes = [*found.notes, *([] if folder is None else [why])]
        return replace(found, plan=replace(found.plan, model=name or found.plan.model), notes=notes, nodes=where)

    def _dry_run(self, gpu_memory: float | None) -> DryRun:
        config, checked, here, path = self.config, self.config, not is_planned(), self.config.model.path
        missing: list[str] = []
        if path is not None and Path(path).is_dir():
            missing = [] if any(Path(path).glob("tokenizer*")) else ["tokenizer"]
            missing += [] if has_weights(path) else ["weights"]
        if path is not None and "tokenizer" in missing:
            # The checks see an unsharded dense model of its sizes with the packaged tokenizer.
            trust = config.model.trust_remote_code
            init = InitModelConfig(
                context=model_context(path, trust), head_dim=head_dim(path, trust) or InitModelConfig().head_dim
            )
            plain = {"path": None, "init": init, "tensor_parallel": 1, "expert_parallel": 1}
            rollout = config.rollout.model_copy(update={"router_replay": False})
            checked = config.model_copy(update={"model": config.model.model_copy(update=plain), "rollout": rollout})
        suspicious = check_config(checked, planned=True, capacity=here)
        # The checks above may have seen a stand-in: check routers, heads, experts, plans and cache of the real model.
        start = RunStart(config, planned=True)
        check_router_replay(start)
        check_train_engine(config)
        mesh_of(config.model, config.cluster)
        packing = packing_of(config)
        start = RunStart(config.model_copy(update=packing.sections(config.model, config.optim)), planned=True)
        start.engine.maker().check()
        roles = RunRoles(start.engine)
        locations = roles.locations()
        total = int(gpu_memory * GIB) if gpu_memory is not None else card_bytes(config.cluster)
        memory = RunMemory(start.engine, total)
        placed = memory.roles()
        found = peaks(placed, total)
        memory.check_fits(placed)
        notes = [
            *run_checks(RunStart(checked, planned=True), "start"),
            *host_lines(placed),
            *(roles.worker_lines() if here else []),
            f"model.packing: {packing.reason}",
            *(f"warning: a run would refuse this: model.path = {path} has no {it}; only its shape is planned" for it in missing),
            *(f"warning: {line}" for line in (*suspicious, *start_notes(start))),
            *run_checks(start, "plan"),
        ]
        return DryRun(Planner(start.config).plan(total is not None), locations, placed, found, notes)

    def plan(self, cuda: bool) -> RunPlan:
        """Compute the plan of a config whose packing is decided. Raises UserError as the parts that it reads."""
        config, steps, batches = self.config, self.config.steps, self.batches()
        every = config.eval.every
        evaluated = [0, *(step for step in range(1, steps) if every and step % every == 0), steps]
        assert len(evaluated) == evaluations_of(config.steps, config.eval)
        each = config.each()
        tasks = sum(one.eval.tasks for one in each)
        sft, shells = config.sft, {"actor": shell(config.model, "policy")}
        if config.critic is not None:
            shells["critic"] = shell(config.model, "value", config.critic.path)
        parameters = [
            Parameters(name, numel(module.parameters()), numel(p for p in module.parameters() if p.requires_grad))
            for name, module in shells.items()
        ]
        optims, dtype = optims_of(config), config.model.computes_in(cuda)
        state = [
            p.numel() * state_bytes(name, p, optims["optim" if role == "actor" else role])
            for role, module in shells.items()
            for name, p in module.named_parameters()
            if p.requires_grad
        ]
        plain = numel(p for name, p in shells["actor"].named_parameters() if ".lora_" not in name)
        # One line per environment: id, reward, limits, and with several environments its share of the groups.
        environments, evaluations = [], {}
        several = len(config.envs) > 1
        shares = MixedTasks(parts_of(config), config.rollout.mixture, config.seed).shares() if several else {}
        for env, one in zip(config.envs, each, strict=True):
            ref, limits = EnvRef.of(env, config.tools), one.rollout
            turns = f"{_count(limits.max_turns, 'turn')} of {limits.max_turn_tokens} tokens"
            share = f", {shares[env.called]:.1%} of the groups at first, {one.algorithm.advantage.name}" if several else ""
            environments.append(f"{env.called} ({ref.entry.id}), reward {find_spec(ref, env.reward)['name']}, {turns}{share}")
            kind = "greedily" if one.eval.temperature == 0 else f"at temperature {one.eval.temperature:g}"
            evaluations[env.called] = f"{one.eval.tasks:,} tasks of {one.eval.split} {kind}"
        points = config.rollout.temperature
        temperatures = (
            [f"{heat:g} after {_count(step, 'update')}" for step, heat in points] if isinstance(points, list) else [f"{points:g}"]
        )
        return RunPlan(
            name=config.name,
            folder=str(Path(config.out) / config.name),
            environments=environments,
            algorithm=f"{config.algorithm.advantage.name}, {config.algorithm.loss.name}, {config.algorithm.aggregate}",
            engine=EngineChoice(config).name,
            model=config.model.path or "a tiny model of random weights ([model.init])",
            dtype=dtype,
            threads=None if cuda else EngineChoice(config).with_threads().model.threads,
            parameters=parameters,
            updates=steps,
            stops_at=config.stop_at_success if every else None,
            batches=batches,
            evaluations=Evaluations(evaluated, tasks, evaluations),
            episodes=steps * batches.episodes,
            evaluation_episodes=len(evaluated) * tasks,
            transcripts=None if sft is None else (min(sft.min_steps, sft.max_steps) * sft.batch, sft.max_steps * sft.batch),
            checkpoints=sorted({*range(0, steps + 1, config.checkpoint.every), steps}),
            kept=config.checkpoint.keep + config.checkpoint.keep_best,
            trajectories=sorted({*range(config.trajectories_every, steps + 1, config.trajectories_every), steps}),
            trackers=[
                *(tracker.name for tracker in config.trackers),
                *(name for name in ("prometheus", "traces", "profile") if getattr(config, name) is not None),
            ],
            rates={f"{section}.lr": float(optim.lr or 0.0) for section, optim in optims.items()},
            temperature=", ".join(temperatures),
            top_p=config.rollout.top_p,
            checkpoint_bytes=MASTER * sum(one.all for one in parameters) + int(sum(state)),
            model_bytes=plain * (width(dtype) * (1 + (sft is not None)) + (0 if config.model.path else MASTER)),
        )

    def batches(self) -> Batches:
        config, rollout, algorithm = self.config, self.config.rollout, self.config.algorithm
        episodes = rollout.groups * rollout.group_size
        members = np.repeat(np.arange(rollout.groups), rollout.group_size) if algorithm.groups == "kept" else None
        parts = [len(part) for part in shuffle_parts(episodes, algorithm.minibatch, config.seed, 0, members)]
        greedy = needs_greedy(algorithm.advantage)  # one more episode per group, which is no member
        pool = config.cluster.pools.get(str(config.cluster.roles.get("actor")))
        ranks = mesh_of(config.model, config.cluster, None if pool is None else pool.nodes * pool.per_node)["dp"]
        wide = config.widest(config.trained_envs).rollout
        longest = min(wide.max_episode_tokens, config.optim.micro_tokens)
        at_once = config.optim.micro_tokens // longest if config.model.packing == "packed" else 1
        replayed, gold = algorithm.experience, algorithm.demonstrations
        kept = 0 if replayed is None else min(int(replayed.share * episodes + 0.5), replayed.size)
        shown = 0 if gold is None else gold.episodes
        most = max(parts) + math.ceil((kept + shown) / len(parts))
        return Batches(
            groups=rollout.groups,
            group_size=rollout.group_size,
            started=(rollout.groups + extra_count(rollout.groups, rollout.oversample))
            * (rollout.group_size + extra_count(rollout.group_size, rollout.oversample_members) + greedy),
            episodes=episodes,
            minibatches=parts,
            epochs=algorithm.epochs,
            optimizer_steps=len(parts) * algorithm.epochs,
            data_ranks=ranks,
            episode_tokens=wide.max_episode_tokens,
            sampled_tokens=min(wide.max_turns * wide.max_turn_tokens, wide.max_episode_tokens),
            tokens=episodes * wide.max_episode_tokens,
            micro_tokens=config.optim.micro_tokens,
            micros=math.ceil(math.ceil(most / ranks) / at_once),
            kept=kept,
            shown=shown,
        )


def lines(plan: RunPlan) -> list[str]:
    """Format the plan for people, one line per question."""
    b, ev = plan.batches, plan.evaluations
    least, most = min(b.minibatches), max(b.minibatches)
    sizes = f"{most:,}" if least == most else f"{least:,} to {most:,}"
    cut = f"{len(b.minibatches)} minibatches of {sizes}" if len(b.minibatches) > 1 else "1 minibatch"
    passes = f" x {b.epochs} passes" if b.epochs > 1 else ""
    more = f" ({b.started:,} are started)" if b.started > b.episodes else ""
    added = [f"{count:,} {what}" for count, what in ((b.kept, "kept"), (b.shown, "demonstrations")) if count]
    extra = f", and at most {' and '.join(added)} next to them" if added else ""
    early = "" if plan.stops_at is None else f", or until an evaluation finds {plan.stops_at:.0%} success"
    rows = [
        ("run", f"{plan.name}: {_count(plan.updates, 'update')} with {plan.algorithm}{early}"),
        *(("environment", line) for line in plan.environments),
        ("model", f"{plan.model}, {computation_text(plan.dtype, plan.threads)}; engine {plan.engine}"),
        *(("trained", f"{one.role}: {one.trained:,} of {one.all:,} parameters") for one in plan.parameters),
        ("an update", f"{b.groups:,} groups x {b.group_size:,} = {b.episodes:,} episodes{more} -> {cut}{passes} -> "
         f"{_count(b.optimizer_steps, 'optimizer step')}{extra}"),
        ("tokens", f"an episode at most {b.sampled_tokens:,} sampled and {b.episode_tokens:,} in all, an update {b.tokens:,}"),
        ("a minibatch", f"over {_count(b.data_ranks, 'rank')}, in micro-batches of at most {b.micro_tokens:,} tokens: at most "
         f"{b.micros:,} on each, if every episode is as long as it may be"),
        ("rates", ", ".join(f"{key} = {value:g}" for key, value in plan.rates.items())),
        ("sampled", f"at temperature {plan.temperature}, top_p {plan.top_p:g}"),
        ("in all", f"{plan.episodes:,} episodes of training, {plan.evaluation_episodes:,} of evaluation, "
         f"{_count(plan.updates * b.optimizer_steps, 'optimizer step')}"),
    ]  # fmt: skip
    if plan.transcripts is not None:
        rows.append(("warm start", f"{plan.transcripts[0]:,} to {plan.transcripts[1]:,} transcripts of the teacher before it"))
    rows += [("evaluated", f"{name}: {how}, {_schedule_text(ev.after)}") for name, how in ev.environments.items()]
    # One more than kept, for a checkpoint that is being written; the newest may also be the best.
    disk = min(plan.kept + 1, len(plan.checkpoints)) * plan.checkpoint_bytes + plan.model_bytes
    kept = "all stay" if plan.kept >= len(plan.checkpoints) else f"at most {plan.kept} stay"
    rows += [
        ("written", f"{plan.folder}: config.toml, metrics.jsonl, the final model; {', '.join(plan.trackers) or 'no tracker'}"),
        ("checkpoints", f"{_schedule_text(plan.checkpoints)}, of which {kept}, {_size(plan.checkpoint_bytes)} each"),
        ("on disk", f"about {_size(disk)}: checkpoints and models, without episodes"),
        ("episodes", f"in trajectories/, {_schedule_text(plan.trajectories)}"),
    ]
    return columns(rows)


def _size(count: int) -> str:
    return f"{count / GIB:,.1f} GiB" if count >= GIB else f"{count / 2**20:,.0f} MiB"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _schedule_text(updates: list[int]) -> str:
    """Format a schedule as "before, after 10, 20, ... 40 updates"."""
    named = [str(step) for step in updates if step]
    shown = ", ".join(named) if len(named) <= 4 else f"{named[0]}, {named[1]}, ... {named[-1]}"
    return f"{'before, ' if 0 in updates else ''}after {shown} {'update' if named == ['1'] else 'updates'}"


# The dry run


@dataclass(frozen=True, slots=True)
class DryRun:
    """Result of a dry run. `peaks`: maximum memory per device; `notes`: all other lines; `nodes`: a line on the planned nodes."""

    plan: RunPlan
    locations: Mapping[str, Sequence[Location]]
    placed: list[RolePlacement]
    peaks: list[Peak]
    notes: list[str]
    nodes: str = ""

    def text(self) -> str:
        nodes = [self.nodes] if self.nodes else []
        places = [placement_table(self.locations), ""] if self.locations else []
        memory = [table_of(self.placed), *map(memory_text, self.peaks)]
        return "\n".join([*lines(self.plan), "", *nodes, *places, *memory, *self.notes])

    def json(self) -> dict[str, Any]:
        """Return the plan, memory per role and peak per device in bytes, and the notes, as JSON."""
        roles = [{"role": one.role, "device": one.device, "ranks": one.ranks, **asdict(one.memory)} for one in self.placed]
        places = {role: [{"node": one.node or one.address, "gpus": list(one.cards)} for one in found]
                  for role, found in self.locations.items()}  # fmt: skip
        return {
            **asdict(self.plan),
            "nodes": self.nodes,
            "places": places,
            "memory": roles,
            "peaks": [asdict(peak) for peak in self.peaks],
            "notes": self.notes,
        }

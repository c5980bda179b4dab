"""`agentrl train --dry-run`: all checks, the plan of the run, its places, and the memory of each role on each device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from agentrl.catalog import EnvRef
from agentrl.catalog.scoring import find_spec
from agentrl.cluster.devices import card_bytes, is_planned, joins, planned_elsewhere
from agentrl.cluster.spread import Location
from agentrl.config import TrainConfig
from agentrl.config.envs import each
from agentrl.config.schema import InitModelConfig
from agentrl.rollout.mixture.source import MixedTasks, parts_of
from agentrl.run.checks import check_config, check_train
from agentrl.run.checks.agent import rehearse
from agentrl.run.checks.model import longest_prompt
from agentrl.run.checks.remote import remote_lines
from agentrl.run.checks.routing import check_router_replay
from agentrl.run.checks.solvable import survey_lines
from agentrl.run.engines import engine_name, maker_of
from agentrl.run.memory import GIB, Peak, RolePlacement, check_fits, memory_of, peaks, table_of, told, waiting
from agentrl.run.placement import locations_of_roles, placement_table, worker_lines
from agentrl.run.plan import RunPlan, lines, plan_of
from agentrl.train.engines import check_train_engine
from agentrl.train.families.choice import packing_of, with_packing
from agentrl.train.pretrained import head_dim, model_context
from agentrl.train.role_layout import mesh_of
from agentrl.train.shapes import shape_folder


@dataclass(frozen=True, slots=True)
class DryRun:
    """What a run would be. `peaks`: the most that each device must hold; `notes`: everything else, a line each; `nodes`: those
    that it is planned for."""

    plan: RunPlan
    several: list[str]
    locations: Mapping[str, Sequence[Location]]
    placed: list[RolePlacement]
    peaks: list[Peak]
    notes: list[str]
    nodes: str = ""

    def text(self) -> str:
        """All of it, for a person."""
        memory = [
            *([self.nodes] if self.nodes else []),
            *([placement_table(self.locations), ""] if self.locations else []),
            table_of(self.placed),
            *map(told, self.peaks),
        ]
        return "\n".join([*lines(self.plan), "", *self.several, *memory, *self.notes])

    def json(self) -> dict[str, Any]:
        """The plan, the memory of each role and the peak of each device in bytes, and the notes."""
        roles = [{"role": one.role, "device": one.device, "ranks": one.ranks, **asdict(one.memory)} for one in self.placed]
        places = {role: [{"node": one.node or one.address, "gpus": list(one.cards)} for one in found]
                  for role, found in self.locations.items()}  # fmt: skip
        return {
            **self.plan.json(),
            "nodes": self.nodes,
            "places": places,
            "memory": roles,
            "peaks": [asdict(peak) for peak in self.peaks],
            "notes": self.notes,
        }


def dry_run(config: TrainConfig, gpu_memory: float | None = None, nodes: tuple[int, int] | None = None) -> DryRun:
    """The plan of a run, all that would be refused before it, where its processes would be if they use GPUs, its memory, and what
    came of one rehearsed episode if an agent plays.

    `gpu_memory`: GiB of each card, for a run on another machine or on a cluster whose cards do not say; else that of the
    cards of the nodes that run it, or host memory if there are none. `nodes`: with it, the number of nodes that the run is
    planned for, whether or not it would join a cluster, and the cards of each; by default one, with as many as it takes.

    Raises a UserError as the run would, and ResourceError, with the table, if a device cannot hold what is on it.
    """
    if gpu_memory is not None and (nodes is not None or not joins(config.cluster)):
        with planned_elsewhere(nodes), shape_folder(config.model.path) as folder:
            return _planned(config, folder, gpu_memory, nodes)
    return _dry_run(config, gpu_memory)


def _planned(config: TrainConfig, folder: str | None, gpu_memory: float, nodes: tuple[int, int] | None) -> DryRun:
    """The plan for other machines, of a model that may be known by its shape alone, in `folder`."""
    name = config.model.path
    known = config if folder is None else config.model_copy(update={"model": config.model.model_copy(update={"path": folder})})
    found = _dry_run(known, gpu_memory)
    used = {(one.address, card) for role in found.locations.values() for one in role for card in one.cards}
    if nodes is None:
        size = max(len(used), 1)
        where = f"planned for one node of {size} card{'s' if size > 1 else ''} (for others: --nodes {-(-size // 8)}x8):"
    else:
        where = f"planned for --nodes {nodes[0]}x{nodes[1]}, of whose {nodes[0] * nodes[1]} cards {len(used)} are used:"
    notes = [*found.notes]
    if folder is not None:
        notes.append(
            f"model.path = {name}: its shape is known here, and no file of it; prompts are counted with the packaged tokenizer"
        )
    return replace(found, plan=replace(found.plan, model=name or found.plan.model), notes=notes, nodes=where)


def _dry_run(config: TrainConfig, gpu_memory: float | None) -> DryRun:
    here = not is_planned()
    suspicious = (check_train if here else check_config)(checked(config), planned=True)
    check_architecture(config)
    packing = packing_of(config)  # of the real model: `checked` may have put another in its place
    config = with_packing(config)
    maker_of(engine_name(config), config).check()  # `checked` may have put a model with a smaller cache in its place
    locations = locations_of_roles(config, engine_name(config))
    total = int(gpu_memory * GIB) if gpu_memory is not None else card_bytes(config.cluster)
    placed = memory_of(config, total)
    found = peaks(placed, total)
    check_fits(config, placed, total)
    notes = [
        *survey_lines(checked(config)),
        *waiting(placed),
        *remote_lines(config),
        *(worker_lines(config) if here else []),
        f"model.packing: {packing.reason}",
        *(f"warning: {line}" for line in suspicious),
        *(rehearse(one) for one in each(config) if one.agent is not None and here),
    ]
    return DryRun(plan_of(config, total is not None), environments(config), locations, placed, found, notes)


def environments(config: TrainConfig) -> list[str]:
    """Of several environments a line each: what it is, how its episodes are scored, its share of the first groups, the tokens of
    its longest opening prompt, and its limits."""
    if len(config.envs) == 1:
        return []
    shares = MixedTasks(parts_of(config), config.rollout.mixture, config.seed).shares()
    lines = [f"{len(config.envs)} environments, rollout.mixture = {config.rollout.mixture.name}:"]
    for env, one in zip(config.envs, each(config), strict=True):
        ref, limits = EnvRef.of(one), one.rollout
        _, longest = longest_prompt(checked(one), ref)
        reward, share = find_spec(ref, env.reward)["name"], shares[env.called]
        lines.append(
            f"  {env.called}: {ref.entry.id}, reward {reward}, {share:.1%} of the groups at first, prompts of at most {longest} "
            f"tokens, {limits.max_turns} turns of {limits.max_turn_tokens} tokens and {limits.max_episode_tokens} in all, "
            f"{one.algorithm.advantage.name}; evaluated on {one.eval.tasks} tasks of {one.eval.split}"
        )
    return [*lines, ""]


def checked(config: TrainConfig) -> TrainConfig:
    """The config that the checks see: with a model folder that has no tokenizer, a dense model of its sizes with the packaged
    one, which nothing splits."""
    path = config.model.path
    if path is None or not Path(path).is_dir() or any(Path(path).glob("tokenizer*")):
        return config
    trust = config.model.trust_remote_code
    init = InitModelConfig(context=model_context(path, trust), head_dim=head_dim(path, trust) or InitModelConfig().head_dim)
    plain = {"path": None, "init": init, "tensor_parallel": 1, "expert_parallel": 1}
    rollout = config.rollout.model_copy(update={"router_replay": False})
    return config.model_copy(update={"model": config.model.model_copy(update=plain), "rollout": rollout})


def check_architecture(config: TrainConfig) -> None:
    """The checks that depend on what `checked` may have put in the model's place: its routers, heads, experts and plans."""
    check_router_replay(config)
    check_train_engine(config)
    mesh_of(config)

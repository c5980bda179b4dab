"""Placement of a run's roles: reserves its pools, and starts the actor's processes in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from agentrl.cluster.devices import has_gpus, is_planned, nodes_of
from agentrl.cluster.group import WorkerGroup
from agentrl.cluster.pool import need, pools_of_roles
from agentrl.cluster.roles import launch_roles
from agentrl.cluster.runtime import ray_of
from agentrl.cluster.spread import WORKER_CPUS, Location, Unpooled, assign, joined, keys_of_roles, locations
from agentrl.config import TrainConfig
from agentrl.errors import AgentrlError, ResourceError
from agentrl.rollout.engine_maker import PROCESS_MIB
from agentrl.run.engines import engine_name as engine_of_run
from agentrl.run.engines import maker_of, workers_apart
from agentrl.run.judges import ROLE as JUDGE
from agentrl.run.judges import judge_processes, place_of
from agentrl.train.actor import Actor
from agentrl.train.role_layout import mesh_of, separate_reference

if TYPE_CHECKING:
    from agentrl.cluster.placement import Pools


def roles_of(config: TrainConfig, engine_name: str) -> list[str]:
    """The roles of this run that have processes, by their names in `cluster.roles`."""
    present = {
        "actor": True,
        "rollout": maker_of(engine_name, config).processes() is not None,
        "reference": separate_reference(config),
        "critic": config.critic is not None,
        "reward_model": config.reward_model is not None,
        "teacher": config.algorithm.distillation is not None,
        JUDGE: bool(judge_processes(config)),
    }
    return [role for role, used in present.items() if used]


def pooled_roles(config: TrainConfig, engine_name: str) -> list[str]:
    """The run's roles that have a pool."""
    return [role for role in roles_of(config, engine_name) if role in {str(name) for name in config.cluster.roles}]


def unpooled_roles(config: TrainConfig, engine_name: str) -> dict[str, Unpooled]:
    """The run's roles without a pool whose processes have GPUs of their own: every actor takes one GPU, a process of the
    engine as many as it computes on. Empty on nodes without GPUs: there Ray places the processes, by CPU slots alone."""
    # The actors come first: the search gives the fewest nodes to the first role, and they are the ones that exchange gradients.
    cluster, found = config.cluster, {}
    if cluster.backend != "ray":
        return {}
    engine, colocated = maker_of(engine_name, config).processes(), beside(config, engine_name)
    if "actor" not in cluster.roles and has_gpus(cluster, "actor"):
        block = engine.gpus if engine is not None and colocated else 1
        key = engine.gpus_key if engine is not None else ""
        found["actor"] = Unpooled("cluster.actors", cluster.actors, 1.0, 1.0, block, key)
    if engine is not None and "rollout" not in {*cluster.roles, *colocated} and has_gpus(cluster, "rollout"):
        found["rollout"] = Unpooled(engine.count_key, engine.count, 0.0, engine.gpus, 1, engine.gpus_key)
    if JUDGE not in cluster.roles and has_gpus(cluster, JUDGE):
        for name, own in judge_processes(config).items():
            at = f"reward.judge.engines.{name}."
            found[place_of(name)] = Unpooled(at + own.count_key, own.count, 0.0, own.gpus, 1, at + own.gpus_key)
    return found


def beside(config: TrainConfig, engine_name: str) -> dict[str, str]:
    """With `rollout.colocate`, an engine that has processes of its own uses the actors' GPUs: {"rollout": "actor"}."""
    own = maker_of(engine_name, config).processes() is not None
    return {"rollout": "actor"} if config.rollout.colocate and own and config.cluster.backend == "ray" else {}


def check_room(config: TrainConfig, engine_name: str) -> None:
    """Raise ResourceError, with a table, if the cluster's nodes have no room for the run's pools and its processes with GPUs,
    even when nothing else runs there."""
    pools = pools_of_roles(config.cluster, pooled_roles(config, engine_name))
    unpooled = unpooled_roles(config, engine_name)
    if config.cluster.backend == "ray" and (pools or unpooled):
        assign(dict(pools.values()), list(unpooled.values()), nodes_of(config.cluster, "actor"))


def check_worker_room(config: TrainConfig, trains: bool) -> None:
    """Raise ResourceError if the nodes have too few CPU slots for `rollout.workers` beside the run's other processes; `trains`:
    whether there are any."""
    workers = workers_apart(config)
    slots = sum(node.cpus for node in nodes_of(config.cluster, "actor"))
    taken = taken_slots(config, engine_of_run(config)) if trains else 0.0
    if workers * WORKER_CPUS > slots - taken:
        raise ResourceError(
            f"rollout.workers = {workers}: each takes {WORKER_CPUS:g} CPU slots, and of {slots:g} the run's other processes take "
            f"{taken:g}; lower rollout.workers to {max(int((slots - taken) / WORKER_CPUS), 0)}, or add nodes"
        )


def taken_slots(config: TrainConfig, engine: str) -> float:
    """The CPU slots of the processes of a training run, other than rollout workers."""
    pools, unpooled = pools_of_roles(config.cluster, pooled_roles(config, engine)), unpooled_roles(config, engine)
    taken = sum(need(pool)[0] * pool.nodes for pool in dict(pools.values()).values())
    taken += sum(one.cpus * one.count for one in unpooled.values())
    # Without GPUs too each actor takes a slot of its own.
    return taken + (0 if "actor" in {*pools, *unpooled} else config.cluster.actors)


def worker_lines(config: TrainConfig) -> list[str]:
    """What a run's workers take, in words; none without workers."""
    workers, nodes = workers_apart(config), nodes_of(config.cluster, "actor")
    if config.rollout.workers and not workers:
        return [f"rollout.workers: {config.rollout.workers}, in the processes of the {engine_of_run(config)} engine"]
    if not workers:
        return []
    room = f"of {sum(node.cpus for node in nodes):g} on {len(nodes)} node{'s' if len(nodes) > 1 else ''}"
    return [
        f"rollout.workers: {workers} processes of {WORKER_CPUS:g} CPU slots ({room}) and about {PROCESS_MIB} MiB each, spread "
        "over the nodes"
    ]


def open_pools(config: TrainConfig, engine_name: str) -> Pools | None:
    """Reserve the run's places: of its roles with a pool, and of the actors and the engine's processes if they use GPUs.
    None if there is nothing to reserve, and with backend "inline".

    Raises ResourceError, with a table of demand and supply, if they do not fit. Ray must be up.
    """
    roles, unpooled = pooled_roles(config, engine_name), unpooled_roles(config, engine_name)
    if config.cluster.backend != "ray" or not (roles or unpooled):
        return None
    from agentrl.cluster.placement import Pools

    return Pools(config.cluster, roles, config.cluster.call_timeout, unpooled, beside(config, engine_name))


def start_actors(config: TrainConfig, pools: Pools | None, role: type[Any] | None = None) -> WorkerGroup[Any]:
    """The actor's processes, in its pool if it has one; `role`: what learns in them, if it is no actor."""
    role = role or Actor
    mesh = mesh_of(config)
    if pools is None or "actor" not in pools:
        # Without `cluster.roles`: the pools that this run uses are reserved already, and none of them is the actor's.
        groups = launch_roles(
            config.cluster.model_copy(update={"roles": {}}), {"actor": role}, {"actor": mesh}, config.cluster.call_timeout
        )
        return groups["actor"]
    try:
        return pools.launch("actor", role, mesh)
    except AgentrlError:
        pools.close()
        raise


def locations_of_roles(config: TrainConfig, engine_name: str) -> dict[str, list[Location]]:
    """Where each process of each role would be: its node and its GPUs, by role and rank, as Ray reserves them now (and
    releases again), or as they are assigned to planned nodes. Empty if there is nothing to reserve: then Ray places the
    processes by CPU slots alone.

    Raises ResourceError if they do not fit, now or at all. Starts or joins Ray if the run would, and if it was not up.
    """
    if config.cluster.backend != "ray":
        [node, *_] = nodes_of(config.cluster, "actor")
        one = Location(node.name, "", ("0",))
        return (
            {role: [one] for role in dict.fromkeys(["actor", "rollout", *roles_of(config, engine_name)])} if is_planned() else {}
        )
    if not (pooled_roles(config, engine_name) or unpooled_roles(config, engine_name)):
        return {}
    judges = [place_of(name) for name in judge_processes(config)]
    roles = [*roles_of(config, engine_name), *judges]
    own = (_assigned if is_planned() else _reserved)(config, engine_name, roles)
    # A role without processes of its own uses the actors' processes.
    shared = own.get("actor", [])
    elsewhere = {"rollout", JUDGE, *judges}
    return {role: own.get(role, shared) for role in roles if role in own or role not in elsewhere}


def _assigned(config: TrainConfig, engine_name: str, roles: Sequence[str]) -> dict[str, list[Location]]:
    """The places of the roles that have some, on the nodes of a plan."""
    pools, unpooled = pools_of_roles(config.cluster, pooled_roles(config, engine_name)), unpooled_roles(config, engine_name)
    by_name, others = dict(pools.values()), beside(config, engine_name)
    shares = assign(by_name, list(unpooled.values()), nodes_of(config.cluster, "actor"))
    gpus = {name: pool.gpus for name, pool in by_name.items()} | {one.key: one.gpus for one in unpooled.values()}
    places, keys = locations(shares, gpus), keys_of_roles(pools, unpooled, others)
    engine = maker_of(engine_name, config).processes()
    size = engine.gpus if engine is not None else 0
    return {
        role: joined(places[key], size) if role in others and gpus[key] else places[key]
        for role, key in keys.items()
        if role in roles
    }


def _reserved(config: TrainConfig, engine_name: str, roles: Sequence[str]) -> dict[str, list[Location]]:
    """The places of the roles that have some, on the cluster's nodes."""
    engine = maker_of(engine_name, config).processes()
    with ray_of(config.cluster):
        pools = open_pools(config, engine_name)
        assert pools is not None
        try:
            gpus = engine.gpus if engine is not None else 0
            return {role: pools.locations(role, gpus) for role in roles if role in pools}
        finally:
            pools.close()


def placement_table(locations: Mapping[str, Sequence[Location]]) -> str:
    """The locations of every role, one row for each node: ranks, node, and the GPUs of each rank."""
    rows = [("role", "ranks", "node", "GPUs of each")]
    for role, of_role in locations.items():
        first = 0
        for (node, address), part in groupby(of_role, key=lambda location: (location.node, location.address)):
            cards = [",".join(location.cards) or "-" for location in part]
            last = first + len(cards) - 1
            at = f"{address} ({node[:8]})" if node else address
            rows.append((role, f"{first}-{last}" if last > first else str(first), at, " ".join(cards)))
            first = last + 1
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join("  ".join(cell.ljust(size) for cell, size in zip(row, widths, strict=True)).rstrip() for row in rows)

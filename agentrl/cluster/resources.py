"""Resources of a cluster: pools, which role runs on which node, and the devices that each process gets.

Computed from the config and the nodes' facts; imports neither Ray nor torch."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

from agentrl.cluster.machine import usable_gpus
from agentrl.cluster.ray_cluster import connected, join_to_ask
from agentrl.config.schema import ClusterConfig, PoolConfig
from agentrl.utils.errors import ConfigError, ResourceError, did_you_mean
from agentrl.utils.processor import usable_cpus

# Pools


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """What one node offers."""

    name: str
    cpus: float
    gpus: float


def check_roles(cluster: ClusterConfig) -> None:
    """Raise ConfigError for a role that names an unknown pool."""
    for role, pool in cluster.roles.items():
        if pool not in cluster.pools:
            hint = did_you_mean(pool, cluster.pools, f"cluster.pools has {sorted(cluster.pools)}")
            raise ConfigError(f"cluster.roles.{role} names the pool {pool!r}, which does not exist; {hint}")


def pools_of_roles(cluster: ClusterConfig, roles: Sequence[str]) -> dict[str, tuple[str, PoolConfig]]:
    """The pool of each of `roles` that has one: (name, pool). Raises ConfigError for an unknown pool."""
    check_roles(cluster)
    placed = {str(role): pool for role, pool in cluster.roles.items()}
    return {role: (placed[role], cluster.pools[placed[role]]) for role in roles if role in placed}


def place(pools: Mapping[str, PoolConfig], nodes: Sequence[ClusterNode]) -> dict[str, list[str]]:
    """Names of the cluster's nodes for each pool, one per node of the pool; the nodes of one pool differ.

    Searches all placements (largest share first), so it fails only if none exists: then it raises
    ResourceError with a table of demand and supply.
    """
    shares = [(name, share) for name, pool in pools.items() for share in range(pool.nodes)]
    # Largest first, onto the fullest node that has room: the search then rarely has to go back.
    # By GPUs before CPU slots: they are what runs short. Among equals the config's order stays.
    shares.sort(key=lambda item: (-need(pools[item[0]])[1], -need(pools[item[0]])[0]))
    left = {node.name: [node.cpus, node.gpus] for node in nodes}
    chosen: dict[str, list[str]] = {name: [] for name in pools}
    if not _search(pools, shares, 0, left, chosen):
        raise ResourceError(f"the pools do not fit the cluster{_obstacle(pools, nodes)}\n" + table(pools, nodes))
    return chosen


def _obstacle(pools: Mapping[str, PoolConfig], nodes: Sequence[ClusterNode]) -> str:
    """The pool that fits on no such nodes even alone, with the way out; empty if each does."""
    cpus, gpus = largest(nodes)
    for name, pool in pools.items():
        if pool.nodes > len(nodes):
            plan = f", or plan for more (--nodes {pool.nodes}x8)" if math.isinf(gpus) else ""
            return (
                f": cluster.pools.{name}.nodes = {pool.nodes}, and the number of nodes is {len(nodes)}. Lower it, add nodes{plan}"
            )
        for asked, has, key in ((pool.gpus, gpus, "GPUs"), (pool.cpus, cpus, "CPU slots")):
            if pool.per_node * asked > has:
                return (
                    f": cluster.pools.{name}.per_node = {pool.per_node}, each with {asked:g} {key}, and the largest node has "
                    f"{has:g}. Lower it to at most {int(has // asked)}, with more cluster.pools.{name}.nodes"
                )
    return ""


def largest(nodes: Sequence[ClusterNode]) -> tuple[float, float]:
    """The most CPU slots of a node, and the most GPUs."""
    return max((node.cpus for node in nodes), default=0.0), max((node.gpus for node in nodes), default=0.0)


def need(pool: PoolConfig) -> tuple[float, float]:
    """CPU slots and GPUs that a pool takes on each of its nodes."""
    return pool.per_node * pool.cpus, pool.per_node * pool.gpus


def _search(
    pools: Mapping[str, PoolConfig],
    shares: Sequence[tuple[str, int]],
    at: int,
    left: dict[str, list[float]],
    chosen: dict[str, list[str]],
) -> bool:
    if at == len(shares):
        return True
    name = shares[at][0]
    cpus, gpus = need(pools[name])
    tried: set[tuple[float, float]] = set()
    for node, (free_cpus, free_gpus) in sorted(left.items(), key=lambda item: (item[1][1], item[1][0], item[0])):
        if node in chosen[name] or free_cpus < cpus or free_gpus < gpus or (free_cpus, free_gpus) in tried:
            continue
        tried.add((free_cpus, free_gpus))  # nodes with equal room are equivalent: trying one is enough
        left[node] = [free_cpus - cpus, free_gpus - gpus]
        chosen[name].append(node)
        if _search(pools, shares, at + 1, left, chosen):
            return True
        chosen[name].pop()
        left[node] = [free_cpus, free_gpus]
    return False


def table(
    pools: Mapping[str, PoolConfig], nodes: Sequence[ClusterNode], others: Mapping[str, tuple[int, float, float]] | None = None
) -> str:
    """A table of what every pool needs on each of its nodes and what each node of the cluster has. `others`: processes without
    a pool, as their number and the CPU slots and GPUs of each."""
    rows = [("demand", "nodes", "processes per node", "CPU slots per node", "GPUs per node")]
    for name, pool in pools.items():
        cpus, gpus = need(pool)
        rows.append((f"pool {name}", str(pool.nodes), str(pool.per_node), f"{cpus:g}", f"{gpus:g}"))
    for name, (count, cpus, gpus) in (others or {}).items():
        rows.append((name, "any", f"{count} in all", f"{cpus:g} each", f"{gpus:g} each"))
    rows.append(("supply", "", "", "CPU slots", "GPUs"))
    rows += [(f"node {node.name}", "", "", f"{node.cpus:g}", f"{node.gpus:g}") for node in nodes]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


# Roles without a pool, over nodes

WORKER_CPUS = 0.5
"""CPU slots of a rollout worker: it waits for the engine and for tools much of the time, so two share a core."""

Shares = list[tuple[str, int]]
"""Names of nodes, each with the number of processes on it, in the order of their ranks."""


@dataclass(frozen=True, slots=True)
class Unpooled:
    """`count` processes, each with `cpus` CPU slots and `gpus` GPUs. `key`: the config key that sets the count.

    `block`: each node gets a multiple of so many, for a process of another role that uses the cards of all of a block.
    `size_key`: the config key that sets the GPUs of a process, or of a block.
    """

    key: str
    count: int
    cpus: float
    gpus: float
    block: int = 1
    size_key: str = ""

    def blocks(self) -> Unpooled:
        """The same with each block as one process."""
        size = self.block
        return replace(self, count=-(-self.count // size), cpus=self.cpus * size, gpus=self.gpus * size, block=1)

    def fit(self, room: Sequence[float]) -> int:
        """How many fit into (CPU slots, GPUs)."""
        # What it does not ask for sets no limit; a process that asks for nothing fits anywhere.
        each = [has // asks for has, asks in zip(room, (self.cpus, self.gpus), strict=True) if asks and not math.isinf(has)]
        return int(min(each, default=self.count))

    def taken(self, room: Sequence[float], count: int) -> list[float]:
        """What is left of (CPU slots, GPUs) beside `count` of them."""
        return [room[0] - count * self.cpus, room[1] - count * self.gpus]


def assign(pools: Mapping[str, PoolConfig], unpooled: Sequence[Unpooled], nodes: Sequence[ClusterNode]) -> dict[str, Shares]:
    """The nodes of every pool, by its name, and of the processes without one, by their key; the pools choose first.

    Raises ResourceError, with a table of demand and supply, if no place is found.
    """
    chosen = place(pools, nodes)
    left = {node.name: [node.cpus, node.gpus] for node in nodes}
    shares: dict[str, Shares] = {}
    for name, pool in pools.items():
        cpus, gpus = need(pool)
        shares[name] = [(node, pool.per_node) for node in chosen[name]]
        for node in chosen[name]:
            left[node] = [left[node][0] - cpus, left[node][1] - gpus]
    units = [one.blocks() for one in unpooled]
    # Few nodes are faster to train on. Any nodes will do before a run is refused that has room.
    found = _on_few_nodes(units, left)
    if found is None:
        found = _on_any_nodes(units, left)
    if found is None:
        raise ResourceError(
            f"the run's processes do not fit the cluster: {_spread_obstacle(pools, unpooled, nodes)}\n"
            + table(pools, nodes, demands(unpooled))
        )
    order = [node.name for node in nodes]
    for one in unpooled:
        shares[one.key] = [(node, found[one.key][node] * one.block) for node in order if found[one.key].get(node)]
    return shares


def _spread_obstacle(pools: Mapping[str, PoolConfig], unpooled: Sequence[Unpooled], nodes: Sequence[ClusterNode]) -> str:
    """The key whose value has no place, with the way out."""
    _, most = largest(nodes)
    for one in (each.blocks() for each in unpooled):
        if one.gpus > most:
            return f"{one.size_key} = {one.gpus:g}: these GPUs are on one node, and the largest has {most:g}. Lower it"
    wanted = sum(one.count * one.gpus for one in unpooled)
    left = sum(node.gpus for node in nodes) - sum(need(pool)[1] * pool.nodes for pool in pools.values())
    keys = " and ".join(f"{one.key} = {one.count}" for one in unpooled)
    # Else the GPUs suffice, but not in the right sizes, or not with CPU slots.
    problem = f"{keys} take {wanted:g} GPUs, and {left:g} are left" if wanted > left else f"{keys} do not divide among the nodes"
    turns = ", or set rollout.colocate = true (both then use the same)" if len(unpooled) > 1 else ""
    return (
        f"{problem}: without a pool each actor takes a GPU of its own, and so does each process of the engine. Lower one, or add "
        f"nodes{turns}"
    )


@dataclass(frozen=True, slots=True)
class Location:
    """Where a process is, or will be: the address of its node, the node's id, and the GPUs that it uses there."""

    address: str
    node: str
    cards: tuple[str, ...]


def locations(shares: Mapping[str, Shares], gpus: Mapping[str, float]) -> dict[str, list[Location]]:
    """The node and the GPUs of each process, which are numbered on each node as they are taken; `gpus`: of a process, by key."""
    taken: dict[str, float] = {}
    found: dict[str, list[Location]] = {key: [] for key in shares}
    for key, node in ((key, node) for key, share in shares.items() for node, count in share for _ in range(count)):
        first = taken.get(node, 0.0)
        taken[node] = first + gpus[key]
        found[key].append(Location(node, "", tuple(map(str, range(int(first), math.ceil(taken[node]))))))
    return found


def joined(ranks: Sequence[Location], size: int) -> list[Location]:
    """Of processes that use the GPUs of `size` ranks each, where they are."""
    parts = [ranks[first : first + size] for first in range(0, len(ranks), size)]
    return [Location(part[0].address, part[0].node, tuple(card for one in part for card in one.cards)) for part in parts]


def keys_of_roles(
    pools: Mapping[str, tuple[str, PoolConfig]], unpooled: Mapping[str, Unpooled], beside: Mapping[str, str]
) -> dict[str, str]:
    """The key in `Shares` of each role that has a place: its pool, its own, or that of the role that it is beside."""
    keys = {role: name for role, (name, _) in pools.items()} | {role: one.key for role, one in unpooled.items()}
    # Last, because a role beside another is in that one's pool, whatever it is.
    return keys | {role: keys[other] for role, other in beside.items()}


def demands(unpooled: Sequence[Unpooled]) -> dict[str, tuple[int, float, float]]:
    """The processes for `pool.table`."""
    return {one.key: (one.count, one.cpus, one.gpus) for one in unpooled}


def _on_few_nodes(wanted: Sequence[Unpooled], left: Mapping[str, list[float]]) -> dict[str, dict[str, int]] | None:
    """Each on the fewest nodes that leave room for the next, equally many on each if that fits: ranks that exchange gradients
    are fastest within a node. None if that is not found."""
    if not wanted:
        return {}
    first, rest = wanted[0], wanted[1:]
    # Those with most room first: then the first few are the fewest that can hold all.
    order = sorted(left, key=lambda node: -first.fit(left[node]))
    for used in range(1, len(order) + 1):
        counts = _counts(first.count, [first.fit(left[node]) for node in order[:used]])
        if counts is None:
            continue
        chosen = dict(zip(order, counts, strict=False))
        after = {node: first.taken(room, chosen.get(node, 0)) for node, room in left.items()}
        others = _on_few_nodes(rest, after)
        if others is not None:
            return {first.key: chosen, **others}
    return None


def _counts(count: int, room: Sequence[int]) -> list[int] | None:
    """`count` over nodes with `room`, equally if that fits, else filling one after the other; None if there is too little."""
    even = [count // len(room) + (number < count % len(room)) for number in range(len(room))]
    if all(wanted <= has for wanted, has in zip(even, room, strict=True)):
        return even
    counts = []
    for has in room:
        counts.append(min(has, count))
        count -= counts[-1]
    return None if count else counts


def _on_any_nodes(wanted: Sequence[Unpooled], left: Mapping[str, list[float]]) -> dict[str, dict[str, int]] | None:
    """Those with most GPUs first, one by one where they take the least room from the smallest: with two kinds of processes, of
    which one takes one GPU, this finds a place whenever there is one."""
    if not wanted:
        return {}
    # Large ones first: small ones fit into the gaps that these leave, but not the other way round.
    order = sorted(wanted, key=lambda one: -one.gpus)
    smallest, room = order[-1], {node: list(has) for node, has in left.items()}
    found: dict[str, dict[str, int]] = {one.key: {} for one in wanted}
    for one in order:
        for _ in range(one.count):
            fitting = [node for node in room if one.fit(room[node])]
            if not fitting:
                return None
            node = min(fitting, key=lambda name: smallest.fit(room[name]) - smallest.fit(one.taken(room[name], 1)))
            room[node] = one.taken(room[node], 1)
            found[one.key][node] = found[one.key].get(node, 0) + 1
    return found


# Devices of roles


def nodes_of(cluster: ClusterConfig, role: str) -> list[ClusterNode]:
    """The nodes that may run a role, with what they have in total; with backend "inline" this machine, but for an engine's
    own processes ("rollout", "judge").

    Joins the cluster if the config (or RAY_ADDRESS) names one and this process is not connected yet; raises ResourceError
    if it cannot be reached. Without an address and before Ray is started, it is this machine, as Ray will find it.
    """
    if (planned := _planned.get()) is not None:
        return planned[:1] if cluster.backend == "inline" else planned
    if cluster.backend == "inline" and role not in ("rollout", "judge"):
        return [this_machine()]
    if not connected():
        if not joins(cluster):
            return [this_machine()]
        join_to_ask(cluster)
    # Here, because it imports ray, which a run on one machine may do without.
    from agentrl.cluster.placement import cluster_nodes

    return cluster_nodes()


def joins(cluster: ClusterConfig) -> bool:
    """Whether a run joins a cluster that is already there."""
    return not is_planned() and bool(cluster.address or os.environ.get("RAY_ADDRESS"))


# Not an argument: the nodes are asked for deep inside checks that have nothing else to do with a plan.
_planned: ContextVar[list[ClusterNode] | None] = ContextVar("the nodes of a planned run", default=None)


@contextmanager
def planned_elsewhere(nodes: tuple[int, int] | None = None) -> Iterator[None]:
    """In this context a run is planned for other machines: for `nodes`, their number and the GPUs of each, or for one with as
    many GPUs as the run asks for. No cluster is joined."""
    count, gpus = nodes or (1, math.inf)
    names = [f"node {number:0{len(str(count))}}" for number in range(1, count + 1)]
    token = _planned.set([ClusterNode(name, math.inf, float(gpus)) for name in names])
    try:
        yield
    finally:
        _planned.reset(token)


def is_planned() -> bool:
    """Whether this is in `planned_elsewhere`: what this machine has, and what is installed on it, does not matter."""
    return _planned.get() is not None


def this_machine() -> ClusterNode:
    """The driver's machine, as a node."""
    return ClusterNode("this machine", float(usable_cpus()), float(usable_gpus()))


def has_gpus(cluster: ClusterConfig, role: str) -> bool:
    """Whether the processes of a role get GPUs: as its pool says, or, without a pool, if a node that may run it has any."""
    if cluster.backend == "ray" and (name := cluster.roles.get(role)) in cluster.pools:  # type: ignore[call-overload]
        return cluster.pools[name].gpus > 0
    return any(node.gpus >= 1 for node in nodes_of(cluster, role))


def card_bytes(cluster: ClusterConfig, timeout: float = 60.0) -> int | None:
    """Bytes of a GPU of the nodes that run the actors (of this machine: of its smallest); None if they have none.

    Raises ResourceError if a cluster's nodes do not say it within `timeout` seconds.
    """
    if not has_gpus(cluster, "actor"):
        return None
    if not connected() or cluster.backend == "inline":
        return _smallest_card()
    import ray

    try:
        # Of a process that Ray gave a GPU: the driver's machine may have other ones. Without a CPU slot: they may all be taken.
        found: int | None = ray.get(ray.remote(num_gpus=1, num_cpus=0)(_smallest_card).remote(), timeout=timeout)
    except ray.exceptions.GetTimeoutError:
        found = None
    if found is None:
        raise ResourceError(
            "the GPUs of the cluster do not say how much memory they have, or are all in use: set --gpu-memory GIB"
        )
    return found


def driver_card() -> int | None:
    """Bytes of the GPU of this process that other programs leave free; None if it has none."""
    import torch

    if not torch.cuda.is_available():
        return None
    return torch.cuda.mem_get_info(0)[0] + torch.cuda.memory_reserved(0)


def _smallest_card() -> int | None:
    import torch

    cards = [torch.cuda.get_device_properties(number).total_memory for number in range(torch.cuda.device_count())]
    # What fits the smallest fits them all.
    return min(cards, default=None)

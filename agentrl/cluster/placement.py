"""Placement: processor and GPU pools of the nodes, their reservation, and the devices of each process."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import accumulate, zip_longest
from typing import Any, TypeVar

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from agentrl.cluster.group import WorkerGroup
from agentrl.cluster.host import VISIBLE
from agentrl.cluster.machine import usable_gpus
from agentrl.cluster.ray_cluster import is_connected, join_to_ask
from agentrl.cluster.ray_group import Hosts, RayBackend, last_line
from agentrl.cluster.worker import Mesh, Worker
from agentrl.config.schema import ClusterConfig, PoolConfig
from agentrl.utils.errors import ConfigError, ResourceError, did_you_mean
from agentrl.utils.processor import usable_cpus
from agentrl.utils.terminal import columns

# Pools


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """Resources of one node."""

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
    shares.sort(key=lambda item: (-node_need(pools[item[0]])[1], -node_need(pools[item[0]])[0]))
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


def node_need(pool: PoolConfig) -> tuple[float, float]:
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
    cpus, gpus = node_need(pools[name])
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


def table(pools: Mapping[str, PoolConfig], nodes: Sequence[ClusterNode], unpooled: Sequence[Unpooled] = ()) -> str:
    """A table of what every pool needs on each of its nodes, what processes without a pool need, and what each node of the
    cluster has."""
    rows = [("demand", "nodes", "processes per node", "CPU slots per node", "GPUs per node")]
    for name, pool in pools.items():
        cpus, gpus = node_need(pool)
        rows.append((f"pool {name}", str(pool.nodes), str(pool.per_node), f"{cpus:g}", f"{gpus:g}"))
    rows += [(one.key, "any", f"{one.count} in all", f"{one.cpus:g} each", f"{one.gpus:g} each") for one in unpooled]
    rows.append(("supply", "", "", "CPU slots", "GPUs"))
    rows += [(f"node {node.name}", "", "", f"{node.cpus:g}", f"{node.gpus:g}") for node in nodes]
    return "\n".join(columns(rows))


# Roles without a pool, over nodes

WORKER_CPUS = 0.5
"""CPU slots of a rollout worker: it waits for the engine and for tools much of the time, so two share a core."""

Shares = list[tuple[str, int]]
"""Names of nodes, each with the number of processes on it, in the order of their ranks."""


@dataclass(frozen=True, slots=True)
class Unpooled:
    """`count` processes, each with `cpus` CPU slots and `gpus` GPUs. `key`: the config key that sets the count.

    `block`: each node gets a multiple of this many, for a process of another role that uses the cards of all of a block.
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
        """Number that fits into (CPU slots, GPUs)."""
        # What it does not ask for sets no limit; a process that asks for nothing fits anywhere.
        each = [has // asks for has, asks in zip(room, (self.cpus, self.gpus), strict=True) if asks and not math.isinf(has)]
        return int(min(each, default=self.count))

    def room_after(self, room: Sequence[float], count: int) -> list[float]:
        """Rest of (CPU slots, GPUs) after `count` of them."""
        return [room[0] - count * self.cpus, room[1] - count * self.gpus]


def assign(pools: Mapping[str, PoolConfig], unpooled: Sequence[Unpooled], nodes: Sequence[ClusterNode]) -> dict[str, Shares]:
    """The nodes of every pool, by its name, and of the processes without one, by their key; the pools choose first.

    Raises ResourceError, with a table of demand and supply, if no place is found.
    """
    chosen = place(pools, nodes)
    left = {node.name: [node.cpus, node.gpus] for node in nodes}
    shares: dict[str, Shares] = {}
    for name, pool in pools.items():
        cpus, gpus = node_need(pool)
        shares[name] = [(node, pool.per_node) for node in chosen[name]]
        for node in chosen[name]:
            left[node] = [left[node][0] - cpus, left[node][1] - gpus]
    units = [one.blocks() for one in unpooled]
    # Few nodes are faster to train on. Any nodes will do before a run is refused that has room.
    found = _on_few_nodes(units, left)
    if found is None:
        found = _on_any_nodes(units, left)
    if found is None:  # say the key whose value has no place, and the way out
        most, wanted = largest(nodes)[1], sum(one.count * one.gpus for one in unpooled)
        free = sum(node.gpus for node in nodes) - sum(node_need(pool)[1] * pool.nodes for pool in pools.values())
        keys = " and ".join(f"{one.key} = {one.count}" for one in unpooled)
        turns = ", or set rollout.colocate = true (both then use the same)" if len(unpooled) > 1 else ""
        advice = (
            f": without a pool each actor takes a GPU of its own, and so does each process of the engine. Lower one, or add "
            f"nodes{turns}"
        )
        if (large := next((one for one in units if one.gpus > most), None)) is not None:
            why = f"{large.size_key} = {large.gpus:g}: these GPUs are on one node, and the largest has {most:g}. Lower it"
        elif wanted > free:
            why = f"{keys} take {wanted:g} GPUs, and {free:g} are left{advice}"
        else:  # the GPUs suffice, but not in the right sizes, or not with CPU slots
            why = f"{keys} do not divide among the nodes{advice}"
        raise ResourceError(f"the run's processes do not fit the cluster: {why}\n" + table(pools, nodes, unpooled))
    order = [node.name for node in nodes]
    for one in unpooled:
        shares[one.key] = [(node, found[one.key][node] * one.block) for node in order if found[one.key].get(node)]
    return shares


@dataclass(frozen=True, slots=True)
class Location:
    """Place of a process, now or later: the address of its node, the node's id, and the GPUs that it uses there."""

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


def join_locations(ranks: Sequence[Location], size: int) -> list[Location]:
    """Of processes that use the GPUs of `size` ranks each, where they are."""
    parts = [ranks[first : first + size] for first in range(0, len(ranks), size)]
    return [Location(part[0].address, part[0].node, tuple(card for one in part for card in one.cards)) for part in parts]


def keys_of_roles(
    pools: Mapping[str, tuple[str, PoolConfig]], unpooled: Mapping[str, Unpooled], beside: Mapping[str, str]
) -> dict[str, str]:
    """The key in `Shares` of each role that has a place: its pool, its own, or that of the role that it is next to."""
    keys = {role: name for role, (name, _) in pools.items()} | {role: one.key for role, one in unpooled.items()}
    # Last, because a role beside another is in that one's pool, whatever it is.
    return keys | {role: keys[other] for role, other in beside.items()}


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
        after = {node: first.room_after(room, chosen.get(node, 0)) for node, room in left.items()}
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
            node = min(fitting, key=lambda name: smallest.fit(room[name]) - smallest.fit(one.room_after(room[name], 1)))
            room[node] = one.room_after(room[node], 1)
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
    if not is_connected():
        if not joins(cluster):
            return [this_machine()]
        join_to_ask(cluster)
    return cluster_nodes()


def joins(cluster: ClusterConfig) -> bool:
    """Return True if a run joins a cluster that is already there."""
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
    """Return True inside `planned_elsewhere`: the hardware and packages of this machine do not matter."""
    return _planned.get() is not None


def this_machine() -> ClusterNode:
    """The driver's machine, as a node."""
    return ClusterNode("this machine", float(usable_cpus()), float(usable_gpus()))


def has_gpus(cluster: ClusterConfig, role: str) -> bool:
    """Return True if the processes of a role get GPUs: those of its pool, or, without one, of a node that may run it."""
    if cluster.backend == "ray" and (name := cluster.roles.get(role)) in cluster.pools:  # type: ignore[call-overload]
        return cluster.pools[name].gpus > 0
    return any(node.gpus >= 1 for node in nodes_of(cluster, role))


def card_bytes(cluster: ClusterConfig) -> int | None:
    """Bytes of a GPU of the nodes that run the actors (of this machine: of its smallest); None if they have none.

    Raises ResourceError if a cluster's nodes do not say it within a minute.
    """
    if not has_gpus(cluster, "actor"):
        return None
    if not is_connected() or cluster.backend == "inline":
        return _smallest_card()
    import ray

    try:
        # Of a process that Ray gave a GPU: the driver's machine may have other ones. Without a CPU slot: they may all be taken.
        found: int | None = ray.get(ray.remote(num_gpus=1, num_cpus=0)(_smallest_card).remote(), timeout=60.0)
    except GetTimeoutError:
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


# Reservation with a deadline

NODE_LABEL = "ray.io/node-id"
PATIENCE = 5.0
"""Seconds that Ray gets to reserve resources that are free, before the search starts again."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """The processes of a pool, or of a role without one, with their resources reserved: one bundle for each, in the order of
    their ranks; `counts` on each node. So the GPUs of a rank are known from here on, and a restarted rank gets the same ones."""

    cpus: float
    gpus: float
    counts: tuple[int, ...]
    group: Any

    @property
    def slots(self) -> int:
        return sum(self.counts)

    def options(self) -> list[dict[str, Any]]:
        """Ray's actor options of each slot; the slots of a node have consecutive ranks."""
        return [{"num_cpus": self.cpus, "num_gpus": self.gpus, **self.at(slot)} for slot in range(self.slots)]

    def at(self, slot: int) -> dict[str, Any]:
        """Ray's option for a process in a slot."""
        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=slot)}

    def release(self) -> None:
        """Release the reservation; Ray ends processes that still use it."""
        remove_placement_group(self.group)


def cluster_nodes() -> list[ClusterNode]:
    """The live nodes of the connected cluster, with their total resources."""
    return list(_nodes({}))


def _nodes(left: Mapping[str, Mapping[str, float]]) -> dict[ClusterNode, str]:
    """The live nodes and their ids, with the resources that `left` gives for a node's id, else its total resources."""
    nodes: dict[ClusterNode, str] = {}
    for node in ray.nodes():
        if node["Alive"]:
            has = left.get(node["NodeID"], node["Resources"])
            # With a part of the id: the search knows nodes by name, and several Ray nodes on one machine share its address.
            name = f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})"
            nodes[ClusterNode(name, float(has.get("CPU", 0.0)), float(has.get("GPU", 0.0)))] = node["NodeID"]
    return nodes


def reserve(pools: Mapping[str, PoolConfig], unpooled: Sequence[Unpooled], timeout: float) -> dict[str, Reserved]:
    """Reserve resources for all pools, and for the processes `unpooled`, or for none of them.

    Every process is pinned to the node that the search found for it: left to itself, Ray could put small pools on the
    only nodes where a large one fits, or all ranks on one of two nodes. Raises ResourceError, with a table of demand and
    supply: as soon as no placement exists, after `timeout` seconds if others use the resources.
    """
    nodes = cluster_nodes()
    # Only for its error: what does not fit the empty cluster either must not wait for the deadline.
    assign(pools, unpooled, nodes)
    deadline = time.monotonic() + timeout
    while True:
        held = _hold(pools, unpooled)
        late = [name for name, one in held.items() if not one.group.wait(timeout_seconds=PATIENCE)]
        if held and not late:
            return held
        # Part of them must not stay reserved: two runs that wait like that would block each other forever.
        for one in held.values():
            one.release()
        if time.monotonic() >= deadline:
            break
        time.sleep(PATIENCE / 10)
        if (now := cluster_nodes()) != nodes:  # Ray knows late that a node is gone
            assign(pools, unpooled, nodes := now)
    free = {key: ray.available_resources().get(key, 0.0) for key in ("CPU", "GPU")}
    names = sorted([*pools, *(one.key for one in unpooled)])
    raise ResourceError(
        f"{names} could not be reserved within {timeout:g} s; others use the cluster (free: {free})\n"
        + table(pools, nodes, unpooled)
    )


def _hold(pools: Mapping[str, PoolConfig], unpooled: Sequence[Unpooled]) -> dict[str, Reserved]:
    """Request resources on nodes that have them free now; empty without any."""
    free = _nodes(available_resources_per_node())
    try:
        shares = assign(pools, unpooled, list(free))
    except ResourceError:
        return {}
    ids = {node.name: number for node, number in free.items()}
    sizes = {name: (pool.cpus, pool.gpus) for name, pool in pools.items()} | {one.key: (one.cpus, one.gpus) for one in unpooled}
    held: dict[str, Reserved] = {}
    for name, share in shares.items():
        cpus, gpus = sizes[name]
        # Without zeros: Ray refuses a bundle that has nothing else.
        bundle = {key: value for key, value in (("CPU", cpus), ("GPU", gpus)) if value}
        pins = [{NODE_LABEL: ids[node]} for node, count in share for _ in range(count)]
        # PACK is only a wish, so it cannot contradict the pins, which decide alone.
        group = placement_group([bundle] * len(pins), strategy="PACK", bundle_label_selector=pins)
        held[name] = Reserved(cpus, gpus, tuple(count for _, count in share), group)
    return held


def locations_of(held: Reserved, timeout: float) -> list[Location]:
    """Ask each reserved bundle, from within, where it is; one after the other on a node, so that few processes start.

    Raises ResourceError if a node cannot answer, or does not within `timeout` seconds.
    """
    # Without the limit, Ray starts a process for every task that has a GPU.
    remote = ray.remote(max_calls=0)(_location)
    options = held.options()
    found: dict[int, Location] = {}
    of_nodes = [range(end - count, end) for count, end in zip(held.counts, accumulate(held.counts), strict=True)]
    for slots in zip_longest(*of_nodes):
        asked = [slot for slot in slots if slot is not None]
        try:
            answers = ray.get([remote.options(**options[slot]).remote() for slot in asked], timeout=timeout)
            found |= zip(asked, answers, strict=True)
        except GetTimeoutError:
            raise ResourceError(
                f"cluster.startup_timeout = {timeout:g}: no process started on a node in this time. Raise it, or free the node"
            ) from None
        except RayError as error:
            raise ResourceError(
                f"a node does not say where it is; is this version of agentrl installed on it? {last_line(error)}"
            ) from error
    return [found[slot] for slot in range(held.slots)]


def _location() -> Location:
    cards = tuple(str(card) for card in ray.get_gpu_ids())
    return Location(ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id(), cards)


W = TypeVar("W", bound=Worker)


class Pools:
    """The resources of a run's roles: all pools that they name are reserved together, then filled role by role.

    `unpooled`: roles without a pool whose processes are reserved too. `beside`: roles whose own processes use the GPUs of
    another role's (rollout.colocate).

    Raises ConfigError for an unknown pool, and ResourceError, with the table of `reserve`, if they do not fit.
    """

    def __init__(
        self,
        cluster: ClusterConfig,
        roles: Sequence[str],
        call_timeout: float | None = None,
        unpooled: Mapping[str, Unpooled] | None = None,
        beside: Mapping[str, str] | None = None,
    ) -> None:
        self._timeout, self._call_timeout = cluster.startup_timeout, call_timeout
        found, loose = pools_of_roles(cluster, roles), unpooled or {}
        self._pool_of = keys_of_roles(found, loose, beside or {})
        self._beside = frozenset(beside or {})
        self._held = reserve(dict(found.values()), list(loose.values()), cluster.startup_timeout)
        self._hosts: dict[str, Hosts] = {}

    def __contains__(self, role: str) -> bool:
        return role in self._pool_of

    def slots(self, role: str) -> int:
        """Number of processes of a role that has a place here."""
        return self._held[self._pool_of[role]].slots

    def launch(self, role: str, cls: type[W], mesh: Mapping[str, int] | None = None) -> WorkerGroup[W]:
        """A group in the role's pool; the processes of a pool start with its first role and are shared by its roles.

        Raises ResourceError if they do not start in time.
        """
        name = self._pool_of[role]
        held = self._held[name]
        # Without handles they have ended with their last role; the reservation stays, so others can start in it.
        if name not in self._hosts or not self._hosts[name].handles:
            self._hosts[name] = Hosts(name, held.options(), self._timeout)
        grid = Mesh.of(mesh, held.slots)
        self._hosts[name].create(role, cls, grid)
        return WorkerGroup(cls, role, grid, RayBackend(role, cls, self._hosts[name], self._call_timeout))

    def ray_options(self, role: str, gpus: int = 0) -> list[dict[str, Any]]:
        """Ray's options for processes that the role starts itself, one per slot of its pool. If other roles
        use the pool's processes, these are on the same nodes and take none of their slots. `gpus`: of each process, if it is
        `beside` another role's: it uses the cards of the next this many ranks, which must have been started."""
        name = self._pool_of[role]
        held = self._held[name]
        # Alone in its pool it takes the slots. Else the pool's processes hold them, and asking for them again would wait forever.
        if sum(other == name for other in self._pool_of.values()) == 1:
            return held.options()
        nothing = {"num_cpus": 0.0, "num_gpus": 0.0}
        if not self._uses_cards_of_others(role):
            return [{**nothing, **held.at(slot)} for slot in range(held.slots)]
        # Ray cannot give parts of several cards to one process, so each is told which ones it sees instead.
        cards = self._hosts[name].cards()
        visible = [[card for rank in cards[first : first + gpus] for card in rank] for first in range(0, held.slots, gpus)]
        return [
            # In the bundle of the first of its ranks: blocks of ranks never span two nodes, so all of their cards are there.
            {**nothing, **held.at(number * gpus), "runtime_env": {"env_vars": {VISIBLE: ",".join(seen)}}}
            for number, seen in enumerate(visible)
        ]

    def locations(self, role: str, gpus: int = 0) -> list[Location]:
        """Place of each process of a role, before they are started; `gpus` as in `ray_options`."""
        ranks = locations_of(self._held[self._pool_of[role]], self._timeout)
        return join_locations(ranks, gpus) if self._uses_cards_of_others(role) else ranks

    def _uses_cards_of_others(self, role: str) -> bool:
        """Return True if a role's own processes are next to those of other roles, which hold the GPUs."""
        return role in self._beside and self._held[self._pool_of[role]].gpus > 0

    def close(self) -> None:
        """End what still runs in the pools and release their resources; idempotent."""
        for hosts in self._hosts.values():
            # Before the release, with which Ray kills what still runs there: a killed process runs no exit handlers.
            hosts.end()
        # After a shutdown nothing is held any more, and asking would fail.
        if ray.is_initialized():
            for held in self._held.values():
                held.release()
        self._hosts, self._held = {}, {}

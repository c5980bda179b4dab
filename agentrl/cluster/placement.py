"""Placement of processes: CPU and GPU pools over nodes, their reservation, and the devices of each process."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
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
from agentrl.utils.threads import setting

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
    """Map each of `roles` that has a pool to (pool name, pool). Raises ConfigError for an unknown pool."""
    check_roles(cluster)
    placed = {str(role): pool for role, pool in cluster.roles.items()}
    return {role: (placed[role], cluster.pools[placed[role]]) for role in roles if role in placed}


def place(pools: Mapping[str, PoolConfig], nodes: Sequence[ClusterNode]) -> dict[str, list[str]]:
    """Choose the nodes of each pool, by node name; the nodes of one pool differ.

    Searches all placements (largest share first). Raises ResourceError, with a table of demand and supply, if none exists.
    """
    shares = [(name, share) for name, pool in pools.items() for share in range(pool.nodes)]
    # Largest share first, onto the fullest node with room, so that the search rarely backtracks. Sorted by GPUs before CPU slots,
    # as GPUs run short first; the sort keeps the config's order among equals.
    shares.sort(key=lambda item: (-node_need(pools[item[0]])[1], -node_need(pools[item[0]])[0]))
    left = {node.name: [node.cpus, node.gpus] for node in nodes}
    chosen: dict[str, list[str]] = {name: [] for name in pools}
    if not _search(pools, shares, 0, left, chosen):
        raise ResourceError(f"the pools do not fit the cluster{_obstacle(pools, nodes)}\n" + table(pools, nodes))
    return chosen


def _obstacle(pools: Mapping[str, PoolConfig], nodes: Sequence[ClusterNode]) -> str:
    """Explain which pool cannot fit on such nodes even alone, and the fix; "" if each fits alone."""
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
    """Return the most CPU slots of any node, and the most GPUs."""
    return max((node.cpus for node in nodes), default=0.0), max((node.gpus for node in nodes), default=0.0)


def node_need(pool: PoolConfig) -> tuple[float, float]:
    """Return the CPU slots and GPUs that a pool takes on each of its nodes."""
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
        tried.add((free_cpus, free_gpus))  # nodes with equal room are equivalent
        left[node] = [free_cpus - cpus, free_gpus - gpus]
        chosen[name].append(node)
        if _search(pools, shares, at + 1, left, chosen):
            return True
        chosen[name].pop()
        left[node] = [free_cpus, free_gpus]
    return False


def table(pools: Mapping[str, PoolConfig], nodes: Sequence[ClusterNode], unpooled: Sequence[Unpooled] = ()) -> str:
    """Format a table of demand (pools per node, processes without a pool) and supply (nodes)."""
    rows = [("demand", "nodes", "processes per node", "CPU slots per node", "GPUs per node")]
    for name, pool in pools.items():
        cpus, gpus = node_need(pool)
        rows.append((f"pool {name}", str(pool.nodes), str(pool.per_node), f"{cpus:g}", f"{gpus:g}"))
    rows += [(one.key, "any", f"{one.count} in all", f"{one.cpus:g} each", f"{one.gpus:g} each") for one in unpooled]
    rows.append(("supply", "", "", "CPU slots", "GPUs"))
    rows += [(f"node {node.name}", "", "", f"{node.cpus:g}", f"{node.gpus:g}") for node in nodes]
    return "\n".join(columns(rows))


# Roles without a pool

WORKER_CPUS = 0.5
"""CPU slots of a rollout worker. It mostly waits for the engine and tools, so two share a core."""

Shares = list[tuple[str, int]]
"""Pairs (node name, number of processes on it), in rank order."""


@dataclass(frozen=True, slots=True)
class Unpooled:
    """`count` processes without a pool, with `cpus` CPU slots and `gpus` GPUs each. `key`: the config key of the count.

    `block`: each node gets a multiple of this many processes, as one process of another role uses the GPUs of a whole block.
    `size_key`: the config key of the GPUs per process, or per block.
    """

    key: str
    count: int
    cpus: float
    gpus: float
    block: int = 1
    size_key: str = ""

    def blocks(self) -> Unpooled:
        """Return the demand with each block as one process."""
        size = self.block
        return replace(self, count=-(-self.count // size), cpus=self.cpus * size, gpus=self.gpus * size, block=1)

    def fit(self, room: Sequence[float]) -> int:
        """Return the number of processes that fit into `room`, (CPU slots, GPUs)."""
        # A resource that is not requested sets no limit; a process that requests none fits anywhere.
        each = [has // asks for has, asks in zip(room, (self.cpus, self.gpus), strict=True) if asks and not math.isinf(has)]
        return int(min(each, default=self.count))

    def room_after(self, room: Sequence[float], count: int) -> list[float]:
        """Return (CPU slots, GPUs) left after `count` processes."""
        return [room[0] - count * self.cpus, room[1] - count * self.gpus]


def assign(pools: Mapping[str, PoolConfig], unpooled: Sequence[Unpooled], nodes: Sequence[ClusterNode]) -> dict[str, Shares]:
    """Choose nodes for every pool (by name) and the processes without one (by key); pools choose first.

    Raises ResourceError, with a table of demand and supply, if no placement is found.
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
    # Training is faster on few nodes. Fall back to any nodes rather than refuse a run that fits.
    found = _on_few_nodes(units, left)
    if found is None:
        found = _on_any_nodes(units, left)
    if found is None:  # name the key that does not fit, and the fix
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
        else:  # enough GPUs, but not in the right sizes or with too few CPU slots
            why = f"{keys} do not divide among the nodes{advice}"
        raise ResourceError(f"the run's processes do not fit the cluster: {why}\n" + table(pools, nodes, unpooled))
    order = [node.name for node in nodes]
    for one in unpooled:
        shares[one.key] = [(node, found[one.key][node] * one.block) for node in order if found[one.key].get(node)]
    return shares


@dataclass(frozen=True, slots=True)
class Location:
    """Location of a process: address and id of its node, and the GPUs that it uses there."""

    address: str
    node: str
    cards: tuple[str, ...]


def locations(shares: Mapping[str, Shares], gpus: Mapping[str, float]) -> dict[str, list[Location]]:
    """Assign each process a node and GPUs, numbered per node in order. `gpus`: GPUs per process, by key."""
    taken: dict[str, float] = {}
    found: dict[str, list[Location]] = {key: [] for key in shares}
    for key, node in ((key, node) for key, share in shares.items() for node, count in share for _ in range(count)):
        first = taken.get(node, 0.0)
        taken[node] = first + gpus[key]
        found[key].append(Location(node, "", tuple(map(str, range(int(first), math.ceil(taken[node]))))))
    return found


def join_locations(ranks: Sequence[Location], size: int) -> list[Location]:
    """Return the locations of processes that each use the GPUs of `size` consecutive ranks."""
    parts = [ranks[first : first + size] for first in range(0, len(ranks), size)]
    return [Location(part[0].address, part[0].node, tuple(card for one in part for card in one.cards)) for part in parts]


def keys_of_roles(
    pools: Mapping[str, tuple[str, PoolConfig]], unpooled: Mapping[str, Unpooled], colocated: Mapping[str, str]
) -> dict[str, str]:
    """Map each role with a place to its key in `Shares`: its pool, its own key, or that of the role that it is colocated with."""
    keys = {role: name for role, (name, _) in pools.items()} | {role: one.key for role, one in unpooled.items()}
    # Last: a colocated role uses the place of the other role, whatever that is.
    return keys | {role: keys[other] for role, other in colocated.items()}


def _on_few_nodes(wanted: Sequence[Unpooled], left: Mapping[str, list[float]]) -> dict[str, dict[str, int]] | None:
    """Put each on the fewest nodes that leave room for the rest, evenly if that fits; None if not found.

    Ranks that exchange gradients are fastest within a node."""
    if not wanted:
        return {}
    first, rest = wanted[0], wanted[1:]
    # Nodes with most room first: the first few are then the fewest that hold all.
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
    """Divide `count` over nodes with `room`: evenly if that fits, else node by node; None if room is short."""
    even = [count // len(room) + (number < count % len(room)) for number in range(len(room))]
    if all(wanted <= has for wanted, has in zip(even, room, strict=True)):
        return even
    counts = []
    for has in room:
        counts.append(min(has, count))
        count -= counts[-1]
    return None if count else counts


def _on_any_nodes(wanted: Sequence[Unpooled], left: Mapping[str, list[float]]) -> dict[str, dict[str, int]] | None:
    """Place processes with most GPUs first, one by one where they cost the smallest kind the least room. Finds a placement
    whenever one exists for two kinds of processes, one of them with one GPU."""
    if not wanted:
        return {}
    # Large processes first: small ones fit into the remaining gaps, but not vice versa.
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
    """Return the nodes that may run a role, with total resources; with backend "inline" this machine, except for the processes
    of an engine ("rollout", "judge").

    Joins the cluster if the config or RAY_ADDRESS names one and this process is not connected; raises ResourceError if it
    cannot be reached. Without an address and before Ray starts, returns this machine with the resources that Ray will find.
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
    """Return True if a run joins an existing cluster."""
    return not is_planned() and bool(cluster.address or os.environ.get("RAY_ADDRESS"))


# A context variable, because checks deep in the call tree that are unaware of a plan ask for the nodes.
_planned: ContextVar[list[ClusterNode] | None] = ContextVar("the nodes of a planned run", default=None)


def planned_elsewhere(nodes: tuple[int, int] | None = None) -> AbstractContextManager[None]:
    """Plan a run for other machines inside the context, without joining a cluster.

    `nodes`: number of nodes and GPUs per node; None: one node with unlimited GPUs."""
    count, gpus = nodes or (1, math.inf)
    names = [f"node {number:0{len(str(count))}}" for number in range(1, count + 1)]
    return setting(_planned, [ClusterNode(name, math.inf, float(gpus)) for name in names])


def is_planned() -> bool:
    """Return True inside `planned_elsewhere`, where this machine's hardware and packages do not matter."""
    return _planned.get() is not None


def this_machine() -> ClusterNode:
    """Return the driver's machine as a node."""
    return ClusterNode("this machine", float(usable_cpus()), float(usable_gpus()))


def has_gpus(cluster: ClusterConfig, role: str) -> bool:
    """Return True if the processes of a role get GPUs, from its pool or else from a node that may run it."""
    if cluster.backend == "ray" and (name := cluster.roles.get(role)) in cluster.pools:  # type: ignore[call-overload]
        return cluster.pools[name].gpus > 0
    return any(node.gpus >= 1 for node in nodes_of(cluster, role))


def card_bytes(cluster: ClusterConfig) -> int | None:
    """Return the memory in bytes of a GPU of the actors' nodes (this machine: of its smallest); None without GPUs.

    Raises ResourceError if the cluster does not answer within a minute.
    """
    if not has_gpus(cluster, "actor"):
        return None
    if not is_connected() or cluster.backend == "inline":
        return _smallest_card()
    import ray

    try:
        # Ask a process with a GPU from Ray: the driver's GPUs may differ. It needs no CPU slot: all may be taken.
        found: int | None = ray.get(ray.remote(num_gpus=1, num_cpus=0)(_smallest_card).remote(), timeout=60.0)
    except GetTimeoutError:
        found = None
    if found is None:
        raise ResourceError("cluster: no GPU reported its memory within a minute; all may be in use. Set --gpu-memory GIB")
    return found


def driver_card() -> int | None:
    """Return the bytes of this process's GPU that other programs leave free; None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    return torch.cuda.mem_get_info(0)[0] + torch.cuda.memory_reserved(0)


def _smallest_card() -> int | None:
    import torch

    cards = [torch.cuda.get_device_properties(number).total_memory for number in range(torch.cuda.device_count())]
    # A program that fits the smallest GPU fits all of them.
    return min(cards, default=None)


# Reservation with a deadline

NODE_LABEL = "ray.io/node-id"
PATIENCE = 5.0
"""Seconds for Ray to reserve free resources before the search starts again."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """Reserved processes of a pool or of a role without one: one bundle per process in rank order, `counts` per node.

    The GPUs of a rank are fixed from here on, so a restarted rank gets the same ones."""

    cpus: float
    gpus: float
    counts: tuple[int, ...]
    group: Any

    @property
    def slots(self) -> int:
        return sum(self.counts)

    def options(self) -> list[dict[str, Any]]:
        """Return Ray's actor options per slot; slots of one node have consecutive ranks."""
        return [{"num_cpus": self.cpus, "num_gpus": self.gpus, **self.at(slot)} for slot in range(self.slots)]

    def at(self, slot: int) -> dict[str, Any]:
        """Return Ray's scheduling option for a process in `slot`."""
        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=slot)}

    def release(self) -> None:
        """Release the reservation; Ray kills processes that still use it."""
        remove_placement_group(self.group)


def cluster_nodes() -> list[ClusterNode]:
    """Return the live nodes of the connected cluster, with total resources."""
    return list(_nodes({}))


def _nodes(left: Mapping[str, Mapping[str, float]]) -> dict[ClusterNode, str]:
    """Map live nodes to their ids, with the resources in `left` (by node id), else their total resources."""
    nodes: dict[ClusterNode, str] = {}
    for node in ray.nodes():
        if node["Alive"]:
            has = left.get(node["NodeID"], node["Resources"])
            # Part of the id makes names unique: several Ray nodes on one machine share its address.
            name = f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})"
            nodes[ClusterNode(name, float(has.get("CPU", 0.0)), float(has.get("GPU", 0.0)))] = node["NodeID"]
    return nodes


def reserve(pools: Mapping[str, PoolConfig], unpooled: Sequence[Unpooled], timeout: float) -> dict[str, Reserved]:
    """Reserve resources for all pools and the processes `unpooled`, or for none.

    Each process is pinned to its node from the search: Ray alone could put small pools on the only nodes where a large one
    fits, or all ranks on one of two nodes. Raises ResourceError, with a table of demand and supply: at once if no placement
    exists, after `timeout` seconds if others use the resources.
    """
    nodes = cluster_nodes()
    # Raises at once if the demand does not fit even an empty cluster, instead of waiting for the deadline.
    assign(pools, unpooled, nodes)
    deadline = time.monotonic() + timeout
    while True:
        held = _request(pools, unpooled)
        late = [name for name, one in held.items() if not one.group.wait(timeout_seconds=PATIENCE)]
        if held and not late:
            return held
        # Release a partial reservation: two runs that hold parts would block each other forever.
        for one in held.values():
            one.release()
        if time.monotonic() >= deadline:
            break
        time.sleep(PATIENCE / 10)
        if (now := cluster_nodes()) != nodes:  # Ray reports a lost node late
            assign(pools, unpooled, nodes := now)
    free = {key: ray.available_resources().get(key, 0.0) for key in ("CPU", "GPU")}
    names = sorted([*pools, *(one.key for one in unpooled)])
    raise ResourceError(
        f"{names} could not be reserved within {timeout:g} s; others use the cluster (free: {free})\n"
        + table(pools, nodes, unpooled)
    )


def _request(pools: Mapping[str, PoolConfig], unpooled: Sequence[Unpooled]) -> dict[str, Reserved]:
    """Request resources on nodes where they are free now; {} if they do not fit."""
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
        # Omit zeros: Ray refuses a bundle of zeros.
        bundle = {key: value for key, value in (("CPU", cpus), ("GPU", gpus)) if value}
        pins = [{NODE_LABEL: ids[node]} for node, count in share for _ in range(count)]
        # PACK is only a preference, so it cannot contradict the pins.
        group = placement_group([bundle] * len(pins), strategy="PACK", bundle_label_selector=pins)
        held[name] = Reserved(cpus, gpus, tuple(count for _, count in share), group)
    return held


def locations_of(held: Reserved, timeout: float) -> list[Location]:
    """Query the location of each reserved bundle, one per node at a time, so that few processes start.

    Raises ResourceError if a node fails to answer within `timeout` seconds.
    """
    # Without this, Ray starts a new process for every task with a GPU.
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
                f"a node failed to report its location; is this version of agentrl installed on it? {last_line(error)}"
            ) from error
    return [found[slot] for slot in range(held.slots)]


def _location() -> Location:
    cards = tuple(str(card) for card in ray.get_gpu_ids())
    return Location(ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id(), cards)


W = TypeVar("W", bound=Worker)


class Pools:
    """The resources of a run's roles: all of their pools are reserved together, then filled role by role.

    `unpooled`: processes to reserve for roles without a pool. `colocated`: role -> role whose GPUs its processes share
    (rollout.colocate).

    Raises ConfigError for an unknown pool, ResourceError with the table of `reserve` if the demand does not fit.
    """

    def __init__(
        self,
        cluster: ClusterConfig,
        roles: Sequence[str],
        call_timeout: float | None = None,
        unpooled: Mapping[str, Unpooled] | None = None,
        colocated: Mapping[str, str] | None = None,
    ) -> None:
        self._timeout, self._call_timeout = cluster.startup_timeout, call_timeout
        found, unplaced = pools_of_roles(cluster, roles), unpooled or {}
        self._pool_of = keys_of_roles(found, unplaced, colocated or {})
        self._colocated = frozenset(colocated or {})
        self._held = reserve(dict(found.values()), list(unplaced.values()), cluster.startup_timeout)
        self._hosts: dict[str, Hosts] = {}

    def __contains__(self, role: str) -> bool:
        return role in self._pool_of

    def slots(self, role: str) -> int:
        """Return the number of slots of a role that has a place here."""
        return self._held[self._pool_of[role]].slots

    def launch(self, role: str, cls: type[W], mesh: Mapping[str, int] | None = None) -> WorkerGroup[W]:
        """Start a group in the role's pool. The first role of a pool starts its processes; later roles share them.

        Raises ResourceError if they do not start in time.
        """
        name = self._pool_of[role]
        held = self._held[name]
        # No handles: the processes ended with their last role. The reservation remains, so new ones can start in it.
        if name not in self._hosts or not self._hosts[name].handles:
            self._hosts[name] = Hosts(name, held.options(), self._timeout)
        grid = Mesh.of(mesh, held.slots)
        self._hosts[name].create(role, cls, grid)
        return WorkerGroup(cls, role, grid, RayBackend(role, cls, self._hosts[name], self._call_timeout))

    def ray_options(self, role: str, gpus: int = 0) -> list[dict[str, Any]]:
        """Return Ray's options for processes that the role starts itself, one per slot. If other roles use the pool's
        processes, these run on the same nodes without taking slots. `gpus`: GPUs per process of a colocated role, which uses
        the GPUs of that many consecutive ranks; the ranks must have been started."""
        name = self._pool_of[role]
        held = self._held[name]
        # Alone in its pool, the role takes the slots. Else the pool's processes hold them, and a request would wait forever.
        if sum(other == name for other in self._pool_of.values()) == 1:
            return held.options()
        nothing = {"num_cpus": 0.0, "num_gpus": 0.0}
        if not self._uses_cards_of_others(role):
            return [{**nothing, **held.at(slot)} for slot in range(held.slots)]
        # Ray cannot assign parts of several GPUs to one process, so set the visible GPUs instead.
        cards = [given for *_, given in self._hosts[name].nodes]
        visible = [[card for rank in cards[first : first + gpus] for card in rank] for first in range(0, held.slots, gpus)]
        return [
            # In the bundle of its first rank: a block of ranks never spans nodes, so all of its GPUs are there.
            {**nothing, **held.at(number * gpus), "runtime_env": {"env_vars": {VISIBLE: ",".join(seen)}}}
            for number, seen in enumerate(visible)
        ]

    def locations(self, role: str, gpus: int = 0) -> list[Location]:
        """Return the location of each process of a role before it starts; `gpus` as in `ray_options`."""
        ranks = locations_of(self._held[self._pool_of[role]], self._timeout)
        return join_locations(ranks, gpus) if self._uses_cards_of_others(role) else ranks

    def _uses_cards_of_others(self, role: str) -> bool:
        """Return True if a role's processes share GPUs held by another role."""
        return role in self._colocated and self._held[self._pool_of[role]].gpus > 0

    def close(self) -> None:
        """End all processes in the pools and release their resources; idempotent."""
        for hosts in self._hosts.values():
            # Before the release, with which Ray kills remaining processes: killed processes run no exit handlers.
            hosts.end()
        # After a shutdown of Ray nothing is reserved, and the call would fail.
        if ray.is_initialized():
            for held in self._held.values():
                held.release()
        self._hosts, self._held = {}, {}

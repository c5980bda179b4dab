"""Placement of roles on a Ray cluster: resources are reserved together, then filled role by role."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from typing import Any, TypeVar

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from agentrl.cluster.group import WorkerGroup
from agentrl.cluster.host import VISIBLE
from agentrl.cluster.ray_group import Hosts, RayBackend
from agentrl.cluster.resources import (
    ClusterNode,
    Location,
    Unpooled,
    assign,
    demands,
    joined,
    keys_of_roles,
    pools_of_roles,
    table,
)
from agentrl.cluster.worker import Mesh, Worker
from agentrl.config.schema import ClusterConfig, PoolConfig
from agentrl.utils.errors import AgentrlError, ResourceError

# Reservation with a deadline

NODE_LABEL = "ray.io/node-id"
PATIENCE = 5.0
"""Seconds that Ray gets to reserve resources that are free, before the search starts again."""
ANSWER_S = 60.0
"""Seconds for a node to start a process that says where it is; a cold one imports Ray from a network disk first."""


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

    def by_node(self) -> list[range]:
        """The slots of each node."""
        ends = list(accumulate(self.counts))
        return [range(end - count, end) for end, count in zip(ends, self.counts, strict=True)]

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
        + table(pools, nodes, demands(unpooled))
    )


def _hold(pools: Mapping[str, PoolConfig], unpooled: Sequence[Unpooled]) -> dict[str, Reserved]:
    """Request resources on nodes that have them free now; empty if there are none."""
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


def locations_of(held: Reserved) -> list[Location]:
    """Ask each reserved bundle, from within, where it is; one after the other on a node, so that few processes start.

    Raises ResourceError if a node cannot answer.
    """
    # Without the limit, Ray starts a process for every task that has a GPU.
    remote = ray.remote(max_calls=0)(_location)
    options = held.options()
    found: dict[int, Location] = {}
    for slots in zip_longest(*held.by_node()):
        asked = [slot for slot in slots if slot is not None]
        try:
            answers = ray.get([remote.options(**options[slot]).remote() for slot in asked], timeout=ANSWER_S)
            found |= zip(asked, answers, strict=True)
        except RayError as error:
            cause = str(error).strip().splitlines()[-1]
            raise ResourceError(
                f"a node does not say where it is; is this version of agentrl installed on it? {cause}"
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
        `beside` another role's: it uses the cards of the next so many ranks, which must have been started."""
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
        """Where each process of a role will be, asked before they are started; `gpus` as in `ray_options`."""
        ranks = locations_of(self._held[self._pool_of[role]])
        return joined(ranks, gpus) if self._uses_cards_of_others(role) else ranks

    def _uses_cards_of_others(self, role: str) -> bool:
        """Whether a role's own processes are beside those of other roles, which hold the GPUs."""
        name = self._pool_of[role]
        return role in self._beside and self._held[name].gpus > 0

    def release_with_groups(self) -> None:
        """Release each pool's resources with the last group in it, for a caller that does not keep the Pools."""
        for name, hosts in self._hosts.items():
            hosts.on_end = self._held[name].release

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


def launch_in_pools(
    cluster: ClusterConfig,
    classes: Mapping[str, type[Worker]],
    meshes: Mapping[str, Mapping[str, int]],
    call_timeout: float | None,
) -> dict[str, WorkerGroup[Any]]:
    """Start roles that have a pool; each pool is released with its last role. See `roles.launch_roles`."""
    pools = Pools(cluster, list(classes), call_timeout)
    try:
        groups = {role: pools.launch(role, cls, meshes.get(role)) for role, cls in classes.items()}
    except AgentrlError:
        pools.close()
        raise
    pools.release_with_groups()
    return groups

"""Pools on a Ray cluster: checked against every node, then reserved with a deadline."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from agentrl.cluster.actors import RayBackend
from agentrl.cluster.group import WorkerGroup
from agentrl.cluster.hosts import Hosts
from agentrl.cluster.mesh import Mesh
from agentrl.cluster.pool import ClusterNode, need, place, pools_of_roles, table
from agentrl.cluster.worker import Worker
from agentrl.config.schema import ClusterConfig, PoolConfig
from agentrl.errors import AgentrlError, ResourceError

W = TypeVar("W", bound=Worker)
NODE_LABEL = "ray.io/node-id"
PATIENCE = 5.0
"""Seconds that Ray gets to reserve resources that are free, before the search starts again."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """A pool with its resources reserved: one bundle per node."""

    name: str
    pool: PoolConfig
    group: Any

    @property
    def slots(self) -> int:
        return self.pool.nodes * self.pool.per_node

    def options(self) -> list[dict[str, Any]]:
        """Ray's actor options of each slot; the slots of a node have consecutive ranks."""
        return [
            {
                "num_cpus": self.pool.cpus,
                "num_gpus": self.pool.gpus,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(
                    self.group, placement_group_bundle_index=slot // self.pool.per_node
                ),
            }
            for slot in range(self.slots)
        ]

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
            name = f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})"
            nodes[ClusterNode(name, float(has.get("CPU", 0.0)), float(has.get("GPU", 0.0)))] = node["NodeID"]
    return nodes


def reserve(pools: Mapping[str, PoolConfig], timeout: float) -> dict[str, Reserved]:
    """Reserve resources for all pools, or for none.

    Every share of a pool is pinned to the node that the search found for it: left to itself, Ray could put
    small pools on the only nodes where a large one fits. Raises ResourceError, with a table of demand and
    supply: at once if no placement exists, after `timeout` seconds if others use the resources.
    """
    nodes = cluster_nodes()
    # Against total resources first: what does not fit an empty cluster need not wait for one.
    place(pools, nodes)
    deadline = time.monotonic() + timeout
    while True:
        held = _hold(pools)
        late = [name for name, one in held.items() if not one.group.wait(timeout_seconds=PATIENCE)]
        if held and not late:
            return held
        # Part of the pools must not stay reserved: two runs that wait like that would block each other forever.
        for one in held.values():
            one.release()
        if time.monotonic() >= deadline:
            break
        time.sleep(PATIENCE / 10)
    free = {key: ray.available_resources().get(key, 0.0) for key in ("CPU", "GPU")}
    raise ResourceError(
        f"pools {sorted(pools)} could not be reserved within {timeout:g} s; others use the cluster (free: {free})\n"
        + table(pools, nodes)
    )


def _hold(pools: Mapping[str, PoolConfig]) -> dict[str, Reserved]:
    """Request resources on nodes that have them free now; empty if there are none."""
    # Ray's public call has only the sum over nodes, which may fit though no node does.
    free = _nodes(available_resources_per_node())
    try:
        chosen = place(pools, list(free))
    except ResourceError:
        return {}
    ids = {node.name: number for node, number in free.items()}
    held: dict[str, Reserved] = {}
    for name, pool in pools.items():
        cpus, gpus = need(pool)
        bundle = {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
        pins = [{NODE_LABEL: ids[node]} for node in chosen[name]]
        group = placement_group([bundle] * pool.nodes, strategy="PACK", bundle_label_selector=pins)
        held[name] = Reserved(name, pool, group)
    return held


class Pools:
    """The resources of a run's roles: all pools that they name are reserved together, then filled role by role.

    Raises ConfigError for an unknown pool, and ResourceError, with the table of `reserve`, if they do not fit.
    """

    def __init__(self, cluster: ClusterConfig, roles: Sequence[str], call_timeout: float | None = None) -> None:
        self._timeout, self._call_timeout = cluster.startup_timeout, call_timeout
        found = pools_of_roles(cluster, roles)
        self._pool_of = {role: name for role, (name, _) in found.items()}
        self._held = reserve(dict(found.values()), cluster.startup_timeout)
        self._hosts: dict[str, Hosts] = {}

    def __contains__(self, role: str) -> bool:
        return role in self._pool_of

    def slots(self, role: str) -> int:
        """Number of processes of a role that has a pool."""
        return self._held[self._pool_of[role]].slots

    def launch(self, role: str, cls: type[W], mesh: Mapping[str, int] | None = None) -> WorkerGroup[W]:
        """A group in the role's pool; the processes of a pool start with its first role and are shared by its roles.

        Raises ResourceError if they do not start in time.
        """
        name = self._pool_of[role]
        held = self._held[name]
        if name not in self._hosts or not self._hosts[name].handles:
            self._hosts[name] = Hosts(name, held.options(), self._timeout)
        grid = Mesh.of(mesh, held.slots)
        self._hosts[name].create(role, cls, grid)
        return WorkerGroup(cls, role, grid, RayBackend(role, cls, self._hosts[name], self._call_timeout))

    def ray_options(self, role: str) -> list[dict[str, Any]]:
        """Ray's options for processes that the role starts itself, one per slot of its pool. If other roles
        use the pool's processes, these are on the same nodes and take none of their slots."""
        held = self._held[self._pool_of[role]]
        shared = sum(name == held.name for name in self._pool_of.values()) > 1
        nothing = {"num_cpus": 0.0, "num_gpus": 0.0} if shared else {}
        return [{**options, **nothing} for options in held.options()]

    def release_with_groups(self) -> None:
        """Release each pool's resources with the last group in it, for a caller that does not keep the Pools."""
        for name, hosts in self._hosts.items():
            hosts.on_end = self._held[name].release

    def close(self) -> None:
        """End what still runs in the pools and release their resources; idempotent."""
        for hosts in self._hosts.values():
            hosts.end()
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

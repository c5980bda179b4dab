"""Pools on a Ray cluster: checked against every node, then reserved with a deadline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from agentrl.cluster.actors import RayBackend
from agentrl.cluster.group import WorkerGroup
from agentrl.cluster.hosts import Hosts
from agentrl.cluster.mesh import Mesh
from agentrl.cluster.pool import Node, need, place, pools_of_roles, table
from agentrl.cluster.worker import Worker
from agentrl.config.schema import ClusterConfig, PoolConfig
from agentrl.errors import AgentrlError, ResourceError


@dataclass(frozen=True, slots=True)
class Reserved:
    """A pool whose place is held: one bundle a node."""

    name: str
    pool: PoolConfig
    group: Any

    @property
    def slots(self) -> int:
        return self.pool.nodes * self.pool.per_node

    def options(self) -> list[dict[str, Any]]:
        """Ray's actor options of each slot; slots of one node have neighbouring ranks."""
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
        """Give the place back; processes that still use it are ended by Ray."""
        remove_placement_group(self.group)


def cluster_nodes() -> list[Node]:
    """The living nodes of the connected cluster, with all that they have."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    return [
        Node(
            f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})",
            float(node["Resources"].get("CPU", 0.0)),
            float(node["Resources"].get("GPU", 0.0)),
        )
        for node in alive
    ]


def reserve(pools: Mapping[str, PoolConfig], timeout: float) -> dict[str, Reserved]:
    """Hold places for all pools, or for none.

    Raises ResourceError, with a table of demand against supply, at once where no placement exists and
    after `timeout` seconds where others use what is needed.
    """
    nodes = cluster_nodes()
    place(pools, nodes)
    held: dict[str, Reserved] = {}
    for name, pool in sorted(pools.items(), key=lambda item: need(item[1]), reverse=True):
        cpus, gpus = need(pool)
        bundle = {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
        strategy = "STRICT_SPREAD" if pool.nodes > 1 else "STRICT_PACK"
        held[name] = Reserved(name, pool, placement_group([bundle] * pool.nodes, strategy=strategy))
    late = [name for name, one in held.items() if not one.group.wait(timeout_seconds=timeout)]
    if late:
        for one in held.values():
            one.release()
        free = {key: ray.available_resources().get(key, 0.0) for key in ("CPU", "GPU")}
        raise ResourceError(
            f"pools {late} got no place within {timeout:g} s; others use the cluster (free: {free})\n"
            + table(pools, nodes)
        )
    return held


def launch_in_pools(
    cluster: ClusterConfig,
    classes: Mapping[str, type[Worker]],
    meshes: Mapping[str, Mapping[str, int]],
    call_timeout: float | None,
) -> dict[str, WorkerGroup[Any]]:
    """Start roles that have a pool; roles of one pool share its processes. See `roles.launch_roles`."""
    by_role = pools_of_roles(cluster, list(classes))
    held = reserve(dict(by_role.values()), cluster.startup_timeout)
    hosts: dict[str, Hosts] = {}
    groups: dict[str, WorkerGroup[Any]] = {}
    try:
        for role, cls in classes.items():
            name = by_role[role][0]
            if name not in hosts:
                hosts[name] = Hosts(name, held[name].options(), cluster.startup_timeout, held[name].release)
            mesh = Mesh.of(meshes.get(role), held[name].slots)
            hosts[name].create(role, cls, mesh)
            groups[role] = WorkerGroup(cls, role, mesh, RayBackend(role, cls, hosts[name], call_timeout))
    except AgentrlError:
        for name, one in held.items():
            if name in hosts:
                hosts[name].end()
            else:
                one.release()
        raise
    return groups

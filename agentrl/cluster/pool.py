"""Resource pools: which role runs in which processes, and whether the nodes have room for them. Does not import ray."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentrl.config.schema import ClusterConfig, PoolConfig
from agentrl.errors import ConfigError, ResourceError, did_you_mean


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

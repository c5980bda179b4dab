"""Resources of a Ray cluster, reserved with a deadline: one bundle for each process, on the node that was found for it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from agentrl.cluster.pool import ClusterNode, table
from agentrl.cluster.spread import Location, Unpooled, assign, demands
from agentrl.config.schema import PoolConfig
from agentrl.errors import ResourceError

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

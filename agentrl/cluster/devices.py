"""Which devices the processes of a run get: what is decided by GPUs is asked here, of the nodes that run the role.

The driver's machine decides for nothing but itself: a head node may have no card where the nodes have eight, or the reverse.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from agentrl.cluster.machine import usable_gpus
from agentrl.cluster.pool import ClusterNode
from agentrl.cluster.runtime import connected, join_to_ask
from agentrl.config.schema import ClusterConfig
from agentrl.errors import ResourceError
from agentrl.processor import usable_cpus


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
    from agentrl.cluster.reserve import cluster_nodes

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

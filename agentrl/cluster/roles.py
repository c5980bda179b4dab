"""Start the roles of a run where the config puts them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl.cluster.group import WorkerGroup
from agentrl.cluster.launch import launch
from agentrl.cluster.pool import check_roles
from agentrl.cluster.worker import Worker
from agentrl.config.schema import ClusterConfig
from agentrl.errors import AgentrlError


def launch_roles(
    cluster: ClusterConfig,
    classes: Mapping[str, type[Worker]],
    meshes: Mapping[str, Mapping[str, int]] | None = None,
    call_timeout: float | None = None,
) -> dict[str, WorkerGroup[Any]]:
    """One group per role. A role with a pool (`cluster.roles`) gets that pool's processes, shared with the
    pool's other roles; any other role gets `cluster.actors` processes of its own. With backend "inline",
    every role lives in this process.

    Raises ConfigError for an unknown pool and ResourceError if something does not fit, with a table of
    demand and supply; everything that was started is ended.
    """
    check_roles(cluster)
    axes = meshes or {}
    placed = {str(role) for role in cluster.roles} if cluster.backend == "ray" else set()
    pooled = {role: cls for role, cls in classes.items() if role in placed}
    groups: dict[str, WorkerGroup[Any]] = {}
    try:
        if pooled:
            from agentrl.cluster.placement import launch_in_pools

            groups |= launch_in_pools(cluster, pooled, axes, call_timeout)
        for role, cls in classes.items():
            if role not in pooled:
                groups[role] = launch(
                    cls,
                    backend=cluster.backend,
                    world_size=cluster.actors,
                    name=role,
                    mesh=axes.get(role),
                    startup_timeout=cluster.startup_timeout,
                    call_timeout=call_timeout,
                )
    except AgentrlError:
        for group in groups.values():
            group.close()
        raise
    return {role: groups[role] for role in classes}

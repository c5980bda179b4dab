"""Where the roles of a run are."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agentrl.config.schema.base import Frozen, NotNegative, NotNegativeInt, Positive, PositiveInt, Ranks, Seconds, Unit

Role = Literal["actor", "rollout", "reference", "critic", "reward_model", "teacher", "judge"]


class PoolConfig(Frozen):
    """A named set of processes for roles."""

    nodes: Annotated[PositiveInt, Unit("nodes")] = 1
    """On how many nodes."""
    per_node: Annotated[PositiveInt, Unit("processes")] = 1
    """How many on each node."""
    cpus: Annotated[Positive, Unit("CPU slots")] = 1.0
    """CPU slots of each process."""
    gpus: Annotated[NotNegative, Unit("GPUs")] = 0.0
    """GPUs of each process."""


class ClusterConfig(Frozen):
    """Where the roles run (docs/cluster.md)."""

    backend: Literal["ray", "inline"] = "ray"
    """Roles are Ray actors, or all in the driver process ("inline"), for one device or a debugger."""
    address: str | None = None
    """Of the Ray cluster to join: HEAD:6379, or "auto" for the one that this machine belongs to; by default `RAY_ADDRESS`, else
    this machine alone."""
    actors: Ranks = 1
    """Processes of a role that `roles` does not list."""
    startup_timeout: Seconds = 180.0
    """In which workers must be placed and started; a local Ray itself has as long to start."""
    call_timeout: Seconds = 3600.0
    """Limit of every call to a worker: one that hangs is reported by name, not waited for."""
    max_restarts: Annotated[NotNegativeInt, Unit("restarts")] = 2
    """How often the run starts again from the newest checkpoint after a worker died."""
    pools: dict[str, PoolConfig] = Field(default_factory=dict)
    """Sets of processes, by a name of your choice."""
    roles: dict[Role, str] = Field(default_factory=dict)
    """Which pool a role uses; roles in the same pool share its processes and take turns."""

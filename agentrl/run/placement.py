"""Placement of a run's roles: reserves its pools, and starts the actor's processes in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.cluster.group import WorkerGroup
from agentrl.cluster.roles import launch_roles
from agentrl.config import TrainConfig
from agentrl.errors import AgentrlError
from agentrl.run.engines import maker_of
from agentrl.train.actor import Actor
from agentrl.train.learner import mesh_of, separate_reference

if TYPE_CHECKING:
    from agentrl.cluster.placement import Pools


def roles_of(config: TrainConfig, engine_name: str) -> list[str]:
    """The roles of this run that have processes, by their names in `cluster.roles`."""
    present = {
        "actor": True,
        "rollout": maker_of(engine_name, config).processes() is not None,
        "reference": separate_reference(config),
        "critic": config.critic is not None,
        "reward_model": config.reward_model is not None,
    }
    return [role for role, used in present.items() if used]


def open_pools(config: TrainConfig, engine_name: str) -> Pools | None:
    """The run's pools, reserved. None if `cluster.roles` names none of the run's roles, or with backend "inline".

    Raises ResourceError, with a table of demand against supply, if they do not fit. Ray must be up.
    """
    roles = [role for role in roles_of(config, engine_name) if role in {str(name) for name in config.cluster.roles}]
    if config.cluster.backend != "ray" or not roles:
        return None
    from agentrl.cluster.placement import Pools

    return Pools(config.cluster, roles, config.cluster.call_timeout)


def start_actors(config: TrainConfig, pools: Pools | None) -> WorkerGroup[Actor]:
    """The actor's processes, in its pool if it has one."""
    mesh = mesh_of(config)
    if pools is None or "actor" not in pools:
        # Without `cluster.roles`: the pools that this run uses are reserved already, and none of them is the actor's.
        groups = launch_roles(
            config.cluster.model_copy(update={"roles": {}}), {"actor": Actor}, {"actor": mesh}, config.cluster.call_timeout
        )
        return groups["actor"]
    try:
        return pools.launch("actor", Actor, mesh)
    except AgentrlError:
        pools.close()
        raise

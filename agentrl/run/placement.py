"""Where a run's roles are placed: the config's pools checked against what the run uses, then reserved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.cluster.group import WorkerGroup
from agentrl.cluster.pool import check_roles, pools_of_roles
from agentrl.cluster.roles import launch_roles
from agentrl.config import TrainConfig
from agentrl.errors import AgentrlError, ConfigError
from agentrl.rollout.engine_maker import ENGINES, Processes
from agentrl.run.engines import maker_of
from agentrl.train.actor import Actor
from agentrl.train.learner import mesh_of

if TYPE_CHECKING:
    from agentrl.cluster.placement import Pools


def roles_of(config: TrainConfig, engine_name: str) -> list[str]:
    """The roles that this run has processes for, by the names of `cluster.roles`."""
    present = {
        "actor": True,
        "rollout": maker_of(engine_name, config).processes() is not None,
        "reference": config.algorithm.kl.coef > 0,
        "critic": config.critic is not None,
        "reward_model": config.reward_model is not None,
    }
    return [role for role, used in present.items() if used]


def check_placement(config: TrainConfig, engine_name: str) -> None:
    """Raise ConfigError for a role in an unknown pool, or in one of another size than the role's."""
    cluster = config.cluster
    check_roles(cluster)
    if cluster.backend != "ray":
        return
    engine = maker_of(engine_name, config).processes()
    if "rollout" in cluster.roles and engine is None:
        raise ConfigError(
            f"cluster.roles.rollout: the {engine_name} engine samples in the driver; set engine = {_with_processes(config)}"
        )
    found = pools_of_roles(cluster, roles_of(config, engine_name))
    for role, (name, pool) in found.items():
        slots = pool.nodes * pool.per_node
        wanted = {"actor": ("cluster.actors", cluster.actors)}
        if engine is not None:
            wanted["rollout"] = (engine.count_key, engine.count)
        key, count = wanted.get(role, ("", slots))
        if count != slots:
            raise ConfigError(
                f"cluster.pools.{name} has {slots} processes (nodes x per_node), but {key} = {count}: the "
                f"role {role!r} fills its pool, so set {key} = {slots}"
            )
        if role not in ("actor", "rollout"):
            mesh_of(config, slots)
    if "rollout" in found and engine is not None:
        _check_rollout(config, engine, found["rollout"][0], [role for role in found if role != "rollout"])


def _with_processes(config: TrainConfig) -> str:
    """The names of engines with processes of their own, for a message."""
    return " or ".join(f'"{entry.name}"' for entry in ENGINES.own() if entry.make(config).processes() is not None)


def _check_rollout(config: TrainConfig, engine: Processes, name: str, others: list[str]) -> None:
    pool = config.cluster.pools[name]
    roles = {str(role): pool for role, pool in config.cluster.roles.items()}
    beside = [role for role in others if roles[role] == name]
    if beside and pool.gpus:
        raise ConfigError(
            f"cluster.roles.rollout: {engine.what} cannot share the GPUs of {' and '.join(beside)} (pool "
            f"{name!r}); give it a pool of its own"
        )
    if pool.gpus and pool.gpus != engine.gpus:
        raise ConfigError(
            f"cluster.pools.{name}.gpus = {pool.gpus:g}, but {engine.what} uses {engine.gpus_key} = "
            f"{engine.gpus} GPUs: set them equal"
        )


def open_pools(config: TrainConfig, engine_name: str) -> Pools | None:
    """The run's pools, reserved; None if `cluster.roles` names none of its roles, and with backend "inline".

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
        groups = launch_roles(
            config.cluster.model_copy(update={"roles": {}}), {"actor": Actor}, {"actor": mesh}, config.cluster.call_timeout
        )
        return groups["actor"]
    try:
        return pools.launch("actor", Actor, mesh)
    except AgentrlError:
        pools.close()
        raise

"""Where a run's roles are placed: the config's pools checked against what the run uses, then reserved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.cluster.group import WorkerGroup
from agentrl.cluster.pool import check_roles, pools_of_roles
from agentrl.cluster.roles import launch_roles
from agentrl.config import TrainConfig
from agentrl.errors import AgentrlError, ConfigError
from agentrl.train.actor import Actor
from agentrl.train.learner import mesh_of

if TYPE_CHECKING:
    from agentrl.cluster.placement import Pools


def roles_of(config: TrainConfig, engine_name: str) -> list[str]:
    """The roles that this run has processes for, by the names of `cluster.roles`."""
    present = {
        "actor": True,
        "rollout": engine_name == "vllm",
        "reference": config.algorithm.kl.coef > 0,
        "critic": config.critic is not None,
        "reward_model": config.reward_model is not None,
    }
    return [role for role, used in present.items() if used]


def check_places(config: TrainConfig, engine_name: str) -> None:
    """Raise ConfigError for a role in an unknown pool, or in one of another size than the role's."""
    cluster = config.cluster
    check_roles(cluster)
    if cluster.backend != "ray":
        return
    if "rollout" in cluster.roles and engine_name != "vllm":
        raise ConfigError('cluster.roles.rollout: the embedded engine samples in the driver; set engine = "vllm"')
    found = pools_of_roles(cluster, roles_of(config, engine_name))
    for role, (name, pool) in found.items():
        slots = pool.nodes * pool.per_node
        wanted = {"actor": ("cluster.actors", cluster.actors), "rollout": ("vllm.replicas", config.vllm.replicas)}
        key, count = wanted.get(role, ("", slots))
        if count != slots:
            raise ConfigError(
                f"cluster.pools.{name} has {slots} processes (nodes x per_node), but {key} = {count}: the "
                f"role {role!r} fills its pool, so set {key} = {slots}"
            )
        if role not in ("actor", "rollout"):
            mesh_of(config, slots)
    if "rollout" in found:
        _check_rollout(config, found["rollout"][0], [role for role in found if role != "rollout"])


def _check_rollout(config: TrainConfig, name: str, others: list[str]) -> None:
    pool = config.cluster.pools[name]
    roles = {str(role): pool for role, pool in config.cluster.roles.items()}
    beside = [role for role in others if roles[role] == name]
    if beside and pool.gpus:
        raise ConfigError(
            f"cluster.roles.rollout: a vLLM replica cannot share the GPUs of {' and '.join(beside)} (pool "
            f"{name!r}); give it a pool of its own"
        )
    if pool.gpus and pool.gpus != config.vllm.tensor_parallel:
        raise ConfigError(
            f"cluster.pools.{name}.gpus = {pool.gpus:g}, but a replica uses vllm.tensor_parallel = "
            f"{config.vllm.tensor_parallel} GPUs: set them equal"
        )


def open_pools(config: TrainConfig, engine_name: str) -> Pools | None:
    """The run's pools, reserved; None where `cluster.roles` names none of its roles, and with backend "inline".

    Raises ResourceError, with a table of demand against supply, where they do not fit. Ray must be up.
    """
    roles = [role for role in roles_of(config, engine_name) if role in {str(name) for name in config.cluster.roles}]
    if config.cluster.backend != "ray" or not roles:
        return None
    from agentrl.cluster.placement import Pools

    return Pools(config.cluster, roles, config.cluster.call_timeout)


def start_actors(config: TrainConfig, pools: Pools | None) -> WorkerGroup[Actor]:
    """The actor's processes, in its pool where it has one."""
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

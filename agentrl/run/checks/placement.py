"""Checks of placement: the config's pools against the roles that the run uses."""

from __future__ import annotations

from agentrl.cluster.devices import has_gpus, joins
from agentrl.cluster.pool import check_roles, pools_of_roles
from agentrl.config import TrainConfig
from agentrl.config.schema import PoolConfig
from agentrl.errors import ConfigError
from agentrl.rollout.engine_maker import ENGINES, Processes
from agentrl.run.engines import maker_of
from agentrl.run.judges import ROLE as JUDGE
from agentrl.run.judges import judge_processes
from agentrl.run.placement import roles_of
from agentrl.train.role_layout import mesh_of
from agentrl.weights.route import ROUTES


def check_placement(config: TrainConfig, engine_name: str) -> None:
    """Raise ConfigError if a role's pool is unknown or has another number of processes than the role, for several
    actors in the driver's process, for a weight route that does not leave a process if there are several, and for the address of
    a cluster that no part of the run would join.

    Reads: cluster, model.lora, engine_args, vllm, algorithm.kl.coef, algorithm.distillation, critic, reward_model,
    model.sequence_parallel, model.tensor_parallel, model.expert_parallel, rollout.colocate, weights.route, reward.judge.engines.
    """
    cluster = config.cluster
    _check_one_process(config, engine_name)
    check_roles(cluster)
    if "reference" in cluster.roles and config.model.lora is not None:
        raise ConfigError(
            "cluster.roles.reference: with [model.lora] the reference is the actor's own model without its adapter, so it has no "
            "processes to place; remove the role"
        )
    if cluster.backend != "ray":
        if cluster.actors > 1:
            raise ConfigError(
                f"cluster.actors = {cluster.actors}: the driver's process has room for one, because torch.distributed has one "
                'rank per process: set cluster.actors = 1 or cluster.backend = "ray"'
            )
        _check_inline(config, engine_name)
        return
    engine = maker_of(engine_name, config).processes()
    if "rollout" in cluster.roles and engine is None:
        raise ConfigError(
            f"cluster.roles.rollout: the {engine_name} engine samples in the driver; set engine = {_with_processes(config)}"
        )
    if JUDGE in cluster.roles and not judge_processes(config):
        raise ConfigError(
            f"cluster.roles.{JUDGE}: no judge has processes to place; remove the role, or set reward.judge.engines.NAME.engine = "
            f"{_with_processes(config)}"
        )
    pools = pools_of_roles(cluster, roles_of(config, engine_name))
    colocated = engine is not None and config.rollout.colocate
    for role, (name, pool) in pools.items():
        slots = pool.nodes * pool.per_node
        wanted = {"actor": ("cluster.actors", cluster.actors)}
        if engine is not None and not (colocated and pool.gpus):
            wanted["rollout"] = (engine.count_key, engine.count)
        key, count = wanted.get(role, ("", slots))
        if count != slots:
            raise ConfigError(
                f"cluster.pools.{name} has {slots} processes (nodes x per_node), but {key} = {count}: the "
                f"role {role!r} fills its pool, so set {key} = {slots}"
            )
        if role == JUDGE:
            _check_judges(config, name, [other for other in pools if other != JUDGE])
            continue
        if role not in ("actor", "rollout"):
            mesh_of(config, slots)
        if role != "rollout":
            _check_gpus(name, pool)
    if engine is not None and colocated and has_gpus(cluster, "actor"):
        _check_colocated(config, engine)
    elif "rollout" in pools and engine is not None:
        _check_rollout(config, engine, pools["rollout"][0], [role for role in pools if role != "rollout"])


def _check_one_process(config: TrainConfig, engine_name: str) -> None:
    route, cluster = config.weights.route, config.cluster
    samples = maker_of(engine_name, config).processes() is not None
    if route in ROUTES and "one_process" in ROUTES.entry(route).traits:
        if cluster.backend == "ray":
            why, instead = 'cluster.backend = "ray" trains in processes of its own', 'cluster.backend = "inline"'
        else:
            why, instead = f"engine = {engine_name} samples in processes of its own", "an engine in the driver"
        if samples or cluster.backend == "ray":
            raise ConfigError(f'weights.route = "{route}" stays within a process, and {why}; use "auto", or {instead}')
    if cluster.address and cluster.backend == "inline" and not samples:
        raise ConfigError(
            f'cluster.address = "{cluster.address}": with cluster.backend = "inline" and engine = {engine_name} all of the run '
            'is in this process, which joins no cluster; set cluster.backend = "ray", or cluster.address = ""'
        )


def _check_inline(config: TrainConfig, engine_name: str) -> None:
    """Ray gives an engine's process the first GPU, not knowing that the driver computes on it."""
    engine = maker_of(engine_name, config).processes()
    judges = judge_processes(config)
    if judges and not joins(config.cluster) and has_gpus(config.cluster, JUDGE):
        raise ConfigError(
            f'cluster.backend = "inline": the driver trains on the first GPU, and judge {next(iter(judges))} would get the same '
            'one; set cluster.backend = "ray", or engine = "embedded" for the judge'
        )
    if engine is None or config.rollout.colocate or joins(config.cluster) or not has_gpus(config.cluster, "rollout"):
        return
    raise ConfigError(
        f'cluster.backend = "inline": the driver trains on the first GPU, and {engine.what} would get the same one; set '
        'cluster.backend = "ray" (each then has its own), rollout.colocate = true (they take turns), or engine = "embedded"'
    )


def _with_processes(config: TrainConfig) -> str:
    """The names of the engines that have their own processes, for a message."""
    return " or ".join(f'"{entry.name}"' for entry in ENGINES.own() if entry.make(config).processes() is not None)


def _check_rollout(config: TrainConfig, engine: Processes, name: str, others: list[str]) -> None:
    pool = config.cluster.pools[name]
    roles = {str(role): pool for role, pool in config.cluster.roles.items()}
    beside = [role for role in others if roles[role] == name]
    if beside and pool.gpus:
        raise ConfigError(
            f"cluster.roles.rollout: {engine.what} cannot share the GPUs of {' and '.join(beside)} (pool "
            f"{name!r}); give it a separate pool, or set rollout.colocate = true"
        )
    if pool.gpus and pool.gpus != engine.gpus:
        raise ConfigError(
            f"cluster.pools.{name}.gpus = {pool.gpus:g}, but {engine.what} uses {engine.gpus_key} = "
            f"{engine.gpus} GPUs: set them equal"
        )


def _check_judges(config: TrainConfig, name: str, others: list[str]) -> None:
    """Judges share a pool with no other role that has GPUs there, and fill it together."""
    pool, roles = config.cluster.pools[name], {str(role): pool for role, pool in config.cluster.roles.items()}
    processes = judge_processes(config)
    count, slots = sum(one.count for one in processes.values()), pool.nodes * pool.per_node
    if beside := [role for role in others if roles[role] == name]:
        raise ConfigError(
            f"cluster.roles.{JUDGE}: judges cannot share the processes of {' and '.join(beside)} (pool {name!r}); give them a "
            "pool of their own"
        )
    if count != slots:
        keys = ", ".join(f"reward.judge.engines.{judge}.{one.count_key} = {one.count}" for judge, one in processes.items())
        raise ConfigError(f"cluster.pools.{name} has {slots} processes (nodes x per_node), but the judges have {count} ({keys})")
    for judge, one in processes.items():
        if pool.gpus and pool.gpus != one.gpus:
            raise ConfigError(
                f"cluster.pools.{name}.gpus = {pool.gpus:g}, but judge {judge} uses reward.judge.engines.{judge}."
                f"{one.gpus_key} = {one.gpus} GPUs: set them equal"
            )


def _check_gpus(name: str, pool: PoolConfig) -> None:
    """A rank computes on one GPU; two of one role cannot share it, because NCCL refuses that."""
    if pool.gpus not in (0.0, 1.0) and not (pool.gpus < 1 and pool.nodes * pool.per_node == 1):
        raise ConfigError(
            f"cluster.pools.{name}.gpus = {pool.gpus:g}: each rank trains on one GPU of its own, so set it to 1 (or to 0, to "
            "train on CPUs), and per_node to the number of GPUs; only a pool of one process may use a part of one"
        )


def _check_colocated(config: TrainConfig, engine: Processes) -> None:
    """Each of the engine's processes uses the GPUs of as many actors, on one node."""
    cluster, gpus = config.cluster, engine.gpus
    train, sample = cluster.roles.get("actor"), cluster.roles.get("rollout", cluster.roles.get("actor"))
    if sample != train:
        raise ConfigError(
            f"rollout.colocate: the engine uses the actors' GPUs, but cluster.roles has rollout = {sample!r} and "
            f"actor = {train!r}"
        )
    if engine.count * gpus != cluster.actors:
        raise ConfigError(
            f"rollout.colocate: {engine.what} uses the GPUs of {engine.gpus_key} = {gpus} actors, so {engine.count_key} = "
            f"{engine.count} need {engine.count * gpus} of them: set cluster.actors = {engine.count * gpus}, or "
            f"{engine.count_key} to cluster.actors / {engine.gpus_key}"
        )
    if train is not None and cluster.pools[train].per_node % gpus:
        raise ConfigError(
            f"cluster.pools.{train}.per_node = {cluster.pools[train].per_node}: with rollout.colocate it must be a multiple of "
            f"{engine.gpus_key} = {gpus}, so that the GPUs of {engine.what} are on one node"
        )

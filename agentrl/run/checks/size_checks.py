"""Checks of sizes: free resources, sizes that fit each other and the model, pools, rollout workers, service engines."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from statistics import NormalDist

from agentrl.cluster.placement import (
    WORKER_CPUS,
    card_bytes,
    check_roles,
    has_gpus,
    is_planned,
    joins,
    node_need,
    nodes_of,
    pools_of_roles,
)
from agentrl.config import ClusterConfig, ModelConfig, TrainConfig
from agentrl.config.schema import DataConfig, OptimConfig
from agentrl.engines.weights.base import ROUTES
from agentrl.reward.leaf import SERVICES
from agentrl.rollout.engine import ENGINES, PROCESS_MIB, Processes
from agentrl.run.assembly import RunStart, model_length
from agentrl.run.checks.model_checks import model_notes
from agentrl.run.engine_choice import EngineChoice
from agentrl.run.role_placement import RunMemory, RunRoles
from agentrl.trainer.algorithms.advantages import ADVANTAGES
from agentrl.trainer.algorithms.losses import POLICY_LOSSES
from agentrl.trainer.optim import MATRIX, Task, optims_of, usual_rate
from agentrl.trainer.pretrained import count_parameters, head_dim
from agentrl.trainer.train_engine import check_on_host, mesh_of
from agentrl.trainer.update import stale_problem
from agentrl.utils.errors import ConfigError, ResourceError
from agentrl.utils.processor import usable_cpus, usable_memory
from agentrl.utils.search_path import pack_given, used_names

# Free resources

MIN_DISK_MIB = 200
MIN_MEMORY_MIB = 1500
MEMORY_PER_PROCESS_MIB = PROCESS_MIB


def check_capacity(start: RunStart) -> None:
    """Raise ResourceError if disk, memory or cores are too small for the config."""
    out = Path(start.config.out)
    folder = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    free = shutil.disk_usage(folder).free >> 20
    if free < MIN_DISK_MIB:
        raise ResourceError(f"{out}: {free} MiB of disk are free, {MIN_DISK_MIB} MiB are needed; free some space or set out=DIR")
    if not os.access(folder, os.W_OK):
        raise ResourceError(f"{folder}: no permission to write; set out=DIR")
    config, cluster, roles = start.config, start.config.cluster, RunRoles(start.engine)
    engine, extra, away = roles.engine, start.engine.worker_processes(), joins(cluster)
    need = MIN_MEMORY_MIB
    if not away:  # processes on a cluster use the memory of its nodes
        need += MEMORY_PER_PROCESS_MIB * (cluster.actors + extra) if cluster.backend == "ray" else 0
        need += sum(one.count * one.mib for one in ([] if engine is None else [engine]) + [own for _, own in roles.side])
    free = usable_memory().free >> 20
    if free < need:
        lower = ["cluster.actors", *(["rollout.workers"] if extra else []), *(engine.lower if engine is not None else ())]
        raise ResourceError(
            f"{free} MiB of memory are free, about {need} MiB are needed for {cluster.actors} actor(s) and the "
            f"{config.engine} engine{f' and {config.rollout.workers} rollout workers' if config.rollout.workers else ''}; lower "
            f"{' or '.join(lower)}, or use cluster.backend=inline"
        )
    if cluster.backend != "ray":
        return
    cores, side = usable_cpus(), {one.name: own.count for one, own in roles.side}
    processes = cluster.actors + (engine.count if engine is not None else 0) + sum(side.values())
    # Driver, actors and engine often wait for each other, so up to two processes per core make progress.
    if not away and processes > 2 * cores:
        raise ResourceError(
            f"{cores} cores cannot run {processes} worker processes (cluster.actors={cluster.actors}"
            f"{f', {engine.count_key}={engine.count}' if engine is not None else ''}"
            f"{''.join(f', {name}: {count}' for name, count in side.items())}); at most {2 * cores} fit"
        )
    roles.check_room()
    slots = sum(int(node.cpus) for node in nodes_of(cluster, "actor"))
    if "actor" not in cluster.roles and cluster.actors > slots:
        where = "the cluster" if away else "this machine"
        raise ResourceError(
            f"cluster.actors = {cluster.actors}: each takes a CPU slot of its own, and {where} has {slots} of them; lower "
            "cluster.actors, or place the actors in a pool whose `cpus` is less than 1"
        )


# Sizes

LARGE = 100_000_000
"""Parameters from which a model gets a warning about learning rates meant for tiny models."""

HIGH, LOW = 30.0, 10.0
"""A learning rate above HIGH times the usual one, or at most 1/LOW of it, gives a warning (also RL's 1e-6 for supervised
training); working recipes are closer."""
WORDS: dict[Task, str] = {
    "rl": "reinforcement learning",
    "critic": "a critic",
    "sft": "supervised training",
    "dpo": "training on pairs",
    "reward": "a reward model",
}


def check_sizes(start: RunStart) -> None:
    """Raise ConfigError for sizes that cannot work.

    Causes: groups too small to compare, rows longer than a micro-batch, attention heads without a kernel in the engine, and keys
    that free GPU memory without GPUs."""
    config = start.config
    check_heads(start.engine)
    if not has_gpus(config.cluster, "actor"):
        check_on_host(config.model)
    rollout, size = config.rollout, config.rollout.group_size
    distillation, advantage = config.algorithm.distillation, config.algorithm.advantage
    if distillation is None or distillation.reward_coef > 0:
        needs = ADVANTAGES.entry(advantage.name).needs
        if size == 1 and "group" in needs:
            raise ConfigError(
                f'rollout.group_size = 1: algorithm.advantage "{advantage.name}" compares the episodes of a group, so every '
                "advantage would be 0; set rollout.group_size to 2 or more, or use one of "
                f"{ADVANTAGES.that_are('group', False)}"
            )
        k = ADVANTAGES.arguments(advantage.name, advantage.args)["k"] if "group_over_k" in needs else 0
        if size <= k:
            raise ConfigError(
                f'rollout.group_size = {size}: algorithm.advantage "{advantage.name}" chooses k = {k} episodes of a group and '
                f"needs more; set rollout.group_size to at least {k + 1}, or lower algorithm.advantage.args.k"
            )
    context = start.engine.maker().context(model_length(config.model))
    longest = min(rollout.max_episode_tokens, context)
    if config.optim.micro_tokens < longest and (config.trained_envs or not config.envs):  # evaluated rows do not count
        raise ConfigError(
            f"optim.micro_tokens = {config.optim.micro_tokens}: an episode may have {longest} tokens (rollout.max_episode_tokens "
            f"= {rollout.max_episode_tokens}, the model takes {context}), and a row is never cut: set optim.micro_tokens to "
            f"at least {longest}, or lower rollout.max_episode_tokens"
        )


def check_heads(engine: EngineChoice) -> None:
    """Raise ConfigError if the engine has no attention kernel for the model's head size on its nodes."""
    sizes, config, init = engine.maker().heads(), engine.config, engine.config.model.init
    if sizes is None:
        return
    key, size = (
        ("model.path", head_dim(str(config.model.path), config.model.trust_remote_code))
        if init is None
        else ("model.init.head_dim", init.head_dim)
    )
    if size is not None and size not in sizes:
        what = f"{key} = {size}" if init is not None else f"{key} = {config.model.path}: its attention heads have size {size}"
        fine = [e.name for e in ENGINES.own() if "messages" not in e.traits and e.make(config).heads() is None]
        others = " or ".join(f"engine={name}" for name in fine)
        raise ConfigError(
            f"{what}: on the nodes that run it, engine={engine.name} supports head sizes {', '.join(map(str, sizes))}, and "
            f"crashes at the first request with others; use {others}, or a model with such heads"
        )


def check_cache(start: RunStart) -> None:
    """Raise ConfigError or ResourceError if the engine's cache cannot hold a sequence, on this machine's GPUs or by
    `engine_args`. Does not ask the GPUs of a cluster, which may be in use until the run has them."""
    if is_planned():
        return  # the plan counts the cards of another machine
    config = start.config
    cards = not joins(config.cluster) and has_gpus(config.cluster, "rollout")
    card = card_bytes(config.cluster) if cards else None
    if card is not None or "kv_cache_mib" in config.engine_args:
        RunMemory(start.engine, card).engine()


def rate_notes(model: ModelConfig, data: DataConfig | None, optims: Mapping[str, OptimConfig]) -> list[str]:
    """Return warnings (key, value, recommendation) about learning rates far from the usual ones."""
    scratch = model.init is not None
    if not scratch and model.path is None:
        return []
    task: Task = "rl" if data is None else data.loss
    tasks: dict[str, Task] = {"optim": task, "critic": "critic", "sft": "sft"}
    rates = [
        (f"{at}.{key}", lr, tasks[at], usual_rate(tasks[at], model) * (1.0 if key == "lr" else MATRIX))
        for at, optim in optims.items()
        if optim.name != "sgd"  # its step size depends on the gradient
        for key, lr in (("lr", optim.lr), ("matrix_lr", optim.matrix_lr))
        if lr is not None
    ]
    far = [one for one in rates if one[1] > HIGH * one[3] or one[1] < 1.001 * one[3] / LOW]
    size = 0
    # Count only now, because counting builds the model's skeleton. Below LARGE both kinds of rates are right.
    if not far or (not scratch and (size := count_parameters(str(model.path), model.trust_remote_code)) < LARGE):
        return []
    kind = "" if model.lora is None else " with LoRA"
    what = f"a model of random weights{kind}" if scratch else f"{size / 1e6:,.0f}M parameters{kind}"
    return [
        f"{key} = {lr:g} is {'high' if lr > usual else 'low'} for {WORDS[task]} of {what}: {usual:g} is a good start "
        "(docs/hyperparameters.md)"
        for key, lr, task, usual in far
    ]


def warmup_notes(config: TrainConfig) -> list[str]:
    """A warning for a learning rate that still rises when the run ends: a resume with more steps would make it right."""
    warmup, steps = config.optim.warmup, config.steps
    if warmup <= steps or config.data is not None:
        return []
    return [
        f"optim.warmup = {warmup} is above steps = {steps}: the learning rate rises to the end and stays below optim.lr; lower "
        "optim.warmup, or raise steps"
    ]


MISMATCH = 2e-4
"""KL per token between engine and trainer in bfloat16; measured: 1.2e-4 to 3.7e-4 (docs/moe.md, benchmarks/results)."""
MANY = 0.05


def sequence_ratio_notes(start: RunStart) -> list[str]:
    """Return a warning if engine mismatch alone puts many sequence ratios outside the bounds of the loss, with their share.

    With a KL of k per token, log ratios of sampled tokens have mean -k and variance 2 k (to first order k3 is k, and the mean
    ratio is 1); their mean over n tokens has variance 2 k / n. PPO's minimum drops the gradient beyond one bound: the upper one
    for A > 0, the lower one for A < 0, assumed to be equally frequent.
    """
    config, algorithm = start.config, start.config.algorithm
    name, traits = algorithm.loss.name, POLICY_LOSSES.entry(algorithm.loss.name).traits
    if algorithm.proximal != "behaviour" or "sequence_ratio" not in traits:
        return []
    if config.model.computes_in(has_gpus(config.cluster, "actor")) == "float32":  # both compute the same numbers
        return []
    args = POLICY_LOSSES.arguments(name, algorithm.loss.args)
    low, high = (math.inf if args.get(key) is None else float(args[key]) for key in ("clip_low", "clip_high"))
    by_token = "clips_tokens" in traits
    lower, upper = (-low, high) if by_token else (math.log1p(-low) if low < 1 else -math.inf, math.log1p(high))

    def outside(tokens: int) -> float:
        mean = NormalDist(-MISMATCH, math.sqrt(2 * MISMATCH / tokens))
        return (mean.cdf(lower) + 1 - mean.cdf(upper)) / 2

    longest = config.longest_sample()
    lengths = [1] if by_token else [max(longest // 16, 1), longest]
    shares = [outside(tokens) for tokens in lengths]
    if max(shares) < MANY:
        return []
    of = ["tokens"] if by_token else [f"sequences of {tokens:,} sampled tokens" for tokens in lengths]
    lost = " and ".join(f"{share:.0%} of {what}" for share, what in zip(shares, of, strict=True))
    return [
        f'algorithm.proximal = "behaviour": the bounds of "{name}" (-{low:g}, +{high:g}) are narrower than the mismatch of '
        f"engine and trainer; at a KL of {MISMATCH:g} per token, {lost} have no gradient before any step. "
        'Set algorithm.proximal = "recompute", or widen the bounds'
    ]


def start_notes(start: RunStart) -> list[str]:
    """Return warnings of a start and of a dry run: learning rates, stale tokens, sequence ratios, and model files.
    Skips the files if the run is planned for another machine or only the model's shape is known."""
    config, path = start.config, start.config.model.path
    shape = path is not None and Path(path).is_dir() and not any(Path(path).glob("tokenizer*"))
    rates = rate_notes(config.model, config.data, optims_of(config))
    stale, why = config.rollout.max_staleness, stale_problem(config.algorithm)
    older = [f"rollout.max_staleness = {stale}: tokens of older weights are trained as new ones: {why}"] if stale and why else []
    files = [] if shape or is_planned() else model_notes(start)
    return [*rates, *warmup_notes(config), *older, *sequence_ratio_notes(start), *files]


# Places


def check_placement(start: RunStart) -> None:
    """Raise ConfigError for an impossible placement.

    Causes: an unknown pool, or one of another size than its role; several actors in the driver's process; a weight route within
    one process if there are several; the address of a cluster that no part of the run would join."""
    config, cluster, places = start.config, start.config.cluster, RunRoles(start.engine)
    engine, route, name = places.engine, config.weights.route, start.engine.name
    if route in ROUTES and "one_process" in ROUTES.entry(route).traits and (engine is not None or cluster.backend == "ray"):
        why, instead = f"engine = {name} samples in processes of its own", "an engine in the driver"
        if cluster.backend == "ray":
            why, instead = 'cluster.backend = "ray" trains in processes of its own', 'cluster.backend = "inline"'
        raise ConfigError(f'weights.route = "{route}" stays within a process, and {why}; use "auto", or {instead}')
    if cluster.address and cluster.backend == "inline" and engine is None:
        raise ConfigError(
            f'cluster.address = "{cluster.address}": with cluster.backend = "inline" and engine = {name} all of the run '
            'is in this process, which joins no cluster; set cluster.backend = "ray", or cluster.address = ""'
        )
    check_roles(cluster)
    if "reference" in cluster.roles and config.model.lora is not None:
        raise ConfigError(
            "cluster.roles.reference: with [model.lora] the reference is the actor's own model without its adapter, so it has no "
            "processes to place; remove the role"
        )
    if cluster.backend == "ray":
        _check_pools(places)
        return
    if cluster.actors > 1:
        raise ConfigError(
            f"cluster.actors = {cluster.actors}: the driver's process has room for one, because torch.distributed has one "
            'rank per process: set cluster.actors = 1 or cluster.backend = "ray"'
        )
    # Ray would give an engine's process the first GPU, because it does not know that the driver uses it.
    both = 'cluster.backend = "inline": the driver trains on the first GPU, and {} would get the same one; set {}'
    side = [one for one, _ in places.side]
    if side and not joins(cluster) and has_gpus(cluster, side[0].role):
        raise ConfigError(both.format(side[0].name, f'cluster.backend = "ray", or {side[0].key}.engine = "embedded"'))
    if engine is not None and not config.rollout.colocate and not joins(cluster) and has_gpus(cluster, "rollout"):
        ways = (
            'cluster.backend = "ray" (each then has its own), rollout.colocate = true (they take turns), or engine = "embedded"'
        )
        raise ConfigError(both.format(engine.what, ways))


def _check_pools(places: RunRoles) -> None:
    """Raise ConfigError if a role's processes do not fill its pool, or roles cannot share GPUs."""
    config, cluster, engine = places.config, places.cluster, places.engine

    def names() -> str:
        """List engines with their own processes; only for messages, because it reads the model."""
        return " or ".join(f'"{one.name}"' for one in ENGINES.own() if one.make(config).processes() is not None)

    if "rollout" in cluster.roles and engine is None:
        raise ConfigError(f"cluster.roles.rollout: the {places.choice.name} engine samples in the driver; set engine = {names()}")
    side_roles = {one.role for one, _ in places.side}
    if idle := [role for role in cluster.roles if role in SERVICES and role not in side_roles]:
        raise ConfigError(
            f"cluster.roles.{idle[0]}: no {idle[0]} has processes to place; remove the role, or set "
            f"reward.{idle[0]}.engines.NAME.engine = {names()}"
        )
    pools = pools_of_roles(cluster, places.names)
    if unused := cluster.pools.keys() - {name for name, _ in pools.values()}:
        roles = ", ".join(places.names)
        raise ConfigError(f"cluster.pools.{min(unused)}: no role uses it (of {roles}). Name it in [cluster.roles], or remove it")
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
        if role in side_roles:
            _check_side_pool(places, role, name, [other for other in pools if other != role])
            continue
        if role not in ("actor", "rollout"):
            mesh_of(config.model, config.cluster, slots)
        # A rank computes on one GPU; NCCL does not let two ranks of a role share it.
        if role != "rollout" and pool.gpus not in (0.0, 1.0) and not (pool.gpus < 1 and slots == 1):
            raise ConfigError(
                f"cluster.pools.{name}.gpus = {pool.gpus:g}: each rank trains on one GPU of its own, so set it to 1 (or to 0, to "
                "train on CPUs), and per_node to the number of GPUs; only a pool of one process may use a part of one"
            )
    if engine is not None and (colocated or "rollout" in pools):
        _check_engine_pool(cluster, engine, colocated, pools)


def _check_engine_pool(cluster: ClusterConfig, engine: Processes, colocated: bool, pools: Collection[str]) -> None:
    """Raise ConfigError if the engine's processes do not fit: colocated on the actors' GPUs of one node, else on their own."""
    gpus, train = engine.gpus, cluster.roles.get("actor")
    if colocated and has_gpus(cluster, "actor"):
        sample = cluster.roles.get("rollout", train)
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
                f"cluster.pools.{train}.per_node = {cluster.pools[train].per_node}: with rollout.colocate it must be a multiple "
                f"of {engine.gpus_key} = {gpus}, so that the GPUs of {engine.what} are on one node"
            )
    elif "rollout" in pools:
        roles = {str(role): pool for role, pool in cluster.roles.items()}
        name = roles["rollout"]
        pool = cluster.pools[name]
        sharing = [role for role in pools if role != "rollout" and roles[role] == name]
        if sharing and pool.gpus:
            raise ConfigError(
                f"cluster.roles.rollout: {engine.what} cannot share the GPUs of {' and '.join(sharing)} (pool "
                f"{name!r}); give it a separate pool, or set rollout.colocate = true"
            )
        if pool.gpus and pool.gpus != gpus:
            raise ConfigError(
                f"cluster.pools.{name}.gpus = {pool.gpus:g}, but {engine.what} uses {engine.gpus_key} = {gpus} GPUs: set them "
                "equal"
            )


def _check_side_pool(places: RunRoles, role: str, name: str, others: list[str]) -> None:
    """Raise ConfigError unless a service's engines have a pool without other roles and fill it together."""
    pool, roles = places.cluster.pools[name], {str(role): pool for role, pool in places.cluster.roles.items()}
    engines = [(one, need) for one, need in places.side if one.role == role]
    count, slots = sum(need.count for _, need in engines), pool.nodes * pool.per_node
    if sharing := [other for other in others if roles[other] == name]:
        raise ConfigError(
            f"cluster.roles.{role}: {role}s cannot share the processes of {' and '.join(sharing)} (pool {name!r}); give them a "
            "pool of their own"
        )
    if count != slots:
        keys = ", ".join(f"{one.key}.{need.count_key} = {need.count}" for one, need in engines)
        raise ConfigError(f"cluster.pools.{name} has {slots} processes (nodes x per_node), but the {role}s have {count} ({keys})")
    for one, need in engines:
        if pool.gpus and pool.gpus != need.gpus:
            raise ConfigError(
                f"cluster.pools.{name}.gpus = {pool.gpus:g}, but {one.name} uses {one.key}.{need.gpus_key} = {need.gpus} GPUs: "
                "set them equal"
            )


# Rollout workers


def check_workers(start: RunStart) -> None:
    """Raise ConfigError for workers in a one-process run, for fewer concurrent API calls than workers, and for Python objects
    that cannot be sent to other processes. Raises ResourceError if the nodes have too few CPU slots, also for the actors."""
    config, workers = start.config, start.config.rollout.workers
    table = config.model_dump(mode="json", exclude_none=True)
    if workers or config.cluster.backend == "ray":  # actors need losses, workers also environments and rewards
        pack_given(used_names(table if workers else table["algorithm"]))
    if not workers:
        return
    if config.cluster.backend != "ray":
        raise ConfigError(
            f'rollout.workers = {workers}: with cluster.backend = "inline" all of the run is in this process; set '
            'cluster.backend = "ray", or rollout.workers = 0'
        )
    calls = "messages" in start.engine.traits or config.rollout.summary_model is not None
    if calls and config.api.concurrency < workers:
        raise ConfigError(
            f"api.concurrency = {config.api.concurrency} concurrent calls are shared by rollout.workers = {workers}, so some of "
            "them get none; raise the first or lower the second"
        )
    if is_planned():
        return
    # The nodes need CPU slots for the workers in addition to the run's other processes.
    roles, cluster, extra = RunRoles(start.engine), config.cluster, start.engine.worker_processes()
    slots, taken = sum(node.cpus for node in nodes_of(cluster, "actor")), 0.0
    if start.purpose == "train":
        pools, unpooled = pools_of_roles(cluster, roles.with_pool), roles.without_pool
        taken = sum(node_need(pool)[0] * pool.nodes for pool in dict(pools.values()).values())
        taken += sum(one.cpus * one.count for one in unpooled.values())
        # Without GPUs, too, each actor takes a slot.
        taken += 0 if "actor" in {*pools, *unpooled} else cluster.actors
    if extra * WORKER_CPUS > slots - taken:
        raise ResourceError(
            f"rollout.workers = {extra}: each takes {WORKER_CPUS:g} CPU slots, and of {slots:g} the run's other processes "
            f"take {taken:g}; lower rollout.workers to {max(int((slots - taken) / WORKER_CPUS), 0)}, or add nodes"
        )

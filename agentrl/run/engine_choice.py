"""Choice of a run's engine (registry: rollout/engine.py); imports only the chosen backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from agentrl.cluster.placement import has_gpus, is_planned, node_need, nodes_of
from agentrl.config import TrainConfig
from agentrl.rollout.engine import ENGINES, Engine, EngineMaker
from agentrl.run.services import RunServices
from agentrl.trainer.pretrained import model_context, named_anywhere
from agentrl.utils.processor import threads_for
from agentrl.utils.registry import Entry

if TYPE_CHECKING:
    from agentrl.cluster.placement import Pools


AUTO = "auto"


class EngineChoice:
    """The engine that a config chooses, before it is made, and the consequences. `name`: of another engine to use instead."""

    def __init__(self, config: TrainConfig, name: str | None = None) -> None:
        self.config = config
        if name is not None:
            self.name = name

    @cached_property
    def name(self) -> str:
        """Name of the engine: the one that claims the model (`api:NAME`), else the key `engine`.

        `auto` is the engine that best suits the GPUs available to it (vLLM if there are any, else embedded): those of its pool,
        or those that the trainer leaves free. With `rollout.colocate` engine and trainer use the same GPUs. Raises ConfigError
        for an unknown name, DependencyError if a package of the engine is missing, ResourceError if the cluster's nodes do not
        answer.
        """
        config, cluster = self.config, self.config.cluster
        if claiming := claiming_engine(config.model.path):
            return claiming.name
        if config.engine != AUTO:
            maker = ENGINES.entry(config.engine).make
            if not is_planned():
                maker.check_installed()
            return config.engine
        if cluster.backend == "ray" and (pool := cluster.pools.get(cluster.roles.get("rollout", ""))) is not None:
            return _best_for(node_need(pool)[1] * pool.nodes)
        available = sum(node.gpus for node in nodes_of(cluster, "actor"))
        if config.rollout.colocate:
            return _best_for(available)
        if cluster.backend == "inline":  # the driver uses a GPU without a reservation in Ray
            return _best_for(0.0)
        placed = {pool for pool in cluster.roles.values() if pool in cluster.pools}
        taken = sum(node_need(cluster.pools[name])[1] * cluster.pools[name].nodes for name in placed)
        return _best_for(available - taken - (0 if "actor" in cluster.roles else cluster.actors))

    @property
    def traits(self) -> frozenset[str]:
        """Traits of the engine in the registry. Raises as `name`."""
        return ENGINES.entry(self.name).traits

    def maker(self) -> EngineMaker:
        """Make the engine's maker, with `engine_args` unless it claims the model. Raises ConfigError for a wrong argument."""
        args = {} if claiming_engine(self.config.model.path) else self.config.engine_args
        maker: EngineMaker = ENGINES.bind(self.name, args)(self.config.widest())
        maker.cuda = partial(has_gpus, self.config.cluster, "rollout")
        return maker

    def make(self, model: str, pools: Pools | None = None, unused: Sequence[int] = (), room: int | None = None) -> Engine:
        """Make the engine without starting it. `model`: folder or hub name; `pools`: the engine's processes run in the pool of
        the role "rollout"; `unused`: token ids that are never sampled; `room`: bytes of its GPU that it may use
        (run/role_placement.py)."""
        maker = self.maker()
        maker.unused, maker.room = unused, room
        processes = maker.processes()
        ray_options: Sequence[Mapping[str, Any]] = ()
        if pools is not None and processes is not None and "rollout" in pools:
            ray_options = pools.ray_options("rollout", processes.gpus)
        return maker.make(named_anywhere(model), model_context(model, self.config.model.trust_remote_code), ray_options)

    def without_trainer(self) -> TrainConfig:
        """Return the config of a command without training, in which `auto` is the engine that suits all GPUs. Raises
        ResourceError if the cluster's nodes do not answer."""
        config = self.config
        if config.engine != AUTO or claiming_engine(config.model.path):
            return config
        gpus = sum(node.gpus for node in nodes_of(config.cluster, "actor"))
        return config.model_copy(update={"engine": _best_for(gpus)})

    def samples_on_ray(self) -> bool:
        """Return True if the run's engine or a service's engine needs Ray."""
        names = [self.name, *(one.engine for one in RunServices(self.config).engines())]
        return any("ray" in ENGINES.entry(name).needs for name in names)

    def worker_processes(self) -> int:
        """Return the number of rollout workers outside of the engine's processes."""
        workers = self.config.rollout.workers
        return workers - self.maker().seats() if workers else 0

    def with_threads(self, trains: bool = True, samples: bool = True) -> TrainConfig:
        """Return the config with `model.threads = "auto"` resolved, the same for all processes of trainer and engine.

        In a synchronous run trainer and engine alternate, so each uses all cores; in an asynchronous run they share them.
        `trains`, `samples`: whether a trainer and an engine compute; a warm start only trains.
        """
        config = self.config
        if config.model.threads != "auto":
            return config
        pool = config.cluster.pools.get(str(config.cluster.roles.get("actor")))
        actors = 1 if config.cluster.backend == "inline" else config.cluster.actors
        training = (actors if pool is None else pool.nodes * pool.per_node) if trains else 0
        sampling = 0
        if samples and config.data is None:  # count processes of the run's engine and of the services' engines
            engine = self.maker().processes()
            sampling = len(RunServices(config).engines()) + (1 if engine is None else engine.count * max(engine.gpus, 1))
        at_once = sampling + training if config.rollout.max_staleness else max(sampling, training)
        nodes = [int(node.cpus) for node in nodes_of(config.cluster, "actor")]
        # Processes are spread evenly over nodes, and a process has at most the cores of its node.
        threads = threads_for(config.model.size(), min(sum(nodes), max(nodes) * at_once), at_once)
        return config.model_copy(update={"model": config.model.model_copy(update={"threads": threads})})

    def computation_line(self, trains: bool) -> str:
        """Describe dtype and threads of the model; "" if `trains` is False and the engine computes no model itself."""
        if not trains and "judges" not in self.traits:
            return ""
        cuda = has_gpus(self.config.cluster, "actor" if trains else "rollout")
        how = computation_text(self.config.model.computes_in(cuda), None if cuda else self.with_threads(trains).model.threads)
        return f"the model is {how} (model.dtype, model.threads)"


def _best_for(gpus: float) -> str:
    return max(ENGINES.own(), key=lambda entry: entry.make.suits(gpus)).name


def claiming_engine(model: str | None) -> Entry[type[EngineMaker]] | None:
    """Find the engine that claims a model of this name, regardless of the key `engine`."""
    return next((entry for entry in ENGINES.own() if entry.make.claims(model)), None)


def computation_text(dtype: str, threads: int | str | None) -> str:
    """Describe dtype and threads of a model's computation (`threads` None: on GPUs)."""
    if threads is None:
        return f"computed in {dtype}"
    return f"computed in {dtype} on the CPU, by {threads} thread{'' if threads == 1 else 's'} of each process"

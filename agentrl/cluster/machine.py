"""This machine as part of a cluster: GPUs, file systems, addresses, the loopback guard, and the rendezvous of ranks.

Imports neither Ray nor torch."""

from __future__ import annotations

import logging
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

import psutil

from agentrl.utils.errors import DispatchError, ResourceError
from agentrl.utils.registry import Registry

NETWORK_FILE_SYSTEMS = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "fuse.sshfs", "gpfs", "beegfs", "glusterfs", "9p", "afs")
)
LONGEST_RAY_FOLDER = 40
"""Maximum characters: Ray puts Unix sockets (paths of at most 107 bytes) into its folder and needs about 65 of them."""


def usable_gpus() -> int:
    """Return the number of GPUs that torch can use on this machine."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def file_system(path: Path) -> str:
    """Return the type of the file system that holds `path`; "" if unknown."""
    mounts = [one for one in psutil.disk_partitions(all=True) if path.resolve().is_relative_to(one.mountpoint)]
    # The innermost mount; of two on one path, the later one hides the earlier.
    return "" if not mounts else str(sorted(mounts, key=lambda one: len(one.mountpoint))[-1].fstype)


def ray_folder() -> str | None:
    """Return a folder for Ray's session files if Ray's default would fail or hang, else None.

    Ray follows TMPDIR. It can hang on a network file system, and a long path breaks its sockets.
    """
    if os.environ.get("RAY_TMPDIR"):
        return None
    folder = Path(tempfile.gettempdir())
    if len(str(folder)) <= LONGEST_RAY_FOLDER and file_system(folder) not in NETWORK_FILE_SYSTEMS:
        return None
    return "/tmp/ray"


def check_ray_folder() -> None:
    """Raise ResourceError, naming the variable to set, if a local Ray cannot write its session files."""
    key = next((name for name in ("RAY_TMPDIR", "TMPDIR") if os.environ.get(name)), "")
    folder = Path(ray_folder() or Path(os.environ[key] if key else "/tmp") / "ray")
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    if not there.is_dir():
        why = f"{there} is no folder"
    elif not os.access(there, os.W_OK | os.X_OK, effective_ids=True):
        try:
            owner = there.owner()
        except KeyError:  # a user id of another machine
            owner = f"user {there.stat().st_uid}"
        why = f"{there} belongs to {owner} and this user cannot write there"
    elif key == "RAY_TMPDIR" and len(os.environ[key]) > LONGEST_RAY_FOLDER:
        why = f"a path of more than {LONGEST_RAY_FOLDER} characters is too long for Ray's sockets"
    else:
        return
    raise ResourceError(
        f"{key or 'RAY_TMPDIR'}: Ray cannot write its files in {folder}: {why}. Set RAY_TMPDIR to a folder of your own on a "
        f"local disk, with a path of at most {LONGEST_RAY_FOLDER} characters (mkdir -p /tmp/$USER; export RAY_TMPDIR=/tmp/$USER)"
    )


# Addresses

LOOPBACK_ADDRESS = "127.0.0.1"


def reachable_address() -> str:
    """Return this process's address for other processes of the run: loopback if all are on this machine, as it works even
    without a route to the machine's own address; else the address under which Ray knows this node."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return LOOPBACK_ADDRESS
    addresses = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    return LOOPBACK_ADDRESS if len(addresses) <= 1 else str(ray.util.get_node_ip_address())


def pin_gloo() -> None:
    """Make Gloo listen on the interface of this node's address, unless the user has set one.

    By default Gloo resolves the host name, which gives loopback on many machines: ranks on several nodes then wait for
    each other until they time out.
    """
    address = reachable_address()
    if os.environ.get("GLOO_SOCKET_IFNAME") or address == LOOPBACK_ADDRESS:
        return
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.family == socket.AF_INET and entry.address == address for entry in entries):
            os.environ["GLOO_SOCKET_IFNAME"] = str(name)
            break


# The loopback guard

log = logging.getLogger(__name__)

LOOPBACK = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1", "AGENTRL_NODE_IP": "127.0.0.2"}
"""Variables pinned if the user has set none of them. AGENTRL_NODE_IP is the address that `start_ray` passes to Ray, which
reads none from the environment. It is 127.0.0.2, because Ray replaces 127.0.0.1 with the machine's address, which does not
work here; all of 127.0.0.0/8 is loopback."""


def own_address() -> str | None:
    """Return the address from which this machine reaches others; None without a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("8.8.8.8", 80))  # connecting a UDP socket sends nothing; it selects a route
        except OSError:
            return None
        return str(probe.getsockname()[0])


def routes_back(address: str, timeout: float = 1.0) -> bool:
    """Return True if a TCP connection to our own `address` succeeds within `timeout` seconds."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        try:
            server.bind((address, 0))
            server.listen(1)
            # The kernel completes the handshake without an accept. The timeout is for firewalls that silently drop packets, which
            # would delay each start for minutes.
            with socket.create_connection(server.getsockname(), timeout=timeout):
                return True
        except OSError:
            return False


def network_fault() -> str | None:
    """Explain why this machine cannot reach itself at its own address; None if it can."""
    address = own_address()
    if address is None:
        return "this machine has no network route"
    return None if routes_back(address) else f"the address {address} does not route back to this machine"


def guard_network(*, multi_node: bool = False) -> str | None:
    """Pin NCCL, Gloo, vLLM and Ray to loopback, with a warning, if this node cannot reach its own address.

    Call before `import ray`. Does nothing on several nodes, or if the user has set any of the variables.
    Returns the reason for pinning, or None.
    """
    # Loopback would cut this node off from others; and a user who has set a variable knows this network better.
    if multi_node or any(os.environ.get(key) for key in LOOPBACK):
        return None
    fault = network_fault()
    if fault is None:
        return None
    os.environ.update(LOOPBACK)
    log.warning("%s: pinned to loopback: %s", fault, ", ".join(f"{k}={v}" for k, v in LOOPBACK.items()))
    return fault


# Rendezvous of ranks


@dataclass(frozen=True)
class Rendezvous:
    """Address where rank 0 listens."""

    host: str
    port: int


_listeners: dict[Rendezvous, socket.socket] = {}
"""Bound sockets of rank 0, kept until the store takes them over."""


def open_rendezvous(host: str) -> Rendezvous:
    """Bind a free port in rank 0's process. `host`: its address as seen by the other ranks. If that is not an address of this
    machine (behind NAT), binds all interfaces for the store, which has no authentication."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((host, 0))
    except OSError:
        log.warning("%s is no address of this machine: the store of torch.distributed listens on all interfaces", host)
        listener.bind(("", 0))
    # All ranks of a large group may connect before rank 0 opens its store; a short backlog would refuse some.
    listener.listen(1024)
    address = Rendezvous(host, int(listener.getsockname()[1]))
    _listeners[address] = listener
    return address


def join_group(rendezvous: Rendezvous | None, rank: int, world_size: int, backend: str | None, timeout: float) -> None:
    """Create this process's default process group, or keep an existing one of the same rank and size.

    Sets MASTER_ADDR and MASTER_PORT for libraries that read them. Raises DispatchError if this process is in a different
    group, or if more than one rank has no rendezvous.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

    if dist.is_initialized():  # a colocated role: torch.distributed has one default group per process
        present = (dist.get_rank(), dist.get_world_size())
        if present != (rank, world_size):
            raise DispatchError(f"this process is already rank {present[0]} of {present[1]}; it cannot be {rank} of {world_size}")
        return
    # Gloo also with GPUs, for tensors on the host: offloaded shards, and checkpoint reads and writes.
    chosen = backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    span = timedelta(seconds=timeout)
    if rendezvous is None:
        if world_size != 1:
            raise DispatchError(f"{world_size} ranks need backend 'ray': an inline group has no processes to join")
        # An in-memory store: a single process needs no port, which could be taken.
        dist.init_process_group(chosen, store=HashStore(), rank=0, world_size=1, timeout=span)
        return
    os.environ.update(MASTER_ADDR=rendezvous.host, MASTER_PORT=str(rendezvous.port))
    if rendezvous.host != LOOPBACK_ADDRESS:
        pin_gloo()
    if rank == 0:
        store = TCPStore(
            rendezvous.host,
            rendezvous.port,
            world_size,
            is_master=True,
            # The constructor would block until all ranks connect; `init_process_group` waits for them with the same timeout.
            wait_for_workers=False,
            timeout=span,
            master_listen_fd=_listeners.pop(rendezvous).detach(),
        )
    else:
        store = TCPStore(rendezvous.host, rendezvous.port, world_size, is_master=False, timeout=span)
    dist.init_process_group(chosen, store=store, rank=rank, world_size=world_size, timeout=span)


Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class MachineFinding:
    """One finding; `advice` is the fix if the level is not "ok"."""

    check: str
    level: Level
    found: str
    advice: str = ""


MACHINE_CHECKS: Registry[Callable[[], Iterator[MachineFinding]]] = Registry("doctor", "MACHINE_CHECKS", "agentrl.cluster.machine")
"""Checks registered by optional features and plug-ins."""

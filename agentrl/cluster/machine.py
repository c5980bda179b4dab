"""This machine in a cluster: its memory and its network.

Facts that Ray, NCCL and shared memory depend on, the address for other processes, the loopback guard,
the rendezvous of ranks. Imports neither Ray nor torch."""

from __future__ import annotations

import logging
import os
import socket
import sys
import tempfile
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import psutil

from agentrl.utils.errors import DispatchError, ResourceError

NETWORK_FILE_SYSTEMS = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "fuse.sshfs", "gpfs", "beegfs", "glusterfs", "9p", "afs")
)
LONGEST_RAY_FOLDER = 40
"""Ray puts Unix sockets under its folder; a socket's path has at most 107 bytes; Ray needs about 65 of them."""


def usable_gpus() -> int:
    """GPUs that torch can compute on here."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def file_system(path: Path) -> str:
    """The type of the file system that holds `path`; "" if unknown."""
    mounts = [one for one in psutil.disk_partitions(all=True) if path.resolve().is_relative_to(one.mountpoint)]
    # The innermost; of two mounts on one path, the later one hides the other.
    return "" if not mounts else str(sorted(mounts, key=lambda one: len(one.mountpoint))[-1].fstype)


def ray_folder() -> str | None:
    """A folder for Ray's session files if its own choice would fail or hang; None leaves the choice to Ray.

    Ray follows TMPDIR. On a network file system it can hang, and a long path breaks its sockets.
    """
    if os.environ.get("RAY_TMPDIR"):
        return None
    folder = Path(tempfile.gettempdir())
    if len(str(folder)) <= LONGEST_RAY_FOLDER and file_system(folder) not in NETWORK_FILE_SYSTEMS:
        return None
    return "/tmp/ray"


def check_ray_folder() -> None:
    """Raise ResourceError, with the variable that helps, if a local Ray cannot write the files of its session."""
    key = next((name for name in ("RAY_TMPDIR", "TMPDIR") if os.environ.get(name)), "")
    folder = Path(ray_folder() or Path(os.environ[key] if key else "/tmp") / "ray")
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    if not there.is_dir():
        why = f"{there} is no folder"
    elif not os.access(there, os.W_OK | os.X_OK, effective_ids=True):
        try:
            owner = there.owner()
        except KeyError:  # a user of another machine
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
    """This process's address for the other processes of the run: loopback if they are all on this machine, because it works
    even if the machine's own address does not route back; else the one under which Ray knows this node."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return LOOPBACK_ADDRESS
    addresses = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    return LOOPBACK_ADDRESS if len(addresses) <= 1 else str(ray.util.get_node_ip_address())


def pin_gloo() -> None:
    """Make gloo listen on the interface of this node's address, if the user has named none.

    Left to itself it takes the address that the host name resolves to, and that is loopback on many machines: ranks on
    several nodes then wait for each other until they time out.
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

LOOPBACK = {
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
    "AGENTRL_NODE_IP": "127.0.0.2",
}
"""Variables that are pinned if the user has set none of them. AGENTRL_NODE_IP is the address that `start_ray`
passes to Ray, which does not read one from the environment. It is 127.0.0.2, because Ray replaces 127.0.0.1 with
the very address that does not work; the whole of 127.0.0.0/8 is loopback."""


def own_address() -> str | None:
    """The address from which this machine would reach others; None if it has no route at all."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("8.8.8.8", 80))  # connecting UDP sends nothing; it only picks a route
        except OSError:
            return None
        return str(probe.getsockname()[0])


def routes_back(address: str, timeout: float = 1.0) -> bool:
    """Return True if a TCP connection to our own `address` arrives within `timeout` seconds."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        try:
            server.bind((address, 0))
            server.listen(1)
            # The kernel completes the handshake without an accept. The timeout is for firewalls that drop packets without a
            # word: they would hold up each start for minutes.
            with socket.create_connection(server.getsockname(), timeout=timeout):
                return True
        except OSError:
            return False


def network_fault() -> str | None:
    """Why this machine cannot reach itself at its own address; None if it can."""
    address = own_address()
    if address is None:
        return "this machine has no network route"
    return None if routes_back(address) else f"the address {address} does not route back to this machine"


def guard_network(*, multi_node: bool = False) -> str | None:
    """Pin NCCL, Gloo, vLLM and Ray to loopback if this node cannot reach itself, and log a warning.

    Call before `import ray`. Does nothing on several nodes, or if the user has set any of the variables.
    Returns the reason if it pinned them, else None.
    """
    # Loopback would cut this node off from the others; and who has set one of the variables knows this network better.
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
    """Address on which rank 0 listens."""

    host: str
    port: int


_listeners: dict[Rendezvous, socket.socket] = {}
"""Rank 0's bound sockets, held until the store takes them over."""


def open_rendezvous(host: str) -> Rendezvous:
    """Bind a free port in this (rank 0's) process. `host`: its address as seen by the other ranks; all interfaces are bound,
    for a store without protection, only if that is not one of this machine's (it is translated on the way)."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((host, 0))
    except OSError:
        log.warning("%s is no address of this machine: the store of torch.distributed listens on all interfaces", host)
        listener.bind(("", 0))
    # All ranks of a large group may connect before rank 0 gets to its store; with a short backlog some would be refused.
    listener.listen(1024)
    address = Rendezvous(host, int(listener.getsockname()[1]))
    _listeners[address] = listener
    return address


def join_group(rendezvous: Rendezvous | None, rank: int, world_size: int, backend: str | None, timeout: float) -> None:
    """Create this process's default process group, or keep one that has the same rank and size.

    Sets MASTER_ADDR and MASTER_PORT for libraries that read them. Raises DispatchError if this process is already in
    another group, or if there is no rendezvous for more than one rank.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

    if dist.is_initialized():  # a colocated role: torch.distributed has one default group per process
        present = (dist.get_rank(), dist.get_world_size())
        if present != (rank, world_size):
            raise DispatchError(f"this process is already rank {present[0]} of {present[1]}; it cannot be {rank} of {world_size}")
        return
    # With GPUs gloo too, for tensors on the host: shards that are kept there, and what a checkpoint reads and writes.
    chosen = backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    span = timedelta(seconds=timeout)
    if rendezvous is None:
        if world_size != 1:
            raise DispatchError(f"{world_size} ranks need backend 'ray': an inline group has no processes to join")
        # A store in memory: a single process needs no port, which could be taken.
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
            # The constructor would block until all have come; `init_process_group` waits for them anyway, by the same timeout.
            wait_for_workers=False,
            timeout=span,
            master_listen_fd=_listeners.pop(rendezvous).detach(),
        )
    else:
        store = TCPStore(rendezvous.host, rendezvous.port, world_size, is_master=False, timeout=span)
    dist.init_process_group(chosen, store=store, rank=rank, world_size=world_size, timeout=span)

"""How the ranks of a group find each other for torch.distributed.

Rank 0 first binds a listening socket and announces its port; the store later takes over that same socket.
So no other process can take the port between choosing and using it.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta

from agentrl.cluster.address import LOOPBACK_ADDRESS, pin_gloo
from agentrl.errors import DispatchError
from agentrl.serving import bind_at


@dataclass(frozen=True)
class Rendezvous:
    """Where rank 0 listens."""

    host: str
    port: int


class Listener:
    """Rank 0's bound socket, held until the store takes it over."""

    def __init__(self, host: str) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        bind_at(self._socket, host)
        # All ranks of a large group may connect before rank 0 gets to its store; with a short backlog some would be refused.
        self._socket.listen(1024)
        self.address = Rendezvous(host, int(self._socket.getsockname()[1]))

    def detach(self) -> int:
        """The socket's file descriptor; the store owns it from now on."""
        return self._socket.detach()


_listeners: dict[Rendezvous, Listener] = {}


def listen(host: str) -> Rendezvous:
    """Bind a free port in this (rank 0's) process. `host`: its address as seen by the other ranks."""
    listener = Listener(host)
    _listeners[listener.address] = listener
    return listener.address


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

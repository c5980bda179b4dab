"""Route `collective`: a torch.distributed broadcast (gloo, host memory) from the trainer's rank 0 to every process
of the engine, for engines on other machines.

The process group is created in addition to the default groups of both sides and does not affect them. `nccl` is for GPUs.
"""

from __future__ import annotations

import socket
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from agentrl.config.schema import WeightsConfig
from agentrl.errors import ConfigError, EngineError
from agentrl.serving import bind_at
from agentrl.weights.bucket import Bucket, Named
from agentrl.weights.route import ROUTES, SLOTS, Offer, Receiver, Route, Sender

REACH_S = 5.0
"""For a plain connection to the trainer: a route that cannot work is refused in seconds, and the next one is tried."""
MEET_S = 30.0
"""After that, until all the others have come. torch asks DNS for names on the way, which takes 10 s if none answers."""
TIMEOUT_S = 120.0
"""For one bucket. A receiver learns of a bucket once it is full, so gathering does not count."""


class CollectiveSender(Sender):
    """See the module. `host`: the address at which the engine's machines reach this one."""

    def __init__(self, slot_bytes: int, receivers: int, host: str) -> None:
        super().__init__(slot_bytes, receivers)
        self._host = host
        self._slots: list[Tensor] = []
        self._works: list[Any] = [None] * SLOTS
        self._pool: ThreadPoolExecutor | None = None
        self._joining: Future[Any] | None = None
        self._store: Any = None
        self._group: Any = None

    def open(self) -> Offer:
        try:
            listener = socket.socket()
            bind_at(listener, self._host)
            listener.listen(1024)
            port, span = int(listener.getsockname()[1]), timedelta(seconds=TIMEOUT_S)
            descriptor = listener.detach()  # the store's from now on
            self._store = TCPStore(
                self._host, port, is_master=True, wait_for_workers=False, timeout=span, master_listen_fd=descriptor
            )
        except (RuntimeError, OSError) as problem:
            raise ConfigError(f"weights.route = collective: cannot listen on {self._host}: {problem}") from problem
        self._slots = [torch.empty(self.slot_bytes, dtype=torch.uint8) for _ in range(SLOTS)]
        # Joining waits for all the others, and they learn of the group only after this call has returned: hence a thread.
        self._pool = ThreadPoolExecutor(1, "weights-collective")
        self._joining = self._pool.submit(_join, self._store, 0, self.receivers + 1, self._host)
        return Offer("collective", self.slot_bytes, self.receivers, (self._host, str(self._store.port)))

    def attached(self) -> None:
        assert self._joining is not None
        try:
            self._group = self._joining.result(TIMEOUT_S)
        except TimeoutError as problem:
            raise ConfigError(f"weights.route = collective: the engine did not join within {TIMEOUT_S:g} s") from problem
        except RuntimeError as problem:
            raise ConfigError(f"weights.route = collective: the engine did not join: {_brief(problem)}") from problem

    def slot(self, number: int) -> Tensor:
        # gloo reads the slot in the background; refilling it before the broadcast is done would send a mixture of two buckets.
        self._wait(number)
        return self._slots[number]

    def ship(self, bucket: Bucket) -> Bucket:
        self._works[bucket.slot] = _broadcast(self._group, self._slots[bucket.slot][: bucket.nbytes])
        return bucket

    def close(self) -> None:
        self._works = [None] * SLOTS
        self._slots, self._group, self._store = [], None, None
        if self._pool is not None:
            # Not awaited: a thread that still waits for others to join would hold up the end of the run.
            self._pool.shutdown(wait=False)
            self._pool = None

    def _wait(self, number: int) -> None:
        work, self._works[number] = self._works[number], None
        if work is not None:
            _finish(work, "a process of the engine is gone")


class CollectiveReceiver(Receiver):
    """See the module."""

    def open(self) -> None:
        host, port = self.offer.where
        try:
            own_address = _address_towards(host, int(port))
            socket.create_connection((host, int(port)), timeout=REACH_S).close()
            store: Any = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=MEET_S))
            self._group = _join(store, 1 + self.index, self.offer.receivers + 1, own_address)
        except (RuntimeError, OSError) as problem:
            raise ConfigError(
                f"weights.route = collective: the engine on {socket.gethostname()} does not reach the trainer at {host}:{port}, "
                f"or another process of the engine does not (all ports between the nodes must be open): {_brief(problem)}"
            ) from problem
        self._keep = store
        self._slot = torch.empty(self.offer.slot_bytes, dtype=torch.uint8)

    def receive(self, bucket: Bucket) -> list[Named]:
        flat = self._slot[: bucket.nbytes]
        _finish(_broadcast(self._group, flat), "the trainer is gone")
        return bucket.cut(flat)

    def close(self) -> None:
        self._group = self._keep = None
        self._slot = torch.empty(0, dtype=torch.uint8)


def _join(store: Any, rank: int, world: int, address: str) -> Any:
    # gloo would wait TIMEOUT_S for a process that cannot come.
    store.set(f"here{rank}", "")
    store.wait([f"here{each}" for each in range(world)], timedelta(seconds=MEET_S))
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # The address, not the host name, which may resolve to an address that does not route.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=TIMEOUT_S)
    return dist.ProcessGroupGloo(dist.PrefixStore("weights", store), rank, world, options)  # type: ignore[attr-defined]


def _broadcast(group: Any, flat: Tensor) -> Any:
    options = dist.BroadcastOptions()  # type: ignore[attr-defined]
    options.rootRank = 0
    return group.broadcast([flat], options)


def _finish(work: Any, guess: str) -> None:
    try:
        work.wait()
    except RuntimeError as problem:
        raise EngineError(f"weights.route = collective: the broadcast failed ({guess}): {problem}") from problem


def _brief(problem: Exception) -> str:
    """The first line of an error of torch, which goes on with a C++ stack."""
    return next(iter(str(problem).splitlines()), type(problem).__name__)


def _address_towards(host: str, port: int) -> str:
    """The address of this machine from which traffic to `host` is sent; connecting a UDP socket sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


@ROUTES.register("collective")
class CollectiveRoute(Route):
    """See the module."""

    cost = 3
    receiver = CollectiveReceiver

    def sender(self, cfg: WeightsConfig, slot_bytes: int, receivers: int, host: str) -> Sender:
        return CollectiveSender(slot_bytes, receivers, host)

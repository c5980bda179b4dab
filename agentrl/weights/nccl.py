"""Route `nccl`: a broadcast between GPUs, from the trainer's rank 0 to every process of a vLLM engine on other GPUs.

The group is vLLM's own, for transfers of weights, beside the default groups of both sides; its processes receive with vLLM's
own engine (backends/vllm/transfer.py), so buckets have the form of its packed transfers: tensors without gaps. NCCL refuses two
processes on one GPU; for those there is `ipc`.
"""

from __future__ import annotations

import importlib.util
import socket
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar

import torch
from torch import Tensor

from agentrl.config.schema import WeightsConfig
from agentrl.errors import ConfigError
from agentrl.weights.bucket import PACKED, Bucket, Named
from agentrl.weights.ipc import gpu_bytes
from agentrl.weights.route import ROUTES, SLOTS, Offer, Receiver, Route, Sender

TIMEOUT_S = 120.0
"""For joining."""


class NcclSender(Sender):
    """See the module. `host`: the address at which the engine's machines reach this one."""

    align: ClassVar[int] = PACKED

    def __init__(self, slot_bytes: int, receivers: int, host: str) -> None:
        super().__init__(slot_bytes, receivers)
        self._host = host
        self._slots: list[Tensor] = []
        self._pool: ThreadPoolExecutor | None = None
        self._joining: Future[Any] | None = None
        self._group: Any = None
        self._stream: Any = None

    def open(self) -> Offer:
        if not torch.cuda.is_available():
            raise ConfigError("weights.route = nccl: the trainer has no GPU")
        if importlib.util.find_spec("vllm") is None:
            raise ConfigError("weights.route = nccl: its group is vLLM's, which is not installed where the trainer runs")
        device, port = torch.cuda.current_device(), _free_port(self._host)
        self._slots = [gpu_bytes(self.slot_bytes, device) for _ in range(SLOTS)]
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Joining waits for all the others, and they learn of the group only after this call has returned: hence a thread.
        self._pool = ThreadPoolExecutor(1, "weights-nccl")
        self._joining = self._pool.submit(_join, self._host, port, self.receivers + 1, device)
        return Offer("nccl", self.slot_bytes, self.receivers, (self._host, str(port)))

    def attached(self) -> None:
        assert self._joining is not None
        try:
            self._group = self._joining.result(TIMEOUT_S)
        except TimeoutError as problem:
            raise ConfigError(f"weights.route = nccl: the engine did not join within {TIMEOUT_S:g} s") from problem
        except Exception as problem:  # NCCL's own errors have no common type
            raise ConfigError(f"weights.route = nccl: the engine did not join: {problem}") from problem

    def slot(self, number: int) -> Tensor:
        return self._slots[number]  # the driver asks for the next bucket but one only when all have loaded this one

    def ship(self, bucket: Bucket) -> Bucket:
        self._stream.wait_stream(torch.cuda.current_stream())  # that fills the slot
        self._group.broadcast(self._slots[bucket.slot][: bucket.nbytes], src=0, stream=self._stream)
        return bucket

    def close(self) -> None:
        if self._group is not None:
            self._group.destroy()  # aborts a broadcast that waits for a process that is gone
        self._slots, self._group, self._stream = [], None, None
        if self._pool is not None:
            # Not awaited: a thread that still waits for others to join would hold up the end of the run.
            self._pool.shutdown(wait=False)
            self._pool = None


class NcclReceiver(Receiver):
    """The end in a process that is not vLLM's: there is none."""

    def open(self) -> None:
        raise ConfigError("weights.route = nccl: only the processes of a vLLM engine (0.32) on GPUs join its group")

    def receive(self, bucket: Bucket) -> list[Named]:
        raise NotImplementedError

    def close(self) -> None:
        return None


def _join(host: str, port: int, world: int, device: int) -> Any:
    from vllm.distributed.weight_transfer.nccl_common import stateless_init_process_group

    torch.cuda.set_device(device)  # each thread has its own
    return stateless_init_process_group(host, port, 0, world, device)


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        try:
            probe.bind((host, 0))
        except OSError as problem:
            raise ConfigError(f"weights.route = nccl: cannot listen on {host}: {problem}") from problem
        return int(probe.getsockname()[1])


@ROUTES.register("nccl", traits={"cuda", "other_gpus"})
class NcclRoute(Route):
    """See the module."""

    cost = 1.6
    receiver = NcclReceiver

    def sender(self, cfg: WeightsConfig, slot_bytes: int, receivers: int, host: str) -> Sender:
        return NcclSender(slot_bytes, receivers, host)

"""GPU routes: `ipc` (memory of the same GPU) and `nccl` (a broadcast in a process group of vLLM)."""

from __future__ import annotations

import base64
import importlib.util
import os
import pickle
import socket
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from agentrl.engines.weights.base import PACKED, ROUTES, SLOTS, TOKEN_BYTES, Bucket, Offer, Receiver, Sender, check_token
from agentrl.utils.errors import ConfigError

# Route `ipc`


def gather_objects(mine: Any) -> list[Any]:
    """Gather an object from every rank, in rank order; a collective."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


DEVICE_AT = 6
"""Index of the device number in `reduce_tensor`'s arguments; the number differs between processes."""
Handle = tuple[Any, ...]


def gpu_bytes(count: int, device: int) -> Tensor:
    """Allocate uint8 [count] on a GPU."""
    return torch.empty(count, dtype=torch.uint8, device=f"cuda:{device}")


def own_handles(offer: Offer) -> tuple[int, str, str, list[Handle]]:
    """Return the number and UUID of this process's GPU, and the trainer's token and slot handles there. Raises ConfigError
    without a GPU, or if no rank of the trainer is on it."""
    if not torch.cuda.is_available():
        raise ConfigError("weights.route = ipc: the engine has no GPU")
    device = torch.cuda.current_device()
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    given = {each.split(" ", 1)[0]: each for each in offer.where}
    if gpu not in given:
        raise ConfigError("weights.route = ipc: the engine's GPU is not one of the trainer's")
    _, token, handles = given[gpu].split(" ")
    return device, gpu, token, pickle.loads(base64.b64decode(handles))


class IpcReceiver(Receiver):
    def open(self) -> None:
        device, _, token, handles = own_handles(self.offer)
        try:
            for handle in handles:
                here = [*handle[:DEVICE_AT], device, *handle[DEVICE_AT + 1 :]]  # the GPU's number in this process
                self.slots.append(rebuild_cuda_tensor(*here))  # type: ignore[no-untyped-call]
        except RuntimeError as problem:
            raise ConfigError(f"weights.route = ipc: the engine cannot map the trainer's memory: {problem}") from problem
        for slot in self.slots:
            check_token(slot, token, "ipc")


@ROUTES.register("ipc", traits={"cuda", "own_gpus"})
class IpcSender(Sender):
    """Slots in the memory of GPUs that trainer and engine share, on every rank."""

    receiver, cost = IpcReceiver, 1.3
    align = PACKED
    every_rank: ClassVar[bool] = True

    def open(self) -> Offer:
        if not torch.cuda.is_available():
            raise ConfigError("weights.route = ipc: the trainer has no GPU")
        mine, problem = None, ""
        try:
            device, token = torch.cuda.current_device(), os.urandom(TOKEN_BYTES)
            self.slots = [gpu_bytes(self.slot_bytes, device) for _ in range(SLOTS)]
            for slot in self.slots:
                slot[:TOKEN_BYTES] = torch.frombuffer(bytearray(token), dtype=torch.uint8)
            torch.cuda.synchronize()
            handles = [reduce_tensor(slot)[1] for slot in self.slots]  # type: ignore[no-untyped-call]
            gpu = torch.cuda.get_device_properties(device).uuid  # the same in every process
            mine = f"{gpu} {token.hex()} {base64.b64encode(pickle.dumps(handles)).decode()}"
        except RuntimeError as failure:  # reported to the other ranks too, which wait in `gather_objects`
            problem = f"no memory of the trainer's GPU can be shared: {failure}"
        found = gather_objects((mine, problem))
        if reasons := [each for _, each in found if each]:
            self.close()
            raise ConfigError(f"weights.route = ipc: {reasons[0]}")
        return Offer("ipc", self.slot_bytes, self.receivers, tuple(each for each, _ in found if each is not None))

    def ship(self, bucket: Bucket) -> Bucket:
        torch.cuda.current_stream().synchronize()  # the receiver does not wait for this process's stream
        return bucket

    def close(self) -> None:
        if self.slots:
            super().close()
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


# Route `nccl`

JOIN_S = 120.0
"""Seconds for all processes of the engine to join the group."""


class NcclReceiver(Receiver):
    """Receiver for engines other than vLLM, which cannot join; vLLM's processes use `NcclTransfer`."""

    def open(self) -> None:
        raise ConfigError("weights.route = nccl: only the processes of a vLLM engine on GPUs join its group")


@ROUTES.register("nccl", traits={"cuda", "other_gpus"})
class NcclSender(Sender):
    """Broadcasts slots from GPU to GPU, in a process group of vLLM."""

    receiver, cost = NcclReceiver, 1.6
    align = PACKED
    _pool: ThreadPoolExecutor | None = None
    _joining: Future[Any] | None = None
    _group: Any = None
    _stream: Any = None

    def open(self) -> Offer:
        if not torch.cuda.is_available():
            raise ConfigError("weights.route = nccl: the trainer has no GPU")
        if importlib.util.find_spec("vllm") is None:
            raise ConfigError("weights.route = nccl: its group is vLLM's, which is not installed where the trainer runs")
        with socket.socket() as probe:
            try:
                probe.bind((self.host, 0))
            except OSError as problem:
                raise ConfigError(f"weights.route = nccl: cannot listen on {self.host}: {problem}") from problem
            port = int(probe.getsockname()[1])
        device = torch.cuda.current_device()
        self.slots = [gpu_bytes(self.slot_bytes, device) for _ in range(SLOTS)]
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # In a thread: joining blocks until all others join, and they learn of the group only after `open` returns.
        self._pool = ThreadPoolExecutor(1, "weights-nccl")
        self._joining = self._pool.submit(_join_nccl, self.host, port, self.receivers + 1, device)
        return Offer("nccl", self.slot_bytes, self.receivers, (self.host, str(port)))

    def attached(self) -> None:
        assert self._joining is not None
        try:
            self._group = self._joining.result(JOIN_S)
        except TimeoutError as problem:
            raise ConfigError(f"weights.route = nccl: the engine did not join within {JOIN_S:g} s") from problem
        except Exception as problem:  # NCCL's errors have no common class, and end with a C++ stack
            brief = next(iter(str(problem).splitlines()), type(problem).__name__)
            raise ConfigError(f"weights.route = nccl: the engine did not join: {brief}") from problem

    def ship(self, bucket: Bucket) -> Bucket:
        self._stream.wait_stream(torch.cuda.current_stream())  # which fills the slot
        self._group.broadcast(self.slots[bucket.slot][: bucket.nbytes], src=0, stream=self._stream)
        return bucket

    def close(self) -> None:
        if self._group is not None:
            self._group.destroy()  # aborts a broadcast that waits for a dead process
        self._group = self._stream = None
        if self._pool is not None:
            # Not awaited: a thread that still waits for others to join would delay the end of the run.
            self._pool.shutdown(wait=False)
            self._pool = None
        super().close()


def _join_nccl(host: str, port: int, world: int, device: int) -> Any:
    from vllm.distributed.weight_transfer.nccl_common import stateless_init_process_group

    torch.cuda.set_device(device)  # each thread has its own
    return stateless_init_process_group(host, port, 0, world, device)

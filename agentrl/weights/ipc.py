"""Route `ipc`: buckets in the memory of a GPU, which an engine's process on the same GPU maps by a CUDA IPC handle.

Every rank of the trainer fills buckets on its own GPU, because a handle is opened on the GPU that it is of: an engine's process
finds the handle of its GPU by the GPU's UUID. vLLM reads the buckets with its own engine for such handles
(backends/vllm/transfer.py), so they have the form of its packed transfers: tensors without gaps.
"""

from __future__ import annotations

import base64
import os
import pickle
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor  # type: ignore[attr-defined]

from agentrl.config.schema import WeightsConfig
from agentrl.errors import ConfigError
from agentrl.weights.bucket import PACKED, Bucket, Named
from agentrl.weights.joined import gathered
from agentrl.weights.route import ROUTES, SLOTS, Offer, Receiver, Route, Sender

TOKEN_BYTES = 16
DEVICE_AT = 6
"""The place of the device's number among what `reduce_tensor` gives, which is another one in each process."""
Handle = tuple[Any, ...]


def gpu_of(device: int) -> str:
    """The UUID of a GPU, which is the same in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def gpu_bytes(count: int, device: int) -> Tensor:
    """Memory of the GPU with that number, uint8 [count]."""
    return torch.empty(count, dtype=torch.uint8, device=f"cuda:{device}")


class IpcSender(Sender):
    """See the module; one on every rank."""

    align: ClassVar[int] = PACKED
    every_rank: ClassVar[bool] = True

    def __init__(self, slot_bytes: int, receivers: int) -> None:
        super().__init__(max(slot_bytes, TOKEN_BYTES), receivers)
        self._slots: list[Tensor] = []

    def open(self) -> Offer:
        if not torch.cuda.is_available():
            raise ConfigError("weights.route = ipc: the trainer has no GPU")
        mine, problem = None, ""
        try:
            mine = self._make(torch.cuda.current_device())
        except RuntimeError as failure:  # told to the other ranks too, which wait in the call below
            problem = f"no memory of the trainer's GPU can be shared: {failure}"
        found = gathered((mine, problem))
        if reasons := [each for _, each in found if each]:
            self.close()
            raise ConfigError(f"weights.route = ipc: {reasons[0]}")
        return Offer("ipc", self.slot_bytes, self.receivers, tuple(each for each, _ in found if each is not None))

    def _make(self, device: int) -> str:
        token = os.urandom(TOKEN_BYTES)
        self._slots = [gpu_bytes(self.slot_bytes, device) for _ in range(SLOTS)]
        for slot in self._slots:
            slot[:TOKEN_BYTES] = torch.frombuffer(bytearray(token), dtype=torch.uint8)
        torch.cuda.synchronize()
        return pack(gpu_of(device), token.hex(), [reduce_tensor(slot)[1] for slot in self._slots])  # type: ignore[no-untyped-call]

    def slot(self, number: int) -> Tensor:
        return self._slots[number]

    def ship(self, bucket: Bucket) -> Bucket:
        torch.cuda.current_stream().synchronize()  # the other process does not see this one's queue
        return bucket

    def close(self) -> None:
        if self._slots:
            self._slots.clear()
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


def pack(gpu: str, token: str, handles: list[Handle]) -> str:
    """What an Offer says of one GPU, as text."""
    return f"{gpu} {token} {base64.b64encode(pickle.dumps(handles)).decode()}"


def handles_for(offer: Offer, gpu: str) -> tuple[str, list[Handle]]:
    """The token and the slots' handles on that GPU. Raises ConfigError if no rank of the trainer is on it."""
    given = {each.split(" ", 1)[0]: each for each in offer.where}
    if gpu not in given:
        raise ConfigError("weights.route = ipc: the engine's GPU is not one of the trainer's")
    _, token, handles = given[gpu].split(" ")
    return token, pickle.loads(base64.b64decode(handles))


def own_gpu() -> tuple[int, str]:
    """This process's GPU: its number and UUID. Raises ConfigError if it has none."""
    if not torch.cuda.is_available():
        raise ConfigError("weights.route = ipc: the engine has no GPU")
    device = torch.cuda.current_device()
    return device, gpu_of(device)


def on_device(handle: Handle, device: int) -> list[Any]:
    """The handle's values for a process in which its GPU has the number `device`."""
    return [*handle[:DEVICE_AT], device, *handle[DEVICE_AT + 1 :]]


class IpcReceiver(Receiver):
    """See the module."""

    def open(self) -> None:
        device, gpu = own_gpu()
        token, handles = handles_for(self.offer, gpu)
        try:
            self._slots: list[Tensor] = [
                rebuild_cuda_tensor(*on_device(handle, device))  # type: ignore[no-untyped-call]
                for handle in handles
            ]
        except RuntimeError as problem:
            raise ConfigError(f"weights.route = ipc: the engine cannot map the trainer's memory: {problem}") from problem
        check_token(self._slots, token)

    def receive(self, bucket: Bucket) -> list[Named]:
        return bucket.cut(self._slots[bucket.slot])

    def close(self) -> None:
        self._slots = []


def check_token(slots: list[Tensor], token: str) -> None:
    """Raise ConfigError if a mapped slot does not begin with what the trainer wrote there."""
    if any(bytes(slot[:TOKEN_BYTES].tolist()).hex() != token for slot in slots):
        raise ConfigError("weights.route = ipc: the engine does not read the memory that the trainer writes")


@ROUTES.register("ipc", traits={"cuda", "own_gpus"})
class IpcRoute(Route):
    """See the module."""

    cost = 1.3
    receiver = IpcReceiver

    def sender(self, cfg: WeightsConfig, slot_bytes: int, receivers: int, host: str) -> Sender:
        return IpcSender(slot_bytes, receivers)

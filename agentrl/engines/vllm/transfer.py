"""Runs in vLLM's worker processes: receives weights over GPU routes with vLLM's weight-transfer engines.

For them, a bucket is one packed chunk: names, types and shapes, and the concatenated bytes of the tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch

from agentrl.engines.weights.base import ROUTES, SLOTS, TOKEN_BYTES, Bucket, Offer, Receiver, check_token
from agentrl.engines.weights.distributed_routes import Handle, IpcReceiver, NcclReceiver, own_handles
from agentrl.utils.errors import ConfigError


class Transfer(ABC):
    """Receiving end of a route; `index` numbers all receivers of the offer."""

    backend: ClassVar[str]
    """vLLM's name of the transfer engine."""

    def __init__(self, offer: Offer, index: int, vllm_config: Any, device: torch.device, model: Any) -> None:
        self._offer, self._index = offer, index
        self._of = (vllm_config, device, model)
        self._engines: list[Any] = []
        self._handles: list[dict[str, Handle]] = []
        """Per slot of the trainer: UUID of this process's GPU -> memory handle; empty on other routes."""

    def open(self) -> None:
        """Start the transfer engines. Raises ConfigError with the reason if the route cannot serve this process."""
        try:
            self._attach()
        except (RuntimeError, ValueError, TypeError, ImportError, OSError) as problem:
            raise ConfigError(f"weights.route = {self._offer.route}: vLLM's engine for it does not start: {problem}") from problem

    def load(self, bucket: Bucket) -> None:
        """Load the tensors of a bucket into the model."""
        own = [entry for entry in bucket.entries if entry.name == entry.source]  # no aliases: on GPUs, tied weights are shared
        update = {
            "names": [entry.name for entry in own],
            "dtype_names": [entry.dtype for entry in own],
            "shapes": [list(entry.shape) for entry in own],
        }
        if self._handles:
            update |= {"ipc_handles": self._handles[bucket.slot], "tensor_sizes": [entry.nbytes for entry in own]}
        engine = self._engines[bucket.slot % len(self._engines)]
        engine.receive_weights(engine.parse_update_info(update))

    def close(self) -> None:
        """Free all resources; idempotent."""
        for engine in self._engines:
            engine.shutdown()
        self._engines = []

    @abstractmethod
    def _attach(self) -> None:
        """Create and start the engines."""

    def _start(self, **info: Any) -> Any:
        """Create an engine and start it with `info`."""
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        engine = WeightTransferEngineFactory.create_engine(WeightTransferConfig(backend=self.backend), *self._of)
        self._engines.append(engine)
        engine.init_transfer_engine(engine.parse_init_info({"packed": True, **info}))
        return engine


class IpcTransfer(Transfer):
    """Transfer by IPC handles of the trainer's memory on this process's GPU."""

    backend = "ipc"

    def _attach(self) -> None:
        from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_consumer

        device, gpu, token, handles = own_handles(self._offer)
        self._handles = [{gpu: handle} for handle in handles]
        assert len(handles) == SLOTS
        for handle in self._handles:
            # One engine per slot: an engine only keeps the mapping of its last handle, and a handle can be mapped only once.
            engine = self._start()
            one = {"names": ["token"], "shapes": [[TOKEN_BYTES]], "dtype_names": ["uint8"], "tensor_sizes": [TOKEN_BYTES]}
            [(_, found)] = packed_ipc_consumer(handle, **one, device_index=device, importer=engine._packed_importer)
            check_token(found, token, self.backend)


class NcclTransfer(Transfer):
    """Transfer by a broadcast in a process group of vLLM."""

    backend = "nccl"

    def _attach(self) -> None:
        if not torch.cuda.is_available():
            raise ConfigError("weights.route = nccl: the engine has no GPU")
        host, port = self._offer.where
        self._start(
            master_address=host,
            master_port=int(port),
            rank_offset=1 + self._index - self._of[0].parallel_config.rank,  # vLLM adds that rank again
            world_size=self._offer.receivers + 1,
            packed_buffer_size_bytes=self._offer.slot_bytes,  # no bucket is larger, so each is one broadcast
            packed_num_buffers=1,
        )


TRANSFERS: dict[type[Receiver], type[Transfer]] = {IpcReceiver: IpcTransfer, NcclReceiver: NcclTransfer}
"""Receiver of a route -> its replacement in vLLM's processes."""


def open_receiving_end(offer: Offer, index: int, vllm_config: Any, device: torch.device, model: Any) -> Receiver | Transfer:
    """Open this process's end of a route. Raises ConfigError with the reason if it cannot attach."""
    receiver = ROUTES.entry(offer.route).make.receiver
    transfer = TRANSFERS.get(receiver)
    end = receiver(offer, index) if transfer is None else transfer(offer, index, vllm_config, device, model)
    end.open()
    return end

"""Counting the bytes that tensor operations allocate and that are alive at once."""

from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GIVEN = torch.ops.aten.set_.source_Storage_storage_offset, torch.ops.aten.set_.source_Storage  # memory of somebody else's


class BytesHeld(TorchDispatchMode):
    """While it is entered: `peak`, the most bytes of memory that were alive at once of what operations of this thread have
    allocated since. Views and mapped files count as nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {_memory(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and _memory(leaf) not in {0, *known} and func not in GIVEN:
                self._note(_local(leaf).untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        self._alive = {at: held for at, held in self._alive.items() if not held[0].expired()}
        if storage.data_ptr() not in self._alive:
            self._alive[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
            self.peak = max(self.peak, sum(size for _, size in self._alive.values()))


def _memory(tensor: torch.Tensor) -> int:
    return 0 if tensor.device.type == "meta" else _local(tensor).untyped_storage().data_ptr()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """What is inside of a distributed tensor, or of one that a collective will fill."""
    if isinstance(tensor, DTensor):
        return _local(tensor._local_tensor)
    return _local(tensor.elem) if isinstance(tensor, AsyncCollectiveTensor) else tensor

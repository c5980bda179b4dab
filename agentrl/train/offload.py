"""Tensors that give their memory back for a while: their bytes wait in host memory, and their storages are empty meanwhile.

Storages are emptied and filled in place, so that views, sharded parameters and an optimizer's state stay the same
objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class _HostCopy:
    """A storage and where its bytes wait: uint8, pinned if they came from a GPU."""

    storage: torch.UntypedStorage
    host: Tensor


class Offloaded:
    """The host copies of some tensors. The copies' memory is kept from one time to the next."""

    def __init__(self) -> None:
        self._held: dict[int, _HostCopy] = {}
        self.away = False

    def take(self, tensors: Iterable[Tensor]) -> None:
        """Copy the tensors to the host and free their memory, except for those that are away already."""
        there = {storage._cdata: storage for tensor in tensors if (storage := local(tensor).untyped_storage()).nbytes()}
        going = {key: self._held.get(key) or _room(storage) for key, storage in there.items()}
        for held in going.values():
            held.host.copy_(_bytes(held.storage), non_blocking=True)
        _wait()
        for held in going.values():
            held.storage.resize_(0)
        # Those of last time only if they are still away: the copy of a tensor that is gone would stay forever.
        self._held = {**self._held, **going} if self.away else going
        self.away = True
        free_cached()

    def give_back(self) -> None:
        """Allocate the memory again and copy the bytes into it. Does nothing if they are there."""
        if not self.away:
            return
        for held in self._held.values():
            held.storage.resize_(held.host.numel())
            _bytes(held.storage).copy_(held.host, non_blocking=True)
        _wait()
        self.away = False

    def where(self, tensor: Tensor) -> Tensor:
        """The tensor itself, or while it is away the same over its bytes on the host: what is written there will be back."""
        part = local(tensor)
        held = self._held.get(part.untyped_storage()._cdata) if self.away else None
        if held is None:
            return tensor
        typed = held.host.view(part.dtype)
        view = typed.as_strided(part.size(), part.stride(), part.storage_offset())
        if not isinstance(tensor, DTensor):
            return view
        make: Callable[..., Tensor] = DTensor  # not `from_local`, which would copy it to the mesh's device
        return make(view, tensor._spec, requires_grad=False)


def free_cached() -> None:
    """Give the GPU what this process's allocator keeps without using it, for other processes."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be sharded."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def _room(storage: torch.UntypedStorage) -> _HostCopy:
    # Pinned, because only such copies run without the CPU's waiting for each.
    host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
    return _HostCopy(storage, host)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()

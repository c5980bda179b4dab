"""Host tensors on their way to a device."""

from __future__ import annotations

from torch import Tensor
from torch import device as Device


def on_device(tensor: Tensor, device: Device) -> Tensor:
    """The tensor on `device`. The way to a GPU is by pinned memory and only queued, in order with the kernels that will read it;
    plain memory would be waited for, after all kernels that were queued before."""
    if device.type != "cuda" or tensor.device.type != "cpu" or not tensor.numel():
        return tensor.to(device)
    # torch's allocator does not give pinned memory to others before its copy is done.
    return tensor.pin_memory().to(device, non_blocking=True)

"""Runs inside vLLM's worker processes: takes published weights out of shared memory into the live model.

vLLM adds `WeightReceiver` to its worker class (`worker_extension_cls`) and calls the methods through
`collective_rpc`. No scheduler step may fall between `begin` and `end`: the engine is paused meanwhile.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

Entry = tuple[str, str, tuple[int, ...], int]  # name, torch dtype's name, shape, byte offset


class WeightReceiver:
    """Mixed into vLLM's worker."""

    vllm_config: Any
    model_config: Any
    model_runner: Any

    def agentrl_begin(self) -> None:
        """Prepare every layer for new weights; what an earlier, broken update left is dropped."""
        with set_current_vllm_config(self.vllm_config):
            model = self.model_runner.get_model()
            finalize_layerwise_reload(model, self.model_config)
            initialize_layerwise_reload(model)

    def agentrl_load(self, path: str, size: int, entries: list[Entry]) -> None:
        """Load one bucket: `size` bytes at `path`, cut as `entries` say. The mapping lives on in the tensors
        until the last layer that holds one of them is complete, so the file may be unlinked at once."""
        flat = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        tensors = []
        for name, dtype_name, shape, offset in entries:
            dtype = getattr(torch, dtype_name)
            count = torch.Size(shape).numel() * dtype.itemsize
            tensors.append((name, flat[offset : offset + count].view(dtype).view(shape)))
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.get_model().load_weights(tensors)

    def agentrl_end(self) -> None:
        """Finish the layers that wait for the end (attention scales, padded weights)."""
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self.model_runner.get_model(), self.model_config)

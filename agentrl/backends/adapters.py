"""Low-rank adapters on their own (Hu et al. 2021, arXiv:2106.09685), merged into plain weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from agentrl.errors import EngineError
from agentrl.weights.target import Adapter

DOWN, UP = ".lora_A.weight", ".lora_B.weight"


def apply_adapter(parameters: dict[str, nn.Parameter], base: dict[str, Tensor], adapter: Adapter) -> None:
    """W = base + alpha / rank * B A, in float32, in place. `base` keeps the adapted layers' weights without any
    adapter; it is filled here. Raises EngineError, with nothing changed, if the adapter does not fit."""
    layers = sorted(name.removesuffix(DOWN) for name in adapter.tensors if name.endswith(DOWN))
    if not layers or len(adapter.tensors) != 2 * len(layers):
        raise EngineError("the adapter is not a set of lora_A / lora_B pairs")
    for layer in layers:
        target = parameters.get(f"{layer}.weight")
        up = adapter.tensors.get(layer + UP)
        if target is None or up is None:
            raise EngineError(f"adapter: {layer!r} is not a linear layer of this model, or has no lora_B")
        shape = (up.shape[0], adapter.tensors[layer + DOWN].shape[1])
        if shape != target.shape:
            raise EngineError(f"adapter: {layer!r} is for a weight of shape {shape}, but it has shape {tuple(target.shape)}")
    with torch.no_grad():
        # First undo the previous adapter: this one may leave some of its layers alone.
        for name, weight in base.items():
            parameters[name].copy_(weight)
        for layer in layers:
            target = parameters[f"{layer}.weight"]
            plain = base.setdefault(f"{layer}.weight", target.detach().clone())
            down, up = (adapter.tensors[layer + part].to(plain.device, torch.float32) for part in (DOWN, UP))
            target.copy_(plain.float() + (adapter.alpha / adapter.rank) * (up @ down))

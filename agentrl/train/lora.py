"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) by peft: injected, the only trained weights, merged for publishing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from agentrl.config.schema import LoraSection
from agentrl.errors import DependencyError, ModelError

BASE, DOWN, UP = ".base_layer.", ".lora_A.default.", ".lora_B.default."


def inject(model: Any, cfg: LoraSection, seed: int = 0) -> None:
    """Add adapters to the linear layers that `cfg.modules` names and freeze everything else.

    The adapters start as a zero change. Raises DependencyError without peft, ModelError if no layer has
    such a name.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise DependencyError("model.lora needs peft: pip install 'agentrl[peft]'") from error
    settings = LoraConfig(r=cfg.rank, lora_alpha=cfg.alpha, target_modules=list(cfg.modules), lora_dropout=0.0)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # every rank must draw the same adapters
            inject_adapter_in_model(settings, model)
    except ValueError as error:
        raise ModelError(f"model.lora.modules = {cfg.modules}: {str(error).splitlines()[0]}") from error
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)


@contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """In this context the model computes as its frozen base. For forward passes without gradient."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer)]
    # Not by peft's `enable_adapters`, which also switches `requires_grad` of parameters that are sharded and have an optimizer.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def merged(held: Mapping[str, Tensor], full: Callable[[Tensor], Tensor], cfg: LoraSection) -> Iterator[tuple[str, Tensor]]:
    """The weights under their plain names, with adapters added: W + alpha / rank * B A.

    `held` is a state dict; `full` returns the full tensor of an entry (a collective if it is sharded).
    """
    for name, tensor in held.items():
        if ".lora_" in name:
            continue
        plain = name.replace(BASE, ".")
        if BASE not in name or not name.endswith(".weight"):
            yield plain, full(tensor)
            continue
        down, up = full(held[name.replace(BASE, DOWN)]), full(held[name.replace(BASE, UP)])
        yield plain, full(tensor) + (cfg.alpha / cfg.rank) * (up @ down)

"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) by peft: injected, the only trained weights, merged for publishing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.config.schema import LoraSection
from agentrl.errors import DependencyError, ModelError
from agentrl.vision import takes_images

TOWER = r".*\bvisual\..*"
"""The layers of a vision tower, as peft is told."""
BASE, DOWN, UP = ".base_layer.", ".lora_A.default.", ".lora_B.default."


def inject(model: Any, cfg: LoraSection, seed: int = 0) -> None:
    """Add adapters to the linear layers that `cfg.modules` names, but for those of a vision tower, and freeze everything else.

    The adapters start as a zero change. Raises DependencyError without peft, ModelError if no layer has
    such a name.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise DependencyError("model.lora needs peft: pip install 'agentrl[peft]'") from error
    # A tower's layers may have the same names.
    tower = {"exclude_modules": TOWER} if takes_images(getattr(model, "config", None)) else {}
    settings = LoraConfig(r=cfg.rank, lora_alpha=cfg.alpha, target_modules=list(cfg.modules), lora_dropout=0.0, **tower)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # every rank must draw the same adapters
            inject_adapter_in_model(settings, model, low_cpu_mem_usage=True)
            _draw(model)
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


def _draw(model: Any) -> None:
    """Real adapters in place of those on the meta device, where peft puts them with the model; drawn in the order in which
    peft draws them when it makes them itself."""
    from peft.tuners.lora import LoraLayer

    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            for name, down in layer.lora_A.items():
                up = layer.lora_B[name]
                layer.lora_A[name] = nn.Linear(down.in_features, down.out_features, bias=False)
                layer.lora_B[name] = nn.Linear(up.in_features, up.out_features, bias=False)
                layer.reset_lora_parameters(name, True)


def adapter_of(held: Iterable[str], full: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """The adapters alone, by the names that `Adapter` has; `held` and `full` as of `merged`."""
    return {name.replace(".default.", "."): full(name) for name in held if ".lora_" in name}


def merged(held: Iterable[str], full: Callable[[str], Tensor], cfg: LoraSection) -> Iterator[tuple[str, Tensor]]:
    """The weights under their plain names, with adapters added: W + alpha / rank * B A.

    `held` are the names of a state dict; `full` returns the full tensor of one (a collective if it is sharded).
    """
    for name in held:
        if ".lora_" in name:
            continue
        plain = name.replace(BASE, ".")
        if BASE not in name or not name.endswith(".weight"):
            yield plain, full(name)
            continue
        down, up = full(name.replace(BASE, DOWN)), full(name.replace(BASE, UP))
        yield plain, full(name) + (cfg.alpha / cfg.rank) * (up @ down)

"""Changes to a model's layers: low-rank adapters and compilation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.config.schema import LoraSection
from agentrl.render.modality import modality_of
from agentrl.trainer.attention import PACKED, packed_attention
from agentrl.trainer.language_model import HeadKernels, logits_gradient, logits_stats
from agentrl.utils.errors import DependencyError, ModelError, hint_text

# Low-rank adapters

ROUTERS = ("router", "gate", "shared_expert_gate")
BASE, DOWN, UP = ".base_layer.", ".lora_A.default.", ".lora_B.default."


def inject(model: Any, cfg: LoraSection) -> None:
    """Add adapters to the linear layers named by `cfg.modules`, and freeze all other parameters.

    Default: all linear layers except head and routers; never those of a vision tower. Adapters start as a change of zero. Raises
    DependencyError without peft, ModelError if a name matches no layer.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import LoraLayer
    except ImportError as error:
        raise DependencyError("model.lora needs peft: pip install 'agentrl[peft]'") from error
    # Layers of a vision tower may have the same names.
    modality = modality_of(getattr(model, "config", None))
    others = {} if modality is None else {"exclude_modules": modality.no_adapters}
    head = model.get_output_embeddings()
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head}
    names = cfg.modules or sorted({name.rpartition(".")[2] for name in linear}.difference(ROUTERS))
    for named in names:  # peft ignores names without a layer if another name has one
        if not any(f".{name}".endswith(f".{named}") for name in linear):
            hint = hint_text(named, {name.rpartition(".")[2] for name in linear})
            raise ModelError(f"model.lora.modules = {names}: {named!r} names no linear layer inside of the model{hint}")
    settings = LoraConfig(r=cfg.rank, lora_alpha=cfg.alpha, target_modules=names, lora_dropout=0.0, **others)
    own = model.config
    # For some families peft would take names of an MLP for fused experts, whose adapters cannot be published.
    model.config = {"model_type": "custom"}
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # every rank must draw the same adapters
            inject_adapter_in_model(settings, model, low_cpu_mem_usage=True)
            # Replace the adapters, which peft creates on the model's meta device, by real ones, drawn in peft's usual order.
            for layer in (module for module in model.modules() if isinstance(module, LoraLayer)):
                for name, down in layer.lora_A.items():
                    up = layer.lora_B[name]
                    layer.lora_A[name] = nn.Linear(down.in_features, down.out_features, bias=False)
                    layer.lora_B[name] = nn.Linear(up.in_features, up.out_features, bias=False)
                    layer.reset_lora_parameters(name, True)
    except ValueError as error:
        raise ModelError(f"model.lora.modules = {names}: {str(error).splitlines()[0]}") from error
    finally:
        model.config = own
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)


def adapter_of(held: Iterable[str], full: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """Return the adapter tensors by their names in `Adapter`. `held`, `full`: as for `merge_adapters`."""
    return {name.replace(".default.", "."): full(name) for name in held if ".lora_" in name}


def merge_adapters(held: Iterable[str], full: Callable[[str], Tensor], cfg: LoraSection) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights by their plain names, with adapters added: W + alpha / rank * B A.

    `held`: names of a state dict; `full`: name -> full tensor (a collective if it is sharded).
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


# Kernels

BACKEND = "inductor"


def compile_layers(layers: list[nn.Module], backend: str = BACKEND) -> None:
    """Compile the forward pass of each layer with torch.compile, for dynamic token counts.

    Packed attention is not compiled: the compiler would specialize on the layout, and recompile for each number of blocks.
    """
    from transformers import AttentionInterface

    uncompiled = torch.compiler.disable(packed_attention)  # type: ignore[no-untyped-call]
    AttentionInterface.register(PACKED, uncompiled)
    for layer in layers:
        # Not `layer.compile()`, which also compiles the module's hooks: FSDP gathers weights in them, and checkpointing wraps
        # the call.
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=backend)


def compiled_head(backend: str = BACKEND) -> HeadKernels:
    """Compile the head's kernels, which then read a chunk's logits once or twice."""
    # Not dynamic=True: only the number of tokens becomes dynamic, from its second value on; the vocabulary stays constant.
    return HeadKernels(torch.compile(logits_stats, backend=backend), torch.compile(logits_gradient, backend=backend))

"""Faster layers for GPUs, if the config asks for them: `model.compile` (torch.compile) and `model.kernels = "liger"`.

Both change a loaded model in place before it is sharded. Attention stays agentrl's own (attention.py). The head is never run
by the model itself, but by chunks (logprobs.py).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.errors import ConfigError, DependencyError, did_you_mean
from agentrl.train.attention import PACKED, PackedSequences, packed_attention
from agentrl.train.logprobs import HeadKernels, slope, summary

BACKEND = "inductor"
_layout: ContextVar[PackedSequences | None] = ContextVar("layout of the packed rows")


def compile_layers(layers: list[nn.Module], backend: str = BACKEND) -> None:
    """Compile the forward pass of each layer with torch.compile, for token counts that differ from one micro-batch to the next.

    Attention over the packed rows is left out, with their layout.
    """
    from transformers import AttentionInterface

    uncompiled = torch.compiler.disable(_attend)  # type: ignore[no-untyped-call]
    AttentionInterface.register(PACKED, uncompiled)
    for layer in layers:
        # Not `layer.compile()`, which compiles the module's hooks as well: FSDP gathers the weights in them, and
        # checkpointing wraps the call.
        layer.forward = _Compiled(torch.compile(layer.forward, dynamic=True, backend=backend))


def compiled_head(backend: str = BACKEND) -> HeadKernels:
    """What happens to a chunk's logits between the products, in a few kernels that read them once or twice."""
    # Dynamic only from the second number of tokens on: the size of the vocabulary stays a constant.
    return HeadKernels(torch.compile(summary, backend=backend), torch.compile(slope, backend=backend))


class _Compiled:
    """A layer's compiled forward pass, called with everything but the layout of the rows.

    The compiler would look into that object, and compile the layer again for each number of blocks in it.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, packed: PackedSequences | None = None, **kwargs: Any) -> Any:
        # Set for each call, because checkpointing calls again in the backward pass, and there from another thread.
        token = _layout.set(packed)
        try:
            return self._function(*args, **kwargs)
        finally:
            _layout.reset(token)


def _attend(*args: Any, packed: PackedSequences | None = None, **kwargs: Any) -> tuple[Tensor, None]:
    """`packed_attention` for the layout that the layer was called with: its own argument if the layer is not compiled."""
    return packed_attention(*args, packed=packed or _layout.get(), **kwargs)


def use_liger(model: Any, device: torch.device) -> None:
    """Replace norms, rotary embeddings and gated MLPs by the Triton kernels of Liger (Hsu et al. 2024, arXiv:2410.10989).

    Its fused cross-entropy is left out, because logprobs and entropies of single tokens are needed. The rotary embedding is
    replaced for the whole family in this process, including an engine in it.

    Raises ConfigError without a GPU and for a family that Liger does not know, DependencyError if it is not installed.
    """
    check_liger(device)
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as known
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance as apply

    family = model.config.model_type
    if family not in known:
        raise ConfigError(
            f'model.kernels = "liger": {did_you_mean(family, known, "Liger has no kernels for this family")} '
            f'(the model is a {family!r}); set model.kernels = "torch"'
        )
    apply(model, rope=True, rms_norm=True, swiglu=True, geglu=True, cross_entropy=False, fused_linear_cross_entropy=False)


def check_liger(device: torch.device) -> None:
    """Raise ConfigError if `device` is not a GPU, DependencyError if Liger is not installed."""
    if device.type != "cuda":
        raise ConfigError('model.kernels = "liger" needs a GPU: its kernels are written in Triton; set model.kernels = "torch"')
    if importlib.util.find_spec("liger_kernel") is None:
        raise DependencyError("model.kernels = \"liger\": Liger is not installed: pip install 'agentrl[liger]'")

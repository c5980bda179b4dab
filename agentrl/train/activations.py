"""What a forward pass keeps for the backward pass, counted by saved-tensor hooks on torch's meta device: nothing is computed.

Attention is counted as the kernels keep it: queries, keys, values, the result, and one number a head and token. Layers are the
plain ones: torch.compile and Liger's kernels keep less.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from agentrl.train.attention import PackedSequences
from agentrl.train.logprobs import CHUNK
from agentrl.train.modules import Micro, PolicyModule, layers_of

COUNTED, NOTED = "agentrl_counted", "agentrl_noted"


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes of one micro-batch.

    `saved` in all; of that the layers save `layers`, the largest of them `layer`, and `largest` is the largest tensor. `inputs`:
    what checkpointing keeps of the layers instead. `logits`: of one chunk in the head's backward pass, with the gradient
    of its weights; `chunk`: of one in a forward pass alone.
    """

    saved: int
    layers: int
    layer: int
    largest: int
    inputs: int
    logits: int
    chunk: int

    @property
    def checkpointed(self) -> int:
        """What is saved if each layer is computed again in the backward pass."""
        return self.saved - self.layers + self.inputs

    def working(self, checkpoints: bool) -> int:
        """The most that comes and goes besides what is saved: a chunk of logits, or the gradients of a layer's results (two of
        the largest at once), with checkpointing beside those results."""
        return max(self.logits, 2 * self.largest + (self.layer if checkpoints else 0))


def count_activations(module: nn.Module, tokens: int, dtype: torch.dtype) -> Activations:
    """Of a forward pass over `tokens` tokens, all of whose logprobs or values are wanted. `module` is on the meta device and
    its attention is `COUNTED`. Raises what the model raises if it cannot run there."""
    # Before `_Kept` looks: this gives the parameters other storages.
    module = module.to(dtype)
    layers, marks = layers_of(module), [0]
    kept = _Kept(module.parameters())

    def mark(*_: Any) -> None:
        marks.append(kept.total)

    handles = [h for layer in layers for h in (layer.register_forward_pre_hook(mark), layer.register_forward_hook(mark))]
    try:
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor), _CountedProducts():
            _forward(module, _micro(tokens))
    finally:
        for handle in handles:
            handle.remove()
    sizes = [after - before for before, after in zip(marks[1::2], marks[2::2], strict=True)]
    width = module.get_parameter(next(name for name, _ in module.named_parameters())).element_size()
    hidden = int(_text(module).hidden_size)
    return Activations(
        kept.total, sum(sizes), max(sizes), kept.largest, len(layers) * tokens * hidden * width, *_logits(module, tokens, width)
    )


class _Kept:
    """Bytes of the storages that autograd keeps, each once, without those of parameters."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._seen: dict[int, Any] = {p.untyped_storage()._cdata: None for p in parameters}
        self.total = self.largest = 0

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # By storage, since a view that is kept keeps all of it.
        if storage._cdata not in self._seen:
            self._seen[storage._cdata] = storage  # held, so that no other takes its place in memory
            self.total += storage.nbytes()
            self.largest = max(self.largest, storage.nbytes())
        return tensor


def _text(module: nn.Module) -> Any:
    return getattr(module, "hf").config.get_text_config()  # noqa: B009 - nn.Module types attributes as tensors or modules


def _micro(tokens: int) -> Micro:
    positions = torch.zeros(tokens, dtype=torch.int64, device="meta")
    packed = PackedSequences(torch.zeros(2, dtype=torch.int32, device="meta"), tokens, ())
    return Micro(positions, positions, packed, positions, positions, positions[:1])


def _forward(module: nn.Module, micro: Micro) -> Any:
    return module(micro, 1.0, True) if isinstance(module, PolicyModule) else module(micro)


def _logits(module: nn.Module, tokens: int, width: int) -> tuple[int, int]:
    """`Activations.logits` and `.chunk`, as `_ChunkedLogprobs` has them at once: the logits as computed and as float32, and p;
    in the backward pass also two terms of the gradient, and the float32 gradient of the output embedding with its cast."""
    if not isinstance(module, PolicyModule):
        return 0, 0
    weight = module.hf.get_output_embeddings().weight
    cells = min(CHUNK, tokens) * len(weight)
    return cells * (4 * 4 + width) + (weight.numel() * (4 + width) if weight.requires_grad else 0), cells * (2 * 4 + width)


class _CountedAttention(torch.autograd.Function):
    """Keeps what the kernels keep, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out


class _CountedProduct(torch.autograd.Function):
    """Of tokens [S, D], by expert, and the experts' matrices [E, D, F]: [S, F], which keeps what the kernel keeps."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, matrices: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, matrices)
        return tokens.new_empty(len(tokens), matrices.shape[-1])


class _CountedProducts(TorchFunctionMode):
    """On the meta device torch multiplies the tokens of experts in bfloat16 alone, where the kernels also take float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.nn.functional.grouped_mm, torch._grouped_mm):
            return _CountedProduct.apply(args[0], args[1])  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


def heads_of(module: nn.Module) -> dict[int, tuple[int, int, int]]:
    """(key heads, width of a key, width of a value) of each layer that attends, by its index: what the layers hand to their
    attention function, since configs name it in many ways, and latent attention in none. `module`: on the meta device, with the
    attention `COUNTED`."""
    found: dict[int, tuple[int, int, int]] = {}

    def note(layer: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        found[layer.layer_idx] = (key.shape[1], key.shape[-1], value.shape[-1])
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1]), None

    from transformers import AttentionInterface

    model: Any = module.hf
    AttentionInterface.register(NOTED, note)
    model.set_attn_implementation(NOTED)
    try:
        with torch.no_grad(), _CountedProducts():
            _forward(module, _micro(2))
    finally:
        model.set_attn_implementation(COUNTED)
    return found


def counted_attention(grouped: bool) -> str:
    """Make the attention that is only counted known to transformers; its name. `grouped`: the kernel reads a key head once for
    all query heads of its group; else keys and values are repeated for each of them."""
    from transformers import AttentionInterface

    # Without a mask function of that name transformers makes no mask; it would have to look at positions, which are not there.
    AttentionInterface.register(COUNTED, partial(_counted, grouped=grouped))
    return COUNTED


def _counted(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, grouped: bool, **_: Any
) -> tuple[Tensor, None]:
    """[1, H, T, D], value [1, G, T, E] -> [1, T, H, E], as packed_attention."""
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if not grouped and len(query[0]) != len(key[0]):
        k, v = (tensor.repeat_interleave(len(query[0]) // len(key[0]), dim=1) for tensor in (k, v))
    out: Tensor = _CountedAttention.apply(q, k, v)  # type: ignore[no-untyped-call]
    return out[None], None

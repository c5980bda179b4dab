"""Estimate the memory of a role on each rank from the model's architecture, without weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from agentrl.config.schema import ModelConfig, OptimConfig
from agentrl.trainer.attention import PackedSequences
from agentrl.trainer.language_model import CHUNK, MODULES, Micro, PolicyModule, Role, layers_of
from agentrl.trainer.layers import inject
from agentrl.trainer.optim import state_bytes
from agentrl.trainer.parallel import Share, split_code
from agentrl.trainer.pretrained import meta_model
from agentrl.utils.errors import ModelError

LARGE = 1_000_000_000
"""Parameters from which saving memory is preferred to speed. Unsharded float32 gradients of 1B parameters take 4 GB per GPU, and
activations of 8,192 tokens of a 1.7B model without checkpointing about 30 GB. Below, both fit on any training GPU, and speed
matters: checkpointing adds a forward pass, a third of the products, and sharding gradients in each micro-batch as much
communication as gathering the weights."""


def by_size(asked: bool | None, size: int) -> bool:
    """Return the configured value `asked`; without one, True for at least LARGE parameters."""
    return size >= LARGE if asked is None else asked


# Activations

COUNTED = "agentrl_counted"


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes of activations of one micro-batch.

    `saved`: all saved tensors; `layers`: those of the layers; `layer`: of the largest layer; `largest`: the largest tensor.
    `inputs`: layer inputs, which checkpointing saves instead. `logits`: of a chunk in the head's backward pass, with the gradient
    of its weights; `chunk`: of a chunk in a forward pass alone.
    """

    saved: int
    layers: int
    layer: int
    largest: int
    inputs: int
    logits: int
    chunk: int

    def working(self, checkpoints: bool) -> int:
        """Return the peak of temporary memory on top of saved activations.

        It is a chunk of logits, or two gradients of the largest tensor, with checkpointing plus a layer's activations."""
        return max(self.logits, 2 * self.largest + (self.layer if checkpoints else 0))


def count_activations(module: nn.Module, tokens: int, dtype: torch.dtype) -> Activations:
    """Count the activations of a forward pass over `tokens` tokens that are all predicted.

    `module`: on the meta device, with attention `COUNTED`. Raises the model's error if it cannot run there."""
    # First, because it replaces the parameters' storages.
    module = module.to(dtype)
    layers, marks, kept = layers_of(module), [0], list[int]()  # bytes of the storages that autograd keeps, each once
    seen: dict[int, Any] = {p.untyped_storage()._cdata: None for p in module.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # By storage, because a saved view keeps all of it.
        if storage._cdata not in seen:
            seen[storage._cdata] = storage  # referenced, so that its address is not reused
            kept.append(storage.nbytes())
        return tensor

    def mark(*_: Any) -> None:
        marks.append(sum(kept))

    handles = [h for layer in layers for h in (layer.register_forward_pre_hook(mark), layer.register_forward_hook(mark))]
    # One row of all tokens.
    positions = torch.zeros(tokens, dtype=torch.int64, device="meta")
    no_rows = torch.empty(0, 4, dtype=torch.int64)
    packed = PackedSequences(torch.zeros(2, dtype=torch.int32, device="meta"), tokens, no_rows)
    micro = Micro(positions, positions, packed, positions, positions, positions[:1])
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), _CountedProducts():
            module(micro, 1.0, True) if isinstance(module, PolicyModule) else module(micro)
    finally:
        for handle in handles:
            handle.remove()
    sizes = [after - before for before, after in zip(marks[1::2], marks[2::2], strict=True)]
    width = next(module.parameters()).element_size()
    model: Any = module.hf
    inputs = len(layers) * tokens * int(model.config.get_text_config().hidden_size) * width
    logits = chunk = 0
    if isinstance(module, PolicyModule):
        # At once in `_ChunkedLogprobs`: the logits as computed and as float32, and p; in the backward pass also two terms of
        # the gradient, and the float32 gradient of the output embedding with its cast.
        weight = model.get_output_embeddings().weight
        cells = min(CHUNK, tokens) * len(weight)
        logits = cells * (4 * 4 + width) + (weight.numel() * (4 + width) if weight.requires_grad else 0)
        chunk = cells * (2 * 4 + width)
    return Activations(sum(kept), sum(sizes), max(sizes), max(kept, default=0), inputs, logits, chunk)


class _CountedAttention(torch.autograd.Function):
    """Attention that saves the tensors of the real kernels and computes nothing."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out


class _CountedProduct(torch.autograd.Function):
    """Grouped product that saves the kernel's tensors: tokens [S, D], by expert, x matrices [E, D, F] -> [S, F]."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, matrices: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, matrices)
        return tokens.new_empty(len(tokens), matrices.shape[-1])


class _CountedProducts(TorchFunctionMode):
    """Replace grouped products by counted ones: on the meta device torch only supports bfloat16, kernels also float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.nn.functional.grouped_mm, torch._grouped_mm):
            return _CountedProduct.apply(args[0], args[1])  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


MASTER = 4
"""Bytes per element of master weights and their gradients: float32. trainer/optim.py has those of optimizer states."""
GATHERED = 3
"""Layers that FSDP2 holds unsharded at once: the current one, the next one, and the buffer of the communication."""


@dataclass(frozen=True, slots=True)
class RoleMemory:
    """Bytes of a role on one rank.

    `weights`, `optimizer` and an engine's `cache` stay between passes; the others exist during passes: `gathered`: unsharded
    layers and buffers of gradient reduction; `activations`: saved for the backward pass of a micro-batch; `working`: peak of
    temporary memory (logits of a chunk, a recomputed layer). `host`: host memory with `model.offload` "always". `checkpoints`,
    `shards_gradients`: True if the role uses them."""

    weights: int = 0
    optimizer: int = 0
    gradients: int = 0
    gathered: int = 0
    activations: int = 0
    working: int = 0
    cache: int = 0
    host: int = 0
    checkpoints: bool = False
    shards_gradients: bool = False

    @property
    def resident(self) -> int:
        """Return the bytes that stay between passes."""
        return self.weights + self.optimizer + self.cache

    @property
    def turn(self) -> int:
        """Return the additional bytes during passes."""
        return self.gradients + self.gathered + self.activations + self.working


def shell(cfg: ModelConfig, role: Role = "policy", path: str | None = None, *, grouped: bool = True) -> nn.Module:
    """Build a role's module on the meta device, with counted attention. `path` replaces `model.path`.

    `grouped`: the kernel reads a key head once per group of query heads; else keys and values are repeated. Raises ModelError,
    DependencyError."""
    from transformers import AttentionInterface

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> tuple[Tensor, None]:
        """Count attention: [1, H, T, D], value [1, G, T, E] -> [1, T, H, E], like packed_attention."""
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        if not grouped and len(query[0]) != len(key[0]):
            k, v = (tensor.repeat_interleave(len(query[0]) // len(key[0]), dim=1) for tensor in (k, v))
        out: Tensor = _CountedAttention.apply(q, k, v)  # type: ignore[no-untyped-call]
        return out[None], None

    # Without a mask function of that name transformers builds no mask, which would need the values of positions.
    AttentionInterface.register(COUNTED, attend)
    with torch.device("meta"):
        source = cfg if path is None else cfg.model_copy(update={"path": path, "init": None})
        model = meta_model(source, classifier=role == "score", attn_implementation=COUNTED)
        if cfg.lora is not None and role != "score":
            inject(model, cfg.lora)
        return MODULES[role](model).train()


Held = dict[int, Share]
"""A rank's share of each parameter, by the parameter's id."""


def count(module: nn.Module, cfg: ModelConfig, ranks: int, tokens: int, optims: Sequence[OptimConfig]) -> RoleMemory:
    """Estimate the memory of a role with `ranks` ranks, on one of them.

    `cfg.dtype` must be set. `tokens`: per micro-batch. `optims`: optimizers, used in turn, so the largest counts; empty for a
    frozen role. Raises ModelError if the model's forward pass cannot be counted."""
    model: Any = module.hf
    parameters, split, trained = list(module.parameters()), dict[int, Share](), bool(optims)
    if cfg.tensor_parallel * cfg.expert_parallel > 1:
        inside = dict(model.named_parameters())
        split = {id(inside[name]): share for name, share in split_code().shares(model, cfg, ranks).items()}
    alone = ranks // cfg.replicas // cfg.tensor_parallel  # only FSDP2 shards parameters outside of the model
    held: Held = {id(p): split.get(id(p)) or Share(tuple(p.shape), 0, alone) for p in parameters}
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad] if trained else []
    learning = [p for _, p in named]
    # As in FsdpEngine: checkpointing depends on the model without adapters, sharded gradients on trained parameters.
    size = numel(p for name, p in module.named_parameters() if ".lora_" not in name)
    checkpoints = by_size(cfg.activation_checkpointing, size)
    shards_gradients = by_size(cfg.shard_gradients, numel(learning))
    states = [sum(state_bytes(name, p, optim) * held[id(p)].max_numel for name, p in named) for optim in optims]
    # On the rank with the most elements.
    own = {"weights": MASTER * sum(held[id(p)].max_numel for p in parameters), "optimizer": math.ceil(max(states, default=0.0))}
    sharded = MASTER * sum(held[id(p)].max_numel for p in learning)
    whole = MASTER * _gathered_numel(learning, held)
    gathered = _gathered_bytes(module, cfg, held, trained) if ranks > 1 or cfg.dtype != "float32" else 0
    if cfg.offload == "always":
        # In host memory; gathered layers and unsharded gradients are still on the device.
        own, sharded = {"host": sum(own.values()) + sharded}, 0
    # Layers get their shapes on a rank: tensor parallelism splits matrices. Embeddings keep theirs, because the head splits
    # tokens, not its vocabulary; so do experts, as if each rank received as many tokens as it sends.
    for parameter in (p for layer in layers_of(module) for p in layer.parameters() if p.ndim < 3):
        parameter.data = parameter.new_empty(held[id(parameter)].shape)
    try:
        found = count_activations(module, math.ceil(tokens / cfg.sequence_parallel), getattr(torch, cfg.dtype))
    except RuntimeError as error:
        raise ModelError(f"the activations of {type(module).__name__} cannot be counted: {error}") from error
    kept = found.saved - found.layers + found.inputs if checkpoints else found.saved
    return RoleMemory(
        **own,
        gradients=sharded if shards_gradients else whole,
        gathered=gathered,
        activations=kept if trained else 0,
        # Without a backward pass nothing is saved, and about one layer's results exist at once.
        working=found.working(checkpoints) if trained else max(found.layer, found.chunk),
        checkpoints=checkpoints and trained,
        shards_gradients=shards_gradients and trained,
    )


def numel(parameters: Iterable[nn.Parameter]) -> int:
    """Return the number of elements of the parameters."""
    return sum(parameter.numel() for parameter in parameters)


def _gathered_bytes(module: nn.Module, cfg: ModelConfig, held: Held, trained: bool) -> int:
    size = width(cfg.dtype)
    layers = [list(layer.parameters()) for layer in layers_of(module)]
    inside = {id(p) for layer in layers for p in layer}
    root = [p for p in module.parameters() if id(p) not in inside]
    largest = max(layers, key=lambda layer: _gathered_numel(layer, held))
    taken = size * (_gathered_numel(root, held) + GATHERED * _gathered_numel(largest, held))
    if cfg.tensor_parallel > 1 and isinstance(module, PolicyModule):
        taken += size * module.hf.get_output_embeddings().weight.numel()  # gathered over the ranks of tensor parallelism too
    if not trained:
        return taken
    # Gradients of a layer, as computed and as float32 in the reduction buffer; gradients outside of layers until the end.
    learning = [[p for p in part if p.requires_grad] for part in (largest, root)]
    return taken + (size + MASTER) * _gathered_numel(learning[0], held) + size * _gathered_numel(learning[1], held)


def _gathered_numel(parameters: Iterable[nn.Parameter], held: Held) -> int:
    return sum(held[id(p)].gathered_numel for p in parameters)


def token_bytes(module: nn.Module, dtype: str) -> int:
    """Estimate the bytes per token of an engine's KV cache; 0 without attention.

    All heads count as the widest. `module`: from `shell`, in any dtype."""
    model: Any = module.hf
    text = model.config.get_text_config()
    queries = getattr(text, "num_attention_heads", None)
    if not queries:
        return 0
    heads = getattr(text, "num_key_value_heads", None) or queries
    heads = max(heads) if isinstance(heads, list) else heads  # of each layer
    # Config names of the parts of a key or value; keys of latent attention have two.
    kinds = ("head_dim",), ("global_head_dim",), ("v_head_dim",), ("qk_nope_head_dim", "qk_rope_head_dim")
    widths = (sum(getattr(text, name, None) or 0 for name in names) for names in kinds)
    widest = max(widths) or text.hidden_size // queries
    return 2 * int(text.num_hidden_layers) * int(heads) * int(widest) * width(dtype)


def width(dtype: str | None) -> int:
    """Return the bytes per element of the compute dtype."""
    return 4 if dtype == "float32" else 2

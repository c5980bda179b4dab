"""How many bytes a role takes on each of its ranks, counted from the model's architecture alone: no weights are read.

The model is built on torch's meta device, with its adapters, so parameters are those that a rank will have. What a rank
holds of them follows FSDP2: float32 shards along the first dimension, and gathered layers in the type of the computation;
after the model's plans have split what tensor and expert parallelism split (train/plans.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from agentrl.config.schema import ModelConfig, OptimConfig
from agentrl.errors import ModelError
from agentrl.train.activations import count_activations, counted_attention, heads_of
from agentrl.train.by_size import by_size
from agentrl.train.lora import inject
from agentrl.train.modules import MODULES, PolicyModule, Role, layers_of
from agentrl.train.optim import state_bytes
from agentrl.train.plans import Share, shares
from agentrl.train.pretrained import meta_model

MASTER = 4
"""Bytes of a number of the weights and of their gradients: float32. What an optimizer keeps is in train/optim.py."""
GATHERED = 3
"""Layers that FSDP2 has gathered at once: the one that computes, the next one, and the buffer that one arrives in."""


@dataclass(frozen=True, slots=True)
class RoleMemory:
    """Bytes on one rank. `weights`, `optimizer` and an engine's `cache` stay between the role's turns; the others exist during
    a turn: `gathered` are unsharded layers and the buffers of their gradients' reduction, `activations` what a micro-batch
    keeps for its backward pass, and `working` the most of what comes and goes in it (logits of a chunk, a layer that is
    computed again). `host`: of host memory, with `model.cpu_offload`. `checkpoints`: whether layers are."""

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
    def held(self) -> int:
        """What stays between turns."""
        return self.weights + self.optimizer + self.cache

    @property
    def turn(self) -> int:
        """What a turn needs in addition."""
        return self.gradients + self.gathered + self.activations + self.working


def shell(cfg: ModelConfig, role: Role = "policy", path: str | None = None, *, grouped: bool = True) -> nn.Module:
    """The role's module on the meta device; `path` instead of `model.path` if given. `grouped`: as of `counted_attention`.

    Raises ModelError, DependencyError."""
    with torch.device("meta"):
        source = cfg if path is None else cfg.model_copy(update={"path": path, "init": None})
        model = meta_model(source, classifier=role == "score", attn_implementation=counted_attention(grouped))
        if cfg.lora is not None and role != "score":
            inject(model, cfg.lora)
        return MODULES[role](model).train()


def count(module: nn.Module, cfg: ModelConfig, ranks: int, tokens: int, optims: Sequence[OptimConfig]) -> RoleMemory:
    """The memory of a role with `ranks` ranks, on one of them. `cfg.dtype` is set; `tokens`: of a micro-batch; `optims`: the
    optimizers that it has, one after the other, of which the largest counts; none of a role that does not learn. Raises
    ModelError if the model's forward pass cannot be counted."""
    held, trained = shares_of(module, cfg, ranks), bool(optims)
    parameters = list(module.parameters())
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad] if trained else []
    learning = [p for _, p in named]
    # As FsdpEngine decides: checkpointing by the model without adapters, sharded gradients by what is trained.
    size = numbers(p for name, p in module.named_parameters() if ".lora_" not in name)
    checkpoints, shards_gradients = by_size(cfg.activation_checkpointing, size), by_size(cfg.shard_gradients, numbers(learning))
    states = [sum(state_bytes(name, p, optim) * held[id(p)].held for name, p in named) for optim in optims]
    own = {"weights": MASTER * _local(parameters, held), "optimizer": math.ceil(max(states, default=0.0))}
    sharded = MASTER * _local(learning, held)
    whole = MASTER * sum(held[id(p)].whole for p in learning)
    gathered = _gathered(module, cfg, held, trained) if ranks > 1 or cfg.dtype != "float32" else 0
    if cfg.cpu_offload:
        # In host memory then; gathered layers, and gradients that are not sharded, are still on the device.
        own, sharded = {"host": sum(own.values()) + sharded}, 0
    _cut(module, held)
    try:
        found = count_activations(module, math.ceil(tokens / cfg.sequence_parallel), getattr(torch, cfg.dtype))
    except RuntimeError as error:
        raise ModelError(f"the activations of {type(module).__name__} cannot be counted: {error}") from error
    kept = found.checkpointed if checkpoints else found.saved
    return RoleMemory(
        **own,
        gradients=sharded if shards_gradients else whole,
        gathered=gathered,
        activations=kept if trained else 0,
        # Without a backward pass nothing is kept, and at most about one layer's results are there at once.
        working=found.working(checkpoints) if trained else max(found.layer, found.chunk),
        checkpoints=checkpoints and trained,
        shards_gradients=shards_gradients and trained,
    )


def numbers(parameters: Iterable[nn.Parameter]) -> int:
    """How many numbers the parameters hold together."""
    return sum(parameter.numel() for parameter in parameters)


Held = dict[int, Share]
"""What a rank holds of each parameter, by its id."""


def shares_of(module: nn.Module, cfg: ModelConfig, ranks: int) -> Held:
    """What each rank holds of each parameter of a role's module; parameters that the module has beside the model are sharded by
    FSDP2 alone."""
    model: Any = module.hf
    named = dict(model.named_parameters())
    held = {id(named[name]): share for name, share in shares(model, cfg, ranks).items()}
    alone = ranks // cfg.replicas // cfg.tensor_parallel
    return {id(p): held.get(id(p)) or Share(tuple(p.shape), 0, alone) for p in module.parameters()}


def _cut(module: nn.Module, held: Held) -> None:
    """Give the layers' parameters, on the meta device, the shapes that they have on a rank, so that its activations can be
    counted: matrices split by tensor parallelism. Embeddings stay, since the head's tokens are split and not its vocabulary;
    experts too, as if each rank got as many tokens as it sends."""
    for layer in layers_of(module):
        for parameter in layer.parameters():
            if parameter.ndim < 3:
                parameter.data = parameter.new_empty(held[id(parameter)].shape)


def _local(parameters: Iterable[nn.Parameter], held: Held) -> int:
    """Numbers on the rank that holds the most."""
    return sum(held[id(p)].held for p in parameters)


def _gathered(module: nn.Module, cfg: ModelConfig, held: Held, trained: bool) -> int:
    size = width(cfg.dtype)
    layers = [list(layer.parameters()) for layer in layers_of(module)]
    inside = {id(p) for layer in layers for p in layer}
    root = [p for p in module.parameters() if id(p) not in inside]
    largest = max(layers, key=lambda layer: _whole(layer, held))
    taken = size * (_whole(root, held) + GATHERED * _whole(largest, held))
    if cfg.tensor_parallel > 1 and isinstance(module, PolicyModule):
        taken += size * module.hf.get_output_embeddings().weight.numel()  # gathered over the ranks of tensor parallelism too
    if not trained:
        return taken
    # Gradients of a layer, as computed and as float32 in the buffer of their reduction; those outside of layers until the end.
    return taken + (size + MASTER) * _whole(_learning(largest), held) + size * _whole(_learning(root), held)


def _whole(parameters: Iterable[nn.Parameter], held: Held) -> int:
    return sum(held[id(p)].whole for p in parameters)


def _learning(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [p for p in parameters if p.requires_grad]


def token_bytes(module: nn.Module, dtype: str) -> int:
    """Bytes of a token in the cache of an engine that keeps a key and a value in each layer, all as wide as the widest.
    `module`: as `shell` makes it, in any type."""
    found = heads_of(module)
    if not found:
        return 0
    heads = max(heads for heads, _, _ in found.values())
    widest = max(max(keys, values) for _, keys, values in found.values())
    return 2 * (max(found) + 1) * heads * widest * width(dtype)


def width(dtype: str | None) -> int:
    """Bytes of a number of the computation."""
    return 4 if dtype == "float32" else 2

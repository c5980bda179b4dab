"""Language models that return log probabilities, never logits.

Log probabilities and entropies by chunks, the head rules of model families, and the modules that an engine shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from agentrl.data.expert_routing import free
from agentrl.render.modality import Inputs, Rows
from agentrl.trainer.attention import PackedSequences, packed_rows
from agentrl.trainer.parallel import Ulysses, compute_divided, parameters_of, use_layout
from agentrl.utils.errors import ModelError

# Log probabilities

# Tokens per chunk. With a vocabulary of 150,000, its float32 logits take 0.6 GB; shorter chunks save memory and are slower.
CHUNK = 1024


def shape_logits(logits: Tensor, bias: Tensor | None, cap: float | None) -> Tensor:
    """Compute cap tanh((logits + bias) / cap) in float32, without a cap logits + bias. Overwrites float32 logits."""
    z = logits.float()
    if bias is not None:
        z = z.add_(bias)
    return z if cap is None else z.div_(cap).tanh_().mul_(cap)


def logits_stats(
    logits: Tensor, targets: Tensor, temperature: float, entropy: bool, bias: Tensor | None = None, cap: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute logsumexp, target logit and entropy of a chunk's logits [M, V]: float32 [M] each.

    All are at `temperature`; entropy is 0 if not wanted. Overwrites float32 logits, as `logits_gradient` does.
    """
    z = shape_logits(logits, bias, cap).div_(temperature)
    lse = torch.logsumexp(z, dim=-1)
    chosen = z.gather(1, targets[:, None]).squeeze(1)
    if not entropy:
        return lse, chosen, torch.zeros_like(lse)
    return lse, chosen, lse - (z - lse[:, None]).exp_().mul_(z).sum(-1)


def logits_gradient(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    entropies: Tensor,
    grads: tuple[Tensor, Tensor | None],
    temperature: float,
    bias: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Compute the gradient of a chunk's logits, [M, V] in their dtype. `grads`: gradients of log p and entropy."""
    of_logprob, of_entropy = grads
    z = shape_logits(logits, bias, cap)
    bend = None if cap is None else z.div(cap).square_().neg_().add_(1.0)  # the derivative of cap tanh(x / cap)
    log_p = z.div_(temperature).sub_(lse[:, None])
    scale = -of_logprob[:, None]
    # dz reuses the memory of p: arrays of the size of a chunk's logits dominate the peak memory.
    if of_entropy is None:
        dz = log_p.exp_().mul_(scale)
    else:
        dz = torch.exp(log_p).mul_(scale - of_entropy[:, None] * (log_p + entropies[:, None]))
    dz.scatter_add_(1, targets[:, None], of_logprob[:, None])
    if bend is not None:
        dz.mul_(bend)
    return dz.div_(temperature).to(logits.dtype)


@dataclass(frozen=True, slots=True)
class HeadKernels:
    """`logits_stats` and `logits_gradient`, plain or compiled.

    Plain, each operation reads and writes all float32 logits of a chunk, which on a GPU takes longer than the products."""

    stats: Callable[..., tuple[Tensor, Tensor, Tensor]] = logits_stats
    gradient: Callable[..., Tensor] = logits_gradient


PLAIN = HeadKernels()


class _ChunkedLogprobs(torch.autograd.Function):
    """With x = h W^T + b and z = x / temperature: log p(y) = z_y - lse(z), H = lse(z) - sum p z.

    d log p(y) / dz = onehot(y) - p;  dH / dz = -p (log p + H). With a cap c, z = c tanh(x / c) / temperature and
    dz / dx = (1 - tanh^2(x / c)) / temperature.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk: int,
        entropy: bool,
        kernels: HeadKernels,
        bias: Tensor | None,
        cap: float | None,
    ) -> tuple[Tensor, Tensor]:
        tokens = hidden.shape[0]
        lse = torch.empty(tokens, dtype=torch.float32, device=hidden.device)
        chosen, entropies = torch.empty_like(lse), torch.empty_like(lse)
        for start in range(0, tokens, chunk):
            part = slice(start, start + chunk)
            logits = hidden[part] @ weight.t()
            lse[part], chosen[part], entropies[part] = kernels.stats(logits, targets[part], temperature, entropy, bias, cap)
        ctx.save_for_backward(hidden, weight, targets, lse, entropies, bias)
        ctx.temperature, ctx.chunk, ctx.kernels, ctx.cap = temperature, chunk, kernels, cap
        ctx.set_materialize_grads(False)  # entropies that are only measured have no gradient and then cost nothing
        return chosen - lse, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, lse, entropies, bias = ctx.saved_tensors
        grad_logprob = torch.zeros_like(lse) if grads[0] is None else grads[0]
        grad_entropy = grads[1]
        grad_hidden = torch.empty_like(hidden)
        train_weight = ctx.needs_input_grad[1]
        # float32, because it is summed over chunks: in bfloat16 the terms of late chunks would be lost to rounding.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if train_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[7] else None
        for start in range(0, hidden.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            asked = (grad_logprob[part], None if grad_entropy is None else grad_entropy[part])
            logits = hidden[part] @ weight.t()
            dz = ctx.kernels.gradient(logits, targets[part], lse[part], entropies[part], asked, ctx.temperature, bias, ctx.cap)
            grad_hidden[part] = dz @ weight
            if grad_weight is not None:
                grad_weight.add_(dz.t() @ hidden[part])
            if grad_bias is not None:
                grad_bias.add_(dz.sum(0, dtype=torch.float32))
        head = None if grad_weight is None else grad_weight.to(weight.dtype)
        offset = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, head, None, None, None, None, None, offset, None


# The head

_EXPONENTS = range(-20, 21)
"""Exponents of the test logits, powers of two of either sign: the smallest far below any cap, the largest far above."""
_NEAR = 1e-5
"""Maximum relative difference between the rule's and the model's logits; some families compute them in float32."""


@dataclass(frozen=True, slots=True)
class HeadRule:
    """The rule from hidden states to logits: cap tanh(scale (W hidden h + b) / cap); without `cap`, scale (W hidden h + b)."""

    hidden: float = 1.0
    scale: float = 1.0
    cap: float | None = None

    def logprobs(
        self,
        hidden: Tensor,
        head: nn.Linear,
        targets: Tensor,
        temperature: float = 1.0,
        *,
        chunk: int = CHUNK,
        entropy: bool = True,
        kernels: HeadKernels = PLAIN,
    ) -> tuple[Tensor, Tensor]:
        """Compute log softmax(logits / temperature) of the targets, and the entropies of the distributions.

        `hidden` [M, E], `head.weight` [V, E], `head.bias` [V], `targets` int64 [M] -> two float32 tensors [M], both with
        gradient; the entropies are zeros if `entropy` is False.
        """
        # With k = a s, c tanh((k x + s b) / c) / t is c/k tanh((x + b/a) / (c/k)) / (t/k): the products x = h W^T are not
        # scaled, so those in bfloat16 are not rounded again.
        factor = self.hidden * self.scale
        bias = None if head.bias is None else head.bias.float() / self.hidden
        cap = None if self.cap is None else self.cap / factor
        call: Callable[..., tuple[Tensor, Tensor]] = _ChunkedLogprobs.apply
        return call(hidden, head.weight.to(hidden.dtype), targets, temperature / factor, chunk, entropy, kernels, bias, cap)

    def logits(self, products: Tensor) -> Tensor:
        """Return the model's logits for results of the output embedding."""
        scaled = products * self.scale
        return scaled if self.cap is None else self.cap * torch.tanh(scaled / self.cap)


def head_rule(model: Any) -> HeadRule:
    """Measure the head rule of a causal language model with test inputs; its weights may be on the meta device.

    Raises ModelError, naming the family, if its logits do not have that form.
    """
    name = f"{type(model).__name__} ({getattr(model.config, 'model_type', 'no model_type')})"
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None:
        raise ModelError(f"{name} has no output embedding, so it is not a causal language model that can be trained here")
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        kind = f"{type(head).__module__}.{type(head).__qualname__}"  # an adapter's class is called Linear, too
        raise ModelError(f"{name}: its output embedding is a {kind}; only a plain linear layer is supported")
    # Real numbers are needed even if the caller's default device is meta (trainer/memory.py).
    with torch.device("cpu"):
        hidden, products, seen, logits = _measure_head(model, head, name)
    before = float(seen.flatten()[0] / hidden.flatten()[0])
    if seen.shape != hidden.shape or not before > 0 or not torch.allclose(seen, before * hidden, rtol=_NEAR, atol=0.0):
        raise ModelError(f"{name}: between its last hidden states and its output embedding there is more than a scale")
    # Read the scale from the smallest logit, and a cap from the largest.
    x, y = products.flatten(), logits.flatten()
    least, most = int(x.abs().argmin()), int(x.argmax())
    scale = float(y[least] / x[least]) if logits.shape == products.shape else 0.0
    capped = scale > 0 and not torch.isclose(y[most], scale * x[most], rtol=_NEAR, atol=0.0)
    rule = HeadRule(before, scale, float(y[most]) if capped else None)
    if not scale > 0 or not torch.allclose(rule.logits(x), y, rtol=_NEAR, atol=0.0):
        raise ModelError(f"{name}: its logits are neither a scale nor a tanh cap of its output embedding's results")
    return rule


def _measure_head(model: Any, head: nn.Linear, name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the head on test inputs: hidden states, results of the output embedding, its actual input, and the logits."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    class States(BaseModelOutputWithPast):
        def __getattr__(self, name: str) -> None:  # no router logits, states of recurrent layers etc.
            return None

    grid = torch.tensor([sign * 2.0**power for power in _EXPONENTS for sign in (1, -1)], dtype=torch.float64)
    vocab, width = head.weight.shape
    tokens = -(-len(grid) // vocab) + 1
    # Powers of two: a family may round them to the dtype of its weights.
    hidden = grid[torch.arange(tokens * width) % 8].reshape(1, tokens, width)
    products = grid[torch.arange(tokens * vocab) % len(grid)].reshape(1, tokens, vocab)
    seen: list[Tensor] = []

    def embedding(states: Tensor) -> Tensor:
        seen.append(states.double())
        return products.clone()

    with ExitStack() as stack, torch.no_grad():
        # Some families call their decoder instead of the base model around it.
        with suppress(AttributeError, NotImplementedError):
            decoder = model.get_decoder()
            if decoder is not model and decoder is not backbone(model):
                stack.enter_context(_replace_forward(decoder, lambda *_, **__: States(last_hidden_state=hidden)))
        stack.enter_context(_replace_forward(backbone(model), lambda *_, **__: States(last_hidden_state=hidden)))
        stack.enter_context(_replace_forward(head, embedding))
        try:
            found = model(input_ids=torch.zeros(1, tokens, dtype=torch.int64), use_cache=False).logits
        except Exception as error:  # whatever a family's own code raises on states that its backbone did not compute
            raise ModelError(f"{name}: how it gets logits from hidden states cannot be measured ({error})") from error
    if len(seen) != 1:
        raise ModelError(f"{name}: its forward pass applies its output embedding {len(seen)} times, not once")
    return hidden, products, seen[0], found.double().cpu()


def backbone(model: Any) -> Any:
    """Return the part of a transformers model that computes the last hidden states."""
    # `base_model` is the model itself if its prefix names a part of a larger model (Llama 4's text model).
    return getattr(model, "model", model) if model.base_model is model else model.base_model


@contextmanager
def _replace_forward(module: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward pass of `module` by `function` within the context."""
    own = module.__dict__.get("forward")
    module.forward = function
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


# The modules


@dataclass(frozen=True, slots=True)
class Micro:
    """The model's input for one micro-batch: N rows, T computed tokens, M predicted tokens (never the first of a row).

    `input_ids`, `position_ids` int64 [T]; `packed`: the layout for attention; `targets` int64 [M]: ids of the predicted tokens;
    `before` int64 [M]: positions of the tokens that predict them; `last` int64 [N]: positions of the rows' last tokens. Rows that
    share a prefix share its positions. `experts` [T, routers, k]: experts to replay (data/expert_routing.py), or None to route.
    `row_counts` int64 [T]: number of rows that share each token, None: 1. `images`: start, end and images of each row; `inputs`:
    inputs of a vision model that replace `input_ids` and `position_ids`.
    """

    input_ids: Tensor
    position_ids: Tensor
    packed: PackedSequences
    before: Tensor
    targets: Tensor
    last: Tensor
    experts: Tensor | None = None
    row_counts: Tensor | None = None
    images: Rows = ()
    inputs: Inputs | None = None


class PolicyModule(nn.Module):
    """A causal language model; its forward returns log pi and entropy of the predicted tokens.

    The head is applied inside of this forward, because a sharded weight is only gathered there.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.hf = model
        self.kernels = PLAIN
        self.rule = head_rule(model)
        self.tensor: Ulysses | None = None  # ranks of tensor parallelism, which share the head's tokens

    def forward(self, micro: Micro, temperature: float, entropy: bool) -> tuple[Tensor, Tensor]:
        """Compute log pi and entropies of the tokens `micro.targets`: two float32 [M]."""
        indices, targets, group = micro.before, micro.targets, micro.packed.ulysses
        hidden, first = backbone_states(backbone(self.hf), micro)
        if group is not None:
            local, counts, back = split_indices(indices, len(hidden), group)
            indices, targets = indices[local], targets[local]
        before = hidden.index_select(0, indices - first)
        compute = partial(self.rule.logprobs, temperature=temperature, entropy=entropy, kernels=self.kernels)
        head, tensor = self.hf.get_output_embeddings(), self.tensor
        own = compute(before, head, targets) if tensor is None else compute_divided(compute, before, head, targets, tensor)
        if group is None:
            return own
        return group.gather(own[0], counts)[back], group.gather(own[1], counts)[back]


class ValueModule(nn.Module):
    """A transformer with a linear value head; its forward returns the value before each predicted token."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.hf = backbone(model)
        self.head = nn.Linear(model.config.get_text_config().hidden_size, 1, bias=False)
        # Zeros: a new critic starts from value 0 instead of adding noise to the first advantages.
        nn.init.zeros_(self.head.weight)

    def forward(self, micro: Micro) -> Tensor:
        """Compute the values of the states before the tokens `micro.targets`: float32 [M]."""
        group, indices = micro.packed.ulysses, micro.before
        hidden, first = backbone_states(self.hf, micro)
        if group is not None:
            local, counts, back = split_indices(indices, len(hidden), group)
            indices = indices[local]
        values: Tensor = self.head(hidden.index_select(0, indices - first)).squeeze(1).float()
        return values if group is None else group.gather(values, counts)[back]


class ScoreModule(nn.Module):
    """A sequence classifier with one label; its forward returns the score of each row, read at its last token."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.hf = model
        if not isinstance(getattr(model, "score", None), nn.Linear) or model.score.out_features != 1:
            raise ModelError("a reward model must be a sequence classifier with a linear head `score` for one label")

    def forward(self, micro: Micro) -> Tensor:
        """Compute scores, float32 [N]."""
        hidden, _ = backbone_states(backbone(self.hf), micro)
        last: Tensor = self.hf.score(hidden.index_select(0, micro.last))
        return last.squeeze(1).float()


def backbone_states(model: Any, micro: Micro) -> tuple[Tensor, int]:
    """Compute the last hidden states [T, E] of packed rows. Returns them and the position of the first token (0).

    With sequence parallelism they are those of this rank's share of the tokens, including padding on the last rank."""
    ids, position_ids, first, experts = micro.input_ids, micro.position_ids, 0, micro.experts
    if micro.packed.ulysses is not None:
        local = micro.packed.ulysses.slice_of(len(ids))
        ids, position_ids, first = ids[local], position_ids[local], local.start
        experts = None if experts is None else experts[local]
    # Without mask and cache, transformers builds no mask and leaves all masking to `packed`.
    packed = micro.packed if experts is None else replace(micro.packed, experts=experts)
    with use_layout(packed):
        positions, given = position_ids[None], {"input_ids": ids[None]}
        if micro.inputs is not None:
            model, positions, given = micro.inputs(model)
        # Only those arguments for positions that its forward takes; attention reads the rows from the layout.
        takes, rest = parameters_of(model.__class__)
        places = {"position_ids": positions, "attention_mask": None}
        places = {name: value for name, value in places.items() if rest or name in takes}
        out = model(**given, use_cache=False, **places)
    return out.last_hidden_state[0], first


def split_indices(indices: Tensor, share: int, group: Ulysses) -> tuple[Tensor, list[int], Tensor]:
    """Split token indices over ranks of `share` tokens each: this rank's mask, counts per rank, inverse order of a gather.

    The inverse is needed because with shared prefixes a rank's indices need not be consecutive."""
    owner = indices // share
    counts: list[int] = torch.bincount(owner, minlength=group.size).tolist()
    return owner == group.rank, counts, torch.argsort(torch.argsort(owner, stable=True))


def share_tokens(micro: Micro, group: Ulysses) -> Micro:
    """Pad a micro-batch, by a separate row, for the group of ranks that shares its tokens."""
    end, packed = len(micro.input_ids), micro.packed
    missing = -end % group.size
    pad = micro.input_ids.new_zeros(missing)
    if missing:
        row = packed.spans.new_tensor([[end, end, end, end + missing]])
        packed = packed_rows(torch.cat([packed.spans, row]), packed.cu_seqlens.device)
    return replace(
        micro,
        input_ids=torch.cat([micro.input_ids, pad]),
        position_ids=torch.cat([micro.position_ids, torch.arange(missing, device=pad.device)]),
        packed=replace(packed, ulysses=group),
        experts=None if micro.experts is None else torch.cat([micro.experts, free(micro.experts, missing)]),
    )


Role = Literal["policy", "value", "score"]
MODULES: dict[Role, Callable[[Any], nn.Module]] = {"policy": PolicyModule, "value": ValueModule, "score": ScoreModule}


def layers_of(backbone: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a transformer: its longest ModuleList outside of a vision tower.

    Raises ModelError without one."""
    named = backbone.named_modules()
    lists = [module for name, module in named if isinstance(module, nn.ModuleList) and "visual" not in name.split(".")]
    if not lists:
        raise ModelError(f"{type(backbone).__name__} has no list of layers to shard")
    return list(max(lists, key=lambda found: len(list(found))))

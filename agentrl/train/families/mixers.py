"""Row boundaries for what mixes tokens other than by attention: recurrent layers, short convolutions, token shifts.

Such a module is called on blocks of right-padded rows [n, width, ...] instead of the packed tokens [1, T, ...]. What it computes
is causal, so padding behind a row changes nothing in it. All other parts of the model stay packed.

If rows share a prefix, the prefix is put before each of its suffixes, and of these cells only the suffix's results are used:
the state at the end of the prefix is computed again for every suffix, exactly. If ranks share the tokens (Ulysses), the module's
inputs are gathered, each rank computes the module for all of them, and keeps the results of its own tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from agentrl.batch.device import on_device
from agentrl.train.attention import PackedSequences, similar
from agentrl.train.families.layout import layout
from agentrl.train.shared_attention import Block
from agentrl.train.ulysses import Ulysses

STATE = frozenset({"cache_params", "past_key_values", "past_key_value", "layer_past", "state"})
"""Arguments by which a module that mixes tokens is given what it kept of earlier ones."""
INTERFACE = "ALL_ATTENTION_FUNCTIONS"
"""What the attention of a model reads the attention function from that its config names."""


def mixers_of(backbone: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model that mix tokens and do not do it through the attention function, by name: those that take a state
    or have a convolution over tokens, the innermost ones."""
    parts = dict(backbone.named_modules())
    attends = {name for name, part in parts.items() if INTERFACE in _names(part)}
    mixing = {name for name, part in parts.items() if _mixes(part)} - attends
    outer = {name.rpartition(".")[0] for name in attends | mixing}
    while any(outer):  # and what those are in
        above = {name.rpartition(".")[0] for name in outer if name}
        if above <= outer:
            break
        outer |= above
    # A block around a mixer in one layer and around an MLP in another mixes nothing itself.
    around = {type(parts[name]) for name in outer}
    return {name: parts[name] for name in parts if name in mixing - outer and type(parts[name]) not in around}


def keep_rows_apart(backbone: nn.Module) -> list[str]:
    """Have the mixers of a model compute row by row; their names. Parameters keep theirs."""
    found = mixers_of(backbone)
    for module in found.values():
        # On the instance: its class, and with it every other model of this process, stays as it is.
        module.forward = partial(_by_rows, module.forward)
    return list(found)


def _mixes(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleList):
        return False
    convolves = any(isinstance(child, nn.Conv1d) and child.kernel_size[0] > 1 for child in module.children())
    return convolves or bool(STATE & set(inspect.signature(type(module).forward).parameters))


def _names(module: nn.Module) -> tuple[str, ...]:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return () if code is None else tuple(code.co_names)


@torch.compiler.disable  # blocks differ from one micro-batch to the next
def _by_rows(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The module's results on the tokens of the layout, each row by itself."""
    packed = layout()
    if packed is None or not (packed.blocks or packed.suffixes):
        return forward(*args, **kwargs)
    group = packed.ulysses
    tokens = _tokens(args, kwargs)
    if group is not None:
        args, kwargs = _each((args, kwargs), tokens, partial(gathered, group=group))
        tokens *= group.size
    out = _blockwise(forward, args, kwargs, tokens, row_blocks(packed))
    return out if group is None else _each(out, tokens, lambda t: t[:, group.slice_of(tokens)])


def _blockwise(forward: Callable[..., Any], args: Any, kwargs: Any, tokens: int, blocks: list[Block]) -> Any:
    results: list[Any] = []
    for block in blocks:

        def padded(tensor: Tensor, block: Block = block) -> Tensor:
            return tensor[0].index_select(0, block.gather).view(block.rows, block.width, *tensor.shape[2:])

        inner, named = _each((args, kwargs), tokens, padded)
        results.append(forward(*inner, **named))
    return _joined(results, blocks, tokens)


def _joined(results: list[Any], blocks: list[Block], tokens: int) -> Any:
    """The blocks' results as one of [1, T, ...]; what is no tensor over tokens (a state) is left out."""
    first = results[0]
    if isinstance(first, tuple):
        return tuple(_joined([result[place] for result in results], blocks, tokens) for place in range(len(first)))
    if not isinstance(first, Tensor) or first.shape[:2] != (blocks[0].rows, blocks[0].width):
        return None
    out = first.new_zeros(tokens, *first.shape[2:])
    cells = [
        r.flatten(0, 1) if b.exact else r.flatten(0, 1).index_select(0, b.cells) for r, b in zip(results, blocks, strict=True)
    ]
    return out.index_copy(0, torch.cat([block.tokens for block in blocks]), torch.cat(cells))[None]


def _tokens(args: Any, kwargs: Any) -> int:
    """T of the first argument that is a tensor [1, T, ...], the hidden states."""
    found = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.dim() > 2)
    return int(found.shape[1])


def _each(value: Any, tokens: int, change: Callable[[Tensor], Tensor]) -> Any:
    """Arguments or results with every tensor over tokens, [1, T, ...], changed."""
    if isinstance(value, Tensor):
        return change(value) if value.dim() > 1 and value.shape[:2] == (1, tokens) else value
    if type(value) in (tuple, list):
        return type(value)(_each(part, tokens, change) for part in value)
    if type(value) is dict:
        return {name: _each(part, tokens, change) for name, part in value.items()}
    return value


def row_blocks(packed: PackedSequences) -> list[Block]:
    """The rows in blocks of similar length: those without a prefix before them, and the suffixes, each behind its prefix."""
    if packed.spans is None:
        return list(packed.blocks)
    device = packed.cu_seqlens.device
    spans = packed.spans[packed.spans[:, 0] != packed.spans[:, 1]].cpu()
    lengths = (spans[:, 1] - spans[:, 0] + spans[:, 3] - spans[:, 2]).tolist()
    return [*packed.blocks, *(_behind(spans[rows], device) for rows in similar(lengths))]


def _behind(spans: Tensor, device: torch.device) -> Block:
    """A block of suffixes, each behind its prefix, whose cells with results are those of the suffixes."""
    first, last, start, stop = (spans[:, place, None] for place in range(4))
    prefix, ends = last - first, last - first + stop - start
    steps = torch.arange(int(ends.max()))[None]
    at = torch.where(steps < prefix, first + steps, start + torch.minimum(steps, ends - 1) - prefix).reshape(-1)
    cells = ((steps >= prefix) & (steps < ends)).reshape(-1).nonzero().squeeze(1)
    gather, used, tokens = (on_device(part, device) for part in (at, cells, at[cells]))
    return Block(len(spans), steps.shape[1], gather, used, tokens, False)


class _Gathered(torch.autograd.Function):
    """[1, T / size, ...] of each rank -> [1, T, ...] on all. Each rank uses all of it, so the gradients are summed over ranks."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Ulysses) -> Tensor:
        ctx.group = group
        given = own[0].contiguous()
        parts = [torch.empty_like(given) for _ in range(group.size)]
        dist.all_gather(parts, given, group=group.group)
        return torch.cat(parts)[None]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        parts = [part.contiguous() for part in grads[0][0].chunk(ctx.group.size)]
        out = torch.empty_like(parts[0])
        dist.reduce_scatter(out, parts, group=ctx.group.group)
        return out[None], None


def gathered(own: Tensor, group: Ulysses) -> Tensor:
    """All tokens of the group, given this rank's."""
    call: Callable[..., Tensor] = _Gathered.apply
    return call(own, group)

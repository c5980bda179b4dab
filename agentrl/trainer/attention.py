"""Attention over packed rows, without padding in the model and within each row.

Blocks of rows of similar length, FlashAttention over packed rows, attention over shared prefixes, the attention
function, and row boundaries for recurrent layers and short convolutions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from agentrl.data.rows import on_device
from agentrl.engines.exact_attention import NOT_GIVEN, AttentionForm, NotGiven, attention_form, exact_attention
from agentrl.trainer.parallel import Ulysses, layout
from agentrl.utils.errors import ModelError

# Blocks: rows of similar length, padded to one width, and the suffixes of a shared prefix. Prefixes are computed as plain
# causal rows; all suffixes of one prefix in one call, each over [prefix; itself], without a mask over all tokens.

WASTE = 1.25
"""Maximum ratio of a block's cells, including padding, to its tokens."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of similar length, computed in one call.

    `gather` [n * width]: token of each cell of the padded block (a cell after a row's end repeats its last token); `cells`
    [tokens]: cells that are not padding; `tokens` [tokens]: positions of their results; `exact`: True without padding. For
    suffixes, `prefix` [first, last): tokens that each of them also sees; `mask` bool [width, prefix + width]: the causal mask."""

    rows: int
    width: int
    gather: Tensor
    cells: Tensor
    tokens: Tensor
    exact: bool
    prefix: tuple[int, int] = (0, 0)
    mask: Tensor | None = None

    def pad(self, tensor: Tensor) -> Tensor:
        """Gather and pad the block's tokens: [T, ...] -> [rows, width, ...]; padding repeats a row's last token."""
        return tensor.index_select(0, self.gather).view(self.rows, self.width, *tensor.shape[1:])

    def unpad(self, cells: Tensor) -> Tensor:
        """Remove padding: [rows, width, ...] -> [tokens, ...]."""
        flat = cells.flatten(0, 1)
        return flat if self.exact else flat.index_select(0, self.cells)


def row_block(rows: Tensor, device: torch.device, prefix: tuple[int, int] = (0, 0)) -> Block:
    """Build the block of rows (start, stop), int64 [n, 2], or suffixes of `prefix`."""
    starts, stops = rows.unbind(1)
    width, before = int((stops - starts).max()), prefix[1] - prefix[0]
    positions = starts[:, None] + torch.arange(width)
    valid = (positions < stops[:, None]).reshape(-1)
    # Padding cells repeat the row's last token, so that they have finite values; their results are dropped.
    gather = torch.minimum(positions, stops[:, None] - 1).reshape(-1)
    cells = valid.nonzero().squeeze(1)
    at, used, tokens = (on_device(part, device) for part in (gather, cells, gather[cells]))
    # Query i sees the whole prefix and the first i + 1 tokens of its suffix, and never padding, which comes later.
    mask = on_device(torch.ones(width, before + width, dtype=torch.bool).tril(before), device) if before else None
    return Block(len(starts), width, at, used, tokens, bool(valid.all()), prefix, mask)


def row_blocks(rows: Tensor, device: torch.device) -> tuple[Block, ...]:
    """Divide rows (start, stop), int64 [n, 2] on the host, into blocks with little padding."""
    return tuple(row_block(rows[chosen], device) for chosen in group_by_length((rows[:, 1] - rows[:, 0]).tolist()))


def group_by_length(lengths: list[int]) -> list[list[int]]:
    """Group rows by length into blocks with little padding; returns row numbers."""
    # Longest first: a block is as wide as its first row, so the padding of each further row is known.
    order = [row for row in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True) if lengths[row]]
    groups: list[list[int]] = []
    used = 0
    for row in order:
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= WASTE * (used + lengths[row]):
            groups[-1].append(row)
            used += lengths[row]
        else:
            groups.append([row])
            used = lengths[row]
    return [sorted(group) for group in groups]


def attend(q: Tensor, k: Tensor, v: Tensor, block: Block, form: AttentionForm) -> Tensor:
    """Compute the attention of a block: [T, H, D], [T, G, D], [T, G, E] -> [tokens of the block, H, E]."""
    first, last = block.prefix
    # No suffix sees the beginning of a prefix that is longer than the window.
    seen = first if form.window is None else max(first, last - form.window + 1)
    # An exact block of all tokens has them in order.
    whole = block.exact and len(q) == len(block.gather)
    query, key, value = (
        (tensor.view(block.rows, block.width, *tensor.shape[1:]) if whole else block.pad(tensor)).transpose(1, 2)
        for tensor in (q, k, v)
    )
    if first < last:
        before = (tensor[seen:last].transpose(0, 1)[None].expand(block.rows, -1, -1, -1) for tensor in (k, v))
        key, value = (torch.cat(pair, dim=2) for pair in zip(before, (key, value), strict=True))
    if not form.plain_up_to(last - first + block.width):
        return block.unpad(exact_attention(query, key, value, form).transpose(1, 2))
    heads, wide = query.shape[1], value.shape[-1]
    # Only torch's half-precision GPU kernel without a mask supports grouped heads; with others, `enable_gqa` would fall back to
    # the slow kernel that stores all scores.
    grouped = query.is_cuda and query.dtype != torch.float32 and block.mask is None and heads != key.shape[1]
    if heads != key.shape[1] and not grouped:
        key, value = (tensor.repeat_interleave(heads // key.shape[1], dim=1) for tensor in (key, value))
    options: dict[str, Any] = {"scale": form.scale, "attn_mask": block.mask, "is_causal": block.mask is None}
    out = F.scaled_dot_product_attention(*same_width(query, key, value), enable_gqa=grouped, **options)
    return block.unpad(out[..., :wide].transpose(1, 2))


def same_width(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad heads with zeros to equal widths of keys and values, as kernels require.

    Latent attention has wider keys. Neither scores nor the first features of a result change."""
    more = query.shape[-1] - value.shape[-1]
    if not more:  # F.pad by 0 would copy
        return query, key, value
    return F.pad(query, (0, max(0, -more))), F.pad(key, (0, max(0, -more))), F.pad(value, (0, max(0, more)))


# FlashAttention


def varlen_takes(width: int) -> bool:
    """Return True if FlashAttention's varlen kernel takes heads of that width; unlike block kernels it does not pad."""
    return width % 8 == 0 and width <= 256


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int, form: AttentionForm) -> Tensor:
    """Compute attention within rows by FlashAttention: [T, H, D], [T, G, D], [T, G, E] -> [T, H, E].

    `cu` int32 [N + 1]: row offsets; `longest`: tokens of the longest row. `form` must not have a cap."""
    from torch.nn.attention.varlen import varlen_attn

    wide = v.shape[2]
    q, k, v = same_width(q, k, v)
    grouped: dict[str, Any] = {}
    if q.shape[1] != k.shape[1]:
        if varlen_takes_groups():
            grouped = {"enable_gqa": True}
        else:
            k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    # The kernel's window excludes the query itself; -1 is unlimited, and 0 tokens ahead is causal.
    back = -1 if form.window is None or form.window >= longest else form.window - 1
    if form.sinks is None:
        out = varlen_attn(q, k, v, cu, cu, longest, longest, scale=form.scale, window_size=(back, 0), **grouped)
        assert isinstance(out, Tensor)
        return out[..., :wide]
    # The operators that `varlen_attn` calls, because only they return and take the lse.
    rows: dict[str, Any] = {"cu_seq_q": cu, "cu_seq_k": cu, "max_q": longest, "max_k": longest}
    seen: dict[str, Any] = {"is_causal": back == -1, "scale": form.scale, "window_size": [back, 0]}
    state = torch.zeros(2, dtype=torch.uint64, device=cu.device)  # RNG state of dropout, unused
    forward = partial(torch.ops.torch_attn._varlen_attn, **rows, **seen, **grouped)
    backward = partial(torch.ops.torch_attn._varlen_attn_backward, **rows, **seen, rng_state=state)
    call: Callable[..., Tensor] = WithSinks.apply
    return call(q, k, v, form.sinks, forward, backward)[..., :wide]


@cache
def varlen_takes_groups() -> bool:
    """Return True if torch's varlen kernel takes fewer key heads than query heads; torch 2.11 lacks the argument."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


class WithSinks(torch.autograd.Function):
    """Attention with a sink s per head in the softmax: out' = out e^(lse - lse'), lse' = log(e^lse + e^s).

    `passes`: forward (q, k, v) -> (out [T, H, D], lse of the scores, float32 [H, T], ...) and backward (gradient of out, q, k, v,
    out, lse) -> gradients of q, k and v of a kernel.

    The backward pass computes p = e^(score - lse) and do . o from its arguments, so with out' and lse' it returns the gradients
    of attention with sinks. The gradient of a sink is - sum of e^(s - lse') (do . o').
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *passes: Callable[..., Any]) -> Tensor:
        plain: Tensor
        plain, lse = passes[0](q, k, v)[:2]
        total = torch.logaddexp(lse, sinks.float()[:, None])
        out: Tensor = (plain * torch.exp(lse - total).t().unsqueeze(-1)).to(plain.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, total)
        ctx.back = passes[1]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, total = ctx.saved_tensors
        grad = grads[0].contiguous()
        dq, dk, dv = ctx.back(grad, q, k, v, out, total)
        drop = (grad.float() * out.float()).sum(-1).t()
        d_sinks = -(torch.exp(sinks.float()[:, None] - total) * drop).sum(1)
        return dq, dk, dv, d_sinks.to(sinks.dtype), None, None


# Shared prefixes

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class SharedAttention(torch.autograd.Function):
    """Attention of `PackedSequences.parts` on a CPU: [T, H, D], [T, H, D], [T, H, D] -> [T, H, D]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, packed: PackedSequences, scale: float | None) -> Tensor:
        blocks, runs = packed.parts
        sums_in = torch.float64 if q.dtype == torch.float64 else torch.float32  # like the kernel's
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=sums_in)
        for block in blocks:
            found, sums = _FORWARD(*(block.pad(tensor).transpose(1, 2) for tensor in (q, k, v)), 0.0, True, scale=scale)
            out.index_copy_(0, block.tokens, block.unpad(found.transpose(1, 2)))
            lse.index_copy_(0, block.tokens, block.unpad(sums.transpose(1, 2)))
        for first, last, start, stop in runs:
            rest, sums = _FORWARD(
                _as_batch(q[start:stop]), _as_batch(k[first:last]), _as_batch(v[first:last]), 0.0, False, scale=scale
            )
            before = lse[start:stop]
            joined = torch.logaddexp(before, sums[0].transpose(0, 1))
            part = out[start:stop]
            share = (before - joined).exp().unsqueeze(-1).to(out.dtype)
            # Shares sum to one: out + (rest - out) * share of the rest.
            part.lerp_(rest[0].transpose(0, 1), 1 - share)
            before.copy_(joined)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.packed, ctx.scale = packed, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        blocks, runs = ctx.packed.parts
        grad = grads[0].contiguous()
        found = tuple(torch.empty_like(tensor) for tensor in (q, k, v))
        for block in blocks:
            given = [block.pad(tensor).transpose(1, 2) for tensor in (grad, q, k, v, out)]
            if not block.exact:  # padding repeats a token, whose gradient must count once
                keep = torch.zeros(block.rows * block.width, dtype=given[0].dtype).index_fill_(0, block.cells, 1)
                given[0] = given[0] * keep.view(block.rows, 1, block.width, 1)
            parts = _BACKWARD(*given, block.pad(lse).transpose(1, 2), 0.0, True, scale=ctx.scale)
            for whole, part in zip(found, parts, strict=True):
                whole.index_copy_(0, block.tokens, block.unpad(part.transpose(1, 2)))
        for first, last, start, stop in runs:
            prefix = [_as_batch(tensor[first:last]) for tensor in (k, v)]
            own = [_as_batch(tensor[start:stop]) for tensor in (grad, q, out, lse)]
            parts = _BACKWARD(own[0], own[1], *prefix, own[2], own[3], 0.0, False, scale=ctx.scale)
            where: Sequence[slice] = (slice(start, stop), slice(first, last), slice(first, last))
            for whole, at, part in zip(found, where, parts, strict=True):
                whole[at] += part[0].transpose(0, 1)
        return (*found, None, None)  # type: ignore[return-value]


def _as_batch(tensor: Tensor) -> Tensor:
    """Add a batch dimension: [n, H, ...] -> [1, H, n, ...]."""
    return tensor.transpose(0, 1)[None]


# The attention function

PACKED, HOST = "agentrl_packed", torch.device("cpu")


@dataclass(frozen=True)
class PackedSequences:
    """The layout of packed rows.

    `spans` int64 [N, 4] on the host (first, last, start, stop): the tokens [start, stop) see themselves causally and all of the
    prefix [first, last), which is empty unless rows share one (`SharedPack.spans`). `cu_seqlens` int32 [N + 1]: their ends on the
    device; `longest`: tokens of the longest row, including its prefix. `shares`: True with prefixes; `fused`: True if
    `SharedAttention` may compute them. `ulysses`: group of ranks that shares the tokens, or None. `experts`: experts to replay
    for this rank's tokens (Micro.experts). Blocks are created on demand, because device and layer decide which are needed."""

    cu_seqlens: Tensor
    longest: int
    spans: Tensor
    shares: bool = False
    fused: bool = False
    ulysses: Ulysses | None = None
    experts: Tensor | None = None
    _cut: dict[int, PackedSequences] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Return blocks of spans without a prefix (including prefixes), and one per prefix of its suffixes."""
        # From the host, because block sizes become shapes: reading them from a GPU would synchronize for each block.
        device, behind = self.cu_seqlens.device, self.spans[:, 0] < self.spans[:, 1]
        groups: dict[tuple[int, int], list[list[int]]] = {}
        for first, last, *suffix in self.spans[behind].tolist():
            groups.setdefault((first, last), []).append(suffix)
        suffixes = [row_block(torch.tensor(rows), device, prefix) for prefix, rows in groups.items()]
        return (*row_blocks(self.spans[~behind, 2:], device), *suffixes)

    @cached_property
    def parts(self) -> tuple[tuple[Block, ...], list[list[int]]]:
        """Return causal blocks of all spans, and the runs of consecutive suffixes of one prefix."""
        runs: list[list[int]] = []
        for first, last, start, stop in self.spans[self.spans[:, 0] < self.spans[:, 1]].tolist():
            if runs and runs[-1][:2] == [first, last] and runs[-1][3] == start:
                runs[-1][3] = stop
            else:
                runs.append([first, last, start, stop])
        return row_blocks(self.spans[:, 2:], self.cu_seqlens.device), runs

    @property
    def positions(self) -> Tensor:
        """Return the position of each token in its row, including a shared prefix: int64 [T]."""
        first, last, start, stop = self.spans.unbind(1)
        before = (start - (last - first)).repeat_interleave(stop - start)
        return on_device(torch.arange(len(before)) - before, self.cu_seqlens.device)

    def cut(self, chunk: int) -> PackedSequences:
        """Return the layout for chunked attention: chunks of `chunk` tokens, from a row's start, become rows."""
        if chunk not in self._cut:  # once for all layers
            # The first chunk after a prefix sees the last, incomplete chunk of the prefix.
            found = []
            for first, last, start, stop in self.spans.tolist():
                over = (last - first) % chunk
                edges = [start, *range(start + chunk - over, stop, chunk), stop]
                for at, (begin, end) in enumerate(pairwise(edges)):
                    found.append([last - over, last, begin, end] if at == 0 and over else [begin, begin, begin, end])
            self._cut[chunk] = packed_rows(torch.tensor(found, dtype=torch.int64), self.cu_seqlens.device)
        return self._cut[chunk]


def packed_rows(rows: Tensor, device: torch.device = HOST) -> PackedSequences:
    """Create the layout of rows on `device`. `rows`, on the host: offsets int64 [N + 1], or spans [N, 4] with prefixes."""
    spans = rows if rows.ndim == 2 else torch.stack([rows[:-1], rows[:-1], rows[:-1], rows[1:]], dim=1)
    prefixes = spans[:, 1] - spans[:, 0]
    shares, longest = bool(prefixes.any()), int((prefixes + spans[:, 3] - spans[:, 2]).max()) if len(spans) else 0
    ends = on_device(torch.cat([spans.new_zeros(1), spans[:, 3]]).to(torch.int32), device)
    return PackedSequences(ends, longest, spans, shares, shares and device.type == "cpu")


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: PackedSequences | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | NotGiven | None = NOT_GIVEN,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each row: query [1, H, T, D], value [1, G, T, E] -> [1, T, H, E], as in transformers.

    Exact with sliding windows, chunks, soft-capped scores, sinks, and values of another width than keys, also after shared
    prefixes and with heads split over ranks. Raises ModelError for any other request of a layer (`attention_form`).
    """
    packed = packed or layout()
    if packed is None:
        raise ModelError("packed attention: the layout of the rows is not known")
    form = attention_form(
        module, query, attention_mask, scaling=scaling, dropout=dropout, sliding_window=sliding_window, others=others
    )
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    group = packed.ulysses
    if form.tuning is not None:
        own = slice(None) if group is None else group.slice_of(len(q) * group.size)
        q = form.at_positions(q, packed.positions[own])
    if form.chunk is not None and form.chunk < packed.longest:
        packed = packed.cut(form.chunk)
    if group is None:
        return _attention(q, k, v, packed, form)[None], None
    # The group's ranks split the heads during attention. Key heads that do not divide evenly are first repeated to the number
    # of query heads.
    if k.shape[1] % group.size:
        repeat = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    q, k, v = group.to_heads(q), group.to_heads(k), group.to_heads(v)
    if form.sinks is not None:
        form = replace(form, sinks=form.sinks[group.slice_of(len(form.sinks))])
    return group.to_tokens(_attention(q, k, v, packed, form))[None], None


def _attention(q: Tensor, k: Tensor, v: Tensor, packed: PackedSequences, form: AttentionForm) -> Tensor:
    """Choose a kernel and compute attention: [T, H, D], [T, G, D], [T, G, E] -> [T, H, E]."""
    # The varlen kernel needs half precision on a GPU, and supports neither shared prefixes nor a cap.
    half = q.dtype in (torch.bfloat16, torch.float16)
    if q.is_cuda and half and not packed.shares and form.cap is None and varlen_takes(max(q.shape[2], v.shape[2])):
        return varlen_attention(q, k, v, packed.cu_seqlens, packed.longest, form)
    # Right-padded blocks under a causal mask: a real token never attends to the padding after it.
    wide, heads = v.shape[2], q.shape[1]
    if packed.fused and form.plain_up_to(packed.longest):
        if k.shape[1] != heads:
            k, v = (tensor.repeat_interleave(heads // k.shape[1], dim=1) for tensor in (k, v))
        call: Callable[..., Tensor] = SharedAttention.apply
        return call(*same_width(q, k, v), packed, form.scale)[..., :wide]
    if len(packed.blocks) == 1 and packed.blocks[0].exact:
        return attend(q, k, v, packed.blocks[0], form)
    # One index_copy for all blocks, because each call allocates a new tensor.
    parts = [attend(q, k, v, block, form) for block in packed.blocks]
    out = q.new_empty(*q.shape[:2], wide)
    return out.index_copy(0, torch.cat([block.tokens for block in packed.blocks]), torch.cat(parts))


def register_packed_attention() -> None:
    """Register `PACKED` with transformers; idempotent. Disables cuDNN's attention in this process."""
    from transformers import AttentionInterface

    # torch prefers cuDNN on Hopper GPUs, where it compiles for each new shape, i.e. for every micro-batch here.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # Without a mask function of that name, transformers builds no mask and does not search positions for packed rows.
    AttentionInterface.register(PACKED, packed_attention)


# Token mixers without the attention function

STATE = frozenset({"cache_params", "past_key_values", "past_key_value", "layer_past", "state"})
"""Arguments of a token mixer for the state of earlier tokens."""
INTERFACE = "ALL_ATTENTION_FUNCTIONS"
"""Name in transformers from which a model's attention reads the configured attention function."""


def mixers_of(backbone: nn.Module) -> dict[str, nn.Module]:
    """Find the token mixers of a model without the attention function, by name.

    They are the innermost modules that take a state or have a convolution over tokens."""
    parts = dict(backbone.named_modules())
    attends, mixing = set[str](), set[str]()
    for name, part in parts.items():
        forward = type(part).forward
        if INTERFACE in getattr(getattr(inspect.unwrap(forward), "__code__", None), "co_names", ()):
            attends.add(name)
        elif not isinstance(part, nn.ModuleList):
            convolves = any(isinstance(child, nn.Conv1d) and child.kernel_size[0] > 1 for child in part.children())
            if convolves or STATE & set(inspect.signature(forward).parameters):
                mixing.add(name)
    # Modules around mixers or attention, which do not mix themselves, nor do others of their types (blocks around an MLP).
    outer = {name[:at] for name in attends | mixing for at, sign in enumerate(name) if sign == "."}
    outer |= {""} if attends | mixing else set()
    around = {type(parts[name]) for name in outer}
    return {name: parts[name] for name in parts if name in mixing - outer and type(parts[name]) not in around}


def keep_rows_apart(backbone: nn.Module) -> list[str]:
    """Make the mixers of a model compute row by row; returns their names. Parameter names do not change."""
    found = mixers_of(backbone)
    for module in found.values():
        # On the instance: the class, and so other models of this process, do not change.
        module.forward = partial(_forward_by_rows, module.forward)
    return list(found)


@torch.compiler.disable  # blocks differ from one micro-batch to the next
def _forward_by_rows(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compute a module's results on the tokens of the layout, each row separately."""
    packed = layout()
    if packed is None or not packed.blocks:
        return forward(*args, **kwargs)
    group = packed.ulysses
    # The hidden states are the first argument that is a tensor [1, T, ...].
    tokens = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.dim() > 2).shape[1]
    if group is not None:
        gather: Callable[..., Tensor] = _Gathered.apply
        args, kwargs = _map_tokens((args, kwargs), tokens, lambda own: gather(own, group))
        tokens *= group.size
    blocks, results = mixer_blocks(packed), list[Any]()
    for block in blocks:
        inner, named = _map_tokens((args, kwargs), tokens, lambda own: block.pad(own[0]))  # noqa: B023 - called at once
        results.append(forward(*inner, **named))
    out = _join_blocks(results, blocks, tokens)
    return out if group is None else _map_tokens(out, tokens, lambda t: t[:, group.slice_of(tokens)])


def _join_blocks(results: list[Any], blocks: list[Block], tokens: int) -> Any:
    """Join the blocks' results to [1, T, ...]; results that are not over tokens (a state) become None."""
    first = results[0]
    if isinstance(first, tuple):
        return tuple(_join_blocks([result[place] for result in results], blocks, tokens) for place in range(len(first)))
    if not isinstance(first, Tensor) or first.shape[:2] != (blocks[0].rows, blocks[0].width):
        return None
    out = first.new_zeros(tokens, *first.shape[2:])
    cells = [block.unpad(result) for result, block in zip(results, blocks, strict=True)]
    return out.index_copy(0, torch.cat([block.tokens for block in blocks]), torch.cat(cells))[None]


def _map_tokens(value: Any, tokens: int, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply `change` to every tensor over tokens, [1, T, ...], in arguments or results."""
    if isinstance(value, Tensor):
        return change(value) if value.dim() > 1 and value.shape[:2] == (1, tokens) else value
    if type(value) in (tuple, list):
        return type(value)(_map_tokens(part, tokens, change) for part in value)
    if type(value) is dict:
        return {name: _map_tokens(part, tokens, change) for name, part in value.items()}
    return value


def mixer_blocks(packed: PackedSequences) -> list[Block]:
    """Return blocks of whole rows of similar length: rows without a prefix, and suffixes with a copy of their prefix."""
    device, found = packed.cu_seqlens.device, [block for block in packed.blocks if block.mask is None]
    spans = packed.spans[packed.spans[:, 0] < packed.spans[:, 1]]
    for rows in group_by_length((spans[:, 1] - spans[:, 0] + spans[:, 3] - spans[:, 2]).tolist()):
        first, last, start, stop = (spans[rows][:, place, None] for place in range(4))
        prefix, ends = last - first, last - first + stop - start
        steps = torch.arange(int(ends.max()))[None]
        at = torch.where(steps < prefix, first + steps, start + torch.minimum(steps, ends - 1) - prefix).reshape(-1)
        cells = ((steps >= prefix) & (steps < ends)).reshape(-1).nonzero().squeeze(1)  # only suffixes have results
        gather, used, tokens = (on_device(part, device) for part in (at, cells, at[cells]))
        found.append(Block(len(rows), steps.shape[1], gather, used, tokens, False))
    return found


class _Gathered(torch.autograd.Function):
    """All-gather of tokens: [1, T / size, ...] -> [1, T, ...]. All ranks use them, so gradients are summed over ranks."""

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

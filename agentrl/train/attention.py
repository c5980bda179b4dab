"""Attention over packed rows: no padding reaches the model, and no row ever sees another.

The rows of a micro-batch follow one another in one sequence of T tokens. transformers passes the
keyword argument `packed` of a model's forward on to the attention function, which is registered here
under the name `PACKED`; there is no mask function of that name, so no T x T mask is ever built.
(With transformers' own attention functions, packed rows silently leak into each other as soon as a
cache or a mask is in use; see tests/train/test_attention.py.)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from agentrl.backends.attention_form import NOT_GIVEN, AttentionForm, NotGiven, attention_form
from agentrl.backends.exact_attention import exact_attention
from agentrl.batch.device import on_device
from agentrl.batch.prefix_attention import SuffixBlock, attend_into, fused_attention, same_width, suffix_blocks
from agentrl.errors import ModelError
from agentrl.train.families.layout import layout
from agentrl.train.shared_attention import Block, Spans, runs_after, shared_attention
from agentrl.train.ulysses import Ulysses
from agentrl.train.varlen import varlen_attention, varlen_takes

PACKED = "agentrl_packed"
WASTE = 1.25
"""The most cells of a block of rows, padding included, as a multiple of its tokens."""


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """The layout of the rows: `cu_seqlens` int32 [N + 1], the longest row, the blocks for a CPU, and the group
    of ranks that shares the tokens, if there is one.

    If rows share prefixes (`spans` of batch/prefix.py), the blocks hold the spans without a prefix before them,
    which include the prefixes themselves, and `suffixes` the suffixes after them; on a CPU, `parts` has all of it for
    `shared_attention`. `experts`: where routers are to send the
    tokens of this rank (Micro.experts)."""

    cu_seqlens: Tensor
    longest: int
    blocks: tuple[Block, ...]
    ulysses: Ulysses | None = None
    suffixes: tuple[SuffixBlock, ...] = ()
    spans: Tensor | None = None
    parts: Spans | None = None
    experts: Tensor | None = None
    _cut: dict[int, PackedSequences] = field(default_factory=dict, compare=False, repr=False)

    @property
    def positions(self) -> Tensor:
        """The position of each token in its row, which counts a shared prefix: int64 [T]."""
        counts = self.cu_seqlens.diff().to(torch.int64)
        before = self.cu_seqlens[:-1].to(torch.int64)
        if self.spans is not None:
            before = before - on_device(self.spans[:, 1] - self.spans[:, 0], before.device)
        total = int(self.cu_seqlens[-1])
        steps = torch.arange(total, device=before.device)
        return steps - before.repeat_interleave(counts, output_size=total)

    def cut(self, chunk: int) -> PackedSequences:
        """The layout in which each run of `chunk` tokens of a row, counted from its start, is a row of its own: attention
        within runs."""
        if chunk not in self._cut:  # made once for all layers
            device = self.cu_seqlens.device
            if self.spans is None:
                self._cut[chunk] = packed_rows(_cut_rows(self.cu_seqlens.tolist(), chunk), device)
            else:
                self._cut[chunk] = packed_trees(_cut_spans(self.spans.tolist(), chunk), chunk, device)
        return self._cut[chunk]


def packed_rows(offsets: Tensor, device: torch.device | None = None) -> PackedSequences:
    """The layout of the rows that `offsets` int64 [N + 1] delimit."""
    place = device or offsets.device
    blocks = _blocks(offsets[:-1], offsets[1:], place)
    longest = int(offsets.diff().max()) if len(offsets) > 1 else 0
    return PackedSequences(on_device(offsets.to(torch.int32), place), longest, blocks)


def packed_trees(spans: Tensor, longest: int, device: torch.device) -> PackedSequences:
    """The layout of rows with shared prefixes; `longest` counts a row's prefix."""
    alone = spans[:, 0] == spans[:, 1]
    blocks = _blocks(spans[alone, 2], spans[alone, 3], device)
    ends = on_device(torch.cat([spans.new_zeros(1), spans[:, 3]]).to(torch.int32), device)
    parts = None
    if device.type == "cpu":
        parts = Spans(_blocks(spans[:, 2], spans[:, 3], device), runs_after(spans))
    suffixes = tuple(suffix_blocks(spans[~alone], device))
    return PackedSequences(ends, longest, blocks, suffixes=suffixes, spans=spans, parts=parts)


def padded(packed: PackedSequences, missing: int) -> PackedSequences:
    """The layout with one more row, of `missing` tokens, which no other row sees."""
    if packed.spans is not None:
        end = int(packed.spans[-1, 3])
        pad = packed.spans.new_tensor([[end, end, end, end + missing]])
        spans = torch.cat([packed.spans, pad]) if missing else packed.spans
        return packed_trees(spans, packed.longest, packed.cu_seqlens.device)
    offsets = packed.cu_seqlens.to(torch.int64)
    return packed_rows(torch.cat([offsets, offsets[-1:] + missing]) if missing else offsets)


def _cut_rows(offsets: list[int], chunk: int) -> Tensor:
    """Offsets int64 of the runs of `chunk` tokens of the rows that `offsets` delimit."""
    ends = [end for first, last in pairwise(offsets) for end in (*range(first + chunk, last, chunk), last)]
    return torch.tensor([0, *ends])


def _cut_spans(spans: list[list[int]], chunk: int) -> Tensor:
    """Spans of the runs of `chunk` tokens: the first run after a prefix sees the prefix's last, unfinished run."""
    found = []
    for first, last, start, stop in spans:
        over = (last - first) % chunk
        edges = [start, *range(start + chunk - over, stop, chunk), stop]
        for at, (begin, end) in enumerate(pairwise(edges)):
            found.append([last - over, last, begin, end] if at == 0 and over else [begin, begin, begin, end])
    return torch.tensor(found, dtype=torch.int64)


def _blocks(starts: Tensor, stops: Tensor, device: torch.device) -> tuple[Block, ...]:
    # On the host, because block sizes become shapes: reading them from a GPU would synchronize with it for each block.
    starts, stops = starts.cpu(), stops.cpu()
    return tuple(_block(starts[rows], stops[rows], device) for rows in similar((stops - starts).tolist()))


def similar(lengths: list[int]) -> list[list[int]]:
    """Rows grouped, in order of length, into blocks with little padding."""
    # Longest first: a block is then as wide as its first row, so each further row's padding is known when it is considered.
    order = sorted((i for i, n in enumerate(lengths) if n), key=lambda i: (-lengths[i], i))
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


def _block(starts: Tensor, ends: Tensor, device: torch.device) -> Block:
    width = int((ends - starts).max())
    steps = torch.arange(width)
    positions = starts[:, None] + steps[None, :]
    valid = positions < ends[:, None]
    gather = torch.minimum(positions, ends[:, None] - 1).reshape(-1)
    cells = valid.reshape(-1).nonzero().squeeze(1)
    at, used, tokens = (on_device(part, device) for part in (gather, cells, gather[cells]))
    return Block(len(starts), width, at, used, tokens, bool(valid.all()))


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
    """Causal attention within each row. Shapes as in transformers: query [1, H, T, D], value [1, G, T, E] -> [1, T, H, E].

    Exact with sliding windows, chunks, soft-capped scores, sinks, and values of another width than keys, also after shared
    prefixes and with heads split over ranks. Raises ModelError for whatever else a layer asks for (`attention_form`).
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
    # During attention the group's ranks split the heads. If they cannot split the key heads evenly, these are first
    # repeated to the number of query heads.
    if k.shape[1] % group.size:
        repeat = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    q, k, v = group.to_heads(q), group.to_heads(k), group.to_heads(v)
    if form.sinks is not None:
        form = replace(form, sinks=form.sinks[group.slice_of(len(form.sinks))])
    return group.to_tokens(_attention(q, k, v, packed, form))[None], None


def _attention(q: Tensor, k: Tensor, v: Tensor, packed: PackedSequences, form: AttentionForm) -> Tensor:
    """[T, H, D], [T, G, D], [T, G, E] -> [T, H, E]."""
    # The varlen kernel needs half precision on a GPU and supports neither a prefix that several rows share nor a cap.
    half = q.dtype in (torch.bfloat16, torch.float16)
    wide = max(q.shape[2], v.shape[2])
    if q.is_cuda and half and packed.spans is None and form.cap is None and varlen_takes(wide):
        return _varlen(q, k, v, packed, form)
    return _blockwise(q, k, v, packed, form)


def _varlen(q: Tensor, k: Tensor, v: Tensor, packed: PackedSequences, form: AttentionForm) -> Tensor:
    return varlen_attention(q, k, v, packed.cu_seqlens, packed.longest, form)


def _blockwise(q: Tensor, k: Tensor, v: Tensor, packed: PackedSequences, form: AttentionForm) -> Tensor:
    """Right-padded blocks under a causal mask: a real token never attends to the padding after it."""
    if len(packed.blocks) == 1 and packed.blocks[0].exact and not packed.suffixes:
        return _attend(q, k, v, packed.blocks[0], form)
    if packed.parts is not None and form.plain_up_to(packed.longest):
        return _shared(q, k, v, packed.parts, form)
    out = q.new_zeros(*q.shape[:2], v.shape[2])
    for block in packed.blocks:
        # Cells past a row's end repeat its last token: they need a finite value, and their results are dropped.
        at = block.gather
        cells = _attend(q.index_select(0, at), k.index_select(0, at), v.index_select(0, at), block, form)
        out = out.index_copy(0, block.tokens, cells if block.exact else cells.index_select(0, block.cells))
    return attend_into(out, q, k, v, packed.suffixes, form) if packed.suffixes else out


def _shared(q: Tensor, k: Tensor, v: Tensor, parts: Spans, form: AttentionForm) -> Tensor:
    wide, heads = v.shape[2], q.shape[1]
    if k.shape[1] != heads:
        k, v = (tensor.repeat_interleave(heads // k.shape[1], dim=1) for tensor in (k, v))
    return shared_attention(*same_width(q, k, v), parts, form.scale)[..., :wide]


def _attend(q: Tensor, k: Tensor, v: Tensor, block: Block, form: AttentionForm) -> Tensor:
    """[n * width, H, D], [n * width, G, D], [n * width, G, E] -> [n * width, H, E]."""
    q, k, v = (tensor.view(block.rows, block.width, *tensor.shape[1:]).transpose(1, 2) for tensor in (q, k, v))
    if form.plain_up_to(block.width):
        out = fused_attention(q, k, v, scale=form.scale, is_causal=True)
    else:
        out = exact_attention(q, k, v, form)
    return out.transpose(1, 2).flatten(0, 1)


def register_packed_attention() -> None:
    """Make `PACKED` known to transformers; idempotent. Turns off cuDNN's attention for this process."""
    from transformers import AttentionInterface

    # torch prefers it on Hopper cards, and it prepares itself for each new shape: here every micro-batch has its own.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # No mask function under that name: transformers then makes no mask, and does not search the positions for packed rows.
    AttentionInterface.register(PACKED, packed_attention)

"""Attention over cache slots, as an attention function of transformers: every model that gets its attention
from `AttentionInterface` runs on it unchanged.

A step's tokens arrive as one flat row [1, T], prefill and decode together. An `AttentionPlan` says which of them
belong to which slot; the function stores their keys and values there, and each token attends to its own
slot up to its own position.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from agentrl.backends.attention_form import NOT_GIVEN, AttentionForm, NotGiven, attention_form
from agentrl.backends.embedded.cascade import Cascade, cascade_of
from agentrl.backends.embedded.kv_cache import Pool, Sequence
from agentrl.backends.exact_attention import masked_attention

NAME = "agentrl_slots"
SHAPES = "agentrl_shapes"


class Span:
    """Tokens of several sequences of one pool that attend together.

    Row i holds `counts[i]` tokens of one slot, starting at position `starts[i]`; the tokens are stored flat, row
    after row, at `[offset, offset + tokens)`. `parts` must be sorted by slot.
    """

    def __init__(self, pool: Pool, offset: int, parts: Seq[tuple[Sequence, int]], device: torch.device) -> None:
        self.pool, self.offset = pool, offset
        self._slots = slots = [sequence.slot for sequence, _ in parts]
        first = [sequence.computed for sequence, _ in parts]
        counts = [count for _, count in parts]
        self.tokens = sum(counts)
        self.width = max(counts)
        self.longest = max(start + count for start, count in zip(first, counts, strict=True))
        self.slots = torch.tensor(slots, device=device)
        self.starts = torch.tensor(first, device=device)
        self._masks: dict[tuple[int | None, int | None], Tensor] = {}
        self.cascade: Cascade | None = None
        if self.width == 1:
            self._lay_out_decode(slots)
            self.cascade = self._shared([sequence for sequence, _ in parts], slots)
        else:
            self._lay_out_prefill(counts)

    def _lay_out_decode(self, slots: list[int]) -> None:
        """One token per row. If most slots between the lowest and the highest take part, all of them do (the
        idle ones attend to position 0 and are dropped), so that keys and values are read in place."""
        self.token_slots, self.positions = self.slots, self.starts
        # A contiguous range of slots is a view, while a gather copies the cache of every row in every layer; fewer idle
        # rows than busy ones cost less than that copy.
        reach = slots[-1] + 1 - slots[0]
        self.view = slice(slots[0], slots[-1] + 1) if reach < 2 * len(slots) else None
        self.scatter = None if self.view is None or reach == len(slots) else self.slots - slots[0]
        if self.scatter is not None:
            self.starts = self.starts.new_zeros(reach).index_copy_(0, self.scatter, self.starts)

    def _shared(self, sequences: list[Sequence], slots: list[int]) -> Cascade | None:
        """How the rows share their prompts; made once for as long as they are the same."""
        found: Cascade | None
        held, at, found = self.pool.cascade
        # A sequence gets a new list with each turn, in which its history may have been rewritten.
        tokens = [sequence.tokens for sequence in sequences]
        if at != slots or any(a is not b for a, b in zip(held, tokens, strict=False)):
            rows = list(range(len(slots))) if self.scatter is None else [slot - slots[0] for slot in slots]
            found = cascade_of(sequences, rows, len(self.starts), self.pool.shape)
            self.pool.cascade = tokens, slots, found
        return found

    def _lay_out_prefill(self, counts: list[int]) -> None:
        lengths = torch.tensor(counts, device=self.slots.device)
        steps = torch.arange(self.width, device=lengths.device)
        self.real = steps < lengths.unsqueeze(1)
        self.padded = torch.where(self.real, (lengths.cumsum(0) - lengths).unsqueeze(1) + steps, 0)
        self.token_slots = self.slots.repeat_interleave(lengths)
        self.positions = (self.starts.unsqueeze(1) + steps)[self.real]
        self.view, self.scatter = None, None

    def cached(self, kv: Tensor, start: int = 0) -> Tensor:
        """The keys and values [2, rows, heads, longest - start, dim] in a layer's [2, slots, heads, capacity, dim]; valid until
        the next call for the same pool."""
        kv = kv[:, :, :, start : self.longest]
        if self.view is not None:
            return kv[:, self.view]
        return self.pool.gathered(kv, self._slots) if kv.device.type == "cpu" else kv.index_select(1, self.slots)

    def mask(self, form: AttentionForm, dtype: torch.dtype) -> Tensor:
        """Additive mask [rows, 1, width, longest]: 0 where a token may attend, -inf elsewhere."""
        # Cached because all layers of a step with the same window share one mask.
        window, chunk = form.window, form.chunk
        if (window, chunk) not in self._masks:
            keys = torch.arange(self.longest, device=self.slots.device)
            queries = self.starts.unsqueeze(1) + torch.arange(self.width, device=keys.device)
            distance = queries.unsqueeze(2) - keys
            blocked = distance < 0
            if window is not None:
                blocked |= distance >= window
            if chunk is not None:
                blocked |= (queries // chunk).unsqueeze(2) != keys // chunk
            bias = torch.zeros(blocked.shape, dtype=dtype, device=keys.device)
            self._masks[window, chunk] = bias.masked_fill_(blocked, float("-inf")).unsqueeze(1)
        return self._masks[window, chunk]


class AttentionPlan:
    """One step: its spans, in the order of their tokens in the flat row."""

    def __init__(self, spans: list[Span]) -> None:
        self.spans = spans


_PLAN: ContextVar[AttentionPlan] = ContextVar("the plan of the step under way")


@contextmanager
def planned(plan: AttentionPlan) -> Iterator[None]:
    """In this context a model's layers attend by `plan`. Not by an argument: not every family hands those on to its layers."""
    token = _PLAN.set(plan)
    try:
        yield
    finally:
        _PLAN.reset(token)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | NotGiven | None = NOT_GIVEN,
    **others: Any,
) -> tuple[Tensor, None]:
    """`query` [1, heads, T, dim], `key` [1, kv heads, T, dim], `value` [1, kv heads, T, value dim] -> ([1, T, heads, value dim],
    None), by the plan that the model runs under (`planned`). Raises ModelError for what is not in the form."""
    form = attention_form(
        module, query, attention_mask, scaling=scaling, dropout=dropout, sliding_window=sliding_window, others=others
    )
    layer = cast(int, module.layer_idx)
    widths = key.shape[-1], value.shape[-1]
    # What the kernels below do not have: one more term of the softmax, a cap, or values of another width than keys.
    plain = form.cap is None and form.sinks is None and widths[0] == widths[1]
    outputs = []
    plan = _PLAN.get()
    if form.tuning is not None:
        tuned = form.at_positions(query[0].transpose(0, 1), torch.cat([span.positions for span in plan.spans]))
        query = tuned.transpose(0, 1)[None]
    for span in plan.spans:
        flat = slice(span.offset, span.offset + span.tokens)
        # The cache is as large as its largest layer needs.
        kv = span.pool.kv[:, layer, :, : key.shape[1], :, : max(widths)]
        # Stored before attending: the tokens of a prefill chunk attend to each other through the cache.
        kv[0, ..., : widths[0]][span.token_slots, :, span.positions] = key[0, :, flat].transpose(0, 1)
        kv[1, ..., : widths[1]][span.token_slots, :, span.positions] = value[0, :, flat].transpose(0, 1)
        q = query[0, :, flat].transpose(0, 1)
        mask = span.mask(form, query.dtype)
        cascade = span.cascade if plain and form.window is None and form.chunk is None else None
        if cascade is not None:
            outputs.append(_cascaded(span, cascade, q, kv, mask, form.scale))
        elif plain:
            attend_span = _decode if span.width == 1 else _prefill
            outputs.append(attend_span(span, q, span.cached(kv), mask, form.scale))
        else:
            keys, values = (part[..., :width] for part, width in zip(span.cached(kv), widths, strict=True))
            outputs.append(_exact(span, q, keys, values, mask, form))
    return torch.cat(outputs).unsqueeze(0), None


def _exact(span: Span, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, form: AttentionForm) -> Tensor:
    """`query` [tokens, heads, dim] -> [tokens, heads, value dim], for any form."""
    if span.width > 1:
        return masked_attention(query[span.padded].transpose(1, 2), key, value, mask, form).transpose(1, 2)[span.real]
    if span.scatter is not None:
        query = query.new_zeros(len(key), *query.shape[1:]).index_copy_(0, span.scatter, query)
    out = masked_attention(query.unsqueeze(2), key, value, mask, form).squeeze(2)
    return out if span.scatter is None else out.index_select(0, span.scatter)


def _cascaded(span: Span, cascade: Cascade, query: Tensor, kv: Tensor, mask: Tensor, scale: float) -> Tensor:
    """As `_decode`, from a layer's whole cache."""
    if span.scatter is not None:
        query = query.new_zeros(len(span.starts), *query.shape[1:]).index_copy_(0, span.scatter, query)
    rows, _, dim = query.shape
    own = span.cached(kv, cascade.length)
    by_head = query.reshape(rows, kv.shape[2], -1, dim)
    out = cascade.attend(by_head, cascade.leading(kv), own, mask[..., cascade.length :], scale).reshape(rows, -1, dim)
    return out if span.scatter is None else out.index_select(0, span.scatter)


def _decode(span: Span, query: Tensor, kv: Tensor, mask: Tensor, scale: float) -> Tensor:
    """`query` [rows, heads, dim] -> the same shape. The query heads that share a key head are treated as
    query positions of that head."""
    _, rows, kv_heads, length, dim = kv.shape
    if span.scatter is not None:
        query = query.new_zeros(rows, *query.shape[1:]).index_copy_(0, span.scatter, query)
    query = query.reshape(rows, kv_heads, -1, dim)
    if query.device.type == "cpu" and query.dtype == torch.float32:
        # On a CPU, with one query per key head, two batched products are twice as fast as the fused kernel.
        key, value = kv[0].reshape(-1, length, dim), kv[1].reshape(-1, length, dim)
        bias = mask.expand(-1, kv_heads, -1, -1).reshape(-1, 1, length)
        scores = torch.baddbmm(bias, query.reshape(rows * kv_heads, -1, dim), key.transpose(1, 2), alpha=scale)
        out = torch.bmm(torch.softmax(scores, dim=-1), value)
    else:
        out = F.scaled_dot_product_attention(query, kv[0], kv[1], attn_mask=mask, scale=scale)
    out = out.reshape(rows, -1, dim)
    return out if span.scatter is None else out.index_select(0, span.scatter)


def _prefill(span: Span, query: Tensor, kv: Tensor, mask: Tensor, scale: float) -> Tensor:
    """`query` [tokens, heads, dim] -> the same shape; rows are padded to the span's widest."""
    padded = query[span.padded].transpose(1, 2)
    if query.device.type == "cpu":
        grouped = padded.shape[1] != kv.shape[2]
        out = F.scaled_dot_product_attention(padded, kv[0], kv[1], attn_mask=mask, scale=scale, enable_gqa=grouped)
    else:
        out = _by_key_head(padded, kv, mask, scale)
    return out.transpose(1, 2)[span.real]


def _by_key_head(query: Tensor, kv: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Masked attention of `query` [rows, heads, width, dim], for GPUs: the heads that share a key head are positions of it."""
    # No fused kernel of a GPU takes a mask together with grouped heads. The fallback repeats keys and values for each head, in
    # float32, and keeps all scores: 50 rows of 8,000 tokens would take tens of GB.
    rows, heads, width, dim = query.shape
    group = heads // kv.shape[2]
    together = query.reshape(rows, -1, group * width, dim)
    out = F.scaled_dot_product_attention(together, kv[0], kv[1], attn_mask=mask.repeat(1, 1, group, 1), scale=scale)
    return out.reshape(rows, heads, width, dim)


def note_shapes(found: dict[int, tuple[int, int, int]]) -> str:
    """Make known to transformers an attention that computes nothing, but notes each layer's key heads and widths of keys and
    values; its name."""

    def note(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        found[cast(int, module.layer_idx)] = (key.shape[1], key.shape[-1], value.shape[-1])
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None

    AttentionInterface.register(SHAPES, note)
    return SHAPES


def register_slot_attention() -> None:
    """Make `attend` known to transformers under `NAME`; idempotent. Turns off cuDNN's attention for this process."""
    # torch prefers it on Hopper cards, and it prepares itself for each new shape: here every step has one, as caches grow.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # No mask function under that name: transformers then makes no mask, and does not search the positions for packed rows.
    AttentionInterface.register(NAME, attend)

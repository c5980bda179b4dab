"""KV cache of the embedded engine, and attention over its slots.

Slots, the prefix index, decode attention over a shared prompt (cascade), and the attention function for transformers' models."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence as Seq
from contextvars import ContextVar
from dataclasses import dataclass, field
from operator import add, attrgetter
from typing import Any, cast

import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from agentrl.engines.exact_attention import NOT_GIVEN, AttentionForm, NotGiven, attention_form, masked_attention
from agentrl.utils.errors import ResourceError
from agentrl.utils.processor import usable_memory

# The cache has one slot per sequence; slots of equal capacity share one tensor. So a decode step attends over all sequences of a
# capacity with batched matrix products on a view, without copying keys or values. A sequence that outgrows its slot moves to one
# of twice the capacity.

HOST_MIB = 4096
"""Upper limit of the cache in host memory (also at most a quarter of the memory, but at least one episode)."""


@dataclass(frozen=True, slots=True)
class KvShape:
    """Shape of one token's cache; the maximum where layers, or keys and values, differ."""

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        return 2 * self.layers * self.heads * self.head_dim * self.dtype.itemsize


@dataclass(eq=False, slots=True)
class CachedSequence:
    """Tokens and their cache slot, which holds keys and values of `tokens[:computed]`. `blocks`: hashes of the tokens' blocks
    (see `PrefixIndex`); the first `first` belong to the first prompt. `experts`: if recorded, those of each computed
    token, [routers, k]."""

    key: str
    tokens: list[int]
    pool: Pool
    slot: int
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    first: int = 0
    experts: list[npt.NDArray[Any]] = field(default_factory=list)


class Pool:
    """Slots of one capacity; `kv` is [2, layers, slots, heads, capacity, head_dim]."""

    def __init__(self, shape: KvShape, capacity: int) -> None:
        self.shape = shape
        self.capacity = capacity
        self.slot_bytes = capacity * shape.token_bytes
        self.free: list[int] = []
        self._allocate(0)
        self.copies = self.kv.flatten()
        """Reused buffer for slots that a step gathers, valid until the next gather."""
        self.cascade: tuple[list[list[int]], list[int], Any] = [], [], None
        """Last decode step's token lists, their slots, and the plan for their shared prompts (a Cascade or None)."""

    def grow(self, budget_bytes: int) -> bool:
        """Ensure a free slot by doubling the slots as far as the budget allows. Returns False if it allows none."""
        if self.free:
            return True
        # Doubling keeps copies rare; from 64 slots on growth is linear, so that a pool takes little memory in vain.
        more = min(max(1, min(self.slots, 64)), budget_bytes // self.slot_bytes)
        if more < 1:
            return False
        old, held = self.kv, self.slots
        if old.device.type != "cpu" and (held + more) * self.slot_bytes > budget_bytes:
            # Both tensors together would exceed the limit, which is all that the GPU has left.
            old = old.cpu()
            self._allocate(0)
        self._allocate(held + more)
        self.kv[:, :, :held] = old
        self.free = list(range(held, self.slots))
        return True

    def clear(self, free_memory: bool = True) -> None:
        """Free every slot, and by default the memory."""
        if free_memory:
            self._allocate(0)
            self.copies = self.kv.flatten()
        self.free = list(range(self.slots))

    def _allocate(self, slots: int) -> None:
        # Zeroed, since masked positions still enter a product, and 0 x NaN is NaN.
        s = self.shape
        self.kv = torch.zeros(2, s.layers, slots, s.heads, self.capacity, s.head_dim, dtype=s.dtype, device=s.device)
        self.slots = slots  # last, so that it is unchanged if the allocation fails


class Slots:
    """All pools under one memory limit."""

    def __init__(self, shape: KvShape, max_context: int, limit_bytes: int) -> None:
        self.limit = limit_bytes
        sizes = [128]
        while sizes[-1] < max_context:
            sizes.append(sizes[-1] * 2)
        sizes[-1] = max_context
        self.pools = [Pool(shape, size) for size in sizes]

    def enlarge(self, sequence: CachedSequence) -> bool:
        """Make room for all tokens of a sequence. Returns False if memory is insufficient."""
        if len(sequence.tokens) <= sequence.pool.capacity:
            return True
        if (found := self.take(len(sequence.tokens))) is None:
            return False
        old, left, length = sequence.pool, sequence.slot, sequence.computed
        sequence.pool, sequence.slot = found
        sequence.pool.kv[:, :, sequence.slot, :, :length] = old.kv[:, :, left, :, :length]
        old.free.append(left)
        return True

    def take(self, length: int) -> tuple[Pool, int] | None:
        """Take a slot for `length` tokens from the smallest possible pool. Returns None if memory is insufficient."""
        fitting = self.pools[bisect_left(self.pools, length, key=attrgetter("capacity")) :]
        left = self.limit - sum(pool.slots * pool.slot_bytes for pool in self.pools)
        found = fitting[0] if fitting[0].grow(left) else None
        if found is None:
            # Unused pools keep their memory, which counts against the limit, until it is freed here.
            for pool in self.pools:
                if 0 < pool.slots == len(pool.free):
                    left += pool.slots * pool.slot_bytes
                    pool.clear()
            found = next((pool for pool in fitting if pool.grow(left)), None)
        if found is None:
            return None
        slot = min(found.free)  # lowest first, to keep a decode step's view dense
        found.free.remove(slot)
        return found, slot


def cache_limit(given_mib: int | None, room: int | None, weights: int, token: int, length: int) -> int:
    """Return the byte limit of the cache: `given_mib`, else `room` bytes of a GPU minus the weights, else a part of host memory.

    `token`: bytes per token; `length`: tokens of one episode. Raises ResourceError if the limit is below one episode."""
    episode = token * length
    if given_mib is not None:
        limit, least = given_mib << 20, -(-episode >> 20)
        problem = f"engine_args.kv_cache_mib = {given_mib}: one episode of {length:,} tokens takes {least:,} MiB"
        fix = f"Set it to at least {least}, unset it, or lower rollout.max_episode_tokens"
    elif room is not None:
        limit = max(room - weights, 0)
        problem = (
            f"rollout.max_episode_tokens: one episode of {length:,} tokens takes {episode / (1 << 30):.1f} GiB of the engine's "
            f"cache, and its weights and the run's other roles leave {limit / (1 << 30):.1f} GiB of the GPU"
        )
        fix = 'Lower it, set rollout.colocate = true and model.offload = "idle", or train adapters ([model.lora])'
    else:
        return max(episode, min(HOST_MIB << 20, usable_memory().total // 4))
    if limit < episode:
        raise ResourceError(f"{problem}. {fix}")
    return limit


# Cached prefixes

BLOCK = 16


class PrefixIndex(dict[int, CachedSequence]):
    """Index: hash of a block -> sequence that holds, or will compute, the tokens up to the end of that block."""

    def find(self, tokens: list[int]) -> tuple[CachedSequence | None, int, list[int]]:
        """Return the holder of the longest known prefix of `tokens[:-1]`, the prefix's length (a multiple of BLOCK), and the
        hashes of all blocks of `tokens`. The last token is never in the prefix, since its logits are needed."""
        blocks: list[int] = []
        chain = 0
        for start in range(0, len(tokens) - BLOCK, BLOCK):
            chain = hash((chain, *tokens[start : start + BLOCK]))
            blocks.append(chain)
        for number in range(len(blocks), 0, -1):
            holder = self.get(blocks[number - 1])
            length = number * BLOCK
            # Hashes may collide, and a wrong hit would attend to another prompt's cache.
            if holder is not None and holder.tokens[:length] == tokens[:length]:
                return holder, length, blocks
        return None, 0, blocks

    def grow(self, sequence: CachedSequence, kept: int) -> None:
        """Index a sequence's new prompt, whose first `kept` tokens are unchanged, since it may be the prefix of another episode
        (`rollout.branch`). Does nothing if the first prompt was changed."""
        if kept // BLOCK < sequence.first:
            return
        self.remove(sequence, kept // BLOCK)
        chain = sequence.blocks[-1] if sequence.blocks else 0
        for start in range(len(sequence.blocks) * BLOCK, len(sequence.tokens) - BLOCK, BLOCK):
            chain = hash((chain, *sequence.tokens[start : start + BLOCK]))
            sequence.blocks.append(chain)
            self.setdefault(chain, sequence)

    def remove(self, sequence: CachedSequence, kept: int = 0) -> None:
        """Remove a sequence's blocks after the first `kept` from the index."""
        for block in sequence.blocks[kept:]:
            if self.get(block) is sequence:
                del self[block]
        del sequence.blocks[kept:]


def common_prefix(left: list[int], right: list[int]) -> int:
    """Return the length of the common prefix."""
    shorter = min(len(left), len(right))
    if left[:shorter] == right[:shorter]:
        return shorter
    # Bisection: comparing list slices runs in C, and contexts have tens of thousands of tokens.
    low, high = 0, shorter
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


# Decode attention over a shared prompt

MIN_SAVED_BYTES = 6 << 20
"""Bytes of a layer's keys and values that sharing must save per step; below this, regrouping queries and scores takes longer than
reading them (`python benchmarks/cascade.py`)."""


@dataclass(frozen=True, slots=True)
class Cascade:
    """Cascade attention: rows of a decode step in groups that share their first `length` tokens.

    `leaders`: per group, a slot that holds the shared tokens. `members` [groups x size]: rows of each group, padded with the
    group's last row; None if that is the order of the rows. `place` [rows]: index of each row in `members`, 0 for idle rows.
    """

    length: int
    leaders: list[int]
    members: Tensor | None
    place: Tensor

    def attend(self, query: Tensor, kv: Tensor, own: Tensor, mask: Tensor, scale: float) -> Tensor:
        """Attend with `query` [rows, heads, 1, dim]; returns that shape. `kv` [2, slots, kv heads, capacity, dim]: a layer's
        cache; `own` [2, rows, kv heads, keys, dim]: keys and values after the shared ones; `mask` [rows, 1, 1, keys]: theirs."""
        rows, kv_heads, dim = len(query), kv.shape[2], query.shape[-1]
        length, keys = self.length, own.shape[3]
        by_head = query.reshape(rows, kv_heads, -1, dim)
        queries = by_head.shape[2]
        # By slices: `index_select` would first copy all slots, since the view is not contiguous.
        shared = torch.stack([kv[:, slot, :, :length] for slot in self.leaders], 1)
        key, value = (part.reshape(-1, length, dim) for part in shared)
        own_key, own_value = (part.reshape(-1, keys, dim) for part in own)
        bias = mask.expand(-1, kv_heads, -1, -1).reshape(-1, 1, keys)
        scores = query.new_empty(rows, kv_heads, queries, length + keys)
        by_group = torch.bmm(self._regroup(by_head * scale), key.transpose(1, 2))
        scores[..., :length] = self._ungroup(by_group, by_head.shape)
        scores[..., length:] = torch.baddbmm(bias, by_head.reshape(-1, queries, dim), own_key.transpose(1, 2), alpha=scale).view(
            rows, kv_heads, queries, keys
        )
        weights = torch.softmax(scores, dim=-1)
        out = torch.bmm(weights.view(-1, queries, length + keys)[..., length:], own_value).view(by_head.shape)
        out.add_(self._ungroup(torch.bmm(self._regroup(weights[..., :length]), value), by_head.shape))
        return out.reshape(query.shape)

    def _regroup(self, rows: Tensor) -> Tensor:
        """Regroup [rows, heads, queries, n] -> [groups x heads, members x queries, n]."""
        heads, queries, n = rows.shape[1:]
        by_group = rows if self.members is None else rows[self.members]
        split = by_group.view(len(self.leaders), -1, heads, queries, n)
        return split.transpose(1, 2).reshape(len(self.leaders) * heads, -1, n)

    def _ungroup(self, groups: Tensor, shape: torch.Size) -> Tensor:
        heads, queries = shape[1:3]
        by_head = groups.view(len(self.leaders), heads, -1, queries, groups.shape[-1]).transpose(1, 2)
        if self.members is None:
            return by_head.reshape(shape[0], heads, queries, groups.shape[-1])
        return by_head.reshape(-1, heads, queries, groups.shape[-1])[self.place]


def cascade_of(sequences: Seq[CachedSequence], rows: Seq[int], count: int, shape: KvShape) -> Cascade | None:
    """Plan the sharing of the prompts of `sequences`, which are the `rows` of `count`. Returns None if it would save too few
    bytes, or on devices and types other than float32 on a CPU."""
    if shape.device.type != "cpu" or shape.dtype != torch.float32:
        return None
    # Find the number of blocks that saves most: each row but the first of its group saves them.
    best, blocks = 0, 0
    prompts = [sequence.blocks[: sequence.first] for sequence in sequences]
    for number, hashes in enumerate(zip(*prompts, strict=False), 1):
        saved = (len(sequences) - len(set(hashes))) * number
        if saved > best:
            best, blocks = saved, number
    length = blocks * BLOCK
    if not blocks or best * BLOCK * shape.token_bytes // shape.layers < MIN_SAVED_BYTES:
        return None
    groups: dict[int, list[int]] = {}
    for at, sequence in enumerate(sequences):
        groups.setdefault(sequence.blocks[blocks - 1], []).append(at)
    size = max(map(len, groups.values()))
    place, padded, leaders = [0] * count, list[int](), list[int]()
    for number, members in enumerate(groups.values()):
        leader = sequences[members[0]]
        # Compare tokens: hashes may collide, and an episode's history may have been rewritten since its prompt was hashed.
        tokens = leader.tokens[:length]
        if any(len(sequences[at].tokens) <= length or sequences[at].tokens[:length] != tokens for at in members):
            return None
        leaders.append(leader.slot)
        placed = [rows[at] for at in members]
        for at, row in enumerate(placed):
            place[row] = number * size + at
        padded += [*placed, *[placed[-1]] * (size - len(placed))]
    order = None if padded == list(range(count)) else torch.tensor(padded, device=shape.device)
    return Cascade(length, leaders, order, torch.tensor(place, device=shape.device))


# Attention over cache slots

NAME = "agentrl_slots"


class Span:
    """Tokens of several sequences of one pool that attend together.

    Row i holds `counts[i]` tokens of one slot from position `starts[i]` on; the tokens are flat, row after row, at
    `[offset, offset + tokens)`. `sequences` must be sorted by slot.
    """

    def __init__(self, offset: int, sequences: Seq[CachedSequence], counts: Seq[int], device: torch.device) -> None:
        self.pool, self.offset = (pool := sequences[0].pool), offset
        self._slots = slots = [sequence.slot for sequence in sequences]
        first = [sequence.computed for sequence in sequences]
        self.tokens = sum(counts)
        self.width = max(counts)
        self.longest = max(map(add, first, counts))
        self.slots = torch.tensor(slots, device=device)
        self.starts = torch.tensor(first, device=device)
        self.view: slice | None = None
        self.scatter: Tensor | None = None
        self.cascade: Cascade | None = None
        self._masks: dict[tuple[int | None, int | None], Tensor] = {}
        if self.width > 1:
            lengths, steps = torch.tensor(counts, device=device), torch.arange(self.width, device=device)
            self.real = steps < lengths.unsqueeze(1)
            self.padded = torch.where(self.real, (lengths.cumsum(0) - lengths).unsqueeze(1) + steps, 0)
            self.token_slots = self.slots.repeat_interleave(lengths)
            self.positions = (self.starts.unsqueeze(1) + steps)[self.real]
            return
        self.token_slots, self.positions = self.slots, self.starts
        # A contiguous range of slots is a view, while a gather copies every row's cache in every layer. So if more than half of
        # the range takes part, all of it does: idle slots attend to position 0, and their output is dropped.
        reach = slots[-1] + 1 - slots[0]
        if reach < 2 * len(slots):
            self.view = slice(slots[0], slots[-1] + 1)
            if reach > len(slots):
                self.scatter = self.slots - slots[0]
                self.starts = self.starts.new_zeros(reach).index_copy_(0, self.scatter, self.starts)
        # The plan for shared prompts is reused while the rows stay the same: each turn gives a sequence a new token list, in
        # which its history may have been rewritten.
        held, at, self.cascade = pool.cascade
        if at != slots or any(sequence.tokens is not one for sequence, one in zip(sequences, held, strict=False)):
            rows = list(range(len(slots))) if self.scatter is None else [slot - slots[0] for slot in slots]
            self.cascade = cascade_of(sequences, rows, len(self.starts), pool.shape)
            pool.cascade = [sequence.tokens for sequence in sequences], slots, self.cascade

    def by_row(self, flat: Tensor) -> Tensor:
        """Arrange [tokens, heads, dim] -> [rows, heads, width, dim], padded to the widest row."""
        if self.width > 1:
            return flat[self.padded].transpose(1, 2)
        if self.scatter is not None:
            flat = flat.new_zeros(len(self.starts), *flat.shape[1:]).index_copy_(0, self.scatter, flat)
        return flat.unsqueeze(2)

    def flat(self, rows: Tensor) -> Tensor:
        """Invert `by_row`."""
        if self.width > 1:
            return rows.transpose(1, 2)[self.real]
        return rows.squeeze(2) if self.scatter is None else rows.squeeze(2).index_select(0, self.scatter)

    def read_cache(self, kv: Tensor, start: int = 0) -> Tensor:
        """Return keys and values [2, rows, heads, longest - start, dim] of a layer's [2, slots, heads, capacity, dim]; valid
        until the next call for the same pool."""
        kv = kv[:, :, :, start : self.longest]
        if self.view is not None:
            return kv[:, self.view]
        if kv.device.type != "cpu":
            return kv.index_select(1, self.slots)
        # By slices: `index_select` would first copy all slots, since the view is not contiguous. Into a reused buffer, since
        # mapping new pages takes longer than writing them; twice as large as needed, since histories grow with each turn.
        shape = (kv.shape[0], len(self._slots), *kv.shape[2:])
        size, pool = math.prod(shape), self.pool
        if pool.copies.numel() < size:
            pool.copies = kv.new_empty(max(size, 2 * pool.copies.numel()))
        return torch.stack([kv[:, slot] for slot in self._slots], 1, out=pool.copies[:size].view(shape))

    def mask(self, form: AttentionForm, dtype: torch.dtype) -> Tensor:
        """Return the additive mask [rows, 1, width, longest]: 0 where a token may attend, -inf elsewhere."""
        # Cached, since all layers of a step with the same window share one mask.
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


SPANS: ContextVar[Seq[Span]] = ContextVar("the spans of the step under way, in the order of their tokens in the flat row")
"""Spans of the current step. No argument of the model, since not every family passes those on to its layers."""


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
    """Attend over the cache by the spans of the current step (`SPANS`); an attention function for transformers.

    `query` [1, heads, T, dim], `key` [1, kv heads, T, dim], `value` [1, kv heads, T, value dim] -> ([1, T, heads, value dim],
    None). Raises ModelError for arguments that `AttentionForm` does not cover."""
    form = attention_form(
        module, query, attention_mask, scaling=scaling, dropout=dropout, sliding_window=sliding_window, others=others
    )
    layer = cast(int, module.layer_idx)
    widths = key.shape[-1], value.shape[-1]
    # The kernels below support neither sinks, nor a cap, nor values of another width than keys.
    plain = form.cap is None and form.sinks is None and widths[0] == widths[1]
    outputs = []
    spans = SPANS.get()
    if form.tuning is not None:
        tuned = form.at_positions(query[0].transpose(0, 1), torch.cat([span.positions for span in spans]))
        query = tuned.transpose(0, 1)[None]
    for span in spans:
        flat = slice(span.offset, span.offset + span.tokens)
        # The cache has the size of the largest layer.
        kv = span.pool.kv[:, layer, :, : key.shape[1], :, : max(widths)]
        # Stored before attending: the tokens of a prefill chunk attend to each other through the cache.
        kv[0, ..., : widths[0]][span.token_slots, :, span.positions] = key[0, :, flat].transpose(0, 1)
        kv[1, ..., : widths[1]][span.token_slots, :, span.positions] = value[0, :, flat].transpose(0, 1)
        rows = span.by_row(query[0, :, flat].transpose(0, 1))
        mask = span.mask(form, query.dtype)
        if not plain:
            keys, values = (part[..., :width] for part, width in zip(span.read_cache(kv), widths, strict=True))
            out = masked_attention(rows, keys, values, mask, form)
        elif span.width > 1 and rows.device.type != "cpu":
            out = _by_key_head(rows, span.read_cache(kv), mask, form.scale)
        elif span.width > 1:
            keys, values = span.read_cache(kv)
            grouped = rows.shape[1] != keys.shape[1]
            out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=form.scale, enable_gqa=grouped)
        elif span.cascade is not None and form.window is None and form.chunk is None:
            length = span.cascade.length
            out = span.cascade.attend(rows, kv, span.read_cache(kv, length), mask[..., length:], form.scale)
        else:
            out = _decode(rows, span.read_cache(kv), mask, form.scale)
        outputs.append(span.flat(out))
    return torch.cat(outputs).unsqueeze(0), None


def _decode(query: Tensor, kv: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attend with one `query` [rows, heads, 1, dim] per row; returns that shape. Query heads that share a key head are treated
    as its query positions."""
    _, rows, kv_heads, length, dim = kv.shape
    if query.device.type == "cpu" and query.dtype == torch.float32:
        # On a CPU, with one query per key head, two batched products are twice as fast as the fused kernel.
        key, value = kv[0].reshape(-1, length, dim), kv[1].reshape(-1, length, dim)
        bias = mask.expand(-1, kv_heads, -1, -1).reshape(-1, 1, length)
        scores = torch.baddbmm(bias, query.reshape(rows * kv_heads, -1, dim), key.transpose(1, 2), alpha=scale)
        out = torch.bmm(torch.softmax(scores, dim=-1), value)
    else:
        by_head = query.reshape(rows, kv_heads, -1, dim)
        out = F.scaled_dot_product_attention(by_head, kv[0], kv[1], attn_mask=mask, scale=scale)
    return out.reshape(query.shape)


def _by_key_head(query: Tensor, kv: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attend with a mask for `query` [rows, heads, width, dim] on GPUs; heads that share a key head become its positions."""
    # No fused GPU kernel takes a mask together with grouped heads. The fallback repeats keys and values per head, in float32,
    # and keeps all scores: tens of GB for 50 rows of 8,000 tokens.
    rows, heads, width, dim = query.shape
    group = heads // kv.shape[2]
    stacked = query.reshape(rows, -1, group * width, dim)
    out = F.scaled_dot_product_attention(stacked, kv[0], kv[1], attn_mask=mask.repeat(1, 1, group, 1), scale=scale)
    return out.reshape(rows, heads, width, dim)


def register_slot_attention() -> None:
    """Register `attend` with transformers as `NAME` and turn off cuDNN's attention in this process; idempotent."""
    # torch prefers cuDNN on Hopper cards, but it prepares for each new shape, and here every step has one, as caches grow.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # Without a mask function of this name, transformers makes no mask and does not search the positions for packed rows.
    AttentionInterface.register(NAME, attend)

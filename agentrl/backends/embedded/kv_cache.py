"""The embedded engine's KV cache: one slot per sequence, slots of equal capacity together in one tensor.

Sequences of one capacity class are adjacent in memory, so that a decode step attends over all of them with
batched matrix products on a view, without copying keys or values. A sequence that outgrows its class
moves to the next (twice the capacity).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from agentrl.errors import ResourceError
from agentrl.processor import usable_memory

HOST_MIB = 4096
"""Upper limit of the cache in host memory (at most a quarter of the machine's, at least one episode's)."""


@dataclass(frozen=True, slots=True)
class KvShape:
    """Shape of one token's cache: of layers whose heads differ, and of keys and values, the most and the widest."""

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        return 2 * self.layers * self.heads * self.head_dim * self.dtype.itemsize


@dataclass(eq=False, slots=True)
class Sequence:
    """Tokens and their cache: keys and values of `tokens[:computed]` are in the slot, the rest is still to be computed.
    `blocks` and `later`: hashes of its first prompt, and of what came after it (see `PrefixIndex`).
    `experts`: if they are noted, those of each computed token, [routers, k]."""

    key: str
    tokens: list[int]
    pool: Pool
    slot: int
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    later: list[int] = field(default_factory=list)
    experts: list[npt.NDArray[Any]] = field(default_factory=list)


class Pool:
    """Slots of one capacity; `kv` is [2, layers, slots, heads, capacity, head_dim]."""

    def __init__(self, shape: KvShape, capacity: int) -> None:
        self.shape = shape
        self.capacity = capacity
        self.kv = self._zeros(0)
        self._free: list[int] = []
        self._copies = self._zeros(0).flatten()
        self.cascade: tuple[list[list[int]], list[int], Any] = [], [], None
        """Of the last decode step: its rows' tokens, their slots, and how they share their prompts (a Cascade or None)."""

    @property
    def slots(self) -> int:
        return self.kv.shape[2]

    @property
    def used(self) -> int:
        return self.slots - len(self._free)

    @property
    def bytes(self) -> int:
        return self.slots * self.capacity * self.shape.token_bytes

    def grow(self, budget_bytes: int) -> bool:
        """Ensure a free slot: double the slots, or add as many as the budget allows. False if it allows none."""
        if self._free:
            return True
        # Doubling keeps copies rare; from 64 slots on growth is linear, so that a pool does not take memory it may never use.
        more = min(max(1, min(self.slots, 64)), budget_bytes // (self.capacity * self.shape.token_bytes))
        if more < 1:
            return False
        old, slots = self.kv, self.slots + more
        if old.device.type != "cpu" and slots * self.capacity * self.shape.token_bytes > budget_bytes:
            # Old and new together would exceed the limit, which is all that a GPU has left.
            old, self.kv = old.cpu(), self._zeros(0)
        self.kv = self._zeros(slots)
        self.kv[:, :, : old.shape[2]] = old
        self._free = list(range(old.shape[2], self.slots))
        return True

    def gathered(self, kv: Tensor, slots: list[int]) -> Tensor:
        """A copy of these slots of a layer's [2, slots, heads, tokens, dim], on a CPU; valid until the next call."""
        # By slices: `index_select` would first make a copy of all slots, whose memory is not in one piece. And into memory that
        # stays: pages that are new each time take longer than what is written into them. Histories grow with each turn, so that
        # memory for just this one would be too small for the next.
        shape = (kv.shape[0], len(slots), *kv.shape[2:])
        if self._copies.numel() < math.prod(shape):
            self._copies = kv.new_empty(max(math.prod(shape), 2 * self._copies.numel()))
        return torch.stack([kv[:, slot] for slot in slots], 1, out=self._copies[: math.prod(shape)].view(shape))

    def take(self) -> int:
        """The lowest free slot; call `grow` first. Taking low ones first keeps a decode step's view dense."""
        slot = min(self._free)
        self._free.remove(slot)
        return slot

    def give(self, slot: int) -> None:
        self._free.append(slot)

    def vacate(self) -> None:
        """Free every slot; the memory stays allocated, since the next sequences need it at once."""
        self._free = list(range(self.slots))

    def clear(self) -> None:
        """Free the memory; only for a pool without used slots."""
        self.kv, self._free = self._zeros(0), []
        self._copies = self.kv.flatten()

    def _zeros(self, slots: int) -> Tensor:
        # Zeros rather than uninitialized memory: masked positions still enter a product, and 0 x NaN is NaN.
        s = self.shape
        return torch.zeros(2, s.layers, slots, s.heads, self.capacity, s.head_dim, dtype=s.dtype, device=s.device)


class Slots:
    """All pools, under one memory limit."""

    def __init__(self, shape: KvShape, max_context: int, limit_bytes: int, smallest: int = 128) -> None:
        self._limit = limit_bytes
        sizes = [smallest]
        while sizes[-1] < max_context:
            sizes.append(sizes[-1] * 2)
        sizes[-1] = max_context
        self.pools = [Pool(shape, size) for size in sizes]

    def new(self, key: str, tokens: list[int]) -> Sequence | None:
        """A sequence with a slot for all its tokens, or None if there is not enough memory."""
        # For the tokens so far, not for all that may be sampled: most turns end early, and `widen` moves those that do not.
        pool = self._room(len(tokens))
        return None if pool is None else Sequence(key, tokens, pool, pool.take())

    def widen(self, sequence: Sequence) -> bool:
        """Make room for all tokens of a sequence; False if there is not enough memory."""
        if len(sequence.tokens) <= sequence.pool.capacity:
            return True
        pool = self._room(len(sequence.tokens))
        if pool is None:
            return False
        source, slot = sequence.pool, sequence.slot
        sequence.pool, sequence.slot = pool, pool.take()
        self._copy(source, slot, sequence, sequence.computed)
        source.give(slot)
        return True

    def share(self, source: Sequence, target: Sequence, length: int) -> None:
        """Copy the cache of the first `length` tokens, which both sequences have in common."""
        # A copy, no shared pages: decoding reads a slot's keys in place, as one block of memory.
        self._copy(source.pool, source.slot, target, length)
        target.computed, target.experts = length, source.experts[:length]

    def free(self, sequence: Sequence) -> None:
        sequence.pool.give(sequence.slot)

    def reset(self, wipe: bool) -> None:
        """Forget everything; existing sequences become invalid. `wipe`: the cached values may not be finite."""
        for pool in self.pools:
            pool.vacate()
            if wipe:
                pool.clear()

    def clear(self) -> None:
        """Forget everything and free the memory."""
        self.reset(wipe=True)

    def _room(self, length: int) -> Pool | None:
        """The smallest pool with a free slot of that length; None if memory allows none."""
        fitting = [pool for pool in self.pools if pool.capacity >= length]
        if fitting[0].grow(self._limit - self._bytes()):
            return fitting[0]
        # Unused pools keep their memory, and it counts against the limit until it is freed here.
        for pool in self.pools:
            if pool.slots and not pool.used:
                pool.clear()
        return next((pool for pool in fitting if pool.grow(self._limit - self._bytes())), None)

    @property
    def used(self) -> float:
        """The share of the memory limit that slots in use take."""
        return sum(pool.used * pool.capacity * pool.shape.token_bytes for pool in self.pools) / self._limit

    def _bytes(self) -> int:
        return sum(pool.bytes for pool in self.pools)

    @staticmethod
    def _copy(pool: Pool, slot: int, target: Sequence, length: int) -> None:
        target.pool.kv[:, :, target.slot, :, :length] = pool.kv[:, :, slot, :, :length]


def cache_limit(given_mib: int | None, room: int | None, weights: int, token: int, length: int) -> int:
    """Bytes that the cache may grow to, for a plan and for the start: `given_mib`, else what the weights leave of `room` bytes
    of a GPU, else a part of host memory. `token`: bytes of a token; `length`: tokens of one episode.

    Raises ResourceError if it does not hold one episode."""
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

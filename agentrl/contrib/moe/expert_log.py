"""Experts of each token of a request, as the steps of an engine report them.

A request keeps the choices of each of its tokens as they were computed *first*: a recomputation, after a publish or a
preemption, may go elsewhere, and later tokens were sampled with the first. Tokens that the prefix cache gave were computed for an
earlier request; theirs are found by the cache's slots, where they lie next to the keys and values.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[Any]
"""[tokens, routers, k], uint8 or int16."""


@dataclass(frozen=True, slots=True)
class Computed:
    """A step's result for one request: `count` tokens from position `start` on, and the cache slots of all its tokens up to
    there. `asked`: whether its choices will be asked for."""

    request: str
    start: int
    count: int
    slots: npt.NDArray[np.int64]
    asked: bool


@dataclass(slots=True)
class ExpertLog:
    """The choices of requests. `slots`: of the whole KV cache; `unread`: how many ended requests are kept for whoever asks."""

    slots: int
    unread: int = 1024
    _by_slot: Rows | None = None
    _running: dict[str, list[Rows]] = field(default_factory=dict)
    _ended: OrderedDict[str, list[Rows]] = field(default_factory=OrderedDict)

    def add(self, step: Sequence[Computed], rows: Rows) -> None:
        """The choices of one step's tokens, in the order of its requests."""
        if self._by_slot is None:  # pages that are never written take no memory
            self._by_slot = np.zeros((self.slots, *rows.shape[1:]), rows.dtype)
        at = 0
        for part in step:
            fresh = rows[at : at + part.count]
            at += part.count
            self._by_slot[part.slots[part.start :]] = fresh
            if part.asked:
                self._extend(part, fresh)

    def _extend(self, part: Computed, fresh: Rows) -> None:
        assert self._by_slot is not None
        kept = self._running.setdefault(part.request, [])
        have = sum(map(len, kept))
        if have < part.start:
            kept.append(self._by_slot[part.slots[have : part.start]])
            have = part.start
        if (new := fresh[have - part.start :]).size:
            kept.append(new)

    def end(self, requests: Sequence[str]) -> None:
        """These requests are over."""
        for request in requests:
            if (kept := self._running.pop(request, None)) is not None:
                self._ended[request] = kept
        while len(self._ended) > self.unread:  # of requests that were cancelled
            self._ended.popitem(last=False)

    def take(self, request: str, start: int, stop: int) -> Rows | None:
        """The choices of a request's tokens [start, stop), or as many as were computed; None if it is not known. vLLM calls a
        request `request-SUFFIX`."""
        for held in (self._ended, self._running):
            name = next((name for name in reversed(held) if name.rpartition("-")[0] == request or name == request), None)
            if name is not None:
                return np.concatenate(held.pop(name))[start:stop]
        return None

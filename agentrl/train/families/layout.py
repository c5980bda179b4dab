"""The layout of the rows that a forward pass computes, for parts of a model that are not told of it by an argument.

Only some families hand the arguments of their forward on to every layer, and what is computed again in the backward pass
(activation checkpointing) must see the layout of its own forward pass, not of the newest one.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from typing import Any

OURS = "agentrl_"
"""How the names of our attention functions begin."""
_LAYOUT: ContextVar[Any] = ContextVar("layout", default=None)


def layout() -> Any:
    """The layout (PackedSequences) of the pass that is under way in this thread; None outside of `laid_out`."""
    return _LAYOUT.get()


@contextmanager
def laid_out(packed: Any) -> Iterator[None]:
    """In this context `layout` returns `packed`."""
    token = _LAYOUT.set(packed)
    try:
        yield
    finally:
        _LAYOUT.reset(token)


def same_when_recomputed() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """`context_fn` of torch.utils.checkpoint, called in the forward pass: what it computes again has that pass's layout, also in
    another thread (the backward passes of GPUs have threads of their own)."""
    return nullcontext(), laid_out(layout())


def taken(backbone: Any, position_ids: Any, packed: Any) -> dict[str, Any]:
    """Of the arguments that tell a model where its rows are, those that its forward takes; others learn it from `layout`."""
    takes, rest = _parameters(backbone.__class__)
    found = {"position_ids": position_ids, "attention_mask": None, "packed": packed}
    # A family's own attention function is not told: it computes one row, and some hand on to it all they are given.
    if not str(backbone.config._attn_implementation).startswith(OURS):
        del found["packed"]
    return {name: value for name, value in found.items() if rest or name in takes}


@cache
def _parameters(kind: Any) -> tuple[frozenset[str], bool]:
    """The names of a forward's parameters, and whether it takes others too."""
    found = inspect.signature(kind.forward).parameters
    return frozenset(found), any(p.kind is inspect.Parameter.VAR_KEYWORD for p in found.values())

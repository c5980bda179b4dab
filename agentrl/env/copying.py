"""Copies of an environment's episode that share nothing with it."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A saved episode: the class that it belongs to and a private copy of its attributes."""

    owner: str
    parts: dict[str, Any]

    def thaw(self, target: object) -> dict[str, Any]:
        """A fresh copy of the attributes for `target`."""
        # A copy each time: one snapshot may begin several episodes.
        return copy.deepcopy(self.parts, {id(_OWNER): target})


class _Owner:
    """Placeholder for the environment inside a snapshot, so that a snapshot contains no environment."""


_OWNER = _Owner()


def copy_parts(source: Any, target: object, names: Iterable[str]) -> dict[str, Any]:
    """Deep copies of some attributes of `source`, with references to `source` redirected to `target`.

    If `target` is `source` itself, the references become a placeholder that `Snapshot.thaw` replaces.
    Raises TypeError, naming the attribute, if one cannot be copied.
    """
    # Seeding deepcopy's memo makes references to the environment end at `target` instead of copying it.
    memo: dict[int, Any] = {id(source): _OWNER if target is source else target}
    parts: dict[str, Any] = {}
    for name in names:
        try:
            parts[name] = copy.deepcopy(source.__dict__[name], memo)
        except TypeError as problem:
            raise TypeError(
                f"{type(source).__name__}.{name} cannot be copied ({problem}); name it in `shared`, or "
                "override snapshot, restore and fork"
            ) from problem
    return parts

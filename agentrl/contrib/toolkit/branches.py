"""Copy a large state lazily: a copy shares all parts that its episode does not read.

A database of 3 MB of JSON takes about 10 MB as Python objects, and as much again for each episode that copies it. `branch`
returns a copy whose parts are copied only when the episode reads them, one level at a time: all episodes of the process share
the rows that none of them reads. Use dictionaries for large tables: reading a list copies it with the first level of each of
its items.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, ItemsView, Iterator, MutableMapping, ValuesView
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import is_dataclass
from datetime import date, datetime
from enum import Enum
from functools import partial
from threading import RLock
from typing import Any, Self, TypeVar

from pydantic import BaseModel

from agentrl.data.trajectory import Json
from agentrl.reward.values import join
from agentrl.utils.parsing import in_json
from agentrl.utils.threads import fork_safe, setting

T = TypeVar("T")

_UNSHARED = frozenset({str, int, float, bool, type(None), bytes, date, datetime})
# Tools run in threads: two that read a part for the first time at once must get the same copy.
_LOCK = fork_safe(RLock())
_NO_COPIES: ContextVar[bool] = ContextVar("looking", default=False)


def branch(base: T) -> T:
    """Return a copy of `base` that may be changed freely; `base` itself must not change afterwards.

    `base` is a tree of dictionaries, lists, pydantic models and dataclasses (an object at two places becomes two objects);
    other objects are deep-copied at their first read. The copy has the methods of a `dict` or `list` and passes `isinstance`;
    copies of the copy (`copy.deepcopy`, a fork or a snapshot of an environment) share the same parts with `base`.
    """
    made: Any = _branch(base)
    return made  # type: ignore[no-any-return]


looking: Callable[[], AbstractContextManager[None]] = partial(setting, _NO_COPIES, True)
"""Reads branches without copies inside its context. The code must neither change nor keep the values, as in a scan of rows."""


def _branch(base: Any) -> Any:
    kind = type(base)
    if kind in _UNSHARED or isinstance(base, Enum):
        return base
    if kind is dict:
        return BranchDict(base)
    if kind is list:
        # All items at once: C code (heapq, pydantic's validators) bypasses a list's methods, and changes the items in place.
        return [_branch(item) for item in base]
    if kind is tuple:
        return tuple(map(_branch, base))
    return _object(base) if _is_record(base) else copy.deepcopy(base)


def _is_record(value: Any) -> bool:
    """Return True if an object's attributes are its whole state; False if its class defines its own deep copy."""
    if isinstance(value, BaseModel):
        return True
    kind = type(value)
    return is_dataclass(kind) and hasattr(value, "__dict__") and not hasattr(kind, "__deepcopy__")


def _object(base: Any) -> Any:
    made = copy.copy(base)
    for parts in (made.__dict__, *(getattr(made, name, None) or {} for name in ("__pydantic_extra__", "__pydantic_private__"))):
        parts.update({name: _branch(part) for name, part in parts.items()})
    return made


class _Values(ValuesView[Any]):
    _mapping: BranchDict

    def __reversed__(self) -> Iterator[Any]:
        return (self._mapping[key] for key in reversed(self._mapping))


class _Items(ItemsView[Any, Any]):
    _mapping: BranchDict

    def __reversed__(self) -> Iterator[tuple[Any, Any]]:
        return ((key, self._mapping[key]) for key in reversed(self._mapping))


class BranchDict(dict[Any, Any]):
    """Dictionary that shares the values of another one until they are read; see `branch`."""

    # C code that bypasses these methods (a serializer) sees all values, some of them shared; this is safe, as it only reads.
    __slots__ = ("_base", "_own")

    def __init__(self, base: dict[Any, Any]) -> None:
        super().__init__(base)
        self._base = base
        self._own: set[Any] = set()

    def _value(self, key: Any, value: Any) -> Any:
        if type(value) in _UNSHARED or _NO_COPIES.get():
            return value
        if key in self._own:
            return super().get(key, value)  # another thread may have copied it since `value` was read
        with _LOCK:
            if key not in self._own:
                super().__setitem__(key, _branch(value))
                self._own.add(key)
            return super().__getitem__(key)

    def __getitem__(self, key: Any) -> Any:
        return self._value(key, super().__getitem__(key))

    def get(self, key: Any, default: Any = None) -> Any:
        return self._value(key, super().get(key, default)) if key in self else default

    # Overridden, so that dict(x), {**x} and update(x) read by key, as Python code does.
    def __iter__(self) -> Iterator[Any]:
        return super().__iter__()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        return super().values() if _NO_COPIES.get() else _Values(self)

    def items(self) -> ItemsView[Any, Any]:  # type: ignore[override]
        return super().items() if _NO_COPIES.get() else _Items(self)

    def copy(self) -> dict[Any, Any]:
        return {key: self[key] for key in self}

    __copy__ = copy

    def __or__(self, other: Any) -> Any:
        return self.copy() | dict(other) if isinstance(other, dict) else NotImplemented

    def __ror__(self, other: Any) -> Any:
        return dict(other) | self.copy() if isinstance(other, dict) else NotImplemented

    def __setitem__(self, key: Any, value: Any) -> None:
        with _LOCK:
            super().__setitem__(key, value)
            self._own.add(key)

    def __delitem__(self, key: Any) -> None:
        with _LOCK:
            super().__delitem__(key)
            self._own.discard(key)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        with _LOCK:
            if key not in self:
                self[key] = default
            return self[key]

    def pop(self, key: Any, *default: Any) -> Any:
        with _LOCK:
            if key not in self:
                return super().pop(key, *default)
            value = self[key]
            del self[key]
            return value

    def popitem(self) -> tuple[Any, Any]:
        with _LOCK:
            if not self:
                return super().popitem()
            key = next(reversed(self))
            return key, self.pop(key)

    update = MutableMapping.update

    def __ior__(self, other: Any) -> Self:  # type: ignore[override,misc]
        self.update(other)
        return self

    def clear(self) -> None:
        with _LOCK:
            super().clear()
            self._own.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> BranchDict:
        made = BranchDict(dict(dict.items(self)))  # `dict`'s own method, because this class's would copy each value
        made._base = self._base
        memo[id(self)] = made
        for key in self._own:
            made[key] = copy.deepcopy(dict.__getitem__(self, key), memo)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return BranchDict, (dict(dict.items(self)),), (None, {"_own": self._own})


def changes(base: Any, now: Any) -> dict[str, Json]:
    """Return the difference of a branch from its base as a small JSON value: `set`, JSON Pointer -> new value, and `removed`,
    the pointers of missing parts. Lists are compared as a whole. Equal states of one base have equal changes, so the changes
    can represent the state (`ToolEnv.state`)."""
    found: dict[str, Json] = {"set": {}, "removed": []}
    _compare(_parts(base), _parts(now), "", found)
    return {"set": dict(sorted(found["set"].items())), "removed": sorted(found["removed"])}


def changed_texts(base: Any, now: Any) -> dict[str, str]:
    """Return `changes` as JSON Pointer -> JSON text of a set value, or "deleted": equal if and only if the databases have the
    same JSON text, like hashes of that text (5 and 5.0 differ)."""
    found = changes(base, now)
    texts = {place: json.dumps(value, sort_keys=True) for place, value in found["set"].items()}
    return texts | dict.fromkeys(found["removed"], "deleted")


def differences(before: Json, after: Json, at: str = "") -> Iterator[dict[str, Json]]:
    """Yield the places where two JSON values differ, outermost first: `path` (JSON Pointer), `kind` (changed, added, removed),
    and both values (None if missing). A part that only one of them has is one place, regardless of its content."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = [(key, key in before, key in after) for key in dict.fromkeys([*before, *after])]
    elif isinstance(before, list) and isinstance(after, list):
        keys = [(key, key < len(before), key < len(after)) for key in range(max(len(before), len(after)))]
    else:
        if before != after or isinstance(before, bool) != isinstance(after, bool):
            yield {"path": at or "/", "kind": "changed", "before": before, "after": after}
        return
    for key, was, still in keys:
        if was and still:
            yield from differences(before[key], after[key], join(at, key))
        elif was:
            yield {"path": join(at, key), "kind": "removed", "before": before[key], "after": None}
        else:
            yield {"path": join(at, key), "kind": "added", "before": None, "after": after[key]}


def _compare(base: Any, now: Any, place: str, found: dict[str, Json]) -> None:
    if not (isinstance(base, dict) and isinstance(now, dict)):
        if type(base) is type(now) is str and base == now:
            return
        value = in_json(now)
        if json.dumps(value, sort_keys=True) != json.dumps(in_json(base), sort_keys=True):
            found["set"][place] = value
        return
    new = 0
    # Only keys whose values can differ from `base`
    for key in (now._own if now._base is base else list(now)) if isinstance(now, BranchDict) else now:
        item = dict.__getitem__(now, key)  # `dict`'s own method, because this class's would copy each value
        if key not in base:
            new += 1
            found["set"][join(place, key)] = in_json(item)
        elif (old := dict.__getitem__(base, key)) is not item:
            _compare(_parts(old), _parts(item), join(place, key), found)
    if len(now) - new < len(base):
        found["removed"] += [join(place, key) for key in base if key not in now]


def _parts(value: Any) -> Any:
    """Return an object's attributes; any other value unchanged."""
    if _is_record(value):
        return {**value.__dict__, **(getattr(value, "__pydantic_extra__", None) or {})}
    return value

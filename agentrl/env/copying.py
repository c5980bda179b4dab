"""Copies of an environment's episode that share nothing with it."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Protocol

from agentrl.tool import Tool, Toolbox
from agentrl.trajectory import Message, Task


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


class Copier(Protocol):
    """An environment as a reset left it, and what makes environments in that state. `size`: about how many bytes it holds."""

    size: int

    def copied(self) -> Any:
        """A new environment, which shares nothing with any other."""
        ...


class PickleCopier:
    """By a pickle: what `fork` gives, ten times as quickly."""

    def __init__(self, env: Any, names: Iterable[str]) -> None:
        """Raises what pickling raises for an attribute that cannot be pickled and AsideError for one that only a copy of all at
        once copies rightly (then `fork` may still copy it), and HeldError if a function holds a part of the episode, which no
        copy of the episode would have."""
        out = io.BytesIO()
        pickler = _Pickler(out, env)
        # Without the generator, which takes half of the time and is hardly ever used: see `ToolEnv.np_random`.
        pickler.dump({name: env.__dict__[name] for name in names if name != "_np_random"})
        packed = {place: item for place, (_, item) in pickler.memo.copy().items()}
        hidden = (*env.toolbox.unlisted.values(), *env.user_toolbox.unlisted.values())
        _check_functions([*pickler.objects, *env.toolbox, *env.user_toolbox, *hidden], {id(env), *packed})
        _check_aside(pickler.objects, packed, env)
        self._env, self._objects, self._packed = env, pickler.objects, out.getvalue()
        self._copied = [place for place, item in enumerate(self._objects) if _aside(item)]
        # In memory, objects take about ten times as much as their pickle.
        self.size: int = 11 * len(self._packed)

    def copied(self) -> Any:
        kind: Any = type(self._env)
        made = kind.__new__(kind)
        made.__dict__.update(self._env.__dict__)
        objects, memo = [*self._objects, made], {id(self._env): made}
        for place in self._copied:
            objects[place] = copy.deepcopy(objects[place], memo)
        made.__dict__.update(_Unpickler(self._packed, objects).load())
        made._tools_before, made._user_tools_before = made.toolbox.table, made.user_toolbox.table
        made._np_random, made._random_of = None, self._env._np_random
        return made


class HeldError(Exception):
    """A function (a tool's, say) holds a part of the episode in its closure or defaults."""


class AsideError(Exception):
    """What has a way of its own to be copied, and so is not pickled, holds what is pickled: the copy would have it twice."""


class ForkCopier:
    """By the environment's own `fork`."""

    size: int = 1 << 20  # not known

    def __init__(self, env: Any) -> None:
        """Raises HeldError, as far as it can be seen."""
        _check_functions(
            [item.function for item in (*env.toolbox, *env.user_toolbox)], {id(env), *map(id, env.__dict__.values())}
        )
        self._env = env

    def copied(self) -> Any:
        return self._env.fork()


class WrapperCopier:
    """Of a wrapped environment: a wrapper around a copy of what it wraps."""

    def __init__(self, wrapper: Any, inner: Copier) -> None:
        self._wrapper, self._inner = wrapper, inner
        self.size: int = inner.size

    def copied(self) -> Any:
        return self._wrapper.around(self._inner.copied())


def copier(env: Any, names: Iterable[str] | None) -> Copier | None:
    """What makes copies of an environment, of which `names` are the attributes that are not shared; without them, its own `fork`
    does. None if copies of it would share a part of its episode."""
    try:
        return ForkCopier(env) if names is None else PickleCopier(env, names)
    except HeldError:
        return None
    except Exception:  # whatever an author's class raises when it is pickled: `fork` may copy it all the same
        return copier(env, None)


def _check_functions(objects: Iterable[Any], held: Set[int]) -> None:
    """Raise HeldError if one of the functions among the objects has a changeable thing of which the id is in `held`."""
    rest: list[Any] = [item for item in objects if isinstance(item, FunctionType | Tool)]
    seen = set[int]()
    while rest:
        item = rest.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tool):  # the parts of a bound one are copied with it
            rest += [] if item.bound else [item.function]
        if not isinstance(item, FunctionType):
            continue
        for value in (*_cells(item), *(item.__defaults__ or ()), *(item.__kwdefaults__ or {}).values()):
            if id(value) in held and type(value) not in _FIXED:
                raise HeldError(f"{item.__qualname__} holds {type(value).__name__}")
            rest.append(value)


def _check_aside(objects: Iterable[Any], packed: Mapping[int, Any], env: Any) -> None:
    """Raise AsideError if one of the objects that are deep-copied has a part (other than a fixed one) that is packed as well."""
    for item in objects:
        if _aside(item):
            memo: dict[int, Any] = {id(env): env}
            copy.deepcopy(item, memo)  # notes what it copies
            for place in memo.keys() & packed.keys():
                if place != id(env) and type(packed[place]) not in _FIXED:
                    raise AsideError(f"{type(item).__name__} holds a {type(packed[place]).__name__} of the episode's")


def _aside(item: Any) -> bool:
    return hasattr(type(item), "__deepcopy__") and not isinstance(item, Tool)


def _cells(function: FunctionType) -> list[Any]:
    found = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not filled yet
            found.append(cell.cell_contents)
    return found


_FIXED = frozenset({str, int, float, bool, type(None), bytes, FunctionType, type})
_PLAIN = frozenset({str, int, float, bool, type(None), dict, list, tuple, bytes})
_SAME = (FunctionType, BuiltinFunctionType, ModuleType, type)
_HERE = -1  # the environment itself: the last of the objects


class _Pickler(pickle.Pickler):
    """Pickles parts of an environment. What `copy.deepcopy` would not copy, or copies by a rule of its own, stays an object."""

    def __init__(self, out: io.BytesIO, env: Any) -> None:
        super().__init__(out, pickle.HIGHEST_PROTOCOL)
        self._places: dict[int, int] = {id(env): _HERE}
        self.objects: list[Any] = []
        boxes = (env.toolbox, env.user_toolbox)
        for table in (env._tools_before, env._user_tools_before, *(one for box in boxes for one in (box.table, box.unlisted))):
            if not any(item.bound for item in table.values()):
                self._place(table)  # as a whole: a table is never changed, only replaced
        for item in (*env.toolbox, *env.user_toolbox):
            for same in (item.schema, item.signature):  # shared by all records
                self._place(same)

    def _place(self, item: Any) -> int:
        if id(item) not in self._places:
            self._places[id(item)] = len(self.objects)
            self.objects.append(item)
        return self._places[id(item)]

    def persistent_id(self, item: Any) -> int | None:
        if id(item) in self._places:
            return self._places[id(item)]
        kind = type(item)
        if kind is Message and not item.tool_calls:
            return self._place(item)
        if kind in _PLAIN or not (isinstance(item, _SAME) or hasattr(kind, "__deepcopy__")):
            return None
        # A toolbox and its bound tools refer to parts of the episode, which must be the same parts in the copy.
        if kind is Toolbox or (isinstance(item, Tool) and item.bound):
            return None
        return self._place(item)

    def reducer_override(self, item: Any) -> Any:
        if isinstance(item, MethodType):  # by its function, not by its name, under which the object may have something else
            return MethodType, (item.__func__, item.__self__)
        if type(item) in (Task, Message):  # their own way is slow
            return type(item), tuple(getattr(item, name) for name in item.__dataclass_fields__)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    """Reads what `_Pickler` wrote. `objects`: those that it kept, and at last the new environment."""

    def __init__(self, packed: bytes, objects: list[Any]) -> None:
        # Not a function of ours, which would be called for each object of a class. Before __init__, which looks for it.
        self.persistent_load = objects.__getitem__  # type: ignore[method-assign, assignment]
        super().__init__(io.BytesIO(packed))

"""Copy an episode: snapshots, copies that share a large state, and twins that replay it."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import pickle
from collections.abc import Coroutine, ItemsView, Iterable, Iterator, Mapping, Set, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, is_dataclass
from datetime import date, datetime
from enum import Enum
from threading import RLock
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Protocol, Self, TypeVar

from pydantic import BaseModel

from agentrl.data.trajectory import Json, Message, Task, ToolCall, Trajectory
from agentrl.env.spaces import run_sync
from agentrl.env.toolbox import Toolbox
from agentrl.env.tools import Tool
from agentrl.env.users import RecordedUser
from agentrl.reward.twins import TurnOutcome, tool_texts
from agentrl.utils.parsing import in_json
from agentrl.utils.threads import fork_safe

# Copies that share nothing


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
    """An object with its own way to be copied, which is therefore not pickled, holds pickled state: the copy would have it
    twice."""


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
    """Maker of copies of an environment, of which `names` are the attributes that are not shared; without them, its own `fork`
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


# Copies of a large state that share with it all that an episode does not touch.
#
# A database of 3 MB of JSON takes some 10 MB as Python objects, and as much again for each episode that copies it. `branch` gives
# an episode a copy that is a dictionary or list of its own, but whose parts are copied only as the episode reads them, each at
# its own level: a row that nobody looks at is shared by all episodes of the process. Large tables are best dictionaries: a list
# that is read is copied with the first level of each of its items.

T = TypeVar("T")

_UNSHARED = frozenset({str, int, float, bool, type(None), bytes, date, datetime})
# Tools run in threads: two that read the same part for the first time must get the same copy of it.
_LOCK = fork_safe(RLock())
_LOOKING: ContextVar[bool] = ContextVar("looking", default=False)


def branch(base: T) -> T:
    """A copy of `base` that may be changed freely; `base` itself must not change from then on.

    `base` is a tree of dictionaries, lists, pydantic models and dataclasses (what stands in it at two places becomes two things);
    anything else in it is deep-copied when it is first read. The copy is a `dict` or a `list` by its methods and by
    `isinstance`, and its own copies (`copy.deepcopy`, a fork or a snapshot of an environment) share with `base` what it shares.
    """
    made: Any = _branch(base)
    return made  # type: ignore[no-any-return]


@contextmanager
def looking() -> Iterator[None]:
    """Inside, what is read of a branch is not copied: for code that changes nothing of what it reads and keeps none of it,
    such as a scan over all rows."""
    token = _LOOKING.set(True)
    try:
        yield
    finally:
        _LOOKING.reset(token)


def _branch(base: Any) -> Any:
    kind = type(base)
    if kind in _UNSHARED or isinstance(base, Enum):
        return base
    if kind is dict:
        return BranchDict(base)
    if kind is list:
        # All items at once: C code (heapq, pydantic's validators) reads a list past any methods, and changes what it finds.
        return [_branch(item) for item in base]
    if kind is tuple:
        return tuple(map(_branch, base))
    return _object(base) if _is_record(base) else copy.deepcopy(base)


def _is_record(value: Any) -> bool:
    """Return True if all of an object is in its attributes. Not if its class has a way of its own to be copied."""
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
    """A dictionary whose values are another's until they are read; see `branch`."""

    # What C code reads past these methods (a serializer) is complete, and partly the shared values: it only reads.
    __slots__ = ("_base", "_own")

    def __init__(self, base: dict[Any, Any]) -> None:
        super().__init__(base)
        self._base = base
        self._own: set[Any] = set()

    def may_differ(self, base: dict[Any, Any]) -> Iterable[Any]:
        """The keys whose values may be others than in `base`: all of them if it is no branch of that very dictionary."""
        return self._own if self._base is base else list(self)

    def _value(self, key: Any, value: Any) -> Any:
        if type(value) in _UNSHARED or _LOOKING.get():
            return value
        if key in self._own:
            return super().get(key, value)  # another thread may have made it the branch's own since `value` was read
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
        return super().values() if _LOOKING.get() else _Values(self)

    def items(self) -> ItemsView[Any, Any]:  # type: ignore[override]
        return super().items() if _LOOKING.get() else _Items(self)

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

    def update(self, *others: Any, **more: Any) -> None:
        for key, value in dict(*others, **more).items():
            self[key] = value

    def __ior__(self, other: Any) -> Self:  # type: ignore[override,misc]
        self.update(other)
        return self

    def clear(self) -> None:
        with _LOCK:
            super().clear()
            self._own.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> BranchDict:
        made = BranchDict(dict(dict.items(self)))  # past the methods, which would copy what is read
        made._base = self._base
        memo[id(self)] = made
        for key in self._own:
            made[key] = copy.deepcopy(dict.__getitem__(self, key), memo)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return _make_copy, (BranchDict, dict(dict.items(self)), self._own)


def _make_copy(kind: Any, parts: Any, own: Any) -> Any:
    made = kind(parts)
    made._own = own
    return made


def changes(base: Any, now: Any) -> dict[str, Json]:
    """Difference of a branch from its origin, as a small JSON value: `set`, JSON Pointer -> new value, and `removed`, the
    pointers of what is gone. Lists are compared as a whole. Equal states of one base have equal changes, so that they may
    stand for the state (`ToolEnv.state`)."""
    found: dict[str, Json] = {"set": {}, "removed": []}
    _compare(_parts(base), _parts(now), "", found)
    return {"set": dict(sorted(found["set"].items())), "removed": sorted(found["removed"])}


def changed_texts(base: Any, now: Any) -> dict[str, str]:
    """`changes` by place, as the JSON text of each value that was set, and "deleted" for one that was removed: equal if and only
    if the databases have the same text, as hashes of such a text do (5 and 5.0 are two texts)."""
    found = changes(base, now)
    texts = {place: json.dumps(value, sort_keys=True) for place, value in found["set"].items()}
    return texts | dict.fromkeys(found["removed"], "deleted")


def _compare(base: Any, now: Any, place: str, found: dict[str, Json]) -> None:
    if not (isinstance(base, dict) and isinstance(now, dict)):
        if type(base) is type(now) is str and base == now:
            return
        value = in_json(now)
        if json.dumps(value, sort_keys=True) != json.dumps(in_json(base), sort_keys=True):
            found["set"][place] = value
        return
    new = 0
    for key in now.may_differ(base) if isinstance(now, BranchDict) else now:
        item = dict.__getitem__(now, key)  # past the methods, which would copy what is only compared
        if key not in base:
            new += 1
            found["set"][_below(place, key)] = in_json(item)
        elif (old := dict.__getitem__(base, key)) is not item:
            _compare(_parts(old), _parts(item), _below(place, key), found)
    if len(now) - new < len(base):
        found["removed"] += [_below(place, key) for key in base if key not in now]


def _below(place: str, key: Any) -> str:
    return f"{place}/{str(key).replace('~', '~0').replace('/', '~1')}"


def _parts(value: Any) -> Any:
    """An object's attributes; anything else as it is."""
    if _is_record(value):
        return {**value.__dict__, **(getattr(value, "__pydantic_extra__", None) or {})}
    return value


# Twins that replay an episode


class EnvTwin:
    """A ToolEnv as a twin (`agentrl.reward.twins.Twin`). `scripted`: what its user does depends on nothing that is said."""

    def __init__(self, env: Any, scripted: bool) -> None:
        self.env, self.scripted = env, scripted

    @property
    def talks(self) -> bool:
        return bool(self.env.has_user)

    def open(self, record: Trajectory) -> None:
        """A user that may be a model is not asked: the record's is played in its place."""
        self.env.reset(seed=record.task.seed, options={"task": record.task, "user": RecordedUser.of(record)})

    async def take(self, turn: Message | ToolCall) -> TurnOutcome:
        if isinstance(turn, ToolCall):
            return TurnOutcome([], [await self.env.auser_call(turn)], self.env.has_finished)
        observation, _, terminated, truncated, _ = await self.env.astep(turn)
        return TurnOutcome(tool_texts(observation), self.env.last_results, terminated or truncated)

    def state(self) -> Json:
        return self.env.state() if self.env.is_open else self.env.trajectory.state

    def copies(self) -> EnvCopies | None:
        """None if `ToolEnv.copier` has none."""
        made = self.env.copier()
        return None if made is None else EnvCopies(made, self.scripted)

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        run_sync(work)

    def close(self) -> None:
        if self.env.holds:  # else there is nothing to free, and its state would be taken once more
            self.env.close()


class CopiedTwin(EnvTwin):
    """A copy of an environment that holds nothing outside of itself."""

    def close(self) -> None:
        env = self.env.unwrapped
        for box in (env.toolbox, env.user_toolbox):
            box.release(env)


class EnvCopies:
    """Twins of an environment that was reset, and is not used any more."""

    def __init__(self, copier: Copier, scripted: bool) -> None:
        self._copier, self._scripted = copier, scripted
        self.size = copier.size

    def twin(self, record: Trajectory) -> EnvTwin:
        env = self._copier.copied()
        if env.unwrapped.user is not None:
            env.unwrapped.user = RecordedUser.of(record)
        return CopiedTwin(env, self._scripted)

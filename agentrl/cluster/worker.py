"""The worker contract: a plain class whose public methods can be called by a group."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from agentrl.cluster.mesh import Mesh
from agentrl.cluster.rendezvous import Rendezvous, join_group
from agentrl.cluster.strategy import Strategy, call_shape
from agentrl.errors import DispatchError, did_you_mean


@dataclass(frozen=True)
class WorkerContext:
    """What a worker knows about its group: its rank, the mesh, and where rank 0 waits for the others."""

    group: str
    rank: int
    mesh: Mesh
    rendezvous: Rendezvous | None = None

    @property
    def world_size(self) -> int:
        return self.mesh.world_size


class Worker:
    """Base of all roles. Subclasses declare `dispatch_table`: public method name -> strategy.

    The table is checked when the class is defined: a key that names no method, a public method without
    an entry, or a signature that does not fit its strategy raises DispatchError. A subclass inherits
    the entries of its bases. Workers live in a process of their own ("ray") or in the driver ("inline").

    `collective`: whether the class enters torch.distributed collectives; if False, the inline
    backend may hold several ranks, which then run one after the other.
    """

    dispatch_table: ClassVar[Mapping[str, Strategy]] = {}
    collective: ClassVar[bool] = True
    threads: int | None = None
    """That compute its model on a CPU; None: as many as OMP_NUM_THREADS says, or one."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Merged over the whole MRO, base first: an entry of a subclass replaces that of its base.
        inherited: dict[str, Strategy] = {}
        for base in reversed(cls.__mro__[1:]):
            inherited.update(base.__dict__.get("dispatch_table", {}))
        table = {**inherited, **cls.__dict__.get("dispatch_table", {})}
        check_table(cls, table)
        cls.dispatch_table = table

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self.rank = context.rank
        self.world_size = context.world_size

    def mesh_rank(self, axis: str = "dp") -> int:
        """This worker's coordinate along a mesh axis."""
        return self.context.mesh.index(self.rank, axis)

    def init_process_group(self, backend: str | None = None, timeout: float = 1800.0) -> None:
        """Join the group's torch.distributed default process group; every rank must call it.

        `backend` is by default "cpu:gloo,cuda:nccl" if this process sees a GPU, else "gloo". A second role in the
        same process reuses the existing group. `timeout` (seconds) bounds every later collective.
        """
        join_group(self.context.rendezvous, self.rank, self.world_size, backend, timeout)


def check_table(cls: type, table: Mapping[str, Strategy]) -> None:
    """Raise DispatchError if the table and the class's public methods do not fit together."""
    methods = public_methods(cls)
    for name, strategy in table.items():
        if not isinstance(strategy, Strategy):
            raise DispatchError(f"{cls.__name__}.dispatch_table[{name!r}] is not a strategy: {strategy!r}")
        if name not in methods:
            hint = did_you_mean(name, methods, f"it has {sorted(methods)}")
            raise DispatchError(f"{cls.__name__}.dispatch_table names {name!r}, which is not a public method; {hint}")
        check_method(cls, name, methods[name], strategy)
    missing = sorted(set(methods) - set(table))
    if missing:
        raise DispatchError(
            f"{cls.__name__}: public method {missing[0]!r} has no entry in dispatch_table (add one, or name it _{missing[0]})"
        )


def check_method(cls: type, name: str, method: Any, strategy: Strategy) -> None:
    """Raise DispatchError if a method's kind or signature does not fit its strategy."""
    label = f"{cls.__name__}.{name}"
    if not inspect.isfunction(method):
        raise DispatchError(f"{label} must be a plain method, it is a {type(method).__name__}")
    if any(test(method) for test in _NOT_PLAIN):
        raise DispatchError(f"{label} must be a plain method: a worker runs one call at a time and returns a value")
    if not inspect.signature(method).parameters:
        raise DispatchError(f"{label} has no parameter `self`")
    parameters, returns = call_shape(method)
    strategy.check(label, parameters, returns)


_NOT_PLAIN = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)


def public_methods(cls: type) -> dict[str, Any]:
    """Public methods that the class and its bases below Worker define, by name."""
    methods: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base is object or base is Worker:
            continue
        for name, value in base.__dict__.items():
            if not name.startswith("_") and _is_method(value):
                methods[name] = value
    return methods


def _is_method(value: Any) -> bool:
    return inspect.isfunction(value) or isinstance(value, (staticmethod, classmethod))


def resolve(cls: type[Worker], method: Callable[..., Any]) -> tuple[str, Strategy]:
    """Name and strategy of a method reference such as `Actor.update` for a group of `cls`.

    Raises DispatchError if the method belongs to another class or has no entry.
    """
    name = method.__name__
    # By identity, not by name: `Critic.update` sent to a group of actors must not run `Actor.update`.
    if not any(base.__dict__.get(name) is method for base in cls.__mro__):
        raise DispatchError(f"{method.__qualname__} is not a method of {cls.__name__}, the class of this group's workers")
    if name not in cls.dispatch_table:
        raise DispatchError(f"{cls.__name__}.{name} has no entry in dispatch_table")
    return name, cls.dispatch_table[name]

"""The worker contract: a plain class whose public methods a group can call.

Defines the mesh of ranks, shipped arguments, dispatch strategies, and the Worker base class. Does not
import torch, so that processes without batches stay small."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from agentrl.cluster.machine import Rendezvous, join_group
from agentrl.utils.errors import DispatchError, did_you_mean

if TYPE_CHECKING:
    from tensordict import TensorDict


# The mesh of ranks


@dataclass(frozen=True, slots=True)
class Mesh:
    """Axis names and sizes; rank = row-major index over the axes."""

    axes: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, sizes: Mapping[str, int] | None, world_size: int) -> Mesh:
        """Build the mesh of `sizes`, by default one axis "dp" over all ranks.

        Raises DispatchError if the product of the sizes is not `world_size`.
        """
        mesh = cls(tuple((sizes or {"dp": world_size}).items()))
        if mesh.world_size != world_size or any(size < 1 for _, size in mesh.axes):
            raise DispatchError(f"mesh {dict(mesh.axes)} does not hold exactly {world_size} ranks")
        return mesh

    @property
    def world_size(self) -> int:
        return math.prod(dict(self.axes).values())

    def size(self, axis: str) -> int:
        """Return the number of ranks along `axis`. Raises DispatchError for an unknown axis."""
        return self.places(axis)[-1] + 1

    def places(self, axis: str) -> list[int]:
        """Return each rank's coordinate along `axis`. Raises DispatchError for an unknown axis."""
        sizes = dict(self.axes)
        if axis not in sizes:
            raise DispatchError(f"no mesh axis {axis!r}; this group has {list(sizes)}")
        found: list[int] = np.indices(tuple(sizes.values()))[list(sizes).index(axis)].ravel().tolist()
        return found


# Shipped arguments of a call


@dataclass(slots=True)
class Shipment:
    """One call to `ranks`.

    All ranks get the same `args` and `kwargs`. A batch dispatched by rows precedes `args`; rank r gets its rows `rows[r]`.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ranks: list[int]
    batch: TensorDict | None = None
    rows: dict[int, np.ndarray] = field(default_factory=dict)


# Dispatch strategies


@dataclass(frozen=True)
class Strategy(ABC):
    """Base of all dispatch strategies."""

    def check(self, label: str, parameters: Sequence[inspect.Parameter], returns: Any) -> None:
        """Raise DispatchError if a method's signature (without self) does not fit this strategy."""
        return None

    @abstractmethod
    def scatter(self, label: str, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mesh) -> Shipment:
        """Split a call over the ranks; `label` names the method in errors. Raises DispatchError if the arguments do not fit."""

    @abstractmethod
    def gather(self, label: str, results: Mapping[int, Any], shipment: Shipment, mesh: Mesh) -> Any:
        """Combine the ranks' results into one."""


@dataclass(frozen=True)
class Broadcast(Strategy):
    """Send the same arguments to every rank; `run` waits for all and returns rank 0's result."""

    def scatter(self, label: str, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mesh) -> Shipment:
        return Shipment(args, kwargs, list(range(mesh.world_size)))

    def gather(self, label: str, results: Mapping[int, Any], shipment: Shipment, mesh: Mesh) -> Any:
        return results[0]


# The contract


@dataclass(frozen=True)
class WorkerContext:
    """Position of a worker in its group; `rendezvous`: the address where rank 0 accepts the other ranks."""

    group: str
    rank: int
    mesh: Mesh
    rendezvous: Rendezvous | None = None


_NOT_PLAIN = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)


class Worker:
    """Base of all roles. Subclasses declare `dispatch_table`: public method name -> strategy.

    Defining a class raises DispatchError if a key names no method, a public method has no entry, or a
    signature does not fit its strategy. A subclass inherits the entries of its bases. Workers run in
    separate processes (backend "ray") or in the driver ("inline").

    `collective`: the class calls torch.distributed collectives; if False, the inline backend may hold
    several ranks, which run one after the other.
    """

    dispatch_table: ClassVar[Mapping[str, Strategy]] = {}
    collective: ClassVar[bool] = True
    threads: int | None = None
    """CPU threads that compute its model; None: OMP_NUM_THREADS, or one."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Base classes first, so that a subclass's entry replaces that of its base.
        inherited: dict[str, Strategy] = {}
        for base in reversed(cls.__mro__[1:]):
            inherited.update(base.__dict__.get("dispatch_table", {}))
        table = {**inherited, **cls.__dict__.get("dispatch_table", {})}
        methods = public_methods(cls)
        for name, strategy in table.items():
            label = f"{cls.__name__}.{name}"
            if not isinstance(strategy, Strategy):
                raise DispatchError(f"{cls.__name__}.dispatch_table[{name!r}] is not a strategy: {strategy!r}")
            if name not in methods:
                hint = did_you_mean(name, methods, f"it has {sorted(methods)}")
                raise DispatchError(f"{cls.__name__}.dispatch_table names {name!r}, which is not a public method; {hint}")
            if not inspect.isfunction(method := methods[name]):
                raise DispatchError(f"{label} must be a plain method, it is a {type(method).__name__}")
            if any(test(method) for test in _NOT_PLAIN):
                raise DispatchError(f"{label} must be a plain method: a worker runs one call at a time and returns a value")
            signature = inspect.signature(method)
            if not signature.parameters:
                raise DispatchError(f"{label} has no parameter `self`")
            strategy.check(label, list(signature.parameters.values())[1:], signature.return_annotation)
        if missing := sorted(set(methods) - set(table)):
            raise DispatchError(
                f"{cls.__name__}: public method {missing[0]!r} has no entry in dispatch_table (add one, or name it _{missing[0]})"
            )
        cls.dispatch_table = table

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self.rank = context.rank
        self.world_size = context.mesh.world_size

    def mesh_rank(self, axis: str = "dp") -> int:
        """Return this worker's coordinate along a mesh axis."""
        return self.context.mesh.places(axis)[self.rank]

    def init_process_group(self, backend: str | None = None, timeout: float = 1800.0) -> None:
        """Join the group's torch.distributed default process group; every rank must call it.

        Default `backend`: "cpu:gloo,cuda:nccl" if this process sees a GPU, else "gloo". A second role in the same
        process reuses the existing group. `timeout` (seconds) bounds every later collective.
        """
        join_group(self.context.rendezvous, self.rank, self.world_size, backend, timeout)


def public_methods(cls: type) -> dict[str, Any]:
    """Return the public methods defined by the class and its bases below Worker, by name."""
    return {
        name: value
        for base in reversed(cls.__mro__)
        for name, value in (vars(base).items() if base not in (object, Worker) else ())
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, (staticmethod, classmethod)))
    }


def resolve(cls: type[Worker], method: Callable[..., Any]) -> tuple[str, Strategy]:
    """Return name and strategy of a method reference such as `Actor.update` for a group of `cls`.

    Raises DispatchError if the method belongs to another class or has no entry.
    """
    name = method.__name__
    # By identity, not by name: `Critic.update` sent to a group of actors must not run `Actor.update`.
    if not any(base.__dict__.get(name) is method for base in cls.__mro__):
        raise DispatchError(f"{method.__qualname__} is not a method of {cls.__name__}, the class of this group's workers")
    if name not in cls.dispatch_table:
        raise DispatchError(f"{cls.__name__}.{name} has no entry in dispatch_table")
    return name, cls.dispatch_table[name]

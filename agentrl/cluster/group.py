"""A group of workers as the driver sees it: `group.run(Actor.update, batch)`.

The method named in a call is the method itself, so an editor, grep and the type checker see it; what
happens to arguments and results is the strategy in the class's dispatch table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from agentrl.cluster.dispatch import AllToAll, Direct, PerRank, Shipment, Strategy, call_shape
from agentrl.cluster.mesh import Mesh
from agentrl.cluster.worker import Worker, resolve
from agentrl.errors import DispatchError

W = TypeVar("W", bound=Worker)
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Backend(ABC):
    """Where the workers of one group live."""

    @abstractmethod
    def call(self, method: str, shipment: Shipment) -> dict[int, Any]:
        """Run on every rank of the shipment and wait: result by rank.

        Raises WorkerError, WorkerDiedError, StalledError, or the worker's own UserError.
        """

    @abstractmethod
    async def acall(self, method: str, shipment: Shipment) -> dict[int, Any]:
        """The same, awaited."""

    @abstractmethod
    def close(self) -> None:
        """End the workers; idempotent."""


class WorkerGroup(Generic[W]):
    """Workers of one class under one name, on the ranks of one mesh."""

    def __init__(self, cls: type[W], name: str, mesh: Mesh, backend: Backend) -> None:
        self.cls = cls
        self.name = name
        self.mesh = mesh
        self.backend = backend

    @property
    def world_size(self) -> int:
        return self.mesh.world_size

    def run(self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call `method` on the group and wait; its strategy makes one result of the ranks' results.

        Raises DispatchError for a call that does not fit, WorkerError naming worker, rank and method
        with the remote traceback, WorkerDiedError where a process is gone, or the worker's UserError.
        """
        where, name, strategy, shipment = self._prepare(method, args, kwargs)
        result: R = strategy.gather(where, self.backend.call(name, shipment), shipment, self.mesh)
        return result

    async def arun(self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """`run`, awaited: the event loop goes on while the workers work."""
        where, name, strategy, shipment = self._prepare(method, args, kwargs)
        results = await self.backend.acall(name, shipment)
        result: R = strategy.gather(where, results, shipment, self.mesh)
        return result

    def run_all(
        self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """`run`, but every rank's own result, in rank order."""
        _, name, _, shipment = self._prepare(method, args, kwargs)
        results = self.backend.call(name, shipment)
        return [results[rank] for rank in shipment.ranks]

    def run_on(
        self, rank: int, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Call a `Direct` method on one rank."""
        name, strategy = resolve(self.cls, method)
        if not isinstance(strategy, Direct) or not 0 <= rank < self.world_size:
            raise DispatchError(
                f"{self.cls.__name__}.{name} on rank {rank}: needs Direct() and 0 <= rank < {self.world_size}"
            )
        result: R = self.backend.call(name, Shipment(args, dict(kwargs), [rank]))[rank]
        return result

    def scatter(
        self,
        method: Callable[Concatenate[W, T, P], R],
        items: Sequence[T],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[R]:
        """Call an `AllToAll` method: rank i gets `items[i]` first; every rank's result, in rank order."""
        name, strategy = resolve(self.cls, method)
        where = f"{self.cls.__name__}.{name}"
        if not isinstance(strategy, AllToAll):
            raise DispatchError(f"{where} is {strategy}: `scatter` is for AllToAll methods")
        shipment = strategy.scatter(
            where, parameter_names(method), (PerRank(items), *args), kwargs, self.mesh
        )
        results = self.backend.call(name, shipment)
        return [results[rank] for rank in shipment.ranks]

    def close(self) -> None:
        """End the workers; idempotent."""
        self.backend.close()

    def __enter__(self) -> WorkerGroup[W]:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _prepare(
        self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[str, str, Strategy, Shipment]:
        name, strategy = resolve(self.cls, method)
        where = f"{self.cls.__name__}.{name}"
        return (
            where,
            name,
            strategy,
            strategy.scatter(where, parameter_names(method), args, dict(kwargs), self.mesh),
        )


def parameter_names(method: Callable[..., Any]) -> list[str]:
    """Names of the positional parameters after `self`."""
    parameters, _ = call_shape(method)
    return [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]

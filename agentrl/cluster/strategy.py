"""Dispatch strategies: what a worker group does with a call's arguments and results, as data.

A strategy is a frozen value in a worker class's `dispatch_table`. `check` runs once, when the class is
defined; `scatter` turns one call into what each rank gets; `gather` turns the ranks' results into one.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.cluster.mesh import Mesh
from agentrl.cluster.shipment import Shipment
from agentrl.errors import DispatchError


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a method: `label` names it in messages, `names` are its positional parameters."""

    label: str
    names: tuple[str, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def take(self, name: str) -> tuple[Any, Call]:
        """The value given for parameter `name`, and the call without it.

        Arguments after it become keyword arguments. Raises DispatchError if it was not given.
        """
        if len(self.args) > len(self.names):
            given = len(self.args)
            raise DispatchError(f"{self.label} takes {list(self.names)}, it was given {given} arguments")
        if name in self.kwargs:
            rest = {key: value for key, value in self.kwargs.items() if key != name}
            return self.kwargs[name], Call(self.label, self.names, self.args, rest)
        at = self.names.index(name)
        if at >= len(self.args):
            raise DispatchError(f"{self.label}: no argument given for {name!r}")
        # Not strict: the last parameters may be left to their defaults.
        after = dict(zip(self.names[at + 1 :], self.args[at + 1 :], strict=False))
        return self.args[at], Call(self.label, self.names, self.args[:at], {**after, **self.kwargs})


@dataclass(frozen=True)
class Strategy(ABC):
    """Base of all strategies."""

    def check(self, label: str, parameters: Sequence[inspect.Parameter], returns: Any) -> None:
        """Raise DispatchError if a method's signature (without self) does not fit."""
        return None

    @abstractmethod
    def scatter(self, call: Call, mesh: Mesh) -> Shipment:
        """Split one call. Raises DispatchError if its arguments do not fit."""

    @abstractmethod
    def gather(self, label: str, results: Mapping[int, Any], shipment: Shipment, mesh: Mesh) -> Any:
        """One result from the ranks' results."""


def call_shape(function: Any) -> tuple[list[inspect.Parameter], Any]:
    """A method's parameters without `self`, and its return annotation."""
    signature = inspect.signature(function)
    return list(signature.parameters.values())[1:], signature.return_annotation


def positional(parameters: Sequence[inspect.Parameter]) -> list[str]:
    """Names of the parameters that take a value by position or by name."""
    return [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]


@dataclass(frozen=True)
class Broadcast(Strategy):
    """The same arguments for every rank; `run` waits for all and returns rank 0's result."""

    def scatter(self, call: Call, mesh: Mesh) -> Shipment:
        return Shipment(call.args, call.kwargs, list(range(mesh.world_size)))

    def gather(self, label: str, results: Mapping[int, Any], shipment: Shipment, mesh: Mesh) -> Any:
        return results[0]


@dataclass(frozen=True)
class RankZero(Strategy):
    """Only rank 0 runs the method. Not for methods that enter a collective."""

    def scatter(self, call: Call, mesh: Mesh) -> Shipment:
        return Shipment(call.args, call.kwargs, [0])

    def gather(self, label: str, results: Mapping[int, Any], shipment: Shipment, mesh: Mesh) -> Any:
        return results[0]


@dataclass(frozen=True)
class Direct(Strategy):
    """One rank, chosen by the call (`WorkerGroup.run_on`), runs the method."""

    def scatter(self, call: Call, mesh: Mesh) -> Shipment:
        raise DispatchError(f"{call.label} is Direct: call it with `run_on(rank, ...)`")

    def gather(self, label: str, results: Mapping[int, Any], shipment: Shipment, mesh: Mesh) -> Any:
        return results[shipment.ranks[0]]


@dataclass(frozen=True)
class PerRank:
    """The per-rank first arguments of an AllToAll call."""

    items: tuple[Any, ...]


@dataclass(frozen=True)
class AllToAll(Strategy):
    """Each rank gets its own first argument (`WorkerGroup.scatter`); the results come back as a list."""

    def check(self, label: str, parameters: Sequence[inspect.Parameter], returns: Any) -> None:
        if not positional(parameters):
            raise DispatchError(f"{label}: AllToAll() gives each rank its own first argument, the method has none")

    def scatter(self, call: Call, mesh: Mesh) -> Shipment:
        given, rest = call.take(call.names[0])
        if not isinstance(given, PerRank):
            raise DispatchError(f"{call.label} is AllToAll: call it with `scatter([one item per rank], ...)`")
        if len(given.items) != mesh.world_size:
            raise DispatchError(f"{call.label}: {len(given.items)} items for {mesh.world_size} ranks")
        own = {rank: {call.names[0]: item} for rank, item in enumerate(given.items)}
        return Shipment(rest.args, rest.kwargs, list(range(mesh.world_size)), own)

    def gather(self, label: str, results: Mapping[int, Any], shipment: Shipment, mesh: Mesh) -> Any:
        return [results[rank] for rank in shipment.ranks]

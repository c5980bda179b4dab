"""A call under way, and its result as an argument of another group's call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

from agentrl.cluster.shipment import Stored
from agentrl.errors import DispatchError
from agentrl.executors import in_thread

R = TypeVar("R")


class Pending(ABC):
    """The backend's side of a call under way."""

    @property
    @abstractmethod
    def handles(self) -> dict[int, Any]:
        """Handles by rank: where that rank's result will be (an object reference, or a lazy result)."""

    @abstractmethod
    def wait(self) -> dict[int, Any]:
        """Results by rank. Raises as `WorkerGroup.run`."""

    @abstractmethod
    async def await_(self) -> dict[int, Any]:
        """The same, awaited."""


class Future(Generic[R]):
    """What `WorkerGroup.submit` returns at once. `result()` or `await` brings the value to the driver;
    `value` stands for it in another group's call, whose workers then read it directly."""

    def __init__(self, label: str, pending: Pending, gather: Callable[[dict[int, Any]], R], stored: Stored | None) -> None:
        self._label, self._pending, self._gather, self._stored = label, pending, gather, stored

    def result(self) -> R:
        """Wait for the call. Raises as `WorkerGroup.run`."""
        return self._gather(self._pending.wait())

    def __await__(self) -> Generator[Any, None, R]:
        return self._result().__await__()

    async def _result(self) -> R:
        results = await self._pending.await_()
        if self._stored is None:  # no rows to join, so gathering is quick
            return self._gather(results)
        return await in_thread("batch", self._gather, results)

    @property
    def value(self) -> R:
        """A placeholder for the result, with the same static type, for the batch argument of another group's call.

        Raises DispatchError if the call's results are not rows (collect "metrics" or "none").
        """
        if self._stored is None:
            raise DispatchError(f"{self._label}: only rows (collect 'source' or 'concat') can be passed on")
        stand_in: Any = self._stored
        result: R = stand_in
        return result

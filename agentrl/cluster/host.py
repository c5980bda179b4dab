"""The process side of a worker group: a host holds role objects and runs their methods when told.

Several roles may share one host (colocation): they take turns, because a host runs one call at a time.
"""

from __future__ import annotations

import os
import pickle
import traceback
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDict

from agentrl.batch.wire import Wire, from_wire, to_wire
from agentrl.cluster.rendezvous import Rendezvous, listen
from agentrl.cluster.worker import Worker, WorkerContext
from agentrl.errors import UserError


class RemoteFailure(Exception):
    """What a worker's exception becomes on its way to the driver: text, and the class of a UserError."""

    def __init__(
        self, rank: int, kind: str, message: str, trace: str, user_error: type[UserError] | None
    ) -> None:
        super().__init__(rank, kind, message, trace, user_error)
        self.rank, self.kind, self.message, self.trace, self.user_error = (
            rank,
            kind,
            message,
            trace,
            user_error,
        )


@dataclass(slots=True)
class Packed:
    """Arguments pickled once for all ranks; large buffers lie beside the pickle, uncopied."""

    data: bytes
    buffers: list[Any]


def failure(rank: int, error: BaseException) -> RemoteFailure:
    """Describe an exception of a worker's method; the traceback starts at the method."""
    entry = error.__traceback__.tb_next if error.__traceback__ else None
    trace = "".join(traceback.format_exception(type(error), error, entry))
    kind = type(error) if isinstance(error, UserError) else None
    return RemoteFailure(rank, type(error).__name__, str(error), trace, kind)


class Host:
    """The class behind each Ray actor. It is not called by users: a WorkerGroup speaks to it."""

    def __init__(self) -> None:
        self._roles: dict[str, Worker] = {}

    def where(self) -> tuple[str, int, str]:
        """This process's node address, process id and node id."""
        import ray

        context = ray.get_runtime_context()
        return ray.util.get_node_ip_address(), os.getpid(), context.get_node_id()

    def listen(self, host: str) -> Rendezvous:
        """Bind the rendezvous socket (rank 0 only)."""
        return listen(host)

    def create(self, role: str, cls: type[Worker], context: WorkerContext) -> None:
        """Build a role object in this process."""
        try:
            self._roles[role] = cls(context)
        except Exception as error:
            raise failure(context.rank, error) from None

    def call(
        self, role: str, method: str, parameter: str | None, common: Packed, own: Any, *parts: Any
    ) -> Any:
        """Run one method. `common` holds (args, kwargs); the parameter `parameter` gets what `own` says:
        rows of the batch in `parts[0]`, or the value in `own`."""
        worker = self._roles[role]
        try:
            args, kwargs = pickle.loads(common.data, buffers=common.buffers)
            args, kwargs = [unwire(x) for x in args], {key: unwire(x) for key, x in kwargs.items()}
            if parameter is not None:
                kwargs[parameter] = from_wire(parts[0], own) if parts else unwire(own)
            return wire(getattr(worker, method)(*args, **kwargs))
        except Exception as error:
            raise failure(worker.rank, error) from None


def wire(value: Any) -> Any:
    """Batches in wire form; everything else as it is."""
    return to_wire(value) if isinstance(value, TensorDict) else value


def unwire(value: Any) -> Any:
    """Inverse of `wire`; what arrives in shared memory is copied."""
    return from_wire(value) if isinstance(value, Wire) else value

"""The process side of a worker group: a host holds role objects and runs their methods on request.

Several roles may share one host (colocation): they take turns, because a host runs one call at a time.
A host imports torch and tensordict only with its first batch, so that workers that get no batches stay small.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentrl.cluster.cards import take_cards
from agentrl.cluster.rendezvous import Rendezvous, listen
from agentrl.cluster.shipment import GatherPlan
from agentrl.cluster.watched import watched
from agentrl.cluster.worker import Worker, WorkerContext
from agentrl.errors import UserError, WorkerError
from agentrl.redaction import guard_process


class RemoteFailure(Exception):
    """A worker's exception on its way to the driver: as text, plus the class if it is a UserError.

    `label` names group, method and rank of the failed call, even if the driver only learns of it through another
    group's call that takes its result as an argument.
    """

    def __init__(self, label: str, message: str, trace: str, user_error: type[UserError] | None) -> None:
        super().__init__(label, message, trace, user_error)
        self.label, self.message, self.trace, self.user_error = label, message, trace, user_error

    def as_error(self) -> Exception:
        """The error that the driver raises."""
        if self.user_error is not None:
            return self.user_error(f"{self.message} ({self.label})")
        return WorkerError(f"{self.label}: {self.message}\n--- remote traceback ---\n{self.trace.rstrip()}")


@dataclass(slots=True)
class PackedCall:
    """Arguments pickled once for all ranks; large buffers are kept outside the pickle, without a copy."""

    data: bytes
    buffers: list[Any]


def failure(label: str, error: BaseException) -> RemoteFailure:
    """Describe an exception raised by a worker's method; the traceback starts at the method."""
    # As text: a traceback cannot be pickled, and an exception class of the user may not exist on the driver.
    entry = error.__traceback__.tb_next if error.__traceback__ else None
    trace = "".join(traceback.format_exception(type(error), error, entry))
    if isinstance(error, UserError):
        return RemoteFailure(label, str(error), trace, type(error))
    return RemoteFailure(label, f"{type(error).__name__}: {error}", trace, None)


class Host:
    """The class behind each Ray actor. Only a WorkerGroup calls it, users do not."""

    def __init__(self) -> None:
        guard_process()
        self._roles: dict[str, Worker] = {}
        self._cards = take_cards()

    def location(self) -> tuple[str, int, str]:
        """This process's node address, process id and node id."""
        import ray

        return ray.util.get_node_ip_address(), os.getpid(), ray.get_runtime_context().get_node_id()

    def cards(self) -> list[str]:
        """The GPUs that Ray gave this process."""
        return self._cards

    def listen(self, host: str) -> Rendezvous:
        """Bind the rendezvous socket (rank 0 only)."""
        return listen(host)

    def create(self, role: str, cls: type[Worker], context: WorkerContext) -> None:
        """Build a role object in this process."""
        try:
            self._roles[role] = cls(context)
        except Exception as error:
            label = f"group {role!r}: {cls.__name__}.__init__, rank {context.rank}"
            raise failure(label, error) from None

    def apply(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a plain function in this process, for no role in particular."""
        try:
            return function(*args)
        except Exception as error:
            raise failure(f"process {os.getpid()} on {self.location()[0]}", error) from None

    def call(
        self,
        role: str,
        method: str,
        common: bytes | PackedCall,
        own: dict[str, Any] | None,
        gather_plans: dict[str, GatherPlan] | None,
        *parts: Any,
    ) -> Any:
        """Run one method: `common` holds the arguments of all ranks, `own` those of this rank, and `gather_plans`
        says, per parameter, from which rows of the pieces in `parts` it is built."""
        worker = self._roles[role]
        try:
            # Unpickled here rather than by Ray, so that a class which this process cannot import fails as an error of this
            # call.
            args, kwargs = unpack_arguments(common)
            kwargs = {key: deserialized(value) for key, value in {**kwargs, **(own or {})}.items()}
            kwargs.update(
                {name: gather_argument(gather_plan, pieces_of(parts)) for name, gather_plan in (gather_plans or {}).items()}
            )
            with watched(worker, method):
                return serialized(getattr(worker, method)(*[deserialized(value) for value in args], **kwargs))
        except Exception as error:
            label = f"group {role!r}: {type(worker).__name__}.{method}, rank {worker.rank}"
            raise failure(label, error) from None


def unpack_arguments(common: bytes | PackedCall) -> Any:
    """(args, kwargs) as the driver pickled them."""
    if isinstance(common, bytes):
        return pickle.loads(common)
    return pickle.loads(common.data, buffers=common.buffers)


def pieces_of(parts: Sequence[Any]) -> Sequence[Any]:
    """The pieces of a call's batch, numbered as in the driver's gather plans; see cluster/column_store.py."""
    from agentrl.cluster.column_store import rejoined

    return rejoined(parts)


def gather_argument(gather_plan: GatherPlan, pieces: Sequence[Any]) -> Any:
    """The argument that a gather plan describes, in fresh storage."""
    from agentrl.batch.rows import concat, select

    first = gather_plan.takes[0]
    if len(gather_plan.takes) == 1:
        value = pick_rows(pieces[first.piece], first.rows)
    else:
        value = concat([pick_rows(pieces[take.piece], take.rows) for take in gather_plan.takes])
    return value if gather_plan.order is None else select(value, gather_plan.order)


def pick_rows(piece: Any, rows: np.ndarray | None) -> Any:
    """Rows of a serialized batch or of a batch; all of them if `rows` is None."""
    from tensordict import TensorDict

    from agentrl.batch.rows import select
    from agentrl.batch.serialization import SerializedBatch, deserialize

    # Rows are copied even if all are wanted: inline, the piece is the caller's own batch, and the method may write into it.
    if isinstance(piece, TensorDict):
        return select(piece, np.arange(len(piece)) if rows is None else rows)
    return deserialize(piece, rows) if isinstance(piece, SerializedBatch) else piece


def serialized(value: Any) -> Any:
    """Batches in serialized form; everything else as it is."""
    if "tensordict" not in sys.modules:  # then the value cannot be a batch, and the import is saved
        return value
    from tensordict import TensorDict

    from agentrl.batch.serialization import serialize

    return serialize(value) if isinstance(value, TensorDict) else value


def deserialized(value: Any) -> Any:
    """Inverse of `serialized`; values that arrive in shared memory are copied."""
    if "agentrl.batch.serialization" not in sys.modules:
        return value
    from agentrl.batch.serialization import SerializedBatch, deserialize

    return deserialize(value) if isinstance(value, SerializedBatch) else value

"""The process side of a worker group: a host holds role objects and runs their methods.

The GPUs of the process, what its calls run in, and the host itself."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from agentrl.cluster.worker import Worker, WorkerContext
from agentrl.utils.errors import ResourceError, UserError, WorkerError, fault_text
from agentrl.utils.redaction import guard_process

if TYPE_CHECKING:
    import torch


# GPUs of a process

VISIBLE = "CUDA_VISIBLE_DEVICES"
_given: list[str] = []


def take_cards() -> list[str]:
    """Make exactly the cards that Ray gave this process visible to it, and return them; before anything asks CUDA.

    Ray leaves every card visible to a process that asked for none, and hides none at all on clusters that set
    RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES; such a process would compute on a card of another one.
    """
    import ray

    _given[:] = [str(card) for card in ray.get_gpu_ids()]
    # Also if Ray gave none: an empty value hides every card, an absent one hides none.
    os.environ[VISIBLE] = ",".join(_given)
    return list(_given)


def own_device() -> torch.device:
    """The device that this process computes on, made CUDA's current one: its first visible card, else the CPU.

    Raises ResourceError if Ray gave it a card, but torch finds none: it would train on the CPU without a word.
    """
    import torch

    if torch.cuda.is_available():
        # Numbers count visible cards only, so 0 is this process's own. NCCL uses the current device, which must be the same one.
        torch.cuda.set_device(0)
        return torch.device("cuda", 0)
    if _given:
        raise ResourceError(
            f"Ray gave this process GPU {', '.join(_given)}, but torch {torch.__version__} finds no CUDA device on its node: "
            "install a build of torch with CUDA there, or set the pool's gpus to 0 to train on CPUs"
        )
    return torch.device("cpu")


# Calls

AROUND_CALLS: list[Callable[[Worker, str], AbstractContextManager[None]]] = []
"""Entered around each call of a worker's method in this process: a profiler's recording (contrib/trackers)."""


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
        trace = f"--- remote traceback ---\n{self.trace.rstrip()}"
        if self.user_error is not None:
            error = self.user_error(f"{self.message} ({self.label})")
            error.add_note(trace)  # for the log
            return error
        return WorkerError(f"{self.label}: {self.message}\n{trace}")


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
    return RemoteFailure(label, fault_text(error), trace, None)


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

    def create(self, role: str, cls: type[Worker], context: WorkerContext) -> None:
        """Build a role object in this process."""
        try:
            self._roles[role] = cls(context)
        except Exception as error:
            raise failure(f"group {role!r}: {cls.__name__}.__init__, rank {context.rank}", error) from None

    def apply(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a plain function in this process, for no role in particular."""
        try:
            return function(*args)
        except Exception as error:
            raise failure(f"process {os.getpid()} on {self.location()[0]}", error) from None

    def call(self, role: str, method: str, common: bytes | PackedCall, rows: np.ndarray | None, *parts: Any) -> Any:
        """Run one method: `common` holds the arguments of all ranks; before them come the `rows` of the batch that `parts` join
        to, if there are parts."""
        worker = self._roles[role]
        try:
            # Unpickled here rather than by Ray, so that a class which this process cannot import fails as an error of this
            # call.
            data, buffers = (common, ()) if isinstance(common, bytes) else (common.data, common.buffers)
            args, kwargs = pickle.loads(data, buffers=buffers)
            args, kwargs = [from_wire(value) for value in args], {key: from_wire(value) for key, value in kwargs.items()}
            batch = []
            if parts:  # the driver's batch in serialized form, or that without its token columns, which follow in the same order
                from agentrl.data.rows import deserialize

                serialized, *columns = parts
                if columns:
                    serialized = replace(serialized, ragged=dict(zip(serialized.ragged, columns, strict=True)))
                batch = [deserialize(serialized, rows)]  # in fresh storage
            with ExitStack() as stack:
                for around in AROUND_CALLS:
                    stack.enter_context(around(worker, method))
                return to_wire(getattr(worker, method)(*batch, *args, **kwargs))
        except Exception as error:
            raise failure(f"group {role!r}: {type(worker).__name__}.{method}, rank {worker.rank}", error) from None


def to_wire(value: Any) -> Any:
    """Batches in serialized form; everything else as it is."""
    if "agentrl.data.rows" not in sys.modules:  # then the value cannot be a batch, and the import is saved
        return value
    from agentrl.data.rows import is_batch, serialize

    return serialize(value) if is_batch(value) else value


def from_wire(value: Any) -> Any:
    """Inverse of `to_wire`; values that arrive in shared memory are copied."""
    if "agentrl.data.rows" not in sys.modules:
        return value
    from agentrl.data.rows import SerializedBatch, deserialize

    return deserialize(value) if isinstance(value, SerializedBatch) else value

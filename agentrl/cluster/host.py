"""The process side of a worker group: a host holds role objects and runs their methods."""

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
    """Make exactly the GPUs that Ray assigned visible to this process and return them. Call before CUDA is initialized.

    Ray leaves every GPU visible to a process that requested none, and hides none on clusters that set
    RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES; such a process would compute on another one's GPU.
    """
    import ray

    _given[:] = [str(card) for card in ray.get_gpu_ids()]
    # Also without assigned GPUs: an empty value hides every GPU, an absent one hides none.
    os.environ[VISIBLE] = ",".join(_given)
    return list(_given)


def own_device() -> torch.device:
    """Return this process's device, its first visible GPU or else the CPU, and make it CUDA's current one.

    Raises ResourceError if Ray assigned a GPU but torch finds none: training would silently run on the CPU.
    """
    import torch

    if torch.cuda.is_available():
        # Device numbers count visible GPUs only: 0 is this process's own. NCCL uses the current device, which must be the same.
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
"""Contexts entered around each method call in this process, for example a profiler's recording (contrib/trackers)."""


class RemoteFailure(Exception):
    """A worker's exception sent to the driver: its text, plus the class if it is a UserError.

    `label` names group, method and rank of the failed call, which matters if the result was an argument of another
    group's call.
    """

    def __init__(self, label: str, message: str, trace: str, user_error: type[UserError] | None) -> None:
        super().__init__(label, message, trace, user_error)
        self.label, self.message, self.trace, self.user_error = label, message, trace, user_error

    def as_error(self) -> Exception:
        """Return the exception that the driver raises."""
        trace = f"--- remote traceback ---\n{self.trace.rstrip()}"
        if self.user_error is not None:
            error = self.user_error(f"{self.message} ({self.label})")
            error.add_note(trace)  # for the log
            return error
        return WorkerError(f"{self.label}: {self.message}\n{trace}")


@dataclass(slots=True)
class PackedCall:
    """Arguments pickled once for all ranks; large buffers stay outside the pickle, without a copy."""

    data: bytes
    buffers: list[Any]


def failure(label: str, error: BaseException) -> RemoteFailure:
    """Convert an exception raised by a worker's method; the traceback starts at the method."""
    # As text: a traceback cannot be pickled, and the driver may not have the class of a user's exception.
    entry = error.__traceback__.tb_next if error.__traceback__ else None
    trace = "".join(traceback.format_exception(type(error), error, entry))
    if isinstance(error, UserError):
        return RemoteFailure(label, str(error), trace, type(error))
    return RemoteFailure(label, fault_text(error), trace, None)


class Host:
    """The class of each Ray actor. Only a WorkerGroup calls it."""

    def __init__(self) -> None:
        guard_process()
        self._roles: dict[str, Worker] = {}
        self._cards = take_cards()

    def location(self) -> tuple[str, int, str, list[str]]:
        """Return this process's node address, process id, node id and the GPUs that Ray assigned to it."""
        import ray

        return ray.util.get_node_ip_address(), os.getpid(), ray.get_runtime_context().get_node_id(), self._cards

    def create(self, role: str, cls: type[Worker], context: WorkerContext) -> None:
        """Build a role object in this process."""
        try:
            self._roles[role] = cls(context)
        except Exception as error:
            raise failure(f"group {role!r}: {cls.__name__}.__init__, rank {context.rank}", error) from None

    def apply(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function that belongs to no role in this process."""
        try:
            return function(*args)
        except Exception as error:
            raise failure(f"process {os.getpid()} on {self.location()[0]}", error) from None

    def call(self, role: str, method: str, common: bytes | PackedCall, rows: np.ndarray | None, *parts: Any) -> Any:
        """Run one method of a role. `common`: the pickled arguments of all ranks. If `parts` are given, they form a batch, and
        its `rows` precede these arguments."""
        worker = self._roles[role]
        try:
            # Unpickled here, not by Ray, so that a class which this process cannot import is an error of this call.
            data, buffers = (common, ()) if isinstance(common, bytes) else (common.data, common.buffers)
            args, kwargs = pickle.loads(data, buffers=buffers)
            args, kwargs = [from_wire(value) for value in args], {key: from_wire(value) for key, value in kwargs.items()}
            batch = []
            if parts:  # the serialized batch, or the batch without token columns followed by these columns in order
                from agentrl.data.rows import deserialize

                serialized, *columns = parts
                if columns:
                    serialized = replace(serialized, ragged=dict(zip(serialized.ragged, columns, strict=True)))
                batch = [deserialize(serialized, rows)]  # copied into new storage
            with ExitStack() as stack:
                for around in AROUND_CALLS:
                    stack.enter_context(around(worker, method))
                return to_wire(getattr(worker, method)(*batch, *args, **kwargs))
        except Exception as error:
            raise failure(f"group {role!r}: {type(worker).__name__}.{method}, rank {worker.rank}", error) from None


def to_wire(value: Any) -> Any:
    """Serialize a batch; return any other value unchanged."""
    if "agentrl.data.rows" not in sys.modules:  # then the value cannot be a batch; saves the import
        return value
    from agentrl.data.rows import is_batch, serialize

    return serialize(value) if is_batch(value) else value


def from_wire(value: Any) -> Any:
    """Invert `to_wire`; copies values that arrive in shared memory."""
    if "agentrl.data.rows" not in sys.modules:
        return value
    from agentrl.data.rows import SerializedBatch, deserialize

    return deserialize(value) if isinstance(value, SerializedBatch) else value

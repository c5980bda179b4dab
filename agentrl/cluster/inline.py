"""The inline backend: the worker lives in the driver process, for debugging and for one-process runs."""

from __future__ import annotations

from typing import Any

import numpy as np
from tensordict import TensorDict

from agentrl.batch.rows import select
from agentrl.cluster.future import Pending
from agentrl.cluster.group import Backend
from agentrl.cluster.host import gather_argument
from agentrl.cluster.mesh import Mesh
from agentrl.cluster.shipment import GatherPlan, RowsOfPart, Shipment, Stored
from agentrl.cluster.watched import watched
from agentrl.cluster.worker import Worker, WorkerContext
from agentrl.errors import ResourceError, UserError, WorkerError
from agentrl.executors import in_thread
from agentrl.processor import own_threads


class InlinePending(Pending):
    """A call that runs in the caller's thread when its result is first requested."""

    def __init__(self, backend: InlineBackend, method: str, shipment: Shipment) -> None:
        self._backend, self._method, self._shipment = backend, method, shipment
        self._results: dict[int, Any] | None = None

    @property
    def handles(self) -> dict[int, Any]:
        # Not computed yet: the call may itself wait for a future, and runs in the thread of whoever needs its result first.
        return {rank: _LazyResult(self, rank) for rank in self._shipment.ranks}

    def wait(self) -> dict[int, Any]:
        if self._results is None:
            ranks = self._shipment.ranks
            self._results = {rank: self._backend.one(self._method, self._shipment, rank) for rank in ranks}
        return self._results

    async def await_(self) -> dict[int, Any]:
        return await in_thread("update", self.wait)


class _LazyResult:
    """One rank's result of an inline call."""

    def __init__(self, pending: InlinePending, rank: int) -> None:
        self._pending, self._rank = pending, rank

    def get(self) -> Any:
        return self._pending.wait()[self._rank]


class InlineBackend(Backend):
    """Role objects in this process. More than one rank only for classes without collectives; such
    ranks run one after the other."""

    def __init__(self, cls: type[Worker], name: str, mesh: Mesh) -> None:
        if mesh.world_size > 1 and cls.collective:
            raise ResourceError(
                f"group {name!r}: {mesh.world_size} ranks were requested; backend 'inline' holds one, "
                "as torch.distributed has one rank per process: "
                "set cluster.actors = 1 or cluster.backend = 'ray'"
            )
        self._name, self._cls, self._mesh = name, cls, mesh
        self._workers: list[Worker] = []
        self.restart()

    def submit(self, method: str, shipment: Shipment) -> Pending:
        return InlinePending(self, method, shipment)

    def put(self, batch: TensorDict) -> Any:
        return select(batch, np.arange(len(batch)))  # a copy, as with Ray: a later change by the caller must not show

    def restart(self) -> None:
        ranks = range(self._mesh.world_size)
        self._workers = [self._cls(WorkerContext(self._name, rank, self._mesh)) for rank in ranks]

    def close(self) -> None:
        self._workers.clear()

    def one(self, method: str, shipment: Shipment, rank: int) -> Any:
        """Run one rank's part. A UserError is raised as it is, any other exception as a WorkerError."""
        kwargs = {**shipment.kwargs, **shipment.own.get(rank, {})}
        if shipment.parameter is not None:
            kwargs[shipment.parameter] = self._rows(shipment, rank)
        own_threads(self._workers[rank].threads)  # this thread may be another one than that of the last call
        try:
            with watched(self._workers[rank], method):
                return getattr(self._workers[rank], method)(*shipment.args, **kwargs)
        except UserError:
            raise
        except Exception as error:
            label = f"group {self._name!r}: {self._cls.__name__}.{method}, rank {rank}"
            raise WorkerError(f"{label}: {type(error).__name__}: {error}") from error

    @staticmethod
    def _rows(shipment: Shipment, rank: int) -> Any:
        batch = shipment.batch
        if isinstance(batch, Stored):
            pieces = [piece.get() if isinstance(piece, _LazyResult) else piece for piece in batch.pieces]
            return gather_argument(shipment.gather_plans[rank], pieces)
        return gather_argument(GatherPlan((RowsOfPart(0, shipment.rows[rank]),)), [batch])

"""The inline backend: the worker lives in the driver process, for a debugger and for one-process runs."""

from __future__ import annotations

import asyncio
from typing import Any

from agentrl.batch.rows import select
from agentrl.cluster.dispatch import Shipment
from agentrl.cluster.group import Backend
from agentrl.cluster.mesh import Mesh
from agentrl.cluster.worker import Worker, WorkerContext
from agentrl.errors import ResourceError, UserError, WorkerError


class InlineBackend(Backend):
    """Role objects in this process. More than one rank only for classes without collectives; such
    ranks run one after the other."""

    def __init__(self, cls: type[Worker], name: str, mesh: Mesh) -> None:
        if mesh.world_size > 1 and cls.collective:
            raise ResourceError(
                f"group {name!r}: {mesh.world_size} ranks were asked for, backend 'inline' holds one {cls.__name__} "
                "(torch.distributed knows one rank a process): set cluster.actors = 1 or cluster.backend = \"ray\""
            )
        self._name, self._cls = name, cls
        self._workers = [cls(WorkerContext(name, rank, mesh)) for rank in range(mesh.world_size)]

    def call(self, method: str, shipment: Shipment) -> dict[int, Any]:
        return {rank: self._one(method, shipment, rank) for rank in shipment.ranks}

    async def acall(self, method: str, shipment: Shipment) -> dict[int, Any]:
        return await asyncio.to_thread(self.call, method, shipment)

    def close(self) -> None:
        self._workers.clear()

    def _one(self, method: str, shipment: Shipment, rank: int) -> Any:
        kwargs = dict(shipment.kwargs)
        if shipment.parameter is not None:
            kwargs[shipment.parameter] = self._own(shipment, rank)
        try:
            return getattr(self._workers[rank], method)(*shipment.args, **kwargs)
        except UserError:
            raise
        except Exception as error:
            where = f"{self._name}: {self._cls.__name__} rank {rank}, method {method}"
            raise WorkerError(f"{where}: {type(error).__name__}: {error}") from error

    @staticmethod
    def _own(shipment: Shipment, rank: int) -> Any:
        if shipment.rows is not None:
            return select(shipment.batch, shipment.rows[rank])
        assert shipment.items is not None
        return shipment.items[rank]

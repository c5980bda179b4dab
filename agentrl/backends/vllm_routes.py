"""The ends of a weight route in a vLLM engine: one in every worker process, and one in the driver where it keeps weights
for replicas that are started later."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
import torch

from agentrl.backends.parameters import Arrivals, Expected
from agentrl.backends.vllm_replicas import Replicas
from agentrl.errors import ConfigError
from agentrl.executors import in_thread
from agentrl.weights.parcel import Parcel, view
from agentrl.weights.route import Offer, Receiver
from agentrl.weights.routes import open_receiver
from agentrl.weights.target import MembersChangedError


class VllmRoutes:
    """See the module. `workers`: processes a replica; `keep`: whether the driver keeps a copy of what comes."""

    def __init__(self, replicas: Replicas, workers: int, keep: bool) -> None:
        self._replicas, self._workers, self._keep = replicas, workers, keep
        self._attached: tuple[str, ...] = ()
        self._mine: Receiver | None = None

    def members(self) -> tuple[str, ...]:
        workers = [f"{r.number}.{r.pid}.{rank}" for r in self._replicas.alive() for rank in range(self._workers)]
        return (*workers, "driver") if self._keep else tuple(workers)

    async def attach(self, offer: Offer) -> None:
        """Raises ConfigError with the reason where one process cannot be served."""
        self._attached = ()
        members, alive = self.members(), self._replicas.alive()
        # All at once: an end of a group waits until all the others are there.
        ends = [self._replicas.ask(replica, "attach", offer, at * self._workers) for at, replica in enumerate(alive)]
        mine = in_thread("weights", open_receiver, offer, len(members) - 1) if self._keep else _nothing()
        receiver, *reasons = await asyncio.gather(mine, *ends)
        if why := next(filter(None, reasons), ""):
            raise ConfigError(why)
        self.close()
        self._mine, self._attached = receiver, members

    def check(self) -> None:
        """Raises MembersChangedError where a process has no end."""
        if not self._attached or self.members() != self._attached:
            raise MembersChangedError("a replica of the vLLM engine was replaced after the route for weights was attached")

    async def load(self, parcel: Parcel, expected: Expected, arrivals: Arrivals) -> tuple[Any, list[Any]] | None:
        """Load one bucket everywhere; where the driver keeps weights, the bucket in Ray's object store."""
        for entry in parcel.entries:
            arrivals.check(entry.name, entry.shape)
        # vLLM packs a tied output head of its own on a CPU: without its name in the update it would go on with the
        # old weights.
        whole = parcel.with_aliases(expected.tied)
        loading = self._replicas.all("receive", whole.to_wire())
        keeping = in_thread("weights", self._copy, whole)
        kept: tuple[Any, list[Any]] | None
        kept, _ = await asyncio.gather(keeping, loading)
        return kept

    def _copy(self, parcel: Parcel) -> tuple[Any, list[Any]] | None:
        if self._mine is None:
            return None
        data = torch.empty(parcel.nbytes, dtype=torch.uint8)
        for entry, (_, tensor) in zip(parcel.entries, self._mine.receive(parcel), strict=True):
            view(data, entry).copy_(tensor)
        return ray.put(data.numpy()), [(e.name, e.dtype, e.shape, e.offset) for e in parcel.entries]

    def close(self) -> None:
        """Close the driver's end; idempotent."""
        if self._mine is not None:
            self._mine.close()
            self._mine = None


async def _nothing() -> None:
    return None

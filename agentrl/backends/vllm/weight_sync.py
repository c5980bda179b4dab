"""The ends of a weight route in a vLLM engine: one in every worker process, and one in the driver if it keeps weights
for replicas that are started later."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import ray
import torch

from agentrl.backends.parameters import Arrivals, Expected
from agentrl.backends.vllm.actor import ReplicaDeadError
from agentrl.backends.vllm.replicas import Replicas
from agentrl.errors import ConfigError
from agentrl.executors import in_thread
from agentrl.weights.bucket import Bucket, view
from agentrl.weights.route import Offer, Receiver
from agentrl.weights.routes import open_receiver
from agentrl.weights.target import MembersChangedError


@dataclass(frozen=True, slots=True)
class Kept:
    """A bucket as it was published, with its bytes, uint8 [nbytes], in Ray's object store."""

    bucket: Bucket
    data: ray.ObjectRef


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
        """Raises ConfigError with the reason if one process cannot be served, MembersChangedError if one died meanwhile."""
        self._attached = ()
        members, alive = self.members(), self._replicas.alive()
        # All at once: an end of a group waits until all the others are there.
        ends = [self._replicas.ask(replica, "attach", offer, at * self._workers) for at, replica in enumerate(alive)]
        mine = in_thread("weights", open_receiver, offer, len(members) - 1) if self._keep else _nothing()
        receiver, *answers = await asyncio.gather(mine, *ends, return_exceptions=True)
        self.close()
        self._mine = receiver if isinstance(receiver, Receiver) else None
        _check_answers([receiver, *answers])
        self._attached = members

    def check(self) -> None:
        """Raises MembersChangedError if a process has no end."""
        if not self._attached or self.members() != self._attached:
            raise MembersChangedError("a replica of the vLLM engine was replaced after the route for weights was attached")

    async def load(self, bucket: Bucket, expected: Expected, arrivals: Arrivals) -> list[Kept]:
        """Load one bucket everywhere; it, if the driver keeps weights. Raises EngineError for one that does not fit."""
        for entry in bucket.entries:
            arrivals.check(entry.name, entry.shape)
        # vLLM packs a tied output head of its own on a CPU: without its name in the update it would go on with the
        # old weights.
        whole = bucket.with_aliases(expected.tied)
        loading = self._replicas.all("receive", whole.to_wire())
        keeping = in_thread("weights", self._copy, whole)
        kept: list[Kept]
        kept, _ = await asyncio.gather(keeping, loading)
        return kept

    def _copy(self, bucket: Bucket) -> list[Kept]:
        if self._mine is None:
            return []
        data = torch.empty(bucket.nbytes, dtype=torch.uint8)
        for entry, (_, tensor) in zip(bucket.entries, self._mine.receive(bucket), strict=True):
            view(data, entry).copy_(tensor)
        return [Kept(bucket, ray.put(data.numpy()))]

    def close(self) -> None:
        """Close the driver's end; idempotent."""
        if self._mine is not None:
            self._mine.close()
            self._mine = None


def _check_answers(answers: list[Receiver | BaseException | str | None]) -> None:
    """Raise for the first process that has no end of the route; for one that died before any other."""
    if any(isinstance(answer, ReplicaDeadError) for answer in answers):
        raise MembersChangedError("a replica of the vLLM engine died while a route for weights was attached")
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
        if isinstance(answer, str) and answer:
            raise ConfigError(answer)


async def _nothing() -> None:
    return None

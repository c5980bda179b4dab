"""Weights that a test holds into an engine, and an actor's weights out of it, as a run does both: over a route.

`publish` sends tensors with the Publisher of a run; only the trainer that holds them is a stand-in. `weights_of` is an
engine's end of a route towards an actor.
"""

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from agentrl.cluster.group import WorkerGroup
from agentrl.cluster.launch import launch
from agentrl.cluster.worker import Broadcast, Mesh, Strategy, WorkerContext
from agentrl.config.schema import WeightsConfig
from agentrl.engines.weights.base import Adapter, Bucket, Named, Offer, WeightTarget, open_receiver
from agentrl.rollout.collector import Collector
from agentrl.rollout.engine import Engine
from agentrl.trainer.actor import Actor
from agentrl.trainer.publish import Publisher
from agentrl.utils.errors import ConfigError

Tensors = Mapping[str, Tensor]


class Held:
    """What a publish asks of a trained model: its tensors in order, and the bytes of the largest."""

    def __init__(self, *parts: Tensors) -> None:
        self._named: list[Named] = [pair for part in parts for pair in part.items()]

    def tensors(self) -> Iterator[Named]:
        return iter(self._named)

    def largest(self) -> int:
        return max((tensor.nbytes for _, tensor in self._named), default=0)

    def resident(self) -> list[Tensor]:
        return []

    def onload(self) -> None: ...

    def saving(self) -> None:
        """They are sent as they are."""
        return None


class Holder(Actor):
    """An actor that publishes what it was given, and nothing else."""

    dispatch_table: ClassVar[dict[str, Strategy]] = {"hold": Broadcast()}

    def hold(self, held: Held) -> None:
        """What to publish from now on."""
        self._engine = held  # type: ignore[assignment]


def holder(held: Any, rank: int) -> Holder:
    """One rank of those that publish."""
    made = Holder(WorkerContext("holders", rank, Mesh.of(None, rank + 1)))
    made.hold(held)
    return made


async def publish(engine: Engine, version: int, *parts: Tensors, bucket_mib: float = 1.0) -> None:
    """The tensors of all parts, in order, as the weights of `version`; raises what `Publisher.send` raises."""
    actors = launch(Holder, backend="inline")
    actors.run(Holder.hold, Held(*parts))
    publisher = Publisher(actors, engine, WeightsConfig(bucket_mib=bucket_mib))
    try:
        await publisher.send(version)
    finally:
        await publisher.close()


async def exchange(collector: Collector, *parts: Tensors) -> None:
    """The tensors as the weights of the collector's version; then groups are admitted, as in a run."""
    env = next(iter(collector.envs.values()))  # a run's environments have one policy
    await collector.exchange(lambda version: publish(env.policy.engine, version, *parts))


def weights_of(actors: WorkerGroup[Any]) -> dict[str, Tensor]:
    """Copies of all weights of an actor by Hugging Face name, in order; an open route is closed."""
    for route in ("memory", "shared"):
        offer = actors.run(Actor.open_route, route, WeightsConfig(bucket_mib=1.0), 1)
        try:
            receiver = open_receiver(offer, 0)
            break
        except ConfigError:
            continue
    else:
        raise AssertionError("no route to the actor")
    actors.run(Actor.route_attached)
    found = {name: tensor.clone() for bucket in buckets_of(actors) for name, tensor in receiver.receive(bucket)}
    receiver.close()
    actors.run(Actor.close_route)
    return found


def buckets_of(actors: WorkerGroup[Any]) -> Iterator[Bucket]:
    """The buckets of one publish, as the driver asks for them: the next one only after the last was loaded."""
    bucket = actors.run(Actor.next_bucket, True)
    while bucket is not None:
        yield bucket
        bucket = actors.run(Actor.next_bucket, False)


def flat(group: Any) -> Tensor:
    """All weights of an actor, one after the other."""
    return torch.cat([tensor.flatten() for tensor in weights_of(group).values()])


class VersionOnly(WeightTarget):
    """Mixed into an engine without a model: of new weights it takes the version."""

    version = 0
    paused = False

    async def pause(self) -> None:
        self.paused = True

    async def resume(self) -> None:
        self.paused = False

    def members(self) -> tuple[str, ...]:
        return ("this process",)

    async def attach(self, offer: Offer) -> None: ...

    async def receive(self, version: int, buckets: AsyncIterator[Bucket]) -> None:
        assert self.paused, "weights may only change while the engine is paused"
        async for bucket in buckets:
            raise AssertionError(f"no model for {bucket}")
        self.version = version

    async def adapt(self, version: int, adapter: Adapter) -> None:
        raise AssertionError("no model for an adapter")

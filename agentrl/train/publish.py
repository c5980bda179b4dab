"""Publishing, on the driver: which route the weights take, and the stream of buckets from the actors to the engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from agentrl.cluster.group import WorkerGroup
from agentrl.config.schema import TrainConfig, WeightsConfig
from agentrl.errors import ConfigError
from agentrl.rollout.engine import Engine
from agentrl.train.actor import Actor
from agentrl.weights.parcel import Parcel
from agentrl.weights.routes import ORDER
from agentrl.weights.target import MembersChangedError, WeightTarget

log = logging.getLogger(__name__)

ATTEMPTS = 3


def check_weights(config: TrainConfig) -> None:
    """Raise ConfigError where `[weights]` does not fit the rest."""
    if config.weights.lora == "merged":
        return
    if config.model.lora is None:
        raise ConfigError('weights.lora = "adapter" needs [model.lora]; without it, all weights are trained')
    if config.sft is not None:
        raise ConfigError(
            'weights.lora = "adapter" does not work with [sft]: the warmed-up model has its adapter merged, so it is no base '
            'for the adapter; use weights.lora = "merged"'
        )


class Publisher:
    """Gives an engine the actors' weights. `route` is the one in use, None before the first publish."""

    def __init__(self, actors: WorkerGroup[Actor], engine: Engine, cfg: WeightsConfig) -> None:
        self._actors, self._cfg = actors, cfg
        if not isinstance(engine, WeightTarget):
            raise ConfigError(f"{type(engine).__name__} takes no weights")
        self._target: WeightTarget = engine
        self._members: tuple[str, ...] = ()
        self.route: str | None = None

    async def send(self, version: int) -> None:
        """Replace the engine's weights, which must be paused. Raises ConfigError where no route serves (or not the one that
        the config names), EngineError where the engine refuses the weights."""
        if self._cfg.lora == "adapter":
            await self._target.adapt(version, await self._actors.arun(Actor.export_adapter))
            return
        for attempt in range(ATTEMPTS):
            await self._connect()
            try:
                await self._target.receive(version, self._parcels())
                return
            except MembersChangedError:
                if attempt == ATTEMPTS - 1:
                    raise

    async def close(self) -> None:
        """Free the route; the actors must still live."""
        if self.route is not None:
            self.route = None
            await self._actors.arun(Actor.close_route)

    async def _connect(self) -> None:
        """Open a route, once; again where a process of the engine was replaced."""
        members = self._target.members()
        if self.route is not None and members == self._members:
            return
        reasons: list[str] = []
        for name in ORDER if self._cfg.route == "auto" else (self._cfg.route,):
            try:
                await self._open(name, len(members))
            except ConfigError as problem:
                reasons.append(str(problem))
                continue
            log.info("weights travel by route %s%s", name, "".join(f"; not {reason}" for reason in reasons))
            self.route, self._members = name, members
            return
        await self._actors.arun(Actor.close_route)
        raise ConfigError("; ".join(reasons))

    async def _open(self, name: str, receivers: int) -> None:
        offer = await self._actors.arun(Actor.open_route, name, self._cfg, receivers)
        await self._target.attach(offer)
        await self._actors.arun(Actor.route_attached)

    async def _parcels(self) -> AsyncIterator[Parcel]:
        """The buckets in order. While the engine loads one, the actors fill the next."""
        coming = asyncio.ensure_future(self._actors.arun(Actor.next_bucket, True))
        try:
            while (parcel := await coming) is not None:
                coming = asyncio.ensure_future(self._actors.arun(Actor.next_bucket, False))
                yield parcel
        finally:
            if not coming.done():
                await asyncio.wait([coming])

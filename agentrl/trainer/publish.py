"""Publish weights, on the driver: the choice of route, and the stream of buckets from the actors to the engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

from agentrl.cluster.group import WorkerGroup
from agentrl.cluster.placement import has_gpus
from agentrl.config.schema import ClusterConfig, WeightsConfig
from agentrl.engines.weights.base import ROUTES, Bucket, MembersChangedError, WeightTarget, auto_routes
from agentrl.rollout.engine import Engine
from agentrl.trainer.actor import Actor
from agentrl.utils.errors import ConfigError, EngineError, WorkerDiedError, WorkerError
from agentrl.utils.spans import here, note, now

log = logging.getLogger(__name__)

ATTEMPTS = 3
AUTO = "auto"


def check_weights(weights: WeightsConfig, cluster: ClusterConfig, *, colocated: bool, lora: bool, sft: bool) -> None:
    """Raise ConfigError if `[weights]` does not fit the rest of the config."""
    name = weights.route
    traits = frozenset[str]() if name == AUTO else ROUTES.entry(name).traits
    if "cuda" in traits and not (has_gpus(cluster, "actor") and has_gpus(cluster, "rollout")):
        raise ConfigError(
            f'weights.route = "{name}" goes from GPU to GPU, and the actors or the engine have no GPU; use one of '
            f'{ROUTES.that_are("cuda", False)}, or "auto"'
        )
    if "own_gpus" in traits and not colocated:
        raise ConfigError(
            f'weights.route = "{name}" needs rollout.colocate: without it the engine has other GPUs than the actors; use "auto"'
        )
    if "other_gpus" in traits and colocated:
        raise ConfigError(
            f'weights.route = "{name}" does not work with rollout.colocate: the engine has the GPUs of the actors; use "auto"'
        )
    if weights.lora == "merged":
        return
    if not lora:
        raise ConfigError('weights.lora = "adapter" needs [model.lora]; without it, all weights are trained')
    if sft:
        raise ConfigError(
            'weights.lora = "adapter" does not work with [sft]: the adapter is merged into the warmed-up model, which therefore '
            'cannot serve as its base; use weights.lora = "merged"'
        )


def check_takes_weights(engine: type[Engine], name: str) -> None:
    """Raise ConfigError if engines of this class cannot be trained. `name`: the engine as the user named it, or the class."""
    if not issubclass(engine, WeightTarget):
        raise ConfigError(f"{name} cannot be trained: {engine.untrainable}")


class Publisher:
    """Publisher of the actors' weights to an engine. `route`: the route in use, None before the first publish."""

    def __init__(
        self, actors: WorkerGroup[Actor], engine: Engine, cfg: WeightsConfig, *, offload: bool = False, colocated: bool = False
    ) -> None:
        """`offload`: offload the actors after each publish. `colocated`: the engine uses the actors' devices, so their caching
        allocators are emptied for it. Raises ConfigError for an engine that cannot be trained."""
        # Workers have other working directories than the driver, so a relative path would name other folders there.
        folder = None if cfg.folder is None else str(Path(cfg.folder).absolute())
        self._actors, self._cfg, self._offload = actors, cfg.model_copy(update={"folder": folder}), offload
        self._colocated = colocated
        check_takes_weights(type(engine), type(engine).__name__)
        assert isinstance(engine, WeightTarget)
        self._target: WeightTarget = engine
        self._members: tuple[str, ...] = ()
        self.route: str | None = None

    async def send(self, version: int) -> None:
        """Pause the engine, replace its weights and resume it.

        Raises ConfigError if the configured route, or with "auto" every route, fails, EngineError if the engine refuses the
        weights."""
        await self._target.pause()
        try:
            if self._colocated:  # the actors' processes still cache the memory of the update's activations
                await self._actors.arun(Actor.free_cached)
            await self._target.wake("weights")
            if self._offload:
                await self._actors.arun(Actor.onload)
            await self._replace(version)
            if self._offload:  # before the engine allocates its cache in the same memory
                await self._actors.arun(Actor.offload)
            if self._colocated:
                await self._actors.arun(Actor.free_cached)
            await self._target.wake("cache")
        finally:
            # Also after a failure: a running engine refuses requests with a reason, a paused one makes episodes wait forever.
            await self._target.resume()

    async def prove(self) -> None:
        """Open the route of `send` before training, so that a broken one fails early. Raises as `send`."""
        if self._cfg.lora != "adapter":
            await self._connect()

    async def sleep(self) -> None:
        """Pause the engine and free its memory until the next `send`; it must have no running requests."""
        await self._target.pause()
        await self._target.sleep()

    async def _replace(self, version: int) -> None:
        if self._cfg.lora == "adapter":
            await self._target.adapt(version, await self._actors.arun(Actor.export_adapter))
            return
        for attempt in range(ATTEMPTS):
            try:
                await self._connect()
                async with aclosing(self._buckets()) as buckets:  # an engine may stop reading
                    await self._target.receive(version, buckets)
                return
            except WorkerDiedError:
                raise
            except (EngineError, WorkerError) as problem:
                # An engine process died during the publish and broke a broadcast, or it was replaced and the new one has no
                # receiver yet: send the weights again. Any other error comes from the weights or the route.
                changed = isinstance(problem, MembersChangedError) or self._target.members() != self._members
                if not changed or attempt == ATTEMPTS - 1:
                    raise
                log.warning("the engine's processes changed during a publish, which is sent again: %s", problem)

    async def close(self) -> None:
        """Close the route; the actors must still be running."""
        if self.route is not None:
            self.route = None
            await self._actors.arun(Actor.close_route)

    async def _connect(self) -> None:
        """Open a route, unless one is open to the engine's current processes."""
        members = self._target.members()
        if self.route is not None and members == self._members:
            return
        self.route = None
        reasons: list[str] = []
        for name in auto_routes() if self._cfg.route == AUTO else (self._cfg.route,):
            try:
                offer = await self._actors.arun(Actor.open_route, name, self._cfg, len(members), self._target.loads_saved)
                await self._target.attach(offer)
                await self._actors.arun(Actor.route_attached)
            except ConfigError as problem:
                reasons.append(str(problem))
                continue
            log.info("weights are sent by route %s%s", name, "".join(f"; not {reason}" for reason in reasons))
            self.route, self._members = name, members
            return
        await self._actors.arun(Actor.close_route)
        raise ConfigError("; ".join(reasons))

    async def _buckets(self) -> AsyncGenerator[Bucket, None]:
        """Yield the buckets in order. While the engine loads one, the actors fill the next."""
        place, since, number = here(), now(), 0
        coming = asyncio.ensure_future(self._actors.arun(Actor.next_bucket, True))
        try:
            while (bucket := await coming) is not None:
                note("bucket", f"fill bucket {number}", since, track="buckets: actors", place=place)
                since = now()
                coming = asyncio.ensure_future(self._actors.arun(Actor.next_bucket, False))
                yield bucket
                # The engine has loaded it; the actors may still be filling the next one.
                note("bucket", f"load bucket {number}", since, track="buckets: engine", place=place)
                number += 1
        finally:
            # If the engine stops reading, the actors are in a call with collectives, which must end before another call.
            if not coming.done():
                await asyncio.wait([coming])

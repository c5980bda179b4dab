"""Services that answer reward leaves from outside of an episode, such as judges: engines, start and end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from agentrl.config import ModelConfig, TrainConfig
from agentrl.reward.leaf import SERVICES, Client, Services

if TYPE_CHECKING:
    from agentrl.cluster.placement import Pools
    from agentrl.reward import Scorer
    from agentrl.rollout.engine import EngineMaker, Processes


@dataclass(frozen=True, slots=True)
class SideEngine:
    """Engine of a service, which runs next to the policy's engine and holds its memory until the end.

    `name`: of its reserved places; `role`: its service's name in `cluster.roles`; `key`: of its config section; `engine`: its
    name in `ENGINES`; `make`: returns its maker for a context length, or None if the length is not needed; `lower`: key in its
    section that makes its cache smaller."""

    name: str
    role: str
    key: str
    engine: str
    model: ModelConfig
    make: Callable[[int | None], EngineMaker]
    lower: str


QUESTION = {"role": "user", "content": "Answer with the word: ready"}
"""Test question for each API model before a run."""


@dataclass(frozen=True, slots=True)
class ApiModel:
    """API model of a service: the config key that names it, its address `base` and that key, and its request without question.
    `args`: config key of the `given` arguments; `set_by`: parameter of the request -> config key that sets it."""

    key: str
    base_key: str
    base: str | None
    request: Mapping[str, Any]
    args: str = "api.args"
    given: Collection[str] = ()
    set_by: Mapping[str, str] = field(default_factory=dict)

    @property
    def model(self) -> str:
        """Model name in the form of litellm."""
        return str(self.request["model"])


class Service(Client):
    """Answers the reward leaves that name it (`Leaf.asks`). Registered in `agentrl.reward.leaf.SERVICES` and made with the
    config's `reward`. Outside of runs it answers without being started. A check in `RUN_CHECKS` under its name refuses configs
    that cannot work."""

    @classmethod
    def engines(cls, run: RunServices) -> Sequence[SideEngine]:
        """Return the engines that the run's config gives this service."""
        return ()

    @classmethod
    def api_models(cls, run: RunServices, scorers: Mapping[str, Scorer]) -> Iterable[ApiModel]:
        """Return the API models that it asks for these scorers; each is tested with `QUESTION` before a run."""
        return ()

    async def start(self, run: RunServices, scorers: Sequence[Scorer]) -> None:
        """Start the engines that the leaves of `scorers` need. Raises UserError or EngineError; `close` ends started ones."""

    async def close(self) -> None:
        """Close the engines; idempotent."""

    async def forget(self) -> None:
        """Drop cached answers that a run resumed from here would not have."""

    def metrics(self) -> dict[str, float | None]:
        """Return metrics since the last call."""
        return {}


class RunServices(Services):
    """Services of a run's reward leaves: their engines, places, start and end."""

    def __init__(self, config: TrainConfig, pools: Pools | None = None) -> None:
        super().__init__(config.reward)
        self.config, self.pools = config, pools

    def kinds(self, scorers: Iterable[Scorer] = ()) -> list[type[Service]]:
        """List the services that the config sets (`reward.NAME`) or that leaves of `scorers` ask."""
        names = self.config.reward.model_fields_set.union(*(scorer.asks for scorer in scorers))
        return [cast("type[Service]", SERVICES.entry(name).make) for name in sorted(names) if name in SERVICES]

    def engines(self) -> list[SideEngine]:
        """List the engines of all services."""
        return [engine for service in self.kinds() for engine in service.engines(self)]

    def processes(self) -> list[tuple[SideEngine, Processes]]:
        """List the service engines that have their own processes, with these."""
        found = [(engine, engine.make(None).processes()) for engine in self.engines()]
        return [(engine, processes) for engine, processes in found if processes is not None]

    def ray_options(self, name: str) -> Sequence[Mapping[str, Any]]:
        """Return Ray options per process of a named engine, for its reserved places; empty if Ray chooses them."""
        pools, places = self.pools, {engine.name: (engine.role, processes.count) for engine, processes in self.processes()}
        if pools is None or name not in places:
            return ()
        role, count = places[name]
        if role not in pools:
            return pools.ray_options(name) if name in pools else ()
        # The engines of a role share its pool, in order.
        first = sum(size for other, size in list(places.values())[: list(places).index(name)] if other == role)
        return pools.ray_options(role)[first : first + count]

    async def start(self, scorers: Sequence[Scorer]) -> None:
        for service in self.values():
            await service.start(self, scorers)

    async def close(self) -> None:
        """Close the services, each even if another fails."""
        async with AsyncExitStack() as closing:
            for service in self.values():
                closing.push_async_callback(service.close)

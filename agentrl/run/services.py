"""Services that answer reward leaves from outside of an episode, as judges do: their engines, start and end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
    """An engine of a service, which runs next to the policy's and holds its memory until the end.

    `name`: of its places; `role`: in `cluster.roles`, the name of its service; `key`: of its section; `engine`: its name in
    `ENGINES`; `make`: its maker, for as many positions as the model takes if they are read; `lower`: the key of its section with
    which its cache is smaller."""

    name: str
    role: str
    key: str
    engine: str
    model: ModelConfig
    make: Callable[[int | None], EngineMaker]
    lower: str


QUESTION = {"role": "user", "content": "Answer with the word: ready"}
"""Asked of each model behind an API before a run."""


@dataclass(frozen=True, slots=True)
class ApiModel:
    """A model behind an API: the config key that names it, that of its address, `base`, and the request that the run will make,
    but for what it asks. `args`: the key of the arguments that are `given`; `set_by`: that of other parameters of the request."""

    key: str
    base_key: str
    base: str | None
    request: Mapping[str, Any]
    args: str = "api.args"
    given: Collection[str] = ()
    set_by: Mapping[str, str] = field(default_factory=dict)

    @property
    def model(self) -> str:
        """Its name in litellm's form."""
        return str(self.request["model"])


class Service(Client):
    """Answers the leaves of a run that name it (`Leaf.asks`). Registered in `agentrl.reward.leaf.SERVICES`, it is made with the
    config's `reward`; outside of runs it is only asked, and not started. A check in `RUN_CHECKS` under its name refuses what
    cannot work."""

    @classmethod
    def engines(cls, run: RunServices) -> Sequence[SideEngine]:
        """The engines that the run's config gives it."""
        return ()

    @classmethod
    def api_models(cls, run: RunServices, scorers: Mapping[str, Scorer]) -> Iterable[ApiModel]:
        """The models behind an API that it asks for these scorers, with `QUESTION`; each is asked for a word before a run."""
        return ()

    async def start(self, run: RunServices, scorers: Sequence[Scorer]) -> None:
        """Start the engines that the leaves of `scorers` ask. Raises UserError or EngineError; `close` ends the started ones."""

    async def close(self) -> None:
        """End the engines; idempotent."""

    async def forget(self) -> None:
        """Drop answers that a run resumed from this moment would not know."""

    def metrics(self) -> dict[str, float]:
        """Figures since the last call."""
        return {}


class RunServices(Services):
    """The services of a run's leaves: their engines and the places of these, start and end."""

    def __init__(self, config: TrainConfig, pools: Pools | None = None) -> None:
        super().__init__(config.reward)
        self.config, self.pools = config, pools

    def kinds(self, scorers: Iterable[Scorer] = ()) -> list[type[Service]]:
        """The services that the config has keys for (`reward.NAME`), or that leaves ask."""
        names = self.config.reward.model_fields_set.union(*(scorer.asks for scorer in scorers))
        return [cast("type[Service]", SERVICES.entry(name).make) for name in sorted(names) if name in SERVICES]

    def engines(self) -> list[SideEngine]:
        """The engines next to the policy's."""
        return [engine for service in self.kinds() for engine in service.engines(self)]

    def processes(self) -> list[tuple[SideEngine, Processes]]:
        """Those that have processes of their own, with these."""
        found = [(engine, engine.make(None).processes()) for engine in self.engines()]
        return [(engine, own) for engine, own in found if own is not None]

    def ray_options(self, name: str) -> Sequence[Mapping[str, Any]]:
        """Ray's options for each process of the engine of that name: those of its places; none if Ray finds them."""
        pools, own = self.pools, {engine.name: (engine.role, processes.count) for engine, processes in self.processes()}
        if pools is None or name not in own:
            return ()
        role, count = own[name]
        if role not in pools:
            return pools.ray_options(name) if name in pools else ()
        # The engines of a role share its pool, in their order.
        first = sum(size for other, size in list(own.values())[: list(own).index(name)] if other == role)
        return pools.ray_options(role)[first : first + count]

    async def start(self, scorers: Sequence[Scorer]) -> None:
        for service in self.values():
            await service.start(self, scorers)

    async def close(self) -> None:
        for service in self.values():
            await service.close()

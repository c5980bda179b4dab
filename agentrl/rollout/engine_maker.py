"""What a run must know about an engine before it exists: the contract, and the registry of engines by name.

    @ENGINES.register("mine")
    class MineMaker(EngineMaker):
        @classmethod
        def engine(cls):
            return MineEngine

        def make(self, model, context, ray_options=()):
            return MineEngine(model, ...)

An engine needs one file in agentrl/backends, or in `plugins/` of a shelf: with the maker, and the engine itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.config import TrainConfig
from agentrl.registry import Registry
from agentrl.rollout.engine import Engine

PROCESS_MIB = 700
"""Memory of a process that has imported torch and Ray."""


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes of an engine outside the driver: how many, and what each needs.

    `gpus`, `mib`: GPUs and host memory of each. `count_key`, `gpus_key`: the config keys that set them; `lower`: keys
    (with their values if that helps) to lower if memory is short. `what`: one of the processes, in words.
    """

    count: int
    gpus: int
    mib: int
    count_key: str
    gpus_key: str
    lower: tuple[str, ...]
    what: str


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes that an engine takes on each of its devices; `lower`: the config key that makes the cache smaller, with its value."""

    weights: int
    cache: int
    lower: str = ""


class EngineMaker(ABC):
    """Made for one config. A subclass's keyword arguments are the config's `engine_args`; nothing heavy is loaded here."""

    on_gpus: Callable[[], bool] = staticmethod(lambda: False)
    """Asks the nodes that run its processes; given by who makes it for a run (run/engines)."""
    unused: Sequence[int] = ()
    """Ids of the model's vocabulary that its tokenizer has no token for, which must never be drawn; given likewise."""
    room: int | None = None
    """With the trait "fills": bytes of its GPU that the run's other roles leave to its weights and cache; given likewise. None:
    of host memory, or not counted."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config

    def cuda(self) -> bool:
        """Whether its processes run on GPUs."""
        return self.on_gpus()

    def threads(self) -> int | None:
        """That compute in each of its processes on a CPU; None: as many as the model's size is worth."""
        asked = self.config.model.threads
        return None if asked == "auto" else asked

    @classmethod
    @abstractmethod
    def engine(cls) -> type[Engine]:
        """The class that `make` returns, which says whether it can be trained. Its module is imported only here."""

    @classmethod
    def claims(cls, model: str | None) -> bool:
        """Whether a model of this name is always run by this engine, whatever the config's `engine` says."""
        return False

    @classmethod
    def suits(cls, gpus: float) -> int:
        """How well it suits a run that has that many GPUs for it; `engine = "auto"` picks the engine with the highest. 0: only
        if it is named."""
        return 0

    @classmethod
    def check_installed(cls) -> None:
        """Raises DependencyError if a package is missing."""
        return None

    def check(self) -> None:  # noqa: B027 - most engines can do all that a config may ask
        """Raises a UserError for what the engine cannot do, before anything is started."""

    def processes(self) -> Processes | None:
        """The processes that `cluster.roles.rollout` places; None for an engine in the driver."""
        return None

    def seats(self) -> int:
        """How many of the run's rollout workers live in its processes: all of them, or none."""
        return 0

    def memory(self, weights: int, token: int, device: int | None) -> EngineMemory | None:
        """What it takes of each device, of `device` bytes (None: host memory): for a model whose weights take `weights` bytes in
        the type of the computation, and a token in the cache `token`. None for an engine that does not say."""
        return None

    def context(self, positions: int) -> int:
        """Tokens that one prompt and its turn may take together, with a model of that many positions."""
        return positions

    def heads(self) -> tuple[int, ...] | None:
        """Attention head sizes that it can compute on the nodes that run it; None means all."""
        return None

    @abstractmethod
    def make(self, model: str, positions: int, ray_options: Sequence[Mapping[str, Any]] = ()) -> Engine:
        """The engine, not started, for a folder or hub name. `ray_options`: of each of its processes, if a pool places them."""

    def make_with(self, transcript: Any) -> Engine:
        """With the trait "messages": the engine over a Transcript, which its renderer reads too."""
        raise NotImplementedError(f"{type(self).__name__} does not make an engine whose ids are messages")


ENGINES: Registry[type[EngineMaker]] = Registry(
    "engine",
    "ENGINES",
    "agentrl.backends",
    given=1,
    needs={"ray": "Ray, whatever cluster.backend says"},
    traits={
        "sleeps": "can free its memory while the actors update",
        "keeps": "keeps its weights in host memory while it sleeps, if only adapters are published",
        "transformers": "computes with transformers' own model classes, so its models must be such as they load",
        "judges": "can be a judge's, beside the engine of the policy (`reward.judge.engines`)",
        "experts": "tells which experts of a mixture-of-experts model a token went to, if the sampling asks for it",
        "vision": "samples from a model that takes images, given them with the prompt (agentrl.images.PromptIds)",
        "fills": "its cache takes what the run's other roles leave of its device, unless `engine_args.kv_cache_mib` says",
        "messages": "its ids are numbers of messages in a Transcript (backends/api), and no tokenizer is loaded: `make_with`",
    },
)

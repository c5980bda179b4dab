"""The engine protocol: token ids in; token ids, log probabilities and weight versions out.

The random streams of requests, the protocol, the registry of engines with what a run must know of
one before it exists, and the choice of a replica for a request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

import numpy.typing as npt

from agentrl.config import TrainConfig
from agentrl.utils.registry import Registry

if TYPE_CHECKING:
    from agentrl.env import ToolEnv

# The protocol

Finish = Literal["stop", "length", "abort", "stop_string"]
"""Why a turn ended: its last id is a stop token; its tokens were used up; `abort`; its text holds a stop string."""

Told = Callable[[Sequence[int], Sequence[float]], None]
"""Gets the ids and logprobs of tokens of a turn as they are sampled; see `Engine.stream`."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters for sampling one turn. With a `seed`, a request's random stream does not depend on what else is running.

    `experts_from`: tell which experts each token from this position on went to; only engines with the trait "experts" can.
    `stop`: texts that end the turn with the token that completes one of them, which is its last id. `grammar`: tokens are drawn
    only where the turn's text still fits it (a grammar of llguidance), and stop tokens only where it may end. Both need an
    engine that knows the text of its tokens (`Engine.refusal`)."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    experts_from: int | None = None
    stop: tuple[str, ...] = ()
    grammar: str | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """A provider's counts for one call: its own tokens, and US dollars (None if unknown)."""

    prompt_tokens: int
    sampled_tokens: int
    usd: float | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """Sampled turn: columns of equal length. `logprobs` are log softmax(z / T) of the sampled tokens over the whole vocabulary:
    the policy at the request's temperature (at T = 0, log softmax(z)), which a trainer can compute too. `top_p`, `top_k` and
    a grammar only restrict which tokens may be drawn. `versions`: the weights that sampled each token. If a stop token ended
    the turn, it is the last id.

    `usage`: only from engines whose ids are not tokens (API models). `experts`: if the sampling asks for them, [tokens,
    routers, k] uint8 or int16 for the tokens of prompt and answer from `experts_from` on: those that the engine computed, as
    it computed them first, so all but the last one, or fewer if the request was cut short."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish: Finish
    usage: Usage | None = None
    experts: npt.NDArray[Any] | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since start, for metrics and benchmarks; `running`, `waiting` and `kv_used` are of this moment. `kv_used`: share
    of the room for keys and values that is taken, None if the engine does not know."""

    running: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    version: int = 0
    kv_used: float | None = None
    extra: dict[str, float] = field(default_factory=dict)


class EngineConnection(ABC):
    """Connection by which another process samples from a started engine; it can be pickled."""

    @abstractmethod
    def connect(self) -> Engine:
        """An engine of that process, not started: it generates, aborts, reports progress and counts its own requests. Weights are
        brought to the one that it is connected to, and closing it closes no more than the connection."""


class Engine(ABC):
    """An inference engine that serves one policy. One that can be trained is a `WeightTarget` too.

    `untrainable`: for any other, why it cannot be trained, for example "an API model takes no weights"; shown to users.
    """

    untrainable: ClassVar[str] = "this engine takes no weights"

    @abstractmethod
    async def start(self) -> None:
        """Load the model and get ready. Raises EngineError or a UserError with the cause."""

    def starting(self) -> str:
        """Stage of `start`, in a few words for the display; "" if it does not say. May be called from any thread."""
        return ""

    @abstractmethod
    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_key: str) -> Generation:
        """Sample one continuation of `token_ids`.

        `request_key` names the episode: it routes the turns of one episode to one prefix cache and
        addresses `abort`. Raises EngineError if the engine failed; cancelling the awaiting task
        frees the request's resources.
        """

    async def stream(self, token_ids: Sequence[int], sampling: Sampling, request_key: str, told: Told) -> Generation:
        """As `generate`; `told` is called with the turn's tokens as they are sampled, in order, each once, before the
        return. An engine that does not override this tells them all at the end."""
        generation = await self.generate(token_ids, sampling, request_key)
        told(generation.token_ids, generation.logprobs)
        return generation

    def refusal(self, sampling: Sampling) -> str:
        """Why this engine cannot sample with a `stop` or a `grammar`, beginning with the field's name; "" if it can. A caller
        that sets one of them asks here first."""
        for name in ("stop", "grammar"):
            if getattr(sampling, name):
                return f"{name}: {type(self).__name__} does not know the text of its tokens"
        return ""

    def meet(self, env: ToolEnv, request_key: str) -> ToolEnv:
        """The environment of an episode that is about to be played with this engine, or one around it: for an engine that answers
        by what it knows of the episode (a script)."""
        return env

    def progress(self, request_key: str) -> int | None:
        """The tokens that the episode's running request has sampled so far; None if none is running, and from an engine that does
        not know."""
        return None

    def connection(self) -> EngineConnection | None:
        """Connection of another process to this engine, without the one that has it; None: only through that one."""
        return None

    def seats(self, workers: int, recipe: Callable[[EngineConnection | None], Any], host: Callable[[], str]) -> Any:
        """Places for `workers` rollout workers (`workers.worker_pool.Seats`) in this engine's processes; None: they get processes
        of their own. `recipe`: what workers are made from, by the connection to the engine that they have there;
        `host`: this process's address as other processes of the run reach it."""
        return None

    async def forget(self) -> None:
        """Drop all caches, if the way in which a token was computed affects the last digits of later ones. An engine whose
        scheduling changes those digits anyway need not do anything."""
        return None

    @abstractmethod
    async def abort(self, request_key: str) -> None:
        """End the running requests of an episode; their `generate` returns the partial output."""

    @abstractmethod
    async def stats(self) -> EngineStats:
        """Counters of this engine."""

    @abstractmethod
    async def close(self) -> None:
        """Free everything; idempotent."""


class StreamingEngine(Engine):
    """Base of engines that report tokens to a listener as they are sampled."""

    @abstractmethod
    async def stream(self, token_ids: Sequence[int], sampling: Sampling, request_key: str, told: Told | None) -> Generation: ...

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_key: str) -> Generation:
        return await self.stream(token_ids, sampling, request_key, None)


# Makers of engines, by name

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

    cuda: Callable[[], bool] = staticmethod(lambda: False)
    """Asks the nodes that run its processes if they run on GPUs; given by who makes it for a run (run/engines)."""
    unused: Sequence[int] = ()
    """Ids of the model's vocabulary that its tokenizer has no token for, which must never be drawn; given likewise."""
    room: int | None = None
    """With the trait "fills": bytes of its GPU that the run's other roles leave to its weights and cache; given likewise. None:
    of host memory, or not counted."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config

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
        """Return True if a model of this name is always run by this engine, whatever the config's `engine` says."""
        return False

    @classmethod
    def suits(cls, gpus: float) -> int:
        """Suitability for a run that has that many GPUs for it; `engine = "auto"` picks the engine with the highest. 0: only if
        it is named."""
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
        """Number of the run's rollout workers that live in its processes: all of them, or none."""
        return 0

    def memory(self, weights: int, token: int, device: int | None) -> EngineMemory | None:
        """Memory that it takes of each device, of `device` bytes (None: host memory): for a model whose weights take `weights`
        bytes in the type of the computation, and a token in the cache `token`. None for an engine that does not say."""
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
    "agentrl.engines",
    given=1,
    needs={"ray": "Ray, whatever cluster.backend says"},
    traits={
        "sleeps": "can free its memory while the actors update",
        "keeps": "keeps its weights in host memory while it sleeps, if only adapters are published",
        "transformers": "computes with transformers' own model classes, so its models must be such as they load",
        "judges": "can be a judge's, next to the engine of the policy (`reward.judge.engines`)",
        "experts": "tells which experts of a mixture-of-experts model a token went to, if the sampling asks for it",
        "vision": "samples from a model that takes images, given them with the prompt (agentrl.data.token_ledger.PromptIds)",
        "fills": "its cache takes what the run's other roles leave of its device, unless `engine_args.kv_cache_mib` says",
        "messages": "its ids are numbers of messages in a Transcript (backends/api), and no tokenizer is loaded: `make_with`",
    },
)


# Random streams by name: a stream depends only on its purpose, never on what else is running.


def derive(*parts: int | str) -> int:
    """A 63-bit seed from a path such as (run_seed, "train", group, member, turn).

    Unlike `hash()` it is the same in every process, and unlike a sum of the parts it does not give neighboring streams
    the same seed.
    """
    return int.from_bytes(blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest(), "big") >> 1


# Which of an engine's replicas a request goes to: there where its prompt is cached, as long as the load allows.
#
# Load is counted in tokens that are still to be computed: those of prompts that no cache has, and those that are expected to be
# sampled. A replica that has n tokens of a request's prompt cached, and d tokens more to compute than the least loaded one, is
# chosen for
#
# a session under way, on its home     while  d <= MOVE n + the request's own tokens
# a new one, as a group's next member  while  d <= SHED n + SLACK (n / prompt) (tokens of the least loaded)
#
# and else the least loaded one. So a busy replica sheds new groups first, and its sessions only if waiting for it would take far
# longer than to compute their prefix again. Requests have seeds of their own: no choice here changes what is sampled.

BLOCK = 64
"""Tokens of a prompt that get one name; the rest of a prompt is not looked for in caches."""
MOVE, SHED, SLACK = 4.0, 2.0, 0.25
_KEYS_REMEMBERED = 65536
_BLOCKS_REMEMBERED = 65536
_EACH = 0.05
"""Weight of one more request in the mean number of sampled tokens."""

Host = TypeVar("Host", bound=Hashable)


def block_names(token_ids: Sequence[int]) -> list[Hashable]:
    """A name for each whole block of BLOCK tokens; equal names: equal tokens up to the block's end."""
    names: list[Hashable] = []
    for end in range(BLOCK, len(token_ids) + 1, BLOCK):
        names.append(hash((names[-1] if names else None, *token_ids[end - BLOCK : end])))
    return names


@dataclass(frozen=True, slots=True)
class Need:
    """Demands of a request. `key`: its session. `prompt`: tokens; `expected`: tokens that it will probably sample. `names`:
    what its prompt begins with, each of `run` tokens, asked for a new session only."""

    key: str
    prompt: int
    expected: float
    names: Callable[[], Sequence[Hashable]]
    run: int = BLOCK


@dataclass(eq=False, slots=True)
class Placed(Generic[Host]):
    """A request on its way: the host that it was given to, and what it still takes of it, in tokens."""

    host: Host
    need: Need
    left: float


@dataclass(slots=True)
class _Load:
    queued: float = 0.0
    cached: OrderedDict[Hashable, None] = field(default_factory=OrderedDict)


@dataclass(slots=True)
class _Home(Generic[Host]):
    host: Host
    tokens: int
    """Of the session that are cached there."""


class RequestRouter(Generic[Host]):
    """The loads of hosts, the caches that they probably have, and the sessions that each has."""

    def __init__(self, remembered: int = _BLOCKS_REMEMBERED) -> None:
        """`remembered`: names that a host's cache is thought to have at most."""
        self._remembered = remembered
        self._loads: dict[Host, _Load] = {}
        self._homes: OrderedDict[str, _Home[Host]] = OrderedDict()
        self._mean: float | None = None

    def leave(self, host: Host) -> None:
        """It is gone, with its caches; its sessions get another one with their next request."""
        self._loads.pop(host, None)
        for key in [key for key, home in self._homes.items() if home.host == host]:
            del self._homes[key]

    def forget(self) -> None:
        """All caches were dropped, as they are when weights change."""
        for load in self._loads.values():
            load.cached.clear()
        for home in self._homes.values():
            home.tokens = 0

    def forecast(self, most: int) -> float:
        """Tokens that a request of at most `most` will probably sample: what requests did of late."""
        return float(most) if self._mean is None else min(self._mean, float(most))

    def begin(self, need: Need, able: Collection[Host]) -> Placed[Host]:
        """Choose one of the hosts that can take the request, at least one, and count it as its load until `end`."""
        for host in able:
            self._loads.setdefault(host, _Load())
        home = self._homes.pop(need.key, None)
        stays = False
        if home is not None and home.host in able:
            home.tokens = min(home.tokens, need.prompt)
            least = min(self._loads[host].queued for host in able)
            more_to_wait = self._loads[home.host].queued - least
            stays = more_to_wait <= MOVE * home.tokens + need.prompt + need.expected
        if home is None or not stays:
            others = [host for host in able if home is None or host != home.host]
            home = self._new(need, others or list(able))
        placed = Placed(home.host, need, need.prompt - home.tokens + need.expected)
        self._loads[home.host].queued += placed.left
        # Sessions never sign off; as an LRU map (popped above, re-added here) it forgets the ones that ended long ago.
        self._homes[need.key] = home
        if len(self._homes) > _KEYS_REMEMBERED:
            self._homes.popitem(last=False)
        return placed

    def note_sampled(self, placed: Placed[Host], sampled: int) -> None:
        """The request has sampled this many tokens, so its prompt is computed."""
        if sampled and placed.host in self._loads:
            left = max(placed.need.expected - sampled, 0.0)
            self._loads[placed.host].queued -= placed.left - left
            placed.left = left

    def end(self, placed: Placed[Host], sampled: int | None) -> None:
        """The request is over, having sampled this many tokens; None if it failed. Its prompt and they are cached."""
        load = self._loads.get(placed.host)
        if load is None:
            return
        load.queued = max(load.queued - placed.left, 0.0)
        placed.left = 0.0
        if sampled is None:
            return
        self._mean = float(sampled) if self._mean is None else self._mean + _EACH * (sampled - self._mean)
        home = self._homes.get(placed.need.key)
        if home is not None and home.host == placed.host:
            home.tokens = placed.need.prompt + sampled

    def over(self, key: str) -> None:
        """The session will have no more requests."""
        self._homes.pop(key, None)

    def _new(self, need: Need, able: Sequence[Host]) -> _Home[Host]:
        """A home for a session that has none."""
        names = need.names()
        cached = {
            host: need.run * next((at for at, name in enumerate(names) if name not in self._loads[host].cached), len(names))
            for host in able
        }
        queued = {host: self._loads[host].queued for host in able}
        longest = min(able, key=lambda host: (-cached[host], queued[host]))
        least = min(able, key=lambda host: queued[host] - cached[host])
        saved = cached[longest] - cached[least]
        spare = SHED * saved + SLACK * saved / max(need.prompt, 1) * queued[least]
        host = longest if queued[longest] - queued[least] <= spare else least
        # Noted before they are cached: the other members of a group arrive at the same moment.
        cache = self._loads[host].cached
        for name in names:
            cache[name] = None
            cache.move_to_end(name)
        while len(cache) > self._remembered:
            cache.popitem(last=False)
        return _Home(host, min(cached[host], need.prompt))

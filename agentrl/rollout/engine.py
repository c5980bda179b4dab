"""Engine interface: token ids in; token ids, log probabilities and weight versions out.

The interface, the registry of engine makers (facts about an engine before it exists), the random streams of requests, and the
router that chooses a replica for a request."""

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

# Interface

Finish = Literal["stop", "length", "abort", "stop_string"]
"""Why a turn ended: at a stop token, its last id; at `max_tokens`; by `abort`; at a stop string in its text."""

OnTokens = Callable[[Sequence[int], Sequence[float]], None]
"""Callback that receives the ids and logprobs of a turn's tokens as they are sampled; see `Engine.stream`."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of one turn. With a `seed`, a request's random stream does not depend on concurrent requests.

    `experts_from`: return the experts that computed each token from this position on (engines with the trait "experts" only).
    `stop`: stop strings; the token that completes one is the turn's last id. `grammar`: llguidance grammar that constrains the
    turn's text; stop tokens are allowed only where it may end. Both need an engine that knows the text of its tokens
    (see `Engine.refusal`)."""

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
    """Usage that a provider reports for one call, in its own tokens and in US dollars (None if unknown)."""

    prompt_tokens: int
    sampled_tokens: int
    usd: float | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """Sampled turn: columns of equal length. `logprobs`: log softmax(z / T) of the sampled tokens over the whole vocabulary, the
    policy at the request's temperature (log softmax(z) at T = 0), which a trainer can recompute. `top_p`, `top_k` and a grammar
    only restrict which tokens may be drawn. `versions`: weight version that sampled each token. A stop token that ended the turn
    is the last id.

    `usage`: only from engines whose ids are not tokens (API models). `experts`: if requested, [tokens, routers, k] uint8 or
    int16 for the tokens of prompt and answer from `experts_from` on, as first computed. The last token is never computed, so
    it is missing; more are if the request was cut short."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish: Finish
    usage: Usage | None = None
    experts: npt.NDArray[Any] | None = None

    def counts(self, prompt: int) -> Usage:
        """Return the provider's usage, or else the counts of a prompt of `prompt` ids and its answer."""
        return self.usage or Usage(prompt, len(self.token_ids))


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the start; `running`, `waiting` and `kv_used` are current values. `kv_used`: share (0..1) of the KV cache in
    use, None if unknown. `extra`: further metrics of the engine."""

    running: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    version: int = 0
    kv_used: float | None = None
    extra: dict[str, float] = field(default_factory=dict)


class EngineConnection(ABC):
    """Picklable connection with which another process samples from a started engine."""

    @abstractmethod
    def connect(self) -> Engine:
        """Return an engine for this process, not started: it generates, aborts, reports progress and counts its own requests.
        It receives no weights (the connected engine does), and closing it only closes the connection."""


class Engine(ABC):
    """Inference engine that serves one policy. A trainable one is also a `WeightTarget`.

    `untrainable`: reason shown to users why another one cannot be trained, for example "an API model takes no weights".
    """

    untrainable: ClassVar[str] = "this engine takes no weights"

    @abstractmethod
    async def start(self) -> None:
        """Load the model. Raises EngineError or a UserError with the cause."""

    def starting(self) -> str:
        """Return the current stage of `start` for the display, or "". May be called from any thread."""
        return ""

    @abstractmethod
    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_key: str) -> Generation:
        """Sample one continuation of `token_ids`.

        `request_key` identifies the episode: it routes the episode's turns to one prefix cache and addresses `abort`.
        Raises EngineError if the engine failed; cancelling the awaiting task frees the request's resources.
        """

    async def stream(self, token_ids: Sequence[int], sampling: Sampling, request_key: str, emit: OnTokens) -> Generation:
        """Sample like `generate`, and pass the tokens to the callback as they are sampled: in order, once, before the return.
        By default all tokens are passed at the end."""
        generation = await self.generate(token_ids, sampling, request_key)
        emit(generation.token_ids, generation.logprobs)
        return generation

    def refusal(self, sampling: Sampling) -> str:
        """Return why this engine cannot sample with the given `stop` or `grammar`, opened by the field's name, or "". Callers
        that set one of them must check first."""
        for name in ("stop", "grammar"):
            if getattr(sampling, name):
                return f"{name}: {type(self).__name__} does not know the text of its tokens"
        return ""

    def meet(self, env: ToolEnv, request_key: str) -> ToolEnv:
        """Return the environment for an episode about to be played: `env` or a wrapper of it, for an engine that must know the
        episode (a scripted one)."""
        return env

    def progress(self, request_key: str) -> int | None:
        """Return the number of tokens sampled so far by the episode's running request; None without one, or if unknown."""
        return None

    def connection(self) -> EngineConnection | None:
        """Return a direct connection for other processes, or None if requests must go through the driver."""
        return None

    def seats(self, workers: int, recipe: Callable[[EngineConnection | None], Any], host: Callable[[], str]) -> Any:
        """Return the `workers.worker_pool.WorkerProcesses` of `workers` rollout workers inside of this engine's processes, or
        None if they get separate ones. `recipe` makes the workers' recipe from their connection to the engine; `host` returns
        the driver's address as seen by other processes of the run."""
        return None

    async def forget(self) -> None:
        """Drop all caches, if cached values change the last digits of later tokens. An engine whose scheduling changes those
        digits anyway need not do anything."""
        return None

    @abstractmethod
    async def abort(self, request_key: str) -> None:
        """End the running requests of an episode; their `generate` returns the partial output."""

    @abstractmethod
    async def stats(self) -> EngineStats:
        """Return the counters of this engine."""

    @abstractmethod
    async def close(self) -> None:
        """Free all resources; idempotent."""


class StreamingEngine(Engine):
    """Base class of engines that pass tokens to a callback as they are sampled."""

    @abstractmethod
    async def stream(
        self, token_ids: Sequence[int], sampling: Sampling, request_key: str, emit: OnTokens | None
    ) -> Generation: ...

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_key: str) -> Generation:
        return await self.stream(token_ids, sampling, request_key, None)


# Makers of engines, by name

PROCESS_MIB = 700
"""Host memory of a process that has imported torch and Ray, in MiB."""


@dataclass(frozen=True, slots=True)
class Processes:
    """Processes of an engine outside of the driver, and the resources that each needs.

    `gpus`, `mib`: GPUs and MiB of host memory per process. `count_key`, `gpus_key`: config keys that set `count` and `gpus`;
    `lower`: keys (perhaps with values) to lower if memory is short. `what`: name of such a process, for messages.
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
    """Bytes that an engine takes on each device. `lower`: config key, with a value, that makes the cache smaller."""

    weights: int
    cache: int
    lower: str = ""


class EngineMaker(ABC):
    """Factory of an engine for one config. A subclass's keyword arguments are the config's `engine_args`; imports stay light."""

    cuda: Callable[[], bool] = staticmethod(lambda: False)
    """Returns True if the nodes of its processes have GPUs; set by `run/engine_choice`."""
    unused: Sequence[int] = ()
    """Ids of the model's vocabulary without a token in the tokenizer, which must never be drawn; set by `run/engine_choice`."""
    room: int | None = None
    """With the trait "fills": bytes of its GPU that the run's other roles leave for weights and cache; set by
    `run/engine_choice`. None: in host memory, or unknown."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config

    def threads(self) -> int | None:
        """Return the compute threads per process on a CPU; None: chosen by the model's size."""
        asked = self.config.model.threads
        return None if asked == "auto" else asked

    @classmethod
    @abstractmethod
    def engine(cls) -> type[Engine]:
        """Return the class of `make`'s engine, which shows whether it is trainable. Imports its module only here."""

    @classmethod
    def claims(cls, model: str | None) -> bool:
        """Return True if this engine always serves models of this name, regardless of the config's `engine`."""
        return False

    @classmethod
    def suits(cls, gpus: float) -> int:
        """Return the suitability for a run with this many GPUs for the engine; `engine = "auto"` picks the highest. 0: only when
        named."""
        return 0

    @classmethod
    def check_installed(cls) -> None:
        """Check the engine's packages. Raises DependencyError if one is missing."""
        return None

    def check(self) -> None:  # noqa: B027 - most engines can do all that a config may ask
        """Check the config before anything is started. Raises a UserError for an unsupported setting."""

    def processes(self) -> Processes | None:
        """Return the processes that `cluster.roles.rollout` places; None for an engine in the driver."""
        return None

    def seats(self) -> int:
        """Return how many of the run's rollout workers live in the engine's processes: all of them, or 0."""
        return 0

    def memory(self, weights: int, token: int, device: int | None) -> EngineMemory | None:
        """Return the memory taken on each device of `device` bytes (None: host memory), or None if unknown. `weights`: bytes of
        the model's weights in the compute type; `token`: bytes per cached token."""
        return None

    def context(self, positions: int) -> int:
        """Return the maximum length of a prompt and its turn together, for a model with this many positions."""
        return positions

    def heads(self) -> tuple[int, ...] | None:
        """Return the attention head sizes supported on the engine's nodes; None means all."""
        return None

    @abstractmethod
    def make(self, model: str, positions: int, ray_options: Sequence[Mapping[str, Any]] = ()) -> Engine:
        """Make the engine, not started, for a model folder or hub name. `ray_options`: per process, if a pool places them."""

    def make_with(self, transcript: Any) -> Engine:
        """Make the engine over a Transcript that its renderer shares (trait "messages")."""
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
        "transformers": "computes with transformers' model classes, so it runs only models that they load",
        "judges": "can serve a judge next to the policy's engine (`reward.judge.engines`)",
        "experts": "returns the experts of a mixture-of-experts model that computed each token, on request",
        "vision": "serves models that take images, passed with the prompt (agentrl.data.token_ledger.PromptIds)",
        "fills": "its cache fills the device memory that the run's other roles leave, unless `engine_args.kv_cache_mib` is set",
        "messages": "its ids number the messages of a Transcript (engines/api_models); no tokenizer is loaded (`make_with`)",
    },
)


# Random streams by name: a stream depends only on its path, never on what else is running.


def derive(*parts: int | str) -> int:
    """Derive a 63-bit seed from a path such as (run_seed, "train", group, member, turn).

    Unlike `hash()` it is equal in every process; unlike a sum of the parts it gives neighboring streams different seeds.
    """
    return int.from_bytes(blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest(), "big") >> 1


# Router: a request goes to the replica that has its prompt cached, as far as the load allows.
#
# Load is the number of tokens still to compute: uncached prompt tokens, and the expected number of sampled tokens. A replica that
# has n tokens of the request's prompt cached, and d more tokens to compute than the least loaded replica, is chosen
#
# for a running session, if it is the session's home      while  d <= MOVE n + the request's tokens
# for a new session (such as a group's next member)       while  d <= SHED n + SLACK (n / prompt) (load of the least loaded)
#
# and otherwise the least loaded replica. So a busy replica sheds new groups first, and running sessions only if waiting would
# take far longer than recomputing their prefix. Requests have their own seeds: routing never changes what is sampled.

BLOCK = 64
"""Prompt tokens per named block; an incomplete last block is ignored."""
MOVE, SHED, SLACK = 4.0, 2.0, 0.25
_KEYS_REMEMBERED = 65536
_BLOCKS_REMEMBERED = 65536
_MEAN_RATE = 0.05
"""Weight of a new request in the running mean of sampled tokens."""

Host = TypeVar("Host", bound=Hashable)


def block_names(token_ids: Sequence[int]) -> list[Hashable]:
    """Return a name per whole block of BLOCK tokens; equal names mean equal tokens up to the block's end."""
    names: list[Hashable] = []
    for end in range(BLOCK, len(token_ids) + 1, BLOCK):
        names.append(hash((names[-1] if names else None, *token_ids[end - BLOCK : end])))
    return names


@dataclass(frozen=True, slots=True)
class Need:
    """Demand of a request. `key`: its session. `prompt`: prompt length in tokens; `expected`: expected number of sampled tokens.
    `names`: returns the names of its prompt's blocks of `run` tokens; called for new sessions only."""

    key: str
    prompt: int
    expected: float
    names: Callable[[], Sequence[Hashable]]
    run: int = BLOCK


@dataclass(eq=False, slots=True)
class Placed(Generic[Host]):
    """A running request: its host, and the load in tokens that it still puts on it."""

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
    """Number of the session's tokens cached on `host`."""


class RequestRouter(Generic[Host]):
    """Chooses hosts for requests by their loads, their presumed cache contents, and the homes of sessions."""

    def __init__(self, remembered: int = _BLOCKS_REMEMBERED) -> None:
        """`remembered`: largest number of block names presumed cached per host."""
        self._remembered = remembered
        self._loads: dict[Host, _Load] = {}
        self._homes: OrderedDict[str, _Home[Host]] = OrderedDict()
        self._mean: float | None = None

    def leave(self, host: Host) -> None:
        """Remove a host and its caches; its sessions move with their next request."""
        self._loads.pop(host, None)
        for key in [key for key, home in self._homes.items() if home.host == host]:
            del self._homes[key]

    def forget(self) -> None:
        """Assume empty caches on all hosts, as after a change of weights."""
        for load in self._loads.values():
            load.cached.clear()
        for home in self._homes.values():
            home.tokens = 0

    def forecast(self, most: int) -> float:
        """Predict the number of sampled tokens of a request, at most `most`: the running mean, or `most` without one."""
        return float(most) if self._mean is None else min(self._mean, float(most))

    def begin(self, need: Need, hosts: Collection[Host]) -> Placed[Host]:
        """Choose one of the hosts `hosts` (not empty) for a request, and add the request to its load until `end`."""
        for host in hosts:
            self._loads.setdefault(host, _Load())
        home = self._homes.pop(need.key, None)
        stays = False
        if home is not None and home.host in hosts:
            home.tokens = min(home.tokens, need.prompt)
            least = min(self._loads[host].queued for host in hosts)
            more_to_wait = self._loads[home.host].queued - least
            stays = more_to_wait <= MOVE * home.tokens + need.prompt + need.expected
        if home is None or not stays:
            others = [host for host in hosts if home is None or host != home.host]
            home = self._new(need, others or list(hosts))
        placed = Placed(home.host, need, need.prompt - home.tokens + need.expected)
        self._loads[home.host].queued += placed.left
        # An LRU map (popped above, re-added here) drops sessions that ended without `over`.
        self._homes[need.key] = home
        if len(self._homes) > _KEYS_REMEMBERED:
            self._homes.popitem(last=False)
        return placed

    def note_sampled(self, placed: Placed[Host], sampled: int) -> None:
        """Record the number of tokens sampled so far; above 0, the prompt no longer counts as load."""
        if sampled and placed.host in self._loads:
            left = max(placed.need.expected - sampled, 0.0)
            self._loads[placed.host].queued -= placed.left - left
            placed.left = left

    def end(self, placed: Placed[Host], sampled: int | None) -> None:
        """Remove an ended request from its host's load. `sampled`: number of its tokens, now cached with the prompt, or None if
        it failed."""
        load = self._loads.get(placed.host)
        if load is None:
            return
        load.queued = max(load.queued - placed.left, 0.0)
        placed.left = 0.0
        if sampled is None:
            return
        self._mean = float(sampled) if self._mean is None else self._mean + _MEAN_RATE * (sampled - self._mean)
        home = self._homes.get(placed.need.key)
        if home is not None and home.host == placed.host:
            home.tokens = placed.need.prompt + sampled

    def over(self, key: str) -> None:
        """Forget a session that will send no more requests."""
        self._homes.pop(key, None)

    def _new(self, need: Need, hosts: Sequence[Host]) -> _Home[Host]:
        """Choose a home for a new session, or for one that leaves its home."""
        names = need.names()
        cached = {
            host: need.run * next((at for at, name in enumerate(names) if name not in self._loads[host].cached), len(names))
            for host in hosts
        }
        queued = {host: self._loads[host].queued for host in hosts}
        longest = min(hosts, key=lambda host: (-cached[host], queued[host]))
        least = min(hosts, key=lambda host: queued[host] - cached[host])
        saved = cached[longest] - cached[least]
        spare = SHED * saved + SLACK * saved / max(need.prompt, 1) * queued[least]
        host = longest if queued[longest] - queued[least] <= spare else least
        # Recorded before they are cached, since the other members of a group arrive at the same time.
        cache = self._loads[host].cached
        for name in names:
            cache[name] = None
            cache.move_to_end(name)
        while len(cache) > self._remembered:
            cache.popitem(last=False)
        return _Home(host, min(cached[host], need.prompt))

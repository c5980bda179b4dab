"""The engine protocol: token ids in; token ids, logprobs and weight versions out.

Every backend in `agentrl/backends` implements `Engine`; one that can be trained is a `WeightTarget` too (weights/target.py)
and passes `tests/backends/contract.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy.typing as npt

from agentrl.env import ToolEnv

if TYPE_CHECKING:  # what lives in workers is made of engines
    from agentrl.rollout.workers.seats import Seats, WorkerRecipe

Finish = Literal["stop", "length", "abort", "stop_string"]
"""Why a turn ended: its last id is a stop token; its tokens were used up; `abort`; its text holds a stop string."""

Told = Callable[[Sequence[int], Sequence[float]], None]
"""Gets the ids and logprobs of tokens of a turn as they are sampled; see `Engine.stream`."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample one turn. With a `seed`, a request's random stream does not depend on what else is running.

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
    """What a provider counted for one call: its own tokens, and US dollars (None if unknown)."""

    prompt_tokens: int
    sampled_tokens: int
    usd: float | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """What the engine sampled: columns of equal length. `logprobs` are log softmax(z / T) of the sampled tokens over the
    whole vocabulary: the policy at the request's temperature (at T = 0, log softmax(z)), which a trainer can
    compute too. `top_p`, `top_k` and a grammar only restrict which tokens may be drawn. `versions`: the weights that sampled each
    token. If a stop token ended the turn, it is the last id.

    `usage`: only from engines whose ids are not tokens (API models). `seconds`: only if the caller's own
    clock would be wrong (a replay reports how long the recorded call took). `experts`: if the sampling asks for them,
    [tokens, routers, k] uint8 or int16 for the tokens of prompt and answer from `experts_from` on: those that the engine
    computed, as it computed them first, so all but the last one, or fewer if the request was cut short."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish: Finish
    usage: Usage | None = None
    seconds: float | None = None
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
    """What another process needs to sample from a started engine; it can be pickled."""

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
        """What `start` waits for now, in a few words for the display; "" if it does not say. May be called from any thread."""
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
        """How another process reaches this engine without the one that has it; None: only through that one."""
        return None

    def seats(
        self, workers: int, recipe: Callable[[EngineConnection | None], WorkerRecipe], host: Callable[[], str]
    ) -> Seats | None:
        """Places for so many rollout workers in processes of this engine, each beside what it samples from; None: they get
        processes of their own. `recipe`: what workers are made from, by the connection to the engine that they have there;
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

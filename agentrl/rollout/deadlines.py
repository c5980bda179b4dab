"""Deadlines of an episode: its clock, and each wait for its environment and its engine."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar, get_args

from agentrl.data.trajectory import Blame, Message, StopReason
from agentrl.env import ToolEnv
from agentrl.env.toolbox import PendingCall
from agentrl.rollout.engine import Engine, Finish, Generation
from agentrl.utils.errors import AgentrlError, EngineError, EnvError
from agentrl.utils.event_loop import LONGEST, end, in_time, run_contained

# The clock of an episode

_NUMBERS = itertools.count()


class Watch:
    """Waits of each episode. `moves` counts everything that comes back: tokens, tool calls, turns, episodes; `heard` signs of
    life of the engine alone. `cut`: the tokens that were sampled in episodes that were then cancelled, without those of a
    turn that was not over.

    `look`: tokens and tool calls of a wait in progress are found by polling, at least once in that many seconds.
    """

    def __init__(self, look: float = LONGEST) -> None:
        self.moves, self.heard, self.cut, self.look = 0, 0, 0, look
        self.number = next(_NUMBERS)
        """What other processes know it by."""
        self._waits: dict[str, tuple[Callable[[], str], float]] = {}
        self.elsewhere: dict[str, tuple[list[tuple[str, str, float]], int, float]] = {}
        """By other process: the longest waits of its episodes, as `oldest` has them, and when that was."""

    def hear(self) -> None:
        """The engine has sampled, for whichever episode."""
        self.heard += 1
        self.moves += 1

    @contextmanager
    def waits(self, key: str, what: Callable[[], str]) -> Iterator[None]:
        """Episode `key` waits for something; its arrival (or giving up on it) counts as a move."""
        self._waits[key] = (what, time.monotonic())
        try:
            yield
        finally:
            self._waits.pop(key, None)
            self.moves += 1

    def oldest(self, most: int) -> tuple[list[tuple[str, str, float]], int]:
        """The `most` longest waits of this process: episode, what it waits for, seconds so far; and how many more there are."""
        now = time.monotonic()
        found = sorted(self._waits.items(), key=lambda item: item[1][1])
        return [(key, what(), now - since) for key, (what, since) in found[:most]], max(len(found) - most, 0)

    def waiting(self, most: int = 3) -> str:
        """Waits of the episodes with their durations, longest first; "" if none waits. May be called from any thread."""
        now = time.monotonic()
        waits, more = self.oldest(most)
        for process, (there, more_there, when) in list(self.elsewhere.items()):
            waits += [(key, f"{what} (in {process})", seconds + now - when) for key, what, seconds in there]
            more += more_there
        waits.sort(key=lambda wait: -wait[2])
        more += max(len(waits) - most, 0)
        shown = [f"episode {key} for {seconds:.0f} s on {what}" for key, what, seconds in waits[:most]]
        return "; ".join(shown) + (f"; and {more} more" if more > 0 else "")


@dataclass(slots=True)
class Quiet:
    """Seconds in which a count of `watch` stood still although the event loop was free to notice; `limit` of them are allowed."""

    watch: Watch
    count: Literal["moves", "heard"]
    limit: float
    seconds: float = 0.0
    last: int = -1

    def remaining(self, passed: float) -> float:
        """Count `passed` seconds, from 0 again if the count moved during them; returns the seconds left."""
        before, self.last = self.last, getattr(self.watch, self.count)
        self.seconds = self.seconds + passed if self.last == before else 0.0
        return self.limit - self.seconds


# Waits under a deadline

Answer = TypeVar("Answer")


class CutError(AgentrlError):
    """The time of an episode, or of its engine, is up: for the reason `stop`."""

    def __init__(self, stop: StopReason, message: str) -> None:
        super().__init__(message)
        self.stop = stop


@dataclass(slots=True)
class Waits:
    """The waits of one episode. Limits in seconds: `turn` of silence of the engine, `limit` of all other time.

    `used`: its seconds by who used them, the policy (tools that run its own code) or the infrastructure (the environment, its
    other tools, an agent's program); each has `limit` of its own.
    """

    key: str
    turn: float
    limit: float
    watch: Watch
    used: dict[Blame, float] = field(default_factory=partial(dict, policy=0.0, infrastructure=0.0))

    async def environment(
        self, env: ToolEnv, work: Awaitable[Answer], what: str, blame: Blame = "infrastructure", limit: float = math.inf
    ) -> Answer:
        """Time limit on the environment's answers. Raises EnvError after `limit`, and CutError if the episode's time is up.
        Time in which all tool calls in progress are queued, or the environment itself is, does not count; who is responsible
        for the rest is decided by the running calls (see `running`), or is `blame` without any."""
        calls, spent = list(env.waiting), 0.0

        def spend(passed: float) -> float:
            nonlocal calls, spent
            # A call that has just ended also counts: the interval that passed was its time.
            whose_it_was = running(now := list(env.waiting)) or running(calls) or blame
            if calls != now:
                calls = now
                self.watch.moves += 1
            at_work = not env.queued and (not calls or any(call.running for call in calls))
            counted = passed if at_work else 0.0
            spent += counted
            self.used[whose_it_was] += counted
            return min(limit - spent, self.limit - self.used[whose_it_was])

        def doing() -> str:
            own = "; ".join(map(str, env.waiting)) or f"{what} of environment {env.id}"
            return f"{own}, which waits for {env.queued}" if env.queued else own

        def late() -> Exception:
            if spent >= limit:
                return EnvError(f"environment {env.id}: {doing()} did not end within {limit:g} s (rollout.env_timeout)")
            cut = self.over(doing())
            env.cut(cut.stop)
            return cut

        name = f"{what} of environment {env.id}"
        with self.watch.waits(self.key, doing):
            return await self._in_time(run_contained(work, name), name, spend, late)

    def over(self, doing: str) -> CutError:
        """The end of an episode whose time is up: why, and what it was doing last."""
        stop = StopReason.MAX_EPISODE_TIME if self.used["policy"] >= self.limit else StopReason.EPISODE_TIMEOUT
        return CutError(stop, f"{self.limit:g} s of active time are used up (rollout.episode_timeout), last on {doing}")

    async def engine(self, engine: Engine, answer: Awaitable[Generation], key: str, what: str, most: int) -> Generation:
        """The engine's `answer` to the request `key`, of at most `most` tokens. Raises EngineError if it fails or answers no such
        thing, and CutError if it falls silent: any token or answer begins the time anew, also another episode's, since an engine
        that is slow, or has a queue, is at work."""
        silent, waited = Quiet(self.watch, "heard", self.turn), 0.0
        tokens: int | None = None

        def spend(passed: float) -> float:
            nonlocal waited, tokens
            waited += passed
            before, now = tokens or 0, engine.progress(key)
            if now is not None:
                tokens = now
                if now > before:
                    self.watch.hear()
            return silent.remaining(passed)

        def doing() -> str:
            if tokens is None:
                return f"{what} at the engine ({waited:.0f} s; it does not report tokens)"
            speed = tokens / waited if waited else 0.0
            return f"{what} at the engine ({tokens} tokens after {waited:.0f} s: {speed:.2g} tokens/s)"

        def late() -> Exception:
            text = f"no token came for {self.turn:g} s (rollout.turn_timeout), last on {doing()}"
            return CutError(StopReason.ENGINE_TIMEOUT, text)

        with self.watch.waits(self.key, doing):
            answered = await self._in_time(run_contained(answer, what, EngineError), what, spend, late)
        self.watch.hear()
        if len(answered.token_ids) > most or answered.finish not in get_args(Finish):
            said = f"{len(answered.token_ids)} tokens of at most {most}, finish = {answered.finish!r}"
            raise EngineError(f"{what}: the engine answered {said}; expected one of {', '.join(get_args(Finish))}")
        return answered

    async def _in_time(
        self, work: Coroutine[Any, Any, Answer], what: str, spend: Callable[[float], float], late: Callable[[], Exception]
    ) -> Answer:
        """The result of `work`, a task of its own. Raises `late()` once `spend` leaves no time."""
        task = asyncio.create_task(work)
        try:
            if not await in_time(task, spend, self.watch.look):
                # In this order: an environment must know why (`cut`) when the cancellation reaches it, and have ended when the
                # teardown follows.
                fault = late()
                await end(task, f"episode {self.key}, {what}")
                raise fault
        except asyncio.CancelledError:
            await end(task, f"episode {self.key}, {what}")
            raise
        return task.result()


def running(calls: Sequence[PendingCall]) -> Blame | None:
    """Party responsible for the time while these calls are in progress: the policy if all running calls are of tools marked
    `policy_late`, whatever else the turn called; None if none is running."""
    tools = [call.tool for call in calls if call.running]
    return None if not tools else "policy" if all(tool.options.policy_late for tool in tools) else "infrastructure"


def whose(env: ToolEnv, message: Message) -> Blame:
    """Party responsible for a step in which no running call was seen: the policy if all called tools are `policy_late`."""
    tools = [found for call in message.tool_calls if (found := env.toolbox.find(call.name))]
    return "policy" if tools and all(tool.options.policy_late for tool in tools) else "infrastructure"

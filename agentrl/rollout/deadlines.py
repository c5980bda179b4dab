"""Deadlines of an episode: limits on its active time and on each wait for its environment and engine."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar, get_args

from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import Blame, Message, StopReason, Trajectory
from agentrl.env import ToolEnv
from agentrl.env.toolbox import PendingCall
from agentrl.rollout.engine import Engine, Finish, Generation
from agentrl.utils.errors import AgentrlError, EngineError, EnvError, fault_text, is_alien
from agentrl.utils.event_loop import LONGEST, end, in_time, loop_clock, run_contained

log = logging.getLogger(__name__)

# Waits of all episodes

_NUMBERS = itertools.count()


class Watch:
    """Registry of the episodes' current waits, with progress counters.

    `moves` counts every result: tokens, tool calls, turns, episodes; `heard` counts only the engine's signs of life. `cut`:
    tokens sampled in episodes that were then cancelled, in finished turns only. `poll_s`: interval in seconds at which a wait in
    progress is polled for new tokens and tool calls.
    """

    def __init__(self, poll_s: float = LONGEST) -> None:
        self.moves, self.heard, self.cut, self.poll_s = 0, 0, 0, poll_s
        self.number = next(_NUMBERS)
        """Identifies this watch to other processes."""
        self._waits: dict[str, tuple[Callable[[], str], float]] = {}
        self.remote: dict[str, tuple[list[tuple[str, str, float]], int, float]] = {}
        """Name of another process -> the result of its `oldest`, and when it was reported (monotonic)."""

    def hear(self) -> None:
        """Count a sign of life from the engine, for any episode."""
        self.heard += 1
        self.moves += 1

    @contextmanager
    def waits(self, key: str, what: Callable[[], str]) -> Iterator[None]:
        """Register a wait of episode `key` for the block's duration; its end, also by an error, counts as a move."""
        self._waits[key] = (what, time.monotonic())
        try:
            yield
        finally:
            self._waits.pop(key, None)
            self.moves += 1

    @contextmanager
    def count_cut(self, parts: Callable[[], Iterable[TokenLedger | Trajectory]]) -> Iterator[None]:
        """Add the sampled tokens of `parts` to `cut` if the block is cancelled."""
        try:
            yield
        except asyncio.CancelledError:
            self.cut += sum(part.sampled_tokens for part in parts())
            raise

    def oldest(self, most: int) -> tuple[list[tuple[str, str, float]], int]:
        """Return the `most` longest waits of this process (episode, reason, seconds so far) and the number left out."""
        now = time.monotonic()
        found = sorted(self._waits.items(), key=lambda item: item[1][1])
        return [(key, what(), now - since) for key, (what, since) in found[:most]], max(len(found) - most, 0)

    def waiting(self, most: int = 3) -> str:
        """Describe the `most` longest waits of all processes; "" without any. May be called from any thread."""
        now = time.monotonic()
        waits, more = self.oldest(most)
        for process, (remote, more_remote, when) in list(self.remote.items()):
            waits += [(key, f"{what} (in {process})", seconds + now - when) for key, what, seconds in remote]
            more += more_remote
        waits.sort(key=lambda wait: -wait[2])
        more += max(len(waits) - most, 0)
        shown = [f"episode {key} for {seconds:.0f} s on {what}" for key, what, seconds in waits[:most]]
        return "; ".join(shown) + (f"; and {more} more" if more > 0 else "")


@dataclass(slots=True)
class SilenceTimer:
    """Timer of the seconds since a counter of `watch` last changed, with a `limit`. Time in which the event loop was blocked
    does not count."""

    watch: Watch
    count: Literal["moves", "heard"]
    limit: float
    seconds: float = 0.0
    last: int = -1

    def remaining(self, passed: float) -> float:
        """Add `passed` seconds, or restart at 0 if the counter changed meanwhile. Returns the seconds left."""
        before, self.last = self.last, getattr(self.watch, self.count)
        self.seconds = self.seconds + passed if self.last == before else 0.0
        return self.limit - self.seconds


# Waits under a deadline

Answer = TypeVar("Answer")


class CutError(AgentrlError):
    """An episode, or the engine it waits for, exceeded a time limit. `stop`: the episode's stop reason."""

    def __init__(self, stop: StopReason, message: str) -> None:
        super().__init__(message)
        self.stop = stop


@dataclass(slots=True)
class Waits:
    """Deadlines on the waits of one episode, in seconds: `turn` limits the engine's silence, `limit` all other time.

    `used`: active seconds by responsible party: the policy (tools that run its own code) or the infrastructure (the environment,
    its other tools, an agent program). `limit` applies to each separately. Waits at the same time share their seconds:
    those up to `charged`, on the loop's clock, are in `used`.
    """

    key: str
    turn: float
    limit: float
    watch: Watch
    used: dict[Blame, float] = field(default_factory=partial(dict, policy=0.0, infrastructure=0.0))
    charged: float = 0.0

    async def environment(
        self, env: ToolEnv, work: Awaitable[Answer], what: str, blame: Blame = "infrastructure", limit: float = math.inf
    ) -> Answer:
        """Await a result of the environment. Raises EnvError after `limit` seconds and for any exception in the author's code,
        CutError if the episode's time is used up.

        Time does not count while the environment, or every tool call in progress, is queued. Other time is charged to the party
        that `blame_of_running` derives from the running calls, or to `blame` if none is running."""
        calls, spent = list(env.waiting), 0.0

        def spend(passed: float) -> float:
            nonlocal calls, spent
            # A call that has just ended still decides: it was running during the interval.
            party = blame_of_running(now := list(env.waiting)) or blame_of_running(calls) or blame
            if calls != now:
                calls = now
                self.watch.moves += 1
            at_work = not env.queued and (not calls or any(call.running for call in calls))
            if at_work:
                before, self.charged = self.charged, loop_clock().now()
                spent += passed
                self.used[party] += min(passed, self.charged - before)
            return min(limit - spent, self.limit - self.used[party])

        def doing() -> str:
            own = "; ".join(map(str, env.waiting)) or f"{what} of environment {env.id}"
            return f"{own}, which waits for {env.queued}" if env.queued else own

        def late() -> Exception:
            if spent >= limit:
                return EnvError(f"environment {env.id}: {doing()} did not end within {limit:g} s (rollout.env_timeout)")
            cut = self.out_of_time(doing())
            env.cut(cut.stop)
            return cut

        name = f"{what} of environment {env.id}"
        with self.watch.waits(self.key, doing):
            try:
                return await self._in_time(run_contained(work, name), name, spend, late)
            except Exception as fault:
                if not is_alien(fault):
                    raise
                log.exception("environment %s failed (episode %s)", env.id, self.key)
                raise EnvError(fault_text(fault)) from fault

    def out_of_time(self, doing: str) -> CutError:
        """Build the error for an episode whose time is used up; `doing` describes its last activity."""
        stop = StopReason.MAX_EPISODE_TIME if self.used["policy"] >= self.limit else StopReason.EPISODE_TIMEOUT
        return CutError(stop, f"{self.limit:g} s of active time are used up (rollout.episode_timeout), last on {doing}")

    async def engine(self, engine: Engine, answer: Awaitable[Generation], key: str, what: str, most: int) -> Generation:
        """Await the engine's `answer` to the request `key`, of at most `most` tokens. Raises EngineError if it fails or
        gives an impossible answer, CutError if the engine is silent.

        A token or answer for any episode restarts the timer, since an engine that is slow or has a queue is still working."""
        silent, waited = SilenceTimer(self.watch, "heard", self.turn), 0.0
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
        """Run `work` as a task and return its result. Raises `late()` once `spend` leaves no time."""
        task = asyncio.create_task(work)
        try:
            if not await in_time(task, spend, self.watch.poll_s):
                # In this order: `late` gives the environment the stop reason (`cut`) before the cancellation reaches it, and
                # the task has ended before the teardown begins.
                fault = late()
                await end(task, f"episode {self.key}, {what}")
                raise fault
        except asyncio.CancelledError:
            await end(task, f"episode {self.key}, {what}")
            raise
        return task.result()


def blame_of_running(calls: Sequence[PendingCall]) -> Blame | None:
    """Return the party responsible for the time of the running calls; None without any. It is the policy if all their tools are
    marked `policy_late`, else the infrastructure."""
    tools = [call.tool for call in calls if call.running]
    return None if not tools else "policy" if all(tool.options.policy_late for tool in tools) else "infrastructure"


def blame_of(env: ToolEnv, message: Message) -> Blame:
    """Return the party responsible for a step without a running call: the policy if all called tools are `policy_late`."""
    tools = [found for call in message.tool_calls if (found := env.toolbox.find(call.name))]
    return "policy" if tools and all(tool.options.policy_late for tool in tools) else "infrastructure"

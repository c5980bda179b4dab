"""What an episode waits for, each under its deadline: its environment and the engine."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from agentrl.deadline import contained, end, in_time
from agentrl.env import ToolEnv
from agentrl.errors import EngineError, EnvError
from agentrl.rollout.clock import EpisodeClock, RequestClock, Watch
from agentrl.rollout.engine import Engine, Generation
from agentrl.tool.toolbox import Waiting
from agentrl.trajectory import Blame, Message, StopReason

Answer = TypeVar("Answer")


class CutError(Exception):
    """The time of an episode, or of its engine, is up: for the reason `stop`."""

    def __init__(self, stop: StopReason, message: str) -> None:
        super().__init__(message)
        self.stop = stop


class Waits:
    """The waits of one episode. Limits in seconds: `turn` of silence of the engine, `episode` of what is not the engine's (see
    `clock`)."""

    def __init__(self, key: str, turn: float, episode: float, watch: Watch) -> None:
        self.clock, self.watch = EpisodeClock(episode), watch
        self._key, self._turn = key, turn

    async def environment(
        self, env: ToolEnv, work: Awaitable[Answer], what: str, blame: Blame = "infrastructure", limit: float = math.inf
    ) -> Answer:
        """What the environment answers. Raises EnvError after `limit`, and CutError if the episode's time is up. Time
        in which all tool calls in progress are queued, or the environment itself is, does not count; who is responsible for
        the rest is decided by the running calls (see `running`), or is `blame` if there are none."""
        task = asyncio.ensure_future(contained(work, f"{what} of environment {env.id}"))
        calls, spent = list(env.waiting), 0.0

        def spend(passed: float) -> float:
            nonlocal calls, spent
            # A call that has just ended also counts: the interval that passed was its time.
            whose_it_was = running(now := list(env.waiting)) or running(calls) or blame
            if calls != now:
                calls = now
                self.watch.moved()
            at_work = not env.queued and (not calls or any(call.running for call in calls))
            counted = passed if at_work else 0.0
            spent += counted
            self.clock.add(whose_it_was, counted)
            return min(limit - spent, self.clock.left(whose_it_was))

        def doing() -> str:
            own = "; ".join(map(str, env.waiting)) or f"{what} of environment {env.id}"
            return f"{own}, which waits for {env.queued}" if env.queued else own

        try:
            with self.watch.waits(self._key, doing):
                in_its_time = await in_time(task, spend, self.watch.look)
                if not in_its_time:
                    # In this order: the environment must know why (`cut`) when the cancellation reaches it, and have ended
                    # when the teardown follows.
                    late = self._late(env, doing(), spent, limit)
                    await end(task, f"episode {self._key}, {what} of environment {env.id}")
                    raise late
        except asyncio.CancelledError:
            await end(task, f"episode {self._key}, {what} of environment {env.id}")
            raise
        return task.result()

    def _late(self, env: ToolEnv, doing: str, spent: float, limit: float) -> Exception:
        if spent >= limit:
            return EnvError(f"environment {env.id}: {doing} did not end within {limit:g} s (rollout.env_timeout)")
        stop, message = self.over(doing)
        env.cut(stop)
        return CutError(stop, message)

    def over(self, doing: str) -> tuple[StopReason, str]:
        """Why an episode whose time is up ends."""
        limit = f"{self.clock.limit:g} s of active time are used up (rollout.episode_timeout)"
        return self.clock.over, f"{limit}, last on {doing}"

    async def engine(self, engine: Engine, answer: Awaitable[Generation], key: str, what: str) -> Generation:
        """The engine's `answer` to the request `key`. Raises EngineError if it fails, and CutError if it falls silent."""
        request = RequestClock(engine, key, self._turn, self.watch)
        task = asyncio.ensure_future(contained(answer, what, EngineError))
        try:
            with self.watch.waits(self._key, lambda: f"{what} at {request}"):
                if not await in_time(task, request.spend, self.watch.look):
                    late = f"no token came for {self._turn:g} s (rollout.turn_timeout), last on {what} at {request}"
                    await end(task, f"episode {self._key}, {what}")
                    raise CutError(StopReason.ENGINE_TIMEOUT, late)
        except asyncio.CancelledError:
            await end(task, f"episode {self._key}, {what}")
            raise
        answered = task.result()
        self.watch.hear()
        return answered


def running(calls: Sequence[Waiting]) -> Blame | None:
    """Who is responsible for the time while these calls are in progress: the policy if all running calls are of tools
    marked `policy_late`, whatever else the turn called; None if none is running."""
    tools = [call.tool for call in calls if call.running]
    return None if not tools else "policy" if all(tool.options.policy_late for tool in tools) else "infrastructure"


def whose(env: ToolEnv, message: Message) -> Blame:
    """Who is responsible for a step in which no running call was seen: the policy if all called tools are `policy_late`."""
    tools = [env.toolbox[call.name] for call in message.tool_calls if call.name in env.toolbox]
    return "policy" if tools and all(tool.options.policy_late for tool in tools) else "infrastructure"

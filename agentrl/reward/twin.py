"""Twins: environments that play an episode once more."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, NamedTuple, Protocol

from agentrl.trajectory import Json, Message, ToolCall, ToolResult, Trajectory


class TurnOutcome(NamedTuple):
    """What came of one turn: the tools' answers as the policy reads them, their results, and whether the episode is over."""

    answers: list[str]
    results: Sequence[ToolResult]
    over: bool


class Twin(Protocol):
    """An environment that plays an episode once more; `agentrl.env.twin.EnvTwin` is that of a ToolEnv.

    `scripted`: what its user does depends on nothing that the policy says. `talks`: somebody listens to a turn without calls.
    """

    scripted: bool

    @property
    def talks(self) -> bool: ...

    def open(self, record: Trajectory) -> None:
        """Begin the record's task, with the record's user in place of one that is a model."""
        ...

    async def take(self, turn: Message | ToolCall) -> TurnOutcome:
        """Take one assistant turn, or make one call of the user's own."""
        ...

    def state(self) -> Json:
        """The state; of an episode that is over, as it was at its end."""
        ...

    def copies(self) -> Copies | None:
        """What makes twins in the state of this one, which is left as it is; None if it cannot be copied."""
        ...

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run what awaits `take` to its end."""
        ...

    def close(self) -> None: ...


class Copies(Protocol):
    """Makes twins that hold nothing outside of themselves, of `size` bytes each."""

    size: int

    def twin(self, record: Trajectory) -> Twin: ...


class PlainTwin:
    """A twin of an environment that has no more than `reset`, `step`, `state` and `close` (`agentrl.reward.leaf.ReplayEnv`)."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self.scripted = bool(getattr(env, "scripted", True))

    @property
    def talks(self) -> bool:
        return bool(getattr(self._env, "has_user", False))

    def open(self, record: Trajectory) -> None:
        self._env.reset(seed=record.task.seed, options={"task": record.task})

    async def take(self, turn: Message | ToolCall) -> TurnOutcome:
        if isinstance(turn, ToolCall):
            return TurnOutcome([], [self._env.user_call(turn)], False)
        outcome: Any = self._env.step(turn)
        record: Trajectory | None = getattr(self._env, "trajectory", None)
        results = record.turns[-1].results if turn.tool_calls and record is not None and record.turns else ()
        return TurnOutcome(tool_texts(outcome[0]), results, bool(outcome[2] or outcome[3]))

    def state(self) -> Json:
        return self._env.state()

    def copies(self) -> None:
        return None

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        run_at_once(work)

    def close(self) -> None:
        self._env.close()


def twin_of(env: Any) -> Twin:
    """An environment as a twin: its own form of one, if it has any."""
    found: Twin = env.as_twin() if hasattr(env, "as_twin") else PlainTwin(env)
    return found


def run_at_once(work: Coroutine[Any, Any, None]) -> None:
    """Run what awaits nothing that would have to be waited for. Raises RuntimeError if it does."""
    try:
        work.send(None)
    except StopIteration:
        return
    raise RuntimeError("a replay environment without an event loop was awaited")


def tool_texts(observation: Sequence[Message]) -> list[str]:
    """The tools' answers among the new messages."""
    return [message.content for message in observation if message.role == "tool"]

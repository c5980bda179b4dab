"""An environment that plays an episode once more, for a reward spec that replays calls."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from agentrl.env.copying import Copier
from agentrl.env.sync import run_sync
from agentrl.env.userside import RecordedUser
from agentrl.reward.twin import TurnOutcome, tool_texts
from agentrl.trajectory import Json, Message, ToolCall, Trajectory


class EnvTwin:
    """A ToolEnv as a twin (`agentrl.reward.twin.Twin`). `scripted`: what its user does depends on nothing that is said."""

    def __init__(self, env: Any, scripted: bool) -> None:
        self.env, self.scripted = env, scripted

    @property
    def talks(self) -> bool:
        return bool(self.env.has_user)

    def open(self, record: Trajectory) -> None:
        """A user that may be a model is not asked: the record's is played in its place."""
        self.env.reset(seed=record.task.seed, options={"task": record.task, "user": RecordedUser.of(record)})

    async def take(self, turn: Message | ToolCall) -> TurnOutcome:
        if isinstance(turn, ToolCall):
            return TurnOutcome([], [await self.env.auser_call(turn)], self.env.has_finished)
        observation, _, terminated, truncated, _ = await self.env.astep(turn)
        return TurnOutcome(tool_texts(observation), self.env.last_results, terminated or truncated)

    def state(self) -> Json:
        return self.env.state() if self.env.is_open else self.env.trajectory.state

    def copies(self) -> EnvCopies | None:
        """None if `ToolEnv.copier` has none."""
        made = self.env.copier()
        return None if made is None else EnvCopies(made, self.scripted)

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        run_sync(work)

    def close(self) -> None:
        if self.env.holds:  # else there is nothing to free, and its state would be taken once more
            self.env.close()


class CopiedTwin(EnvTwin):
    """A copy of an environment that holds nothing outside of itself."""

    def close(self) -> None:
        env = self.env.unwrapped
        for box in (env.toolbox, env.user_toolbox):
            box.release(env)


class EnvCopies:
    """Twins of an environment that was reset, and is not used any more."""

    def __init__(self, copier: Copier, scripted: bool) -> None:
        self._copier, self._scripted = copier, scripted
        self.size = copier.size

    def twin(self, record: Trajectory) -> EnvTwin:
        env = self._copier.copied()
        if env.unwrapped.user is not None:
            env.unwrapped.user = RecordedUser.of(record)
        return CopiedTwin(env, self._scripted)

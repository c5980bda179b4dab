"""Where episodes play: live, live with a record, or from a record."""

from __future__ import annotations

from collections.abc import Callable

from agentrl.catalog import EnvRef
from agentrl.env import ToolEnv
from agentrl.reward.leaf import JudgeClient, Twin
from agentrl.trajectory import Task, Trajectory

TwinMaker = Callable[[Task], Twin]


class Stage:
    """Live: everything is asked where it is. `Recorder` and `Replayer` stand in between."""

    def env(self, ref: EnvRef, episode: str) -> ToolEnv:
        """The environment of one episode."""
        return ref.build()

    def judge(self, client: JudgeClient) -> JudgeClient:
        """Who judges."""
        return client

    def twin(self, make: TwinMaker) -> TwinMaker:
        """Where gold replays run."""
        return make

    def ready(self, episode: str) -> Trajectory | None:
        """The episode's trajectory where it is not to be played at all."""
        return None

    def ended(self, episode: str, trajectory: Trajectory) -> None:
        """The episode is over and scored."""

    def close(self) -> None:
        """Free what is held; idempotent."""

"""Everything that episodes ask of the outside: live, live with a record (`Recorder`), or from a record (`Replayer`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import ClassVar

from agentrl.catalog import EnvRef
from agentrl.env import ToolEnv
from agentrl.reward import Context
from agentrl.reward.leaf import AsTwin, JudgeClient, ReplayEnv
from agentrl.reward.twins import Twins
from agentrl.rollout.engine import Engine
from agentrl.trajectory import Json, Task, Trajectory

ReplayEnvMaker = Callable[[Task], ReplayEnv | AsTwin]
Entries = Mapping[int, dict[str, Json]]


class EpisodeIO:
    """Live: passes everything through unchanged. `Recorder` and `Replayer` intercept it. `live`: whether anything outside is
    asked at all."""

    live: ClassVar[bool] = True

    def env(self, ref: EnvRef, episode: str) -> ToolEnv:
        """The environment of one episode."""
        return ref.build()

    def engine(self, make: Callable[[], Engine]) -> Engine:
        """The engine that samples; `make` builds the live one."""
        return make()

    def transcript(self, owner: str) -> tuple[Entries, Callable[[int, Json], None]]:
        """The messages of an API model that already have a number, and a callback for new ones. `owner` distinguishes two
        models of a run."""
        return {}, lambda number, entry: None

    def judge(self, client: JudgeClient) -> JudgeClient:
        """The client that judges."""
        return client

    def replay_env(self, make: ReplayEnvMaker) -> ReplayEnvMaker:
        """The maker of the environments in which calls are replayed; asked for once for each environment of the run, in order."""
        return make

    def replays(self) -> Twins:
        """What plays and keeps the replays of calls."""
        return Twins()

    def scoring(self, context: Context) -> Context:
        """The context of a reward spec, with its judge and replay environments passed through this object."""
        judge = None if context.judge is None else self.judge(context.judge)
        if context.replay_env is None:
            return replace(context, judge=judge)
        return replace(context, judge=judge, replay_env=self.replay_env(context.replay_env), replays=self.replays())

    def ready(self, episode: str) -> Trajectory | None:
        """The episode's trajectory if the episode need not be run at all."""
        return None

    def ended(self, episode: str, trajectory: Trajectory) -> None:
        """The episode is over and scored."""

    def close(self) -> None:
        """Free all resources; idempotent."""

"""Estimate the value of each turn by continuations sampled from there (`agentrl rollout --values`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from agentrl.contrib.branching.checks import fork_obstacle
from agentrl.contrib.branching.trees import Fork, attempt_branch
from agentrl.data.trajectory import Trajectory
from agentrl.rollout.deadlines import Watch
from agentrl.rollout.engine import derive
from agentrl.rollout.episode import EpisodeHook, EpisodeSpec, RunningEpisode
from agentrl.rollout.player import SCRIPTS, Job, LocalPlayer, Script, success_rate
from agentrl.run.checks import RunStart
from agentrl.utils.errors import ConfigError


class ForkEveryTurn(EpisodeHook):
    """Forks an episode before each of its turns."""

    def __init__(self) -> None:
        self.forks: list[Fork] = []

    async def before(self, turn: int, episode: RunningEpisode) -> None:
        self.forks.append(Fork.of(episode, turn))


@dataclass(frozen=True, slots=True)
class ValueScript(Script):
    """Plays an episode, then `samples` continuations from before each of at most `turns` turns. A turn's value is the success
    rate of its scored continuations, an estimate with variance V (1 - V) / samples."""

    spec: EpisodeSpec
    samples: int
    turns: int

    def specs(self) -> Iterable[EpisodeSpec]:
        return (self._spec(turn, number) for turn in range(self.turns) for number in range(self.samples))

    def _spec(self, turn: int, number: int) -> EpisodeSpec:
        seed = derive(self.spec.seed, "value", turn, number)
        return replace(self.spec, seed=seed, key=f"{self.spec.key}.v{turn}.{number}")

    async def play(self, job: Job, player: LocalPlayer, watch: Watch) -> list[Trajectory]:
        """Play an episode and estimate its turn values; closes every fork."""
        hook = ForkEveryTurn()
        try:
            root = await player.episode(job, watch, hook)
            forks = [] if root.stop.infrastructure else [fork for fork in hook.forks if fork.turn < len(root.turns)]
            for fork in forks:
                made = list[Trajectory]()
                async with asyncio.TaskGroup() as tasks:
                    for number in range(self.samples):
                        tasks.create_task(attempt_branch(job, fork, [self._spec(fork.turn, number)], player, watch, made))
                root.turns[fork.turn].value = success_rate(made)
            return [root]
        finally:
            for fork in hook.forks:
                await fork.close()


@SCRIPTS.register("values")
def measure_values(start: RunStart, samples: int) -> Callable[[EpisodeSpec], Script]:
    """Build the script of each episode. Raises ConfigError if it cannot be forked."""
    if (why := fork_obstacle(start)) is not None:
        raise ConfigError(f"--values: {why}")
    if "messages" in start.engine.traits:
        raise ConfigError("--values: a script or a model behind an API cannot go on from a fork. Give a model folder or hub name")
    return lambda spec: ValueScript(spec, samples, start.config.rollout.max_turns)

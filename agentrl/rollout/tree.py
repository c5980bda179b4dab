"""A tree of episodes, played in one process: a root from the beginning, then branches from forks of it, all at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from agentrl.config.schema import BranchConfig
from agentrl.env import ToolEnv
from agentrl.rollout.course import EpisodeSpec
from agentrl.rollout.forks import Fork, Keeper, Places
from agentrl.trajectory import StopReason, Task, Trajectory

Attempts = Sequence[EpisodeSpec]
"""A branch: what identifies each attempt at it, in order. The next is made if one ends by a fault of the infrastructure."""
PlayRoot = Callable[[Keeper], Awaitable[Trajectory]]
PlayBranch = Callable[[EpisodeSpec, ToolEnv, Fork], Awaitable[Trajectory]]


async def play_tree(
    config: BranchConfig, branches: Sequence[Attempts], play_root: PlayRoot, play_branch: PlayBranch
) -> list[Trajectory]:
    """The root, then every attempt at every branch, in the order of `branches`, but of those for which it has no turn to branch
    at; the root alone if it ended by a fault of the infrastructure.

    `play_branch` gets an environment of its own, and ends it. Every fork that was kept is closed, whatever happens.
    """
    places = Places(config, len(branches))
    try:
        root = await play_root(places)
        if root.stop.infrastructure:
            return [root]
        forks = await places.chosen(root)
        async with asyncio.TaskGroup() as tasks:
            begun = [(fork, of) for fork, of in zip(forks, branches, strict=True) if fork is not None]
            playing = [tasks.create_task(_attempts(fork, of, play_branch)) for fork, of in begun]
        return [root, *(played for task in playing for played in task.result())]
    finally:
        await places.close()


async def _attempts(fork: Fork, attempts: Attempts, play: PlayBranch) -> list[Trajectory]:
    found: list[Trajectory] = []
    for spec in attempts:
        try:
            env = fork.env.fork()
        except Exception as fault:  # whatever an author's class raises: a fault of the infrastructure, as in an episode
            found.append(_unforked(spec, fork, f"no fork of environment {fork.env.id}: {type(fault).__name__}: {fault}"))
            continue
        found.append(await play(spec, env, fork))
        if not found[-1].stop.infrastructure:
            break
    return found


def _unforked(spec: EpisodeSpec, fork: Fork, error: str) -> Trajectory:
    """The record of an attempt that could not begin."""
    made = Trajectory(fork.env.id, Task("", spec.task_seed, spec.split), spec.seed, spec.member, parent=fork.member)
    made.stop, made.error, made.cause = StopReason.ENV_ERROR, error, {"blame": "infrastructure"}
    made.branch_turn = fork.turn
    return made

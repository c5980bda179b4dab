"""Instances and forks do not affect each other."""

from __future__ import annotations

import json

from agentrl.env.base import ToolEnv
from agentrl.env.check.report import CheckFailed, Skipped, Subject, short_repr
from agentrl.env.spaces import Action


def shown_by(env: ToolEnv) -> str:
    """Everything an episode shows: messages and state."""
    row = env.trajectory.to_json()
    return json.dumps([row["messages"], row["state"]], sort_keys=True)


def _alone(subject: Subject, seed: int) -> tuple[list[Action], str]:
    env = subject.build()
    env.reset(seed=seed)
    turns = subject.turns(env, seed)
    for turn in turns:
        if env.step(turn)[2]:
            break
    shown = shown_by(env)
    env.close()
    return turns, shown


def check_instances(subject: Subject) -> str:
    """Two instances played alternately give the same episodes as each one alone."""
    pairs = 0
    for seed in subject.few_seeds():
        seeds = (seed, seed + 1000)
        alone = [_alone(subject, item) for item in seeds]
        envs = [subject.build() for _ in seeds]
        for env, item in zip(envs, seeds, strict=True):
            env.reset(seed=item)
        over = [False, False]
        for number in range(max(len(turns) for turns, _ in alone)):
            for index, env in enumerate(envs):
                turns = alone[index][0]
                if not over[index] and number < len(turns):
                    over[index] = env.step(turns[number])[2]
        for index, env in enumerate(envs):
            if shown_by(env) != alone[index][1]:
                raise CheckFailed(
                    f"seed {seeds[index]} gives a different episode while seed {seeds[1 - index]} runs at the same time: "
                    f"{short_repr(env.trajectory.messages[-1].content)}"
                )
            env.close()
        pairs += 1
    return f"{pairs} pairs of episodes, played alternately"


def check_fork(subject: Subject) -> str:
    """A fork starts equal to its parent, its turns do not change the parent, and restore returns to the snapshot."""
    count = 0
    for seed in subject.few_seeds():
        env = subject.build()
        env.reset(seed=seed)
        turns = subject.turns(env, seed)
        half = len(turns) // 2
        if any(env.step(turn)[2] for turn in turns[:half]):
            continue  # sampled turns may end an episode early, and then there is nothing left to compare
        before, snapshot, forked = shown_by(env), env.snapshot(), env.fork()
        if shown_by(forked) != before:
            raise CheckFailed(f"seed {seed}: a fork after {half} turns is not equal to its parent")
        _play(forked, turns[half:])
        if shown_by(env) != before:
            raise CheckFailed(f"seed {seed}: playing the fork changed its parent")
        _play(env, turns[half:])
        if shown_by(env) != shown_by(forked):
            raise CheckFailed(f"seed {seed}: parent and fork end differently after the same turns")
        env.restore(snapshot)
        if shown_by(env) != before:
            raise CheckFailed(f"seed {seed}: restore did not return to the snapshot")
        env.close()
        forked.close()
        count += 1
    if not count:
        raise Skipped("every episode ended before its middle")
    return f"{count} episodes forked halfway and restored"


def _play(env: ToolEnv, turns: list[Action]) -> None:
    for turn in turns:
        if env.step(turn)[2]:
            break

"""What the tests of the conversation environments have in common: playing episodes and fuzzing tools."""

import random
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

from agentrl.data.trajectory import Task, Trajectory
from agentrl.env import Message, ToolEnv
from agentrl.env.check import floors
from agentrl.env.check_tools import Subject
from tests.env.toyenvs import call


def play(env: ToolEnv, turns: Iterable[Message | str]) -> tuple[float, bool]:
    """(reward, terminated) after the turns, or earlier if the episode ends."""
    reward, terminated = 0.0, False
    for action in turns:
        _, reward, terminated, _, _ = env.step(action)
        if terminated:
            break
    return reward, terminated


def again(env: ToolEnv, turns: Iterable[Message | str], task: Task | None = None) -> tuple[float, bool]:
    """`play` in a new episode of the same task, or of another."""
    env.reset(options={"task": task or env.task})
    return play(env, turns)


def first_task(env: ToolEnv, wanted: Callable[[Task, list[Message]], bool]) -> list[Message]:
    """Start the first episode whose task and gold turns satisfy `wanted`; returns its gold turns."""
    for seed in range(300):
        task = env.make_task(seed, "train")
        turns = list(env.gold_turns(task))
        if wanted(task, turns):
            env.reset(options={"task": task})
            return turns
    raise AssertionError("no such task")


def say(text: str) -> Message:
    return Message("assistant", text)


def answer(env: ToolEnv, name: str, /, **arguments: Any) -> str:
    """The answer to a call."""
    return str(env.step(call(name, **arguments))[0][0].content)


def gold_episode(env: ToolEnv, seed: int, split: str) -> tuple[float, Trajectory]:
    """The reward of the scripted gold policy, and its record. The task's own rules end the episode; no call fails."""
    env.reset(seed=seed, options={"split": split})
    turns = env.gold_turns(env.task)
    reward, terminated = play(env, turns)
    assert terminated, f"{env.id} seed {seed}: the gold turns do not end the episode"
    assert len(env.trajectory.turns) == len(turns), f"{env.id} seed {seed}: gold turns are left over"
    assert all(result is not None and result.error is None for _, _, result in env.trajectory.calls())
    return reward, env.trajectory


SAID = ("Done.", "Yes. Do you confirm? Shall I proceed?", "CANNOT: I am unable to do this.")


def idle_values(env: ToolEnv, splits: Iterable[str], seeds: Iterable[int]) -> set[float | None]:
    """The values of episodes that do nothing of use: by the scripts of `env check`, and by one text said again and again."""
    subject, tasks = Subject(lambda: env, env.scorer), list(seeds)
    found = set[float | None]()
    for split in splits:
        found |= {value for floor in floors(subject, env, split, tasks) for value in floor.values}
        for seed, text in product(tasks, SAID):
            env.reset(seed=seed, options={"split": split})
            play(env, [say(text)] * 25)
            found.add(subject.score(env).value)
    return found


def seen_by_policy(trajectory: Trajectory) -> str:
    """All text that the policy was shown."""
    return "\n".join(m.content for m in trajectory.messages if m.role != "assistant")


def teacher_success(env: ToolEnv, episodes: int) -> float:
    """The mean reward of the environment's own teacher, who errs now and then."""
    rewards = []
    for seed in range(episodes):
        observation, _ = env.reset(seed=seed)
        teacher = env.teacher(env.task, random.Random(seed))
        reward, over = 0.0, False
        while not over and (message := teacher.act(observation)) is not None:
            observation, reward, over, *_ = env.step(message)
        rewards.append(reward)
    return sum(rewards) / episodes

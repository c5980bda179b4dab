"""What the tests of the conversation environments have in common: playing episodes and fuzzing tools."""

import random
from collections.abc import Callable, Iterable

import numpy as np

from agentrl.data.trajectory import Task, ToolCall, Trajectory
from agentrl.env import Message, ToolEnv
from agentrl.env.spaces import sample_arguments


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


def gold_episode(env: ToolEnv, seed: int, split: str) -> tuple[float, Trajectory]:
    """The reward of the scripted gold policy, and its record. The task's own rules end the episode; no call fails."""
    env.reset(seed=seed, options={"split": split})
    turns = env.gold_turns(env.task)
    reward, terminated = play(env, turns)
    assert terminated, f"{env.id} seed {seed}: the gold turns do not end the episode"
    assert len(env.trajectory.turns) == len(turns), f"{env.id} seed {seed}: gold turns are left over"
    assert all(result is not None and result.error is None for _, _, result in env.trajectory.calls())
    return reward, env.trajectory


def null_policies(env: ToolEnv) -> dict[str, Callable[[list[Message]], Message]]:
    """Policies that do nothing of use; none may score."""
    reads = [item.name for item in env.toolbox if item.options.read_only]
    rng = np.random.default_rng(0)

    def spam(observation: list[Message]) -> Message:
        names = [str(name) for name in rng.choice(reads, size=3)]
        calls = [ToolCall(name, sample_arguments(env.toolbox[name].signature.parameters, rng)) for name in names]
        return Message("assistant", tool_calls=tuple(calls))

    return {
        "empty": lambda _: Message("assistant", ""),
        "done": lambda _: Message("assistant", "Done."),
        "yes": lambda _: Message("assistant", "Yes. Do you confirm? Shall I proceed?"),
        "cannot": lambda _: Message("assistant", "CANNOT: I am unable to do this."),
        "echo": lambda observation: Message("assistant", "\n".join(m.content for m in observation)),
        "spam": spam,
    }


def null_score(env: ToolEnv, seed: int, split: str, name: str) -> float:
    """The score of one null policy in one episode of at most 25 turns."""
    observation, _ = env.reset(seed=seed, options={"split": split})
    policy = null_policies(env)[name]
    everything = list(observation)
    for _ in range(25):
        observation, reward, terminated, _, _ = env.step(policy(everything if name == "echo" else observation))
        everything += observation
        if terminated:
            return float(reward)
    assert env.scorer is not None
    return float(env.scorer.score(env.trajectory).value)  # type: ignore[attr-defined]


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

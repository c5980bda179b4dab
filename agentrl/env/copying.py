"""Copies of an episode: snapshots, and replays of its calls."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.data.trajectory import Message, ToolCall, Trajectory
from agentrl.env.users import RecordedUser
from agentrl.reward.replays import FrozenState, Replay, RoundEnd, RoundTurns
from agentrl.reward.values import UnscorableError, brief

# Copies


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A saved episode: the name of its environment's class and a private copy of the attributes."""

    owner: str
    parts: dict[str, Any]


class _Owner:
    """Placeholder for the environment inside a snapshot, which thus contains no environment."""

    user_toolbox = None  # as an environment, for tools that enclose one

    def __reduce__(self) -> str:
        return "ENVIRONMENT"  # copied and unpickled snapshots get the same object


ENVIRONMENT = _Owner()


def copy_parts(source: Any, target: object, names: Iterable[str], memo: dict[int, Any] | None = None) -> dict[str, Any]:
    """Deep-copy attributes of `source`, with references to `source` redirected to `target`.

    If `target` is `source` itself, the references become the placeholder `ENVIRONMENT`, which `ToolEnv.restore` replaces.
    Raises TypeError, naming the attribute, if one cannot be copied.
    """
    # Seeding deepcopy's memo redirects references to the environment to `target` instead of copying it.
    memo = {} if memo is None else memo
    memo[id(source)] = ENVIRONMENT if target is source else target
    parts: dict[str, Any] = {}
    for name in names:
        try:
            parts[name] = copy.deepcopy(source.__dict__[name], memo)
        except Exception as problem:  # of its own methods, or too deep
            raise TypeError(
                f"{type(source).__name__}.{name} cannot be copied ({problem}); name it in `shared`, or "
                "override snapshot, restore and fork"
            ) from problem
    return parts


# Replays


async def play_again(env: Any, record: Trajectory, rounds: Sequence[RoundTurns], found: Replay, gold: bool) -> None:
    """Replay an episode's rounds on a `ToolEnv`; see `agentrl.reward.replays.MakeEnv`."""
    calls, done, over = sum(one.calls for one in rounds), 0, False

    async def take(turn: Message | ToolCall, answers: list[str]) -> None:
        nonlocal done, over
        made = (turn,) if isinstance(turn, ToolCall) else turn.tool_calls
        if not made and (over or not env.has_user):
            return  # no user reads the text
        if over:
            raise UnscorableError(f"the replay environment ended after {done} of {calls} replayed calls")
        done += len(made)
        if isinstance(turn, ToolCall):
            results, over = [await env.auser_call(turn)], env.has_finished
        else:
            observation, _, terminated, truncated, _ = await env.astep(turn)
            turns = env.unwrapped._env_record.turns  # empty for a remote environment, whose server has them
            results, over = turns[-1].results if turns else [], terminated or truncated
            answers += [message.content for message in observation if message.role == "tool"]
        if gold and (refused := next((result for result in results if result.error is not None), None)):
            raise UnscorableError(
                f"the replay environment refused gold call {done} of {calls}, {made[-1].name}: {refused.error}: "
                f"{brief(refused.content)}"
            )

    try:
        # The recorded user, since the environment's may be a model.
        await env.areset(seed=record.task.seed, options={"task": record.task, "user": RecordedUser.of(record)})
        for one in rounds:
            answers: list[str] = []
            for turn in one.turns:
                await take(turn, answers)
            found.ends.append(RoundEnd(FrozenState(env.state() if env.is_open else env.trajectory.state), answers))
            if one.text is not None and one is not rounds[-1]:
                await take(one.text, answers)
    finally:
        if env.holds:  # else there is nothing to free, and closing would compute the state again
            await env.aclose()
        for box in (env.unwrapped.toolbox, env.unwrapped.user_toolbox):
            box.release(env.unwrapped)

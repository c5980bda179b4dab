"""Gold replay: the expected calls run on a twin environment, and the state they lead to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl.reward.gold import GoldCall, gold_calls
from agentrl.reward.leaf import Context, Twin, UnscorableError
from agentrl.reward.view import View, calls_made
from agentrl.trajectory import Json, Message, Task, ToolCall


def replay(context: Context, view: View, gold: Json) -> tuple[Json, Json]:
    """(state after the calls made, state after the gold calls).

    For an episode the first is the trajectory's own final state and `gold` the list of gold calls. For
    round r `gold` is a list of rounds, each a list of calls; both sides are replayed up to and with r.
    Raises UnscorableError where the gold has another shape or a twin refuses a gold call.
    """
    task = view.trajectory.task
    if view.scope == "episode":
        return view.trajectory.state, gold_state(context, task, gold_calls(gold, "literal"))
    if not isinstance(gold, (list, tuple)) or len(gold) <= view.round:
        raise UnscorableError(f"replay by round: there are no gold calls for round {view.round}")
    wanted = [call for part in gold[: view.round + 1] for call in gold_calls(part, "literal")]
    upto = view.turns[-1].index if view.turns else -1
    made = calls_made([turn for turn in view.trajectory.turns if turn.index <= upto])
    twin, _ = run_calls(context, task, [item.call for item in made])
    state = twin.state()
    twin.close()
    return state, gold_state(context, task, wanted)


def replay_answers(context: Context, view: View, gold: Json) -> list[str]:
    """What the tools answer to the gold calls (of the view's round, where the view is one).

    Raises UnscorableError as `replay` does.
    """
    before: list[GoldCall] = []
    if view.scope == "round":
        if not isinstance(gold, (list, tuple)) or len(gold) <= view.round:
            raise UnscorableError(f"replay by round: there are no gold calls for round {view.round}")
        before = [call for part in gold[: view.round] for call in gold_calls(part, "literal")]
        gold = gold[view.round]
    now = gold_calls(gold, "literal")
    twin, answers = run_calls(context, view.trajectory.task, _as_calls([*before, *now]))
    twin.close()
    return [message.content for message in answers[len(before) :]]


def _as_calls(gold: Sequence[GoldCall]) -> list[ToolCall]:
    return [ToolCall(call.name, dict(call.arguments), id=f"gold-{i}") for i, call in enumerate(gold)]


def gold_state(context: Context, task: Task, gold: Sequence[GoldCall]) -> Json:
    """State of a fresh twin after the gold calls. Raises UnscorableError where the twin refuses one."""
    twin, _ = run_calls(context, task, _as_calls(gold))
    state = twin.state()
    twin.close()
    return state


def run_calls(context: Context, task: Task, calls: Sequence[ToolCall]) -> tuple[Twin, list[Message]]:
    """A fresh twin after the calls, one a turn, and the tool messages it answered with.

    The calls go in as one assistant message each, so the twin's own budget of turns must allow them.
    """
    if context.twin is None:
        raise UnscorableError("this run gives no environment to replay on")
    twin = context.twin(task)
    twin.reset(seed=task.seed, options={"task": task})
    answers: list[Message] = []
    for index, call in enumerate(calls):
        outcome: Any = twin.step(Message("assistant", "", (call,)))
        answers.extend(message for message in outcome[0] if message.role == "tool")
        if (outcome[2] or outcome[3]) and index + 1 < len(calls):
            raise UnscorableError(
                f"the twin environment ended after {index + 1} of {len(calls)} replayed calls"
            )
    return twin, answers

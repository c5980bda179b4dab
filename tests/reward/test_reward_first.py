"""The key_value spec end to end: value, evidence, metrics, and the token that carries the reward."""

from pathlib import Path

import pytest

from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import Message, StopReason, Task, ToolCall, ToolResult, Trajectory, Turn
from agentrl.reward import compile_spec, token_rewards

SPEC = Path(__file__).parents[2] / "rewards" / "key_value.json"


def episode(answer: str, gold: object = "17") -> Trajectory:
    call = Message("assistant", "", (ToolCall("lookup", {"name": "pear"}, id="c0"),))
    last = Message("assistant", answer)
    ledger = TokenLedger()
    ledger.append_context([1, 2, 3], 0)
    ledger.append_sampled([4, 5], [-0.1, -0.2], [0, 0], 0)
    ledger.append_context([6, 7], 1)
    ledger.append_sampled([8, 9, 10], [-0.1] * 3, [0] * 3, 1)
    turns = [
        Turn(0, call, [ToolResult("c0", "lookup", "k7")], ledger=0, end=4),
        Turn(1, last, ledger=0, end=9),
    ]
    task = Task("t", 0, gold={"answer": gold, "calls": [{"name": "lookup", "arguments": {"name": "pear"}}]})
    return Trajectory("KeyValue", task, turns=turns, ledgers=[ledger])


@pytest.mark.parametrize(
    ("answer", "value"),
    [("17", 1), ("The total is 17.", 1), ("17.0", 1), ("170", 0), ("117", 0), ("v17", 0), ("-17", 0), ("1,7", 0),
     ("17 or 18", 0), ("", 0), ("seventeen", 0), ("9" * 100_000, 0)],
)  # fmt: skip
def test_the_answer_is_a_whole_number_token(answer, value):
    assert compile_spec(SPEC).score(episode(answer)).value == value


def test_a_call_is_not_an_answer():
    silent = episode("17")
    silent.turns.pop()
    assert compile_spec(SPEC).score(silent).value == 0


@pytest.mark.parametrize("gold", [None, [], {"x": 1}, "twelve", True, float("nan")])
def test_a_gold_answer_of_another_shape_is_unscored(gold):
    score = compile_spec(SPEC).score(episode("17", gold))
    assert score.value is None
    assert "expected answer must be a number" in score.evidence["root"]["unscored"]


@pytest.mark.parametrize("stop", [stop for stop in StopReason if stop.infrastructure])
def test_an_infrastructure_failure_is_never_a_reward(stop):
    broken = episode("17")
    broken.stop = stop
    assert compile_spec(SPEC).score(broken).value is None


def test_metrics_beside_the_reward():
    score = compile_spec(SPEC).score(episode("17"))
    assert score.metrics["success"] == 1
    assert score.metrics["calls"] == 1
    assert score.metrics["state"] is None  # this record has no state: measured as unknown, rewarded all the same
    assert score.value == 1


def test_the_terminal_reward_lies_on_the_last_sampled_token():
    trajectory = episode("17")
    rewards = token_rewards(trajectory, compile_spec(SPEC).score(trajectory))
    assert [list(column) for column in rewards] == [[0] * 9 + [1]]

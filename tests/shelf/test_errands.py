"""errands: any number of calls, gold that only its own calls reach, and prompts that hold what has to be copied."""

import pytest

from agentrl.env import Message, ToolCall
from agentrl.env.catalog import find_reward, make_env
from agentrl.reward import compile_spec
from tests.shelf.conversation_probes import first_task, play


def score(env, turns):
    play(env, turns)
    return compile_spec(find_reward("errands")).score(env.trajectory).value


@pytest.mark.parametrize("calls", [1, 2, 3, 7, 20, 50])
def test_a_task_has_as_many_calls_as_asked_and_its_text_has_what_they_need(calls):
    env = make_env("errands", calls=calls, lookups=0.4, cancels=0.3)
    for seed in range(8):
        task = env.make_task(seed, "heldout")
        assert len(task.gold["calls"]) == calls
        text = " ".join(task.data["jobs"])
        looked_up = set(task.data["addresses"].values())
        for call in task.gold["calls"]:
            for key, value in call["arguments"].items():
                hidden = key == "number" or value in looked_up
                assert (str(value) in text) != hidden, (task.id, call)
        env.reset(options={"task": task})
        assert score(env, env.gold_turns(task)) == 1.0


def test_an_order_that_is_cancelled_must_have_been_ordered_and_the_state_is_counted_by_hand():
    env = make_env("errands", calls=6, lookups=0.0, cancels=0.5)
    turns = first_task(env, lambda _, turns: any(turn.tool_calls and turn.tool_calls[0].name == "cancel_order" for turn in turns))
    task = env.task
    skipped = {call["arguments"]["number"] for call in task.gold["calls"] if call["name"] == "cancel_order"}
    assert len(task.gold["state"]["cancelled"]) == len(skipped)
    orders = [call for call in task.gold["calls"] if call["name"] == "order"]
    assert len(task.gold["state"]["orders"]) == len(orders) - len(skipped)
    kept = [turn for turn in turns if not turn.tool_calls or turn.tool_calls[0].name not in ("order", "cancel_order")]
    assert score(env, kept) == 0.0


@pytest.mark.parametrize("spoil", ["early", "twice", "other"])
def test_one_call_less_more_or_other_is_no_success(spoil):
    env = make_env("errands", calls=4, lookups=0.0, cancels=0.0)
    turns = first_task(env, lambda _, turns: any(turn.tool_calls and turn.tool_calls[0].name == "book_table" for turn in turns))
    at = next(i for i, turn in enumerate(turns) if turn.tool_calls and turn.tool_calls[0].name == "book_table")
    wrong = {**turns[at].tool_calls[0].arguments, "guests": 11}
    parts = {"early": [], "twice": [turns[at]] * 2, "other": [Message("assistant", tool_calls=(ToolCall("book_table", wrong),))]}
    assert score(env, [*turns[:at], *parts[spoil], *turns[at + 1 :]]) == 0.0

"""Users with tools of their own: who may call what, in which order calls are made and recorded, and what becomes of faults."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.contrib.users import ModelUser
from agentrl.data.trajectory import Message, StopReason, ToolCall, Trajectory
from agentrl.env.users import RecordedUser, SilentUser, user_view
from agentrl.env.wrappers import SystemPrompt
from agentrl.reward.values import turn_places
from agentrl.utils.errors import EnvError, ToolTimeoutError
from tests.env.phone import Phone


def press(button: str) -> list[Any]:
    return ["press", {"button": button}]


def call(on: bool) -> Message:
    return Message("assistant", "", (ToolCall("line", {"on": on}),))


def made(record: Trajectory) -> list[tuple[int, int, str, Any, str | None, str | None]]:
    """Turn, step, id, argument, result and error of the user's calls."""
    return [
        (one.turn, one.step, one.call.id, (one.call.arguments or {}).get("button"), one.result and one.result.content,
         one.result and one.result.error)
        for one in record.user_calls
    ]  # fmt: skip


def test_the_users_tools_are_not_the_policys_and_the_policys_not_the_users() -> None:
    env = Phone(script=[[["line", {"on": True}]], "it is off"], scorer=None)
    env.reset(seed=0)
    assert env.toolbox.names == ("line",) and env.user_toolbox.names == ("press", "wait")
    assert [tool["function"]["name"] for tool in env.trajectory.tools] == ["line"]
    refused = env.step(Message("assistant", "", (ToolCall("press", {"button": "power"}),)))[0][0]
    assert json.loads(refused.content)["error"] == "unknown_tool"
    observation = env.step("Is it on?")[0]
    assert observation == [Message("user", "it is off")]
    [only] = env.trajectory.user_calls
    assert only.result is not None and only.result.error == "unknown_tool"
    assert env.state() == {"done": []}


def test_calls_are_made_before_the_user_speaks_and_told_to_the_user_alone() -> None:
    env = Phone(script=[[press("a"), press("none")], [press("b")], "done, it blinks"], scorer=None)
    env.reset(seed=0)
    env.step(call(True))
    observation, _, over, _, info = env.step("Press a, then b.")
    assert observation == [Message("user", "done, it blinks")] and not over
    record = env.trajectory
    assert made(record) == [
        (1, 0, "user_0", "a", "pressed a", None),
        (1, 0, "user_1", "none", '{"error": "tool_error", "message": "there is no such button"}', "tool_error"),
        (1, 1, "user_2", "b", "pressed b", None),
    ]
    assert env.state()["done"] == [["assistant", "line", True], ["user", "press", "a"], ["user", "press", "b"]]
    assert "pressed" not in json.dumps([m.content for m in record.messages]) and "pressed" not in json.dumps(info)
    roles = [(m.role, len(m.tool_calls)) for m in user_view(record)]
    assert roles == [
        ("system", 0), ("assistant", 0), ("user", 0), ("assistant", 1), ("tool", 0), ("assistant", 0),
        ("user", 2), ("tool", 0), ("tool", 0), ("user", 1), ("tool", 0), ("user", 0),
    ]  # fmt: skip


def test_a_user_who_opens_may_call_before_its_first_words() -> None:
    script = [[press("power")], "it stays black", [press("a")], "now it works"]
    env = SystemPrompt(Phone(script=script, opens=True, scorer=None), "Be kind.")
    opening, _ = env.reset(seed=0)
    assert [m.role for m in opening] == ["system", "assistant", "user"] and opening[-1].content == "it stays black"
    assert made(env.trajectory) == [(-1, 0, "user_0", "power", "pressed power", None)]
    env.step("Press a.")
    assert [(one.turn, one.step) for one in env.trajectory.user_calls] == [(-1, 0), (0, 0)]
    assert [m.content or m.tool_calls[0].name for m in user_view(env.trajectory)] == [
        "Be kind.\n\nYou are the provider.", "Hello, how can I help?", "press", "pressed power", "it stays black",
        "Press a.", "press", "pressed a", "now it works",
    ]  # fmt: skip


def test_a_user_that_only_calls_is_cut_and_the_episode_is_scored() -> None:
    """A policy must not escape its score by sending the user in circles; before its first turn it is nobody's doing."""
    env = Phone(script=[[press("power")]] * 9, scorer=None)
    env.user_call_limit = 3
    env.reset(seed=0)
    observation, reward, over, cut, info = env.step("Press power until it works.")
    assert (observation, reward, over, cut, info["stop"]) == ([], 0.0, False, True, "max_turns")
    assert "4 calls in one answer" in info["error"] and not env.is_open
    assert len(env.trajectory.user_calls) == 3 and env.trajectory.truncated and not env.trajectory.stop.infrastructure
    opens = Phone(script=[[press("power")]] * 9, opens=True, scorer=None)
    opens.user_call_limit = 3
    with pytest.raises(EnvError, match="4 calls in one answer"):
        opens.reset(seed=0)
    assert opens.trajectory.stop is StopReason.ENV_ERROR


@pytest.mark.parametrize(("name", "arguments", "error", "stop"), [
    ("press", {"button": "broken"}, EnvError, StopReason.ENV_ERROR),
    # late = "policy" is refused to a user's tool: it would make an outage a reward.
    ("wait", {}, ToolTimeoutError, StopReason.TOOL_TIMEOUT),
])  # fmt: skip
def test_a_users_tool_that_fails_leaves_the_episode_unscored(
    name: str, arguments: dict[str, Any], error: type[Exception], stop: StopReason
) -> None:
    env = Phone(script=[[press("a"), [name, arguments]], "never said"])
    env.reset(seed=0)
    with pytest.raises(error):
        env.step("Go on.")
    record = env.trajectory
    assert record.stop is stop and record.reward is None and record.state is None
    assert [one.result is not None for one in record.user_calls] == [True, False] and not env.is_open


async def test_a_cut_in_a_users_call_is_recorded_and_torn_down() -> None:
    env = Phone(script=[[["wait", {}]], "never"], scorer=None)
    env.user_toolbox.replace(env.user_toolbox["wait"].with_options(timeout=30.0))
    await env.areset(seed=0)
    step = asyncio.ensure_future(env.astep("Wait."))
    while not env.waiting:
        await asyncio.sleep(0)
    assert [(one.tool.name, one.tool.options.policy_late) for one in env.waiting] == [("wait", False)]
    env.cut(StopReason.EPISODE_TIMEOUT)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    assert env.trajectory.stop is StopReason.EPISODE_TIMEOUT and not env.waiting
    assert [(one.call.name, one.result) for one in env.trajectory.user_calls] == [("wait", None)]


def test_a_fork_and_a_snapshot_have_their_own_user_tools_and_calls() -> None:
    env = Phone(script=[[press("a")], "one", [press("b")], "two"], scorer=None)
    env.reset(seed=0)
    env.step("first")
    kept, forked = env.snapshot(), env.fork()
    for one in (env, forked):
        assert one.step("second")[0][0].content == "two"
        assert one.state()["done"] == [["user", "press", "a"], ["user", "press", "b"]]
    env.restore(kept)
    assert len(env.trajectory.user_calls) == 1 and len(forked.trajectory.user_calls) == 2
    assert env.step("second")[0][0].content == "two"
    assert [one.call.id for one in env.trajectory.user_calls] == ["user_0", "user_1"]


def test_the_row_of_an_episode_has_the_calls_and_older_rows_are_read() -> None:
    env = Phone(script=[[press("a")], "one"], scorer=None)
    env.reset(seed=0)
    env.step("first")
    record = env.trajectory
    assert Trajectory.from_json(json.loads(json.dumps(record.to_json()))) == record
    assert Trajectory.from_json(json.loads("".join(record.json_chunks()))).user_calls == record.user_calls
    quiet = Trajectory("e", record.task)
    assert "user_calls" not in quiet.to_json() and "user_calls" not in json.loads("".join(quiet.json_chunks()))
    assert Trajectory.from_json(quiet.to_json()).user_calls == []


@pytest.mark.parametrize(
    ("last", "parting"),
    [("Thanks, bye. ###STOP###", "Thanks, bye."), (" ###STOP### ", ""), ("###STOP### Bye ###OUT###!", "Bye !")],
)
async def test_a_users_last_words_are_in_the_record_without_the_stop_words_and_nobody_is_told(last: str, parting: str) -> None:
    async def complete(messages: Any) -> str:
        return last

    env = Phone(scorer=None)
    await env.areset(seed=0)
    env.user = ModelUser(system="Play.", stop=("###STOP###", "###OUT###"), complete=complete)
    observation, _, over, _, _ = await env.astep("It works again.")
    record = env.trajectory
    assert (observation, over, record.parting, record.stop) == ([], True, parting, StopReason.DONE)
    assert record.messages[-1].role == "assistant"
    row = json.loads("".join(record.json_chunks()))
    assert row.get("parting", "") == parting and ("parting" in row) == bool(parting) and row.keys() == record.to_json().keys()
    assert Trajectory.from_json(row) == record
    if parting:
        del row["parting"]
        assert Trajectory.from_json(row).parting == "", "a file from before"
    twin = Phone(scorer=None)
    await twin.areset(options={"task": record.task, "user": RecordedUser.of(record)})
    assert (await twin.astep("It works again."))[2] is True, "the recorded user leaves, too"


async def test_a_model_user_calls_its_tools_and_a_stop_beside_a_call_ends_nothing() -> None:
    seen: list[list[Any]] = []
    said = [Message("user", "###STOP### wait", (ToolCall("press", {"button": "a"}, "x"),)), "it blinks", "bye ###TRANSFER###"]

    async def complete(messages: Any) -> Any:
        seen.append(list(messages))
        return said[len(seen) - 1]

    env = Phone(scorer=None)
    await env.areset(seed=0)
    env.user = ModelUser(system="Play.", stop=("###STOP###", "###TRANSFER###"), complete=complete)
    await env.astep(call(True))
    assert (await env.astep("Press a."))[0] == [Message("user", "it blinks")]
    assert env.trajectory.user_calls[0].text == "###STOP### wait"
    assert seen[1][0] == {"role": "system", "content": "Play."}
    assert [m["role"] for m in seen[1]] == ["system", "user", "assistant", "user", "assistant", "tool"]
    asked = seen[1][-2]["tool_calls"][0]
    assert asked == {"id": "user_0", "type": "function", "function": {"name": "press", "arguments": '{"button": "a"}'}}
    assert seen[1][-1] == {"role": "tool", "tool_call_id": "user_0", "content": "pressed a"}
    assert "line on" not in json.dumps(seen)
    assert (await env.astep("Bye."))[2] is True


def test_a_user_that_answers_something_else_is_the_environments_fault() -> None:
    class Odd:
        async def reply(self, conversation: Any) -> Any:
            return Message("assistant", "I am the policy")

    env = Phone(scorer=None)
    env.reset(seed=0)
    env.user = Odd()
    with pytest.raises(EnvError, match="the user's reply must be a text, a Message of role 'user'"):
        env.step("Hello?")


def test_an_opening_that_does_not_come_in_time_or_has_no_user_fails_the_reset() -> None:
    class Slow:
        async def reply(self, conversation: Any) -> str:
            await asyncio.sleep(30)
            return "late"

    class Asks(Phone):
        async def setup(self, task: Any) -> None:
            self.user = Slow() if self.script else None  # type: ignore[assignment]

    env = Asks(script=["x"], opens=True, scorer=None)
    env.opening_timeout = 0.05
    with pytest.raises(EnvError, match="opening of environment tests/Phone-v0"):
        env.reset(seed=0)
    assert env.trajectory.stop is StopReason.ENV_ERROR and not env.is_open
    with pytest.raises(EnvError, match="there is no user to ask"):
        Asks(opens=True, scorer=None).reset(seed=0)


BUTTONS = st.sampled_from(["a", "b", "none"])
WORDS = st.sampled_from(["yes", "no", "hm"])
LINES = st.lists(st.one_of(WORDS, st.lists(BUTTONS.map(press), min_size=1, max_size=3)), max_size=8)
TURNS = st.lists(st.one_of(WORDS, st.lists(st.booleans(), min_size=1, max_size=2)), max_size=6)


@given(LINES, TURNS, st.booleans())
@settings(max_examples=60, deadline=None)
def test_the_order_of_calls_is_the_order_of_the_script_and_a_recorded_user_repeats_it(
    lines: list[Any], turns: list[Any], opens: bool
) -> None:
    """Against a plain simulation; a second environment with the recorded user records the same calls."""
    env = Phone(script=lines, opens=opens, scorer=None)
    played = play(env, turns)
    done, calls, said = simulated(lines, turns[:played], opens)
    record = env.trajectory
    assert env.trajectory.state == {"done": done}
    assert [(one.turn, one.step, one.call.arguments["button"]) for one in record.user_calls] == calls  # type: ignore[index]
    assert [m.content for m in record.messages[2:] if m.role == "user"] == said
    asked = [m for m in user_view(record) if m.role == "user" and m.tool_calls]
    assert [c.arguments["button"] for m in asked for c in m.tool_calls] == [button for _, _, button in calls]  # type: ignore[index]
    plain = [[m for m in said if not m.tool_calls and m.role != "tool"] for said in (user_view(record), record.messages)]
    assert plain[0] == plain[1]
    assert len(turn_places(record)) == len(record.turns)
    twin = Phone(script=["another"], opens=opens, scorer=None)
    twin.reset(options={"task": record.task, "user": RecordedUser.of(record)})
    for turn in record.turns:
        twin.step(turn.message)
    again = twin.trajectory
    assert made(again) == made(record) and again.state == record.state
    assert [(m.role, m.content) for m in again.messages] == [(m.role, m.content) for m in record.messages]


def play(env: Phone, turns: list[Any]) -> int:
    env.reset(seed=0)
    for number, turn in enumerate(turns):
        action = turn if isinstance(turn, str) else Message("assistant", "", tuple(ToolCall("line", {"on": on}) for on in turn))
        if env.step(action)[2]:
            return number + 1
    return len(turns)


def simulated(lines: list[Any], turns: list[Any], opens: bool) -> tuple[list[Any], list[Any], list[str]]:
    """What is done by whom, the user's calls as (turn, step, button), and what the user says."""
    left, done, calls, said = list(lines), list[Any](), list[Any](), list[str]()

    def ask(turn: int) -> str | None:
        step = 0
        while left and not isinstance(left[0], str):
            for _, arguments in left.pop(0):
                calls.append((turn, step, arguments["button"]))
                if arguments["button"] != "none":
                    done.append(["user", "press", arguments["button"]])
            step += 1
        return left.pop(0) if left else None

    said.append((ask(-1) or "") if opens else "My phone is dead.")
    for number, turn in enumerate(turns):
        if isinstance(turn, str):
            answer = ask(number)
            said += [] if answer is None else [answer]
        else:
            done += [["assistant", "line", on] for on in turn]
    return done, calls, said


def test_a_recorded_user_never_invents_an_answer_and_a_gold_replay_asks_nobody() -> None:
    env = Phone(script=["one"], scorer=None)
    env.reset(seed=0)
    env.step("first")
    twin = Phone(opens=True, scorer=None)
    twin.reset(options={"task": env.task, "user": RecordedUser.of(env.trajectory)})
    twin.step("first")
    with pytest.raises(EnvError, match="no answer to text 2"):
        twin.step("and more?")
    gold = Phone(opens=True, scorer=None)
    gold.reset(options={"task": env.task, "user": SilentUser()})
    gold.step(call(True))
    assert gold.user_call(ToolCall("press", {"button": "b"})).content == "pressed b"
    gold.step(call(False))
    assert gold.state()["done"] == [["assistant", "line", True], ["user", "press", "b"], ["assistant", "line", False]]
    assert [(one.turn, one.step) for one in gold.trajectory.user_calls] == [(0, 0)]

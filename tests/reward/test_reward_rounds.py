"""Replays by round: they go through the episode's rounds, with the tools and the state that its user's turns bring."""

import copy
import gc
import json
import weakref
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.data.trajectory import Message, Task, ToolCall, ToolResult, Trajectory
from agentrl.env import tool
from agentrl.env.users import ScriptedUser
from agentrl.reward import Context, compile_spec
from agentrl.reward.leaf import episode_view
from agentrl.reward.leaves.state import gold_end, replay
from agentrl.reward.values import course_of
from tests.reward.rounds_env import Cabinet, Guest, X, Y, by_gold, by_round, played, put, swap, task_of


def test_tools_that_arrive_with_a_users_turn_are_there_in_a_replay() -> None:
    """`swap` comes with round 1 only, as in BFCL's miss_func: there the gold scored 0."""
    gold = [[X], [swap("a", "b")], [put("b", "y")]]
    right = by_gold(gold, brings={"1": ["swap"]})
    task = right.task
    assert [r.error for turn in right.turns for r in turn.results] == [None] * 3
    assert by_round().score(right).value == 1
    early = played(task, [[[X, swap("a", "b")]], [[swap("a", "b")]], [[put("b", "y")]]])
    assert early.turns[0].results[1].error == "unknown_tool"
    assert by_round().score(early).value == 1  # the refused call did nothing, in the replay as in the episode
    wrong = played(task, [[[X]], [[put("b", "x")]], [[put("b", "y")]]])
    scored = by_round("state.match").score(wrong)
    assert scored.value == 0 and [part["value"] for part in scored.evidence["root"]["parts"]] == [1, 0, 0]


def test_state_that_a_users_turn_changes_is_there_in_a_replay() -> None:
    """The number of the round is part of the state: without the user's turns it would be 0 on both sides."""
    seen = []

    class Seen(Cabinet):
        def state(self):
            seen.append(self.round)
            return super().state()

    gold = [[X], [Y], [put("a", "z")]]
    assert by_round("state.match", make=lambda task: Seen()).score(by_gold(gold)).value
    assert seen == [0, 1, 2, 0, 1, 2]  # one pass of the gold calls and one of those made; no state is read twice


def test_an_opening_history_has_no_rounds() -> None:
    """user, assistant with a call, its result, assistant, and only then the episode's first user message."""
    shown = ToolCall("put", {"drawer": "z", "thing": "old"}, id="h")
    said = [("user", "before"), ("assistant", "", (shown,)), ("tool", "z has 1"), ("assistant", "done")]
    right = by_gold([[X], [Y]], history=[asdict(Message(*one)) for one in said])
    assert by_round().score(right).value == 1
    late = played(right.task, [[], [[X, Y]]])
    scored = by_round("state.match").score(late)
    assert [part["value"] for part in scored.evidence["root"]["parts"]] == [0, 1]


def test_several_messages_of_the_user_in_a_row_are_one_turn() -> None:
    class Twice(Cabinet):
        async def user_reply(self, message):
            said = await super().user_reply(message)
            return said and [*said, Message("user", "please")]

    episode = by_gold([[X], [Y]], Twice())
    assert [m.role for m in episode.messages].count("user") == 3
    assert by_round(make=lambda task: Twice()).score(episode).value == 1


def test_an_episode_that_ended_early_is_compared_as_far_as_it_went() -> None:
    episode = played(task_of([[X], [Y], [ToolCall("nonsense", {})]]), [[[X]], [[Y], [ToolCall("lock", {})]]])
    assert episode.turns[-1].message.tool_calls[0].name == "lock" and len(episode.turns) == 4
    assert by_round().score(episode).value == 1  # of gold round 2, which is refused, nothing was asked


def test_gold_that_is_refused_in_a_later_round_spoils_no_earlier_one() -> None:
    episode = played(task_of([[X], [ToolCall("take", {"drawer": "b"})]]), [[[X]], [[Y]]])
    parts = by_round("state.match").score(episode).evidence["root"]["parts"]
    assert parts[0]["value"] == 1 and parts[1]["value"] is None
    assert "refused gold call 2 of 2, take: tool_error: " in parts[1]["of"][0]["unscored"]


def test_what_a_user_hears_decides_what_the_user_of_a_replay_does() -> None:
    """A user that answers by what the policy says: gold is replayed with the episode's own texts, so for each text anew."""

    class Hears(Cabinet):
        scripted = False

        async def user_reply(self, message):
            if "swap" in message.content:
                self.drawers = {"from": ["user"]}
            return await super().user_reply(message)

    plain, env = by_gold([[X], [Y]], Hears()), Hears()
    env.reset(seed=0, options={"task": plain.task})
    for turn in (Message("assistant", "", (X,)), "swap", Message("assistant", "", (Y,)), "done"):
        env.step(turn)
    scorer = by_round(make=lambda task: Hears())
    assert env.trajectory.state["drawers"] == {"from": ["user"], "a": ["y"]}
    assert [scorer.score(episode).value for episode in (plain, env.trajectory, plain)] == [1, 1, 1]


def test_a_call_that_used_up_its_time_is_not_made_again() -> None:
    episode = by_gold([[X]])
    late = replace(episode.turns[0], index=1, message=Message("assistant", "", (ToolCall("lock", {}, id="l"),)), results=[])
    episode.turns[1:], episode.stop = [late], type(episode.stop).MAX_TOOL_TIME
    episode.messages[-1] = late.message
    assert by_round("state.match").score(episode).value == 1


@pytest.mark.parametrize("stop", ["MAX_TOOL_TIME", "MAX_EPISODE_TIME"])
def test_of_a_turn_that_was_cut_the_calls_that_were_answered_are_made_again(stop: str) -> None:
    """Of two calls of an agent that makes its own, the first was answered, and the second had not ended."""
    episode = played(task_of([[X, Y]]), [[[X]]])
    calls = (replace(Y, id="y"), ToolCall("take", {"drawer": "a"}, id="late"))
    cut = replace(episode.turns[0], index=1, message=Message("assistant", "", calls), results=[ToolResult("y", "put", "a has 2")])
    episode.turns[1:], episode.stop = [cut], getattr(type(episode.stop), stop)
    episode.messages[-1] = cut.message
    assert by_round("state.match").score(episode).value == 1


def test_a_model_user_is_never_asked_by_a_replay_and_its_recorded_calls_are_made_again() -> None:
    Guest.asked = 0
    episode = by_gold([[X], [swap("a", "guest")], [Y]], Guest())
    assert [made.call.arguments["thing"] for made in episode.user_calls] == ["1", "3", "5"] and Guest.asked == 6
    scorer = by_round(make=lambda task: Guest())
    assert scorer.score(episode).value == 1 and Guest.asked == 6
    wrong = played(episode.task, [[[X]], [[put("guest", "x")]], [[Y]]], Guest())
    parts = by_round("state.match", make=lambda task: Guest()).score(wrong).evidence["root"]["parts"]
    assert [part["value"] for part in parts] == [1, 0, 0] and Guest.asked == 12


def test_a_gold_call_of_the_users_own_is_made_by_the_user() -> None:
    calls = [{"name": "put", "arguments": {"drawer": "a", "thing": "x"}, "by": by} for by in ("assistant", "user")]
    args = {"replay": calls}
    root = {"op": "all", "of": [{"use": name, "args": args} for name in ("state.match", "results.contains")]}
    spec = {"agentrl_reward": 1, "name": "both", "root": root}
    scorer = compile_spec(spec, context=Context(replay_env=lambda task: Guest()))
    Guest.asked = 0
    episode = played(task_of([[]]), [[[X]]], Guest())
    assert scorer.score(episode).value == 0 and Guest.asked == 2
    episode.state = {"drawers": {"a": ["x", "x"]}, "round": 0}
    assert scorer.score(episode).value == 1  # of the answers only the policy's has to be read


@pytest.mark.parametrize(("thing", "value"), [("1", 1), ("7", 0)])
def test_of_gold_that_names_the_users_calls_the_records_own_are_not_made_beside_them(thing: str, value: float) -> None:
    """In the record the guest put "1" after the first round; what it says is played all the same, and brings `swap`."""
    task = task_of([[X], [put("guest", thing), swap("a", "guest")]])
    first, (users, last) = task.gold["rounds"]
    task = replace(task, gold={"rounds": [first, [{**users, "by": "user"}, last]]})
    Guest.asked = 0
    episode = played(task, [[[X]], [[swap("a", "guest")]]], Guest())
    assert [made.call.arguments["thing"] for made in episode.user_calls] == ["1", "3"]
    episode.user_calls.pop()  # as of an episode that was cut after its last call
    del episode.messages[-1], episode.turns[-1]
    episode.messages.pop()
    parts = by_round("state.match", make=lambda task: Guest()).score(episode).evidence["root"]["parts"]
    assert [part["value"] for part in parts] == [1, value]


class Patient(Cabinet):
    """Its user says nothing to "wait", and notes it: a round may have several texts."""

    scripted = False

    async def user_reply(self, message: Message) -> list[Message] | None:
        if not message.content.startswith("wait"):
            return await super().user_reply(message)
        self.drawers.setdefault("waited", []).append(message.content)
        return []


def test_a_text_that_the_user_says_nothing_to_ends_no_round_and_is_heard_by_both_replays() -> None:
    """Of three members one waits in the first round, one in the second (twice), one never: each has its own gold."""

    def episode(*turns: Message | str | ToolCall) -> Trajectory:
        env = Patient()
        env.reset(seed=0, options={"task": task_of([[X], [Y]])})
        for turn in turns:
            env.step(Message("assistant", "", (turn,)) if isinstance(turn, ToolCall) else turn)
        return env.trajectory

    members = [
        episode(X, "wait", "done", Y, "done"),
        episode(X, "done", "wait 1", Y, "wait 2", "done"),
        episode(X, "done", Y, "done"),
        episode(X, "wait", "done", X, "done"),
    ]
    assert members[1].state == {"drawers": {"a": ["x", "y"], "waited": ["wait 1", "wait 2"]}, "round": 2}
    for order in (1, -1):
        scorer = by_round(make=lambda task: Patient())
        assert [scorer.score(one).value for one in members[::order]][::order] == [1, 1, 1, 0]


def test_a_model_user_that_said_nothing_and_stayed_stays_in_a_replay() -> None:
    class Quiet(Cabinet):
        async def setup(self, task: Task) -> None:
            await super().setup(task)
            self.user = ScriptedUser(["", "go on", "go on"])

        async def user_reply(self, message: Message) -> list[Message] | None:
            said = await self.ask_user()
            return None if said is None else [Message("user", said)] if said else []

    env = Quiet()
    env.reset(seed=0, options={"task": task_of([[X], [Y]])})
    for turn in (X, "silence", "more", Y, "done"):
        env.step(turn if isinstance(turn, str) else Message("assistant", "", (turn,)))
    assert [m.content for m in env.trajectory.messages if m.role == "user"] == ["begin", "go on", "go on"]
    assert by_round(make=lambda task: Quiet()).score(env.trajectory).value == 1


def test_a_user_that_turned_the_cabinet_before_its_first_words_has_its_own_gold() -> None:
    """Two members, whose users say the same and opened in different ways."""

    class Opens(Guest):
        async def prompt(self, task: Task) -> list[Message]:  # type: ignore[override]
            return [Message("user", await self.ask_user() or "")]

        @staticmethod
        async def _said(messages: Any) -> str | Message:
            Guest.asked += 1
            return (
                "go on"
                if any(row["role"] == "assistant" for row in messages)
                else Message("user", "", (put("guest", str(Guest.asked)),))
            )

    Guest.asked = 0
    members = [by_gold([[X], [Y]], Opens()) for _ in range(2)]
    things = [[made.call.arguments["thing"] for made in one.user_calls] for one in members]
    assert len(things[0]) == len(things[1]) == 1 and things[0] != things[1]
    scorer = by_round(make=lambda task: Opens())
    assert [scorer.score(one).value for one in members] == [1, 1]


def test_tasks_that_differ_in_a_type_only_share_no_gold() -> None:
    """1 is equal to True in Python, and is not in JSON."""

    class Shows(Cabinet):
        @tool(inline=True)
        def show(self) -> str:
            """shows"""
            return f"flag {json.dumps(self.task.data['flag'])}"

    members = [by_gold([[ToolCall("show", {})], [Y]], Shows(), flag=[flag]) for flag in (1, True, 1.0)]
    assert [one.turns[0].results[0].content for one in members] == ["flag [1]", "flag [true]", "flag [1.0]"]
    scorer = by_round(make=lambda task: Shows())
    assert [scorer.score(one).value for one in members] == [1, 1, 1]


drawers = st.sampled_from("ab")
any_call = st.one_of(
    st.builds(put, drawers, st.sampled_from("xyz")),
    st.builds(swap, drawers, drawers),
    st.builds(lambda drawer: ToolCall("take", {"drawer": drawer}), drawers),
    st.just(ToolCall("count", {})),
    st.just(ToolCall("nothing", {"like": "it"})),
    st.just(ToolCall("put", {"drawer": 3})),
    st.just(ToolCall("put", None, error="not JSON")),
)
turns = st.lists(st.lists(any_call, min_size=1, max_size=3), max_size=3)


class Watched(Cabinet):
    """Keeps its state as each round ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[object] = []

    async def user_reply(self, message: Message) -> list[Message] | None:
        self.ends.append(copy.deepcopy(self.state()))
        return await super().user_reply(message)


@settings(max_examples=30, deadline=None, database=None)
@given(st.lists(turns, min_size=1, max_size=3), st.booleans())
def test_a_replay_of_an_episodes_own_calls_goes_through_its_own_states(rounds: list[list[list[ToolCall]]], brings: bool) -> None:
    """Gold of the accepted calls, one a turn, has the same states; neither record nor task changes."""
    env = Watched()
    task = task_of([[]] * len(rounds), brings={"1": ["swap"]} if brings and len(rounds) > 1 else {})
    episode = played(task, rounds, env)
    places = course_of(episode).rounds
    gold: list[list[object]] = [[] for _ in rounds]
    for turn, place in zip(episode.turns, places, strict=True):
        accepted = zip(turn.message.tool_calls, turn.results, strict=True)
        gold[place] += [{"name": c.name, "arguments": c.arguments} for c, result in accepted if result.error is None]
    before = json.dumps(episode.to_json())
    context = Context(replay_env=lambda task: Watched())
    alone = all(len(turn.message.tool_calls) <= 1 for turn in episode.turns)
    wanted = [result.content for turn in episode.turns for result in turn.results if result.error is None]
    for _ in range(4):
        parts = episode_view(episode).parts("round")
        states = [replay(context, part, gold if alone else [[] for _ in gold]) for part in parts]
        assert [own.value for own, _ in states] == env.ends
        if alone:  # gold calls are one a turn; calls of one turn may have ended in another order
            assert [expected.value for _, expected in states] == env.ends
            assert [text for part in parts for text in gold_end(context, part, gold).answers] == wanted
    assert json.dumps(episode.to_json()) == before


def test_an_environment_ends_with_its_replay() -> None:
    """At once, by its last reference: a circle would keep every one of a batch until the garbage collector's longest pass."""
    made: list[weakref.ref[Any]] = []

    class Counted(Cabinet):
        async def astep(self, action: Any) -> Any:
            made.append(weakref.ref(self))
            return await super().astep(action)

    episode = by_gold([[X], [Y]])
    scorer = by_round(make=lambda task: Counted())
    scorer.score(episode)
    made.clear()
    gc.disable()
    try:
        assert scorer.score(episode).value == 1
        assert len(made) == 3 and [one() for one in made] == [None] * 3  # two calls and the text between them
    finally:
        gc.enable()


def test_what_a_replay_opened_is_freed() -> None:
    class Frees(Cabinet):
        freed = 0

        async def teardown(self) -> None:
            Frees.freed += 1

    episode = by_gold([[X], [Y]])
    scorer = by_round(make=lambda task: Frees())
    assert [scorer.score(episode).value for _ in range(4)] == [1] * 4
    assert Frees.freed == 5  # of the gold's replay and of each episode's

"""Snapshot, restore and fork of the toy (those of the shelf: `env check`); and nothing that is given out changes a record."""

import copy
import json
import pickle
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.data.trajectory import Json, StopReason
from agentrl.env import Message, Task, Tool, ToolCall, ToolEnv, tool
from agentrl.env.wrappers import ToolFaults
from agentrl.reward import Context, compile_spec
from tests.env.toyenvs import Notes, call


def observe(env: ToolEnv) -> Any:
    return env.trajectory.to_json()


def test_what_two_environments_share_is_shared_by_their_forks_too() -> None:
    outer, inner = Notes(), Notes()
    outer.inner, inner.outer, outer.db = inner, outer, {"a": []}  # type: ignore[attr-defined]
    inner.db = outer.db  # type: ignore[attr-defined]
    forked: Any = outer.fork()
    assert forked.inner.db is forked.db is not outer.db and forked.inner.outer is forked  # type: ignore[attr-defined]
    assert forked.inner is not inner


def test_restore_goes_back_any_number_of_times() -> None:
    env = Notes()
    env.reset(seed=0)
    env.step(call("write", text="a"))
    snapshot = env.snapshot()
    before = observe(env)
    for text in ("b", "c"):
        env.step(call("write", text=text))
        env.extra = text  # type: ignore[attr-defined]
        env.restore(snapshot)
        assert observe(env) == before and "extra" not in vars(env)
    assert env.step(call("write", text="d"))[0][0].content == "2"


def test_a_snapshot_travels_to_another_environment_and_through_pickle() -> None:
    env, other = Notes(), Notes()
    env.reset(seed=0)
    env.step(call("write", text="a"))
    env.toolbox.remove("quit")
    env.itself = env  # type: ignore[attr-defined]
    other.restore(copy.deepcopy(env.snapshot()))
    assert vars(other)["itself"] is other
    other.step(call("write", text="b"))
    assert env.notes == ["a"] and other.notes == ["a", "b"] and "quit" not in other.toolbox
    assert pickle.loads(pickle.dumps(env.trajectory)) == env.trajectory
    with pytest.raises(ValueError, match="does not fit"):
        other.restore(Strange().snapshot())


class Strange(Notes):
    id = "tests/Strange-v0"
    shared = frozenset({"handle"})


class Encloses(Notes):
    """A tool of the episode encloses the environment."""

    async def setup(self, task: Task) -> None:
        await super().setup(task)

        def jot(text: str, *, times: int = 2) -> int:
            self.notes += [text] * times
            return len(self.notes) + (0 if self.notes else later)

        self.toolbox.add(jot)
        if self.notes:
            later = 1


@pytest.mark.parametrize("wrap", [lambda env: env, partial(ToolFaults, rate=0.0)], ids=["plain", "in a wrapper of tools"])
def test_a_tool_that_encloses_its_environment_is_the_forks_in_the_fork(wrap: Any) -> None:
    """A call of the fork wrote into its parent."""
    env = wrap(Encloses())
    env.reset(seed=0)
    other, saved = env.fork(), env.snapshot()
    assert [one.step(call("jot", text="a"))[0][0].content for one in (other, other, env)] == ["2", "4", "2"]
    assert (len(env.unwrapped.notes), len(other.unwrapped.notes)) == (2, 4)
    for one in (env, other):
        one.restore(saved)
        assert one.step(call("jot", text="a", times=1))[0][0].content == "1" and one.unwrapped.notes == ["a"]


def test_a_fork_that_begins_another_episode_calls_its_own_tools() -> None:
    """With a tool of the object from its beginning on, they were its parent's again."""
    env = Notes()
    env.toolbox.add(tool(name="jot")(env.write))
    env.reset(seed=0)
    other = env.fork()
    other.reset(seed=0)
    assert [one.step(call("jot", text="a"))[0][0].content for one in (other, env)] == ["1", "1"]


class Uncopied:
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("only leaves")


def test_what_cannot_be_copied_is_named() -> None:
    env, strange = Notes(), Strange()
    for one in (env, strange):
        one.reset(seed=0)
        one.handle = (x for x in ())  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"Notes\.handle"):
        env.fork()
    assert strange.fork().handle is strange.handle  # type: ignore[attr-defined]
    env.handle = Uncopied()  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"Notes\.handle cannot be copied \(only leaves\)"):  # as tensors with a gradient say
        env.fork()


@given(st.lists(st.sampled_from(["a", "b", "no"]), max_size=6), st.integers(0, 6), st.lists(st.text(max_size=3), max_size=4))
@settings(max_examples=60, deadline=None)
async def test_a_fork_equals_a_replay(script: list[str], at: int, rest: list[str]) -> None:
    """Forking after some turns and playing on gives what playing everything in a fresh one gives."""

    env = Notes()
    await env.areset(seed=1)
    for text in script[:at]:
        await env.astep(call("write", text=text))
    replay_env = env.fork()
    for text in script[at:]:
        await env.astep(call("write", text=text))
    for text in rest:
        await replay_env.astep(call("write", text=text))
    fresh = Notes()
    await fresh.areset(seed=1)
    for text in script[:at] + rest:
        await fresh.astep(call("write", text=text))
    assert replay_env.trajectory.messages == fresh.trajectory.messages
    assert replay_env.state() == fresh.state()


# -- whatever tools and hooks do with what they are given ------------------------------------------

LOOSE = {"type": "object", "properties": {"items": {}, "at": {}}, "additionalProperties": True}
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text("ab", max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("xy", max_size=2), inner, max_size=3),
    max_leaves=6,
)
quick = settings(max_examples=25, deadline=None, database=None)


def spoil(value: Any) -> None:
    """Change everything in it that can be changed."""
    if isinstance(value, dict):
        for item in list(value.values()):
            spoil(item)
        value["spoiled"] = True
    elif isinstance(value, list):
        for item in list(value):
            spoil(item)
        value.append("spoiled")


class Spoils(ToolEnv):
    """Keeps what it is given, and changes it: in each hook, and in tools of each kind."""

    id = "test/Spoils-v0"
    given: Mapping[str, Json]

    def __init__(
        self, given: Mapping[str, Json] = MappingProxyType({}), gold: Mapping[str, Json] = MappingProxyType({}), **base: Any
    ):
        super().__init__(**base)
        self.given, self.gold = given, gold
        self.toolbox.add(Tool.from_schema("loose", "", LOOSE, self._loose))

    def make_task(self, rng_seed: int, split: str) -> Task:
        # One dictionary for all episodes, as a data set that is read once gives it.
        return Task(f"s/{rng_seed}", rng_seed, split, self.given, self.gold)

    def prompt(self, task: Task) -> list[Message]:
        spoil(task.data.get("shown"))
        return [Message("user", json.dumps(dict(task.data), sort_keys=True))]

    async def setup(self, task: Task) -> None:
        spoil(task.data.get("kept"))

    async def _loose(self, **values: Any) -> list[Any]:
        kept = [values]
        spoil(values)
        spoil(dict(self.task.data))
        spoil(dict(self.task.gold))
        return kept

    @tool
    async def typed(self, items: list[Any], at: dict[str, Any]) -> list[Any]:
        """takes them"""
        spoil(items)
        spoil(at)
        spoil(dict(self.task.gold))
        return [items, at]


@quick
@given(json_values, st.dictionaries(st.text("xy", max_size=2), json_values, max_size=3), json_values)
def test_what_tools_do_with_their_arguments_is_not_recorded(items: Any, at: dict[str, Any], data: Any) -> None:
    given = {"shown": [data], "kept": {"deep": data}, "rest": data}
    gold = {"answer": [data]}
    before = copy.deepcopy([given, gold])
    calls = [ToolCall("loose", {"items": items, "at": at}, id="a"), ToolCall("typed", {"items": [items], "at": at}, id="b")]
    said = copy.deepcopy(calls)
    env = Spoils(given, gold)
    first, _ = env.reset(seed=1)
    env.step(Message("assistant", "", tuple(calls)))
    answers = [result.value for result in env.trajectory.turns[0].results]
    assert [result.error for result in env.trajectory.turns[0].results] == [None, None]
    recorded = [(call.name, call.arguments) for _, call, _ in env.trajectory.calls()]
    assert recorded == [(call.name, call.arguments) for call in said]
    assert [dict(env.trajectory.task.data), dict(env.trajectory.task.gold)] == before == [given, gold]
    env.step(Message("assistant", "", (ToolCall("loose", {"items": items}, id="c"),)))
    assert [result.value for result in env.trajectory.turns[0].results] == answers
    again, _ = env.reset(seed=2)
    assert again == first and [dict(env.trajectory.task.data), dict(env.trajectory.task.gold)] == before


REPLAYED = {
    "agentrl_reward": 1,
    "name": "replayed",
    "root": {"use": "state.match", "id": "success", "args": {"replay": {"$": "/task/gold/calls"}}},
}


class Piles(Notes):
    """A pile that a tool keeps and later adds to."""

    def make_task(self, rng_seed: int, split: str) -> Task:
        calls = [{"name": "pile", "arguments": {"of": [1]}}, {"name": "add", "arguments": {"thing": 2}}]
        return Task("p", rng_seed, split, {"words": []}, {"calls": calls})

    @tool
    async def pile(self, of: list) -> None:  # type: ignore[type-arg]  # without a type of its items, it gets the list itself
        self.notes = of

    @tool
    async def add(self, thing: int) -> None:
        self.notes.append(thing)

    def gold_turns(self, task: Task) -> list[Message]:
        return [*(call(one["name"], **one["arguments"]) for one in task.gold["calls"]), Message("assistant", "done")]


def test_gold_is_worth_one_every_time_it_is_replayed() -> None:
    """The second replay would begin from a pile of two."""
    scorer = compile_spec(REPLAYED, context=Context(replay_env=lambda task: Piles()))
    for _ in range(3):
        env = Piles()
        env.reset(seed=0)
        for turn in env.gold_turns(env.task):
            env.step(turn)
        assert env.trajectory.stop is StopReason.DONE and env.trajectory.state == {"notes": [1, 2]}
        assert scorer.score(env.trajectory).value == 1.0
        assert env.trajectory.task.gold["calls"][0]["arguments"] == {"of": [1]}


def test_a_fork_shares_no_task() -> None:
    env = Spoils({"kept": {"a": [1]}}, {"answer": [1]})
    env.reset(seed=1)
    other = env.fork()
    other.step(Message("assistant", "", (ToolCall("typed", {"items": [], "at": {}}, id="a"),)))
    assert other.task.gold == {"answer": [1, "spoiled"]} and env.task.gold == {"answer": [1]}
    assert other.trajectory.task.gold == {"answer": [1]} == env.trajectory.task.gold

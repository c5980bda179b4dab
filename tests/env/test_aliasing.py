"""No tool and no hook can change a record, a task, or another episode, whatever it does with what it is given."""

import copy
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.data.trajectory import Json, StopReason
from agentrl.env import Message, Task, Tool, ToolCall, ToolEnv, tool
from agentrl.reward import Context, compile_spec
from tests.env.toyenvs import Notes, call

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

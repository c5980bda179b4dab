"""What suites share: versions, published tools, scripted gold, official rows, calls as text."""

import asyncio
import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agentrl.contrib.suites.benchmarks import calling, groups, message_of
from agentrl.contrib.suites.suite import found_version, known_word, members, within
from agentrl.contrib.suites.verifiers import _record_faults
from agentrl.data.trajectory import Message, StopReason, ToolCall
from agentrl.env.catalog import find_env
from agentrl.env.official import Played
from agentrl.utils.errors import ConfigError
from agentrl.utils.search_path import load_module


def part_of(env: str, name: str) -> Any:
    """A module of an environment of the shelf."""
    return load_module(Path(str(find_env(env).path)).with_name(f"{name}.py"))


CALLS, TABLES, PACKAGE = (part_of("bfcl", name) for name in ("calls", "official", "package"))
DOMAINS, SIDES = part_of("tau2", "domains"), part_of("tau2", "sides")
ROWS, TOGETHER = part_of("appworld", "rows"), part_of("toolsandbox", "together")


def played(name: str, success: bool | None, kind: str = "a", sample: int = 0, family: str = "f") -> Played:
    value = None if success is None else float(success)
    return Played(name, family, {"kind": kind}, sample, value, success, StopReason.DONE, 1, 1)


def test_a_version_is_that_of_the_project_then_of_the_installed_package_then_of_the_commit(tmp_path: Path) -> None:
    folder = tmp_path / "toy"
    folder.mkdir()
    assert found_version(folder) == "no version"
    (tmp_path / "toy-1.2.dist-info").mkdir()
    (tmp_path / "toyother-9.dist-info").mkdir()
    assert found_version(folder) == "1.2"
    (folder / "pyproject.toml").write_text('[project]\nversion = "3"\n')
    assert found_version(folder) == "3"
    (folder / "pyproject.toml").write_text("[project")
    with pytest.raises(ConfigError, match=r"pyproject\.toml: "):
        found_version(folder)


def test_words_numbers_and_groups_of_a_users_are_named_with_what_was_expected() -> None:
    assert known_word("retail", ("mock", "retail"), "x") == "retail"
    with pytest.raises(ConfigError, match=r"^toy: domain = 'retial'; did you mean 'retail'\?$"):
        known_word("retial", ("mock", "retail"), "toy: domain")
    with pytest.raises(ConfigError, match=r"= 'zzz'; known: mock, retail$"):
        known_word("zzz", ("mock", "retail"), "toy: domain")
    assert [within(number, 1, 5, "n") for number in (1, 5)] == [1, 5]
    for number in (0, 6):
        with pytest.raises(ConfigError, match=rf"^n = {number}; expected a number within 1\.\.5$"):
            within(number, 1, 5, "n")
    assert members(["b", "both"], {"a": ["a"], "b": ["b"], "both": ["a", "b"]}, "x") == ("b", "a")


def test_gold_of_two_sides_asks_the_user_for_its_calls_and_the_user_makes_them_when_all_are_named() -> None:
    calls = [
        {"name": name, "arguments": {"n": number}, "by": by}
        for number, (name, by) in enumerate([("look", "assistant"), ("tap", "user"), ("hold", "user"), ("write", "assistant")])
    ]
    turns = SIDES.two_sided_turns(calls)
    assert [(turn.content, [call.name for call in turn.tool_calls]) for turn in turns] == [
        ("", ["look"]), ("Please use tap, hold", []), ("", ["write"]),
    ]  # fmt: skip
    user = SIDES.AskedUser("My phone is broken.", calls)

    def reply(*conversation: Message) -> Any:
        return asyncio.run(user.reply(conversation))

    assert reply(Message("system")) == "My phone is broken."
    assert [call.arguments for call in reply(turns[1]).tool_calls] == [{"n": 1}, {"n": 2}]
    assert reply(Message("tool", "ok")) == "I have done that."
    assert reply(turns[1]) is None, "it has nothing more to do"
    assert asyncio.run(SIDES.AskedUser("", calls).reply([Message("assistant", "Please use tap")])) == ""  # its opening, first


def test_messages_are_read_as_written() -> None:
    row = {"role": "assistant", "content": None, "tool_calls": [{"name": "put", "arguments": {"n": 1}, "id": "c1"}]}
    assert message_of(row) == Message("assistant", "", (ToolCall("put", {"n": 1}, id="c1"),))
    assert message_of({"role": "tool", "content": "ok", "id": "c1"}) == Message("tool", "ok", tool_call_id="c1")


def test_families_are_whole_or_not() -> None:
    episodes = [played("a1", True), played("a2", False), played("b1", True, family="g"), played("c1", None, family="h")]
    assert (ROWS.whole_row("x", episodes).value, ROWS.whole_row("x", episodes).n) == (0.5, 2)
    assert ROWS.in_percent(ROWS.whole_row("x", episodes)).value == 50.0 and "1 of 4" in ROWS.whole_row("x", episodes).note
    # Of a part that was played: families of two tasks, of which g and h have one each, are no whole ones.
    part = ROWS.whole_row("x", episodes, size=2)
    assert (part.value, part.n) == (0.0, 1) and part.note == "1 of 4 episodes unscored, in no mean; 2 of 3 not played whole"
    named = groups(episodes, lambda one: [one.task_id[0], "all"])
    assert {name: len(part) for name, part in named.items()} == {"a": 2, "all": 4, "b": 1, "c": 1}, "each counts in several"


def test_the_spread_of_groups_is_their_range_and_their_standard_deviation() -> None:
    episodes = [played(f"{kind}{n}", n < right, kind) for kind, right in (("x", 1), ("y", 2), ("z", 4)) for n in range(4)]
    rows = TABLES.spread_rows("s", episodes, lambda one: [one.data["kind"]])
    assert [(row.name, row.n) for row in rows] == [("s: range", 12), ("s: deviation", 12)]
    assert [row.value for row in rows] == [pytest.approx(0.75), pytest.approx(np.std([0.25, 0.5, 1.0], ddof=1))]
    assert TABLES.spread_rows("s", episodes[:4], lambda one: [one.data["kind"]]) == []


def test_calls_are_written_in_four_forms_and_other_languages_types_become_those_of_json_schema() -> None:
    formats = part_of("bfcl", "formats")
    calls = [("pay", {"sum": 3, "note": 'a"<'}), ("look", {})]
    assert formats.as_python(calls) == "[pay(sum=3, note='a\"<'), look()]"
    assert json.loads(formats.as_json(calls))[0] == {"function": "pay", "parameters": {"sum": 3, "note": 'a"<'}}
    assert formats.as_xml(calls[:1]) == (
        '<functions><function name="pay"><param name="sum" type="integer">3</param>'
        '<param name="note" type="string">a"&lt;</param></function></functions>'
    )
    assert formats.as_verbose_xml([("pay", {"sum": 3})]) == (
        '<functions><function name="pay"><params><param name="sum" value="3" type="integer"/></params></function></functions>'
    )
    inner = {"type": "ArrayList", "items": {"type": "long"}}
    shown = formats.with_json_types(
        {"type": "HashMap", "properties": {"a": inner, "b": {}}}, {"HashMap": "object", "ArrayList": "array"}
    )
    expected = {"a": {"type": "array", "items": {"type": "string"}}, "b": {"type": "string"}}
    assert shown == {"type": "object", "properties": expected}
    assert inner["items"] == {"type": "long"}, "what was declared stays as it is"


def test_a_package_in_place_is_its_folder_and_a_missing_file_is_named(tmp_path: Path) -> None:
    made = PACKAGE.PackageInPlace
    one = made(tmp_path)
    assert copy.deepcopy(one) is one and {one, made(tmp_path)} == {one} and one != made(tmp_path / "x")
    with pytest.raises(ConfigError, match=r"^toy: .*tasks\.json is missing$"), DOMAINS.named_if_missing("toy"):
        (tmp_path / "tasks.json").read_text()


async def test_calls_of_a_turn_are_asked_for_once_and_equal_calls_get_an_answer_each() -> None:
    turn = SimpleNamespace(message=calling([("find", {"n": 1}), ("no_tool", {}), ("find", {"n": 1}), ("find", {"n": 2})]))
    env: Any = SimpleNamespace(trajectory=SimpleNamespace(turns=[turn]))
    asked: list[list[Any]] = []

    async def ask(made: Any) -> list[str]:
        asked.append([call.arguments for call in made])
        return [f"{len(asked)}.{place}" for place in range(len(made))]

    together = TOGETHER.CallsTogether(["find"])
    found = [await together.answer(env, "find", {"n": n}, ask) for n in (1, 1, 2)]
    assert (found, asked) == (["1.0", "1.1", "1.2"], [[{"n": 1}, {"n": 1}, {"n": 2}]])
    assert await together.answer(env, "find", {"n": 1}, ask) == "2.0", "one more, in no turn: alone"


def test_reward_functions_under_another_name_are_named() -> None:
    """Else what they raise would be a reward of 0."""
    with pytest.raises(AttributeError, match="funcs"):
        _record_faults(SimpleNamespace(rubrics=()))

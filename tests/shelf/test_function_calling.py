"""Function calling: the generated set, scoring traps, and a reader for each layout on a small file of it."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.env import Message, ToolCall, ToolEnv
from agentrl.env.catalog import find_env, make_env
from agentrl.utils.errors import ConfigError, TaskDataError
from agentrl.utils.search_path import load_module
from tests.conftest import examples

FOLDER = Path(str(find_env("function_calling").path)).parent
conversations = load_module(FOLDER / "conversations.py")
KINDS = ["single", "multiple", "parallel", "parallel_multiple", "irrelevance", "missing"]


def calls(*items: tuple[str, dict[str, Any]]) -> Message:
    return Message("assistant", tool_calls=tuple(ToolCall(name, arguments) for name, arguments in items))


def play(env: ToolEnv, seed: int, turn: Message | str | None = None, split: str = "train") -> float:
    """The reward of one turn (the gold one by default), which ends the episode whatever it is."""
    env.reset(seed=seed, options={"split": split})
    _, reward, over, _, _ = env.step(env.gold_turns(env.task)[0] if turn is None else turn)
    assert over and env.trajectory.stop.value == "done"
    return reward


def write(path: Path, rows: Any, lines: bool = True) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, rows)) + "\n" if lines else json.dumps(rows))
    return path


def from_file(path: Path, **params: Any) -> ToolEnv:
    return make_env("function_calling", data=str(path), splits_by="none", **params)


# -- the generated set -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", ["train", "heldout"])
def test_gold_scores_one_on_every_kind(kind: str, split: str) -> None:
    env = make_env("function_calling", kinds=[kind])
    for seed in range(15):
        assert play(env, seed, split=split) == 1.0
        data, gold = env.task.data, env.task.gold
        names = [call["name"] for call in gold["calls"]]
        offered = [tool["function"]["name"] for tool in data["tools"]]
        assert data["kind"] == kind and set(names) <= set(offered)
        if kind == "single":
            assert len(offered) == len(names) == 1
        elif kind == "multiple":
            assert len(names) == 1 < len(offered)
        elif kind.startswith("parallel"):
            assert len(names) > 1 and (len(set(names)) == 1) == (kind == "parallel")
        else:
            assert not names and len(gold["answers"]) == 1 and offered


@pytest.mark.parametrize(
    "params", [{"calls": 8, "kinds": ["parallel", "parallel_multiple"]}, {"distractors": 12}, {"distractors": 0}]
)
def test_gold_scores_one_at_the_ends_of_the_knobs(params: dict[str, Any]) -> None:
    env = make_env("function_calling", **params)
    for seed in range(20):
        assert play(env, seed) == 1.0
        if "calls" in params:
            assert len(env.task.gold["calls"]) == 8
        else:
            assert len(env.task.data["tools"]) <= params["distractors"] + 4


def test_kinds_come_with_their_weights() -> None:
    env = make_env("function_calling", kinds={"single": 3, "irrelevance": 1})
    seen = Counter(env.make_task(seed, "train").data["kind"] for seed in range(400))
    assert set(seen) == {"single", "irrelevance"} and 0.65 < seen["single"] / 400 < 0.85


def test_what_a_request_says_is_what_the_gold_holds() -> None:
    """Every allowed text of every argument without a conversion stands in the request; a converted one does not."""
    env = make_env("function_calling", kinds=["single"])
    for seed in range(60):
        task = env.make_task(seed, "train")
        request = task.data["messages"][0]["content"]
        for call in task.gold["calls"]:
            for key, allowed in call["arguments"].items():
                if isinstance(allowed[0], str) and key in ("city", "origin", "destination", "recipient", "text"):
                    assert allowed[0] in request
                if key in ("date", "check_in"):
                    assert allowed[0] not in request


def test_null_policies_and_near_misses_score_nothing() -> None:
    env = make_env("function_calling", kinds=KINDS)
    for seed in range(40):
        env.reset(seed=seed)
        task, gold = env.task, env.gold_turns(env.task)[0]
        shown = "\n".join(message.content for message in env.prompt(task))
        empty = [("x", {})] + [(tool["function"]["name"], {}) for tool in task.data["tools"]]
        wrong: list[Message | str] = ["", " ", shown, task.data["messages"][-1]["content"], "I cannot do that.", "MISSING",
                                      calls(*empty), "<tool_call>{</tool_call>"]  # fmt: skip
        if gold.tool_calls:
            wrong += ["NO FUNCTION", Message("assistant", tool_calls=(*gold.tool_calls, gold.tool_calls[0]))]
            wrong += [Message("assistant", tool_calls=gold.tool_calls[:-1]) if len(gold.tool_calls) > 1 else "none"]
            first = gold.tool_calls[0]
            other = ToolCall(first.name, {**(first.arguments or {}), next(iter(first.arguments or {})): "zzz"})
            wrong += [Message("assistant", tool_calls=(other, *gold.tool_calls[1:]))]
            extra = ToolCall(first.name, {**(first.arguments or {}), "more": 1})
            wrong += [Message("assistant", tool_calls=(extra, *gold.tool_calls[1:]))]
        else:
            wrong += ["NO FUNCTION" if gold.content != "NO FUNCTION" else "MISSING city", gold.content + " city"]
        for turn in wrong:
            assert play(env, seed, turn) == 0.0, (task.data["kind"], turn)


def test_allowed_values_defaults_and_order_are_free() -> None:
    env = make_env("function_calling", kinds=["parallel", "parallel_multiple"])
    rng, tried = random.Random(0), Counter[str]()
    for seed in range(60):
        env.reset(seed=seed)
        made = []
        for call in env.task.gold["calls"]:
            arguments = {}
            for key, allowed in call["arguments"].items():
                value = rng.choice(allowed)
                tried["left out" if value == "" else "other value" if value != allowed[0] else "first"] += 1
                if value != "":
                    arguments[key] = value.upper() if isinstance(value, str) and key == "city" else value
            made.append((call["name"], arguments))
        rng.shuffle(made)
        assert play(env, seed, calls(*made)) == 1.0
    assert min(tried[key] for key in ("left out", "other value", "first")) > 3


def test_one_turn_is_all_there_is_and_calls_are_written_down() -> None:
    env = make_env("function_calling", kinds=["multiple"])
    env.reset(seed=3)
    observation, _, over, _, _ = env.step(calls(("no_such", {})))
    assert over and "unknown_tool" in observation[0].content and env.state() == {"made": []}
    play(env, 3)
    gold = env.gold_turns(env.task)[0].tool_calls[0]
    assert env.state() == {"made": [{"name": gold.name, "arguments": gold.arguments}]}
    for seed in (3, 4):
        env.reset(seed=seed)
        wanted = [tool["function"]["name"] for tool in env.task.data["tools"]]
        assert [tool["function"]["name"] for tool in env.trajectory.tools] == wanted == list(env.toolbox.names)


def test_splits_share_no_request() -> None:
    env = make_env("function_calling")
    made = [[env.make_task(seed, split) for seed in range(300)] for split in ("train", "heldout")]
    train, held = ({json.dumps([task.data["messages"], task.gold], sort_keys=True) for task in tasks} for tasks in made)
    assert not train & held and min(len(train), len(held)) > 150


# -- layouts -----------------------------------------------------------------------------------------

TOOL = {
    "name": "geo.area",
    "description": "area of a rectangle",
    "parameters": {
        "type": "dict",
        "properties": {
            "width": {"type": "float", "description": "width"},
            "height": {"type": "integer"},
            "unit": {"type": "string", "default": "m", "enum": ["m", "ft"]},
            "tags": {"type": "tuple", "items": {"type": "any"}},
            "extra": {"type": "dict", "properties": {"round": {"type": "boolean", "required": True}}},
        },
        "required": ["width", "height"],
    },
}


def bfcl_folder(root: Path, version: str = "v4") -> Path:
    def question(name: str, text: str = "the area of 3 by 4?") -> dict[str, Any]:
        return {"id": name, "question": [[{"role": "user", "content": text}]], "function": [TOOL]}

    gold = {"geo.area": {"width": [3, 3.0], "height": [4], "unit": ["m", ""]}}
    nested = {"geo.area": {"width": [1], "height": [2], "extra": [{"round": [True], "digits": [2, ""]}]}}
    files: dict[str, tuple[list[Any], list[Any]]] = {
        "simple_python": ([question("simple_python_0"), question("simple_python_1")], [[gold], [nested]]),
        "parallel": ([question("parallel_0")], [[gold, {"geo.area": {"width": [5], "height": [6]}}]]),
    }
    for category, (rows, answers) in files.items():
        write(root / f"BFCL_{version}_{category}.json", rows)
        truth = [{"id": row["id"], "ground_truth": answer} for row, answer in zip(rows, answers, strict=True)]
        write(root / "possible_answer" / f"BFCL_{version}_{category}.json", truth)
    write(root / f"BFCL_{version}_live_irrelevance.json", [question("live_irrelevance_0-0-0", "sing a song")])
    write(root / f"BFCL_{version}_live_relevance.json", [question("live_relevance_0-0-0")])
    write(root / f"BFCL_{version}_multi_turn_base.json", [{"id": "multi_turn_base_0", "question": [[], []]}])
    return root


@pytest.mark.parametrize("version", ["v3", "v4"])
def test_the_berkeley_leaderboards_files(tmp_path: Path, version: str) -> None:
    env = from_file(bfcl_folder(tmp_path, version))
    kinds = {}
    for seed in range(5):
        assert play(env, seed) == 1.0 and play(env, seed, "") == 0.0
        kinds[env.task.id.rpartition("/")[2]] = env.task.data["kind"]
    assert kinds == {"live_irrelevance_0-0-0": "irrelevance", "live_relevance_0-0-0": "relevance", "parallel_0": "parallel",
                     "simple_python_0": "single", "simple_python_1": "single"}  # fmt: skip
    parameters = env.task.data["tools"][0]["function"]["parameters"]
    assert parameters["type"] == "object" and parameters["properties"]["width"]["type"] == "number"
    assert parameters["properties"]["tags"] == {"type": "array", "items": {}}
    assert parameters["properties"]["extra"]["required"] == ["round"]


def test_the_berkeley_leaderboards_rules(tmp_path: Path) -> None:
    env = from_file(bfcl_folder(tmp_path) / "BFCL_v4_simple_python.json")
    area = "geo.area"
    assert play(env, 0, calls((area, {"width": 3.0, "height": 4}))) == 1.0
    assert play(env, 0, calls((area, {"width": 3, "height": 4, "unit": "M"}))) == 1.0
    assert play(env, 0, calls((area, {"width": 3, "height": 4, "unit": "ft"}))) == 0.0
    assert play(env, 0, calls((area, {"width": 3}))) == 0.0
    assert play(env, 0, calls((area, {"width": 3, "height": 4, "tags": []}))) == 0.0
    nested = {"width": 1, "height": 2, "extra": {"round": True}}
    assert play(env, 1, calls((area, nested))) == 1.0
    assert play(env, 1, calls((area, {**nested, "extra": {"round": True, "digits": 2}}))) == 1.0
    assert play(env, 1, calls((area, {**nested, "extra": {"round": False}}))) == 0.0


def test_relevance_wants_some_call_whatever_it_is(tmp_path: Path) -> None:
    """As the leaderboard does: it only asks whether the model took the tools to be relevant."""
    env = from_file(bfcl_folder(tmp_path) / "BFCL_v4_live_relevance.json")
    assert play(env, 0, calls(("geo.area", {"width": 9, "height": 9}))) == 1.0
    assert play(env, 0, calls(("geo.area", {"width": "9"}))) == 1.0
    assert play(env, 0, calls(("no_such_tool", {}))) == 1.0
    assert play(env, 0, "NO FUNCTION") == 0.0


def test_berkeley_rows_that_nobody_can_solve_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One has no allowed value for an argument, one says that a required one may be left out and nothing else."""
    number = {"type": "integer"}
    sides = {"type": "dict", "properties": {"width": number, "height": number}, "required": ["width", "height"]}
    area = {"name": "geo.area", "description": "", "parameters": sides}
    asked = {"question": [[{"role": "user", "content": "how large?"}]], "function": [area]}
    rows = [{"id": f"simple_{index}", **asked} for index in range(4)]
    sets: list[dict[str, Any]] = [{"width": width, "height": [4]} for width in ([3], [], [[3]], [""])]
    gold = [{"id": f"simple_{number}", "ground_truth": [{"geo.area": arguments}]} for number, arguments in enumerate(sets)]
    write(tmp_path / "BFCL_v4_simple.json", rows)
    write(tmp_path / "possible_answer" / "BFCL_v4_simple.json", gold)
    env = from_file(tmp_path / "BFCL_v4_simple.json")
    tasks = {env.make_task(seed, split).id.rpartition("/")[2] for split in env.splits for seed in range(env.task_count(split))}
    assert tasks == {"simple_0", "simple_2"} and len(env.skipped) == 2
    assert "2 rows are left out" in caplog.text
    assert [play(env, seed, split=split) for split in env.splits for seed in range(env.task_count(split))] == [1.0] * 4


def test_xlam(tmp_path: Path) -> None:
    parameters = {
        "q": {"description": "text", "type": "str"},
        "limit": {"description": "how many", "type": "int", "default": "10"},
        "ids": {"description": "ids", "type": "List[int], optional"},
        "map": {"description": "m", "type": "Dict[str, float]", "default": ""},
    }
    tools = [{"name": "search", "description": "search things", "parameters": parameters}]
    answers = [{"name": "search", "arguments": {"q": "x", "limit": 10}}, {"name": "search", "arguments": {"q": "y"}}]
    rows = [
        {"id": 7, "query": "find x and y", "tools": json.dumps(tools), "answers": json.dumps(answers)},
        {"id": 8, "query": "sing", "tools": json.dumps(tools), "answers": "[]"},
    ]
    env = from_file(write(tmp_path / "xlam_function_calling_60k.json", rows, lines=False))
    assert play(env, 0) == 1.0 and env.task.data["kind"] == "parallel" and env.task.id.endswith("/7")
    parameters = env.task.data["tools"][0]["function"]["parameters"]
    assert parameters["required"] == ["q"] and parameters["properties"]["limit"]["default"] == 10
    assert parameters["properties"]["ids"]["items"] == {"type": "integer"}
    assert parameters["properties"]["map"]["type"] == "object"
    assert play(env, 0, calls(("search", {"q": "y", "limit": 10}), ("search", {"q": "x"}))) == 1.0
    assert play(env, 0, calls(("search", {"q": "y", "limit": 9}), ("search", {"q": "x"}))) == 0.0
    assert play(env, 1, "no function") == 1.0 and play(env, 1, calls(("search", {"q": "sing"}))) == 0.0


def test_toolace(tmp_path: Path) -> None:
    functions = [
        {"name": "Market Trends API", "description": "trends",
         "parameters": {"type": "dict", "properties": {"kind": {"type": "string"}, "top": {"type": "int"},
                        "flags": {"type": "array"}}, "required": ["kind"]}, "required": None},
        {"name": "quote/get", "description": "a quote", "parameters": {"type": "dict", "properties": {}}},
    ]  # fmt: skip
    turns = [
        ("user", "Trends?"),
        ("assistant", "[Market Trends API(kind=\"A, (B) and 'C'\", top=3, flags=[true, {'a': None}]), quote/get()]"),
        ("tool", json.dumps([{"name": "Market Trends API", "results": 1}, {"name": "quote/get", "results": 2}])),
        ("assistant", "Up. Anything else?"),
        ("user", "Again"),
        ("assistant", "[quote/get()]"),
    ]
    system = f"You compose functions [see below].\n{json.dumps(functions)}\nNO other text."
    row = {"system": system, "conversations": [{"from": who, "value": text} for who, text in turns]}
    env = from_file(write(tmp_path / "data.json", [row], lines=False))
    assert play(env, 0) == 1.0 and env.task.data["kind"] == "parallel_multiple"
    made = env.task.gold["calls"][0]["arguments"]
    assert (made["kind"], made["flags"]) == (["A, (B) and 'C'"], [[True, {"a": None}]])
    assert play(env, 1) == 1.0
    shown = env.prompt(env.task)
    assert [one.role for one in shown] == ["system", "user", "assistant", "tool", "tool", "assistant", "user"]
    assert shown[4].name == "quote/get" and json.loads(shown[4].content)["results"] == 2
    assert shown[2].tool_calls[1].id == shown[4].tool_call_id


def hermes_row(wrapped: bool, tools_field: bool) -> dict[str, Any]:
    function = {"name": "lamp", "description": "set a lamp",
                "parameters": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}}  # fmt: skip
    listed = json.dumps([{"type": "function", "function": function} if wrapped else function])
    call = "<tool_call>\n{'arguments': {'on': True}, 'name': 'lamp'}\n</tool_call>"
    response = '<tool_response>\n{"name": "lamp", "content": {"ok": true}}\n</tool_response>'
    turns = [
        ("system", "You call functions within <tools> </tools>. " + ("" if tools_field else f"<tools> {listed} </tools>")),
        ("human", "Light!"), ("gpt", call), ("tool", response), ("gpt", "Done."), ("human", "And off and on."),
        ("gpt", 'Sure.\n<tool_call>\n{"name": "lamp", "arguments": {"on": false}}\n</tool_call>\n' + call),
    ]  # fmt: skip
    row: dict[str, Any] = {"id": "a1", "conversations": [{"from": who, "value": text} for who, text in turns]}
    return {**row, "tools": listed} if tools_field else row


@pytest.mark.parametrize("tools_field", [True, False])
def test_hermes(tmp_path: Path, tools_field: bool) -> None:
    rows = [hermes_row(not tools_field, tools_field)]
    env = from_file(write(tmp_path / "func-calling.json", rows, lines=False))
    assert play(env, 0) == 1.0 and play(env, 1) == 1.0
    assert len(env.task.gold["calls"]) == 2 and env.prompt(env.task)[0].content.startswith("Make all")
    assert json.loads(env.prompt(env.task)[3].content) == {"name": "lamp", "content": {"ok": True}}
    assert play(env, 1, calls(("lamp", {"on": True}), ("lamp", {"on": True}))) == 0.0


def native_row(**changes: Any) -> dict[str, Any]:
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}}
    row = {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "f of 1"}],
        "tools": [tool],
        "calls": [{"name": "f", "arguments": {"x": [1, 2]}}],
    }
    return {**row, **changes}


def test_the_native_layout(tmp_path: Path) -> None:
    rows = [native_row(), native_row(calls=[], answers=["which one?", "Which?"], kind="missing"), native_row(calls=[])]
    env = from_file(write(tmp_path / "tasks.jsonl", rows))
    assert play(env, 0, calls(("f", {"x": 2}))) == 1.0 and play(env, 0, calls(("f", {"x": 3}))) == 0.0
    assert env.prompt(env.task)[0].content.startswith("Be brief.\n\nMake all")
    assert play(env, 1, "WHICH?") == 1.0 and play(env, 1, "NO FUNCTION") == 0.0
    assert play(env, 2, "NO FUNCTION") == 1.0 and play(env, 3) == 1.0  # row 0 again
    late = native_row(calls=[{"name": "f", "arguments": {"x": ["one", "", 1], "z": ["", 3]}}])
    env = from_file(write(tmp_path / "late.jsonl", [late]))
    assert play(env, 0) == 1.0 and env.gold_turns(env.task)[0].tool_calls[0].arguments == {"x": 1}


@pytest.mark.parametrize(("row", "says"), [
    (native_row(messages=[]), "row 2, field 'messages'"),
    (native_row(messages=[{"role": "bot", "content": "x"}]), r"row 2, field 'messages\[0\].role': expected one of"),
    (native_row(messages=[{"role": "assistant", "content": "x"}]), "the user's or a tool's"),
    (native_row(tools="f"), "row 2, field 'tools': expected a list"),
    (native_row(tools=[{"name": ""}]), "a function needs a name"),
    (
        native_row(tools=[{"name": "f", "parameters": {"properties": {"x": 3}}}]),
        r"field 'tools\[0\].parameters.properties.x'",
    ),
    (native_row(tools=[{"name": "f"}, {"name": "f"}]), "two tools are called 'f'"),
    (native_row(calls=[{"name": "g", "arguments": {}}]), "'g' is not one of the tools"),
    (native_row(calls=[{"name": "f", "arguments": {"x": 1}}]), r"field 'calls\[0\].arguments.x'"),
    (native_row(calls=[{"name": "f", "arguments": {"x": ["1", 1.5]}}]), r"'calls\[0\]': no call of 'f' .* expected integer, got"),
    (native_row(calls=[{"name": "f", "arguments": {"x": [1], "y": [2]}}]), r"'calls\[0\]': .* no argument 'y'"),
    (native_row(calls=[{"name": "f", "arguments": {}}]), r"'calls\[0\]': .* missing argument 'x'.* Write such as"),
    (native_row(calls=[{**native_row()["calls"][0], "by": "user"}]), r"'calls\[0\].by': no user"),
    (native_row(calls=[{**native_row()["calls"][0], "compare": "x"}]), r"'calls\[0\]': .*compare must be a list"),
    (native_row(calls=[], answers=[" "]), "field 'answers'"),
    (native_row(calls=[], answers=[]), "field 'answers': expected at least one"),
    ("{", "row 2: not JSON"),
    (json.dumps(native_row())[:-1] + ', "calls": []}', "row 2: not JSON: key 'calls' is given twice"),
    (native_row(tools=[{"name": "f"}], calls=[{"name": "f", "arguments": {"x": [float("nan")]}}]), "row 2: not JSON: NaN"),
    ([1], "row 2: expected an object"),
])  # fmt: skip
def test_a_bad_row_names_file_row_and_field(tmp_path: Path, row: Any, says: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(native_row()) + "\n" + (row if isinstance(row, str) else json.dumps(row)))
    with pytest.raises(TaskDataError, match=f"(?s)tasks.jsonl.*{says}"):
        from_file(path)
    env = from_file(path, bad_rows="skip")
    assert len(env.skipped) == 1 and play(env, 1) == 1.0  # type: ignore[attr-defined]


def test_files_that_cannot_be_used_say_why(tmp_path: Path) -> None:
    bfcl_folder(tmp_path)
    unpaired = write(tmp_path / "BFCL_v4_multiple.json", [{"id": "multiple_0", "question": [[]], "function": []}])
    odd = write(tmp_path / "odd.jsonl", [{"text": "hello"}])
    for path, says in (
        (tmp_path / "none.json", "no such file"),
        (tmp_path / "BFCL_v4_multi_turn_base.json", "no known layout|multi_turn_base"),
        (unpaired, "possible_answer"),
        (odd, "no known layout has the fields text"),
        *(
            (
                write(tmp_path / f"BFCL_v{n}_irrelevance.json", [{"id": "irrelevance_0", "question": [[first]], "function": []}]),
                says,
            )
            for n, (first, says) in enumerate([({}, r"messages\[0\].role"), ("x", r"messages\[0\]': expected an object")])
        ),
        (write(tmp_path / "empty.jsonl", []), "it contains no tasks"),
        (tmp_path / "possible_answer" / "x", "no such file"),
    ):
        with pytest.raises(TaskDataError, match=says):
            from_file(path)
    with pytest.raises(TaskDataError, match="category 'multi_turn_base'"):
        from_file(tmp_path / "BFCL_v4_multi_turn_base.json", layout="bfcl")
    with pytest.raises(ConfigError, match="layout"):
        from_file(odd, layout="parquet")


def test_rows_of_a_file_are_split_by_content(tmp_path: Path) -> None:
    rows = [native_row(messages=[{"role": "user", "content": f"f of {i % 100}"}]) for i in range(200)]
    env = make_env("function_calling", data=str(write(tmp_path / "t.jsonl", rows)))
    train, held = ({env.make_task(seed, split).data["messages"][0]["content"] for seed in range(200)} for split in env.splits)
    assert len(train) + len(held) == 100 and not train & held and 3 <= len(held) <= 30
    one = write(tmp_path / "one.jsonl", [native_row()])
    with pytest.raises(TaskDataError, match="splits_by"):
        for split in ("train", "heldout"):
            make_env("function_calling", data=str(one)).make_task(0, split)


@pytest.mark.parametrize(("text", "expected"), [
    ("[f()]", [("f", {})]), ("[a b(x=1), c.d(y='it''s')]", [("a b", {"x": 1}), ("c.d", {"y": "its"})]),
    ('[f(t="a \\"q\\", b)", n=-1.5, z=(1, 2))]', [("f", {"t": 'a "q", b)', "n": -1.5, "z": [1, 2]})]), ("Hello [there](x)", []),
    ("[1, 2]", []), ("[]", []),
])  # fmt: skip
def test_calls_written_in_brackets(text: str, expected: list[Any]) -> None:
    assert conversations.bracket_calls(text, "here") == expected


@settings(max_examples=examples(300), deadline=None)
@given(st.text("[](){}'\"=,:ab1 \\", max_size=30))
def test_odd_text_never_crashes_the_call_parser(text: str) -> None:
    rows = load_module(FOLDER / "rows.py")
    for read in (conversations.bracket_calls, conversations.tagged_calls):
        for sample in (text, f"[f({text})]", f"<tool_call>{text}</tool_call>"):
            try:
                read(sample, "here")
            except rows.BadRowError as problem:
                assert problem.field == "here"


def test_a_call_inside_a_thought_is_no_gold(tmp_path: Path) -> None:
    row = hermes_row(True, True)
    made = row["conversations"][2]["value"]
    row["conversations"][2]["value"] = f"<think>or {made.replace('True', 'False')}</think>{made}"
    env = from_file(write(tmp_path / "a.jsonl", [row]))
    assert play(env, 0, calls(("lamp", {"on": True}))) == 1.0
    assert [call["arguments"] for call in env.task.gold["calls"]] == [{"on": [True]}]


@pytest.mark.parametrize(
    ("default", "given", "same"),
    [(False, 0, 0), (0, False, 0), (1, True, 0), (1, 1.0, 1), ("a", "a", 1), ([0], [False], 0), (None, None, 1)],
)
def test_a_gold_value_that_python_finds_equal_to_the_default_is_still_the_gold(
    default: Any, given: Any, same: float, tmp_path: Path
) -> None:
    tools = [{"name": "f", "parameters": {"type": "object", "properties": {"x": {"default": default}}}}]
    row = {"query": "q", "tools": tools, "answers": [{"name": "f", "arguments": {"x": given}}]}
    env = from_file(write(tmp_path / "a.jsonl", [row]))
    assert play(env, 0, calls(("f", {"x": given}))) == 1.0 and play(env, 0, calls(("f", {}))) == same


def test_schemas_keep_what_they_say_and_messages_have_any_form_of_calls(tmp_path: Path) -> None:
    parts = {"a": {"$ref": "#/$defs/p"}, "b": {"anyOf": [{"type": "string"}, {"const": 3}]}, "c": {"pattern": "^a"}}
    schema = {"properties": parts, "type": "object", "$defs": {"p": {"oneOf": [{"type": "integer"}]}}}
    made = [{"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}} for id in "xy"]
    results = [{"role": "tool", "tool_call_id": id, "content": id} for id in "yx"]
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": made}, *results]
    row = native_row(messages=said, tools=[{"name": "f", "inputSchema": schema}], calls=[])
    env = from_file(write(tmp_path / "a.jsonl", [row]))
    env.reset(seed=0)
    assert env.trajectory.tools[0]["function"]["parameters"] == schema
    assert [message.content for message in env.prompt(env.task)[-2:]] == ["x", "y"]

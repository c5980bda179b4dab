"""Tasks that bring their own tools: what an episode offers, who answers, and rows that nobody could play."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from agentrl.cli.main import main
from agentrl.config.load import config_from
from agentrl.data.trajectory import Trajectory
from agentrl.env import ToolCall
from agentrl.env.catalog import EnvRef, make_env
from agentrl.run.assembly import RunStart
from agentrl.utils.errors import ConfigError, EnvError, TaskDataError
from tests.conftest import proof
from tests.contrib.view.test_api import client
from tests.shelf.conversation_probes import answer

NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"], "additionalProperties": False}
AGE = {"name": "age", "description": "years", "parameters": NAME}
CITY = {"type": "function", "function": {"name": "city", "description": "where", "parameters": NAME}}
ANSWERS = [{"name": "age", "arguments": {"name": "ann"}, "content": "31"},
           {"name": "age", "arguments": {"name": "ann"}, "content": "32"},
           {"name": "age", "arguments": {"name": "bob"}, "content": "no bob here", "error": True}]  # fmt: skip
ROW: dict[str, Any] = {"id": "a", "split": "train", "prompt": "How old is ann?", "tools": [AGE, CITY], "answers": ANSWERS,
                       "gold": {"answer": 31, "calls": [{"name": "age", "arguments": {"name": "ann"}}]}}  # fmt: skip


def file(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def offered(env: Any) -> list[str]:
    return [tool["function"]["name"] for tool in env.trajectory.tools]


def test_each_episode_offers_its_own_tools_and_those_alone() -> None:
    env = make_env("own_tools")
    seen = set()
    for seed in range(12):
        env.reset(seed=seed)
        wanted = [entry["function"]["name"] for entry in env.task.data["tools"]]
        assert offered(env) == wanted == list(env.toolbox.names)
        other = next(name for name in ("price_of", "shelf_of", "platform_of", "height_of") if name not in wanted)
        assert "unknown_tool" in answer(env, other)
        seen.add(tuple(wanted))
    assert len(seen) > 4, "the tools differ between episodes of one environment"


def test_the_environment_is_shown_with_the_tools_of_each_task_that_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {"prompt": "Where is ann?", "tools": [CITY], "answers": [], "gold": {"answer": "x"}}
    held = {**ROW, "id": "b", "split": "heldout", **other}
    assert main(["env", "show", "own_tools", f"tasks={file(tmp_path, ROW, held)}"]) == 0
    train, heldout = capsys.readouterr().out.partition("task 0 of train:")[2].split("task 0 of heldout:")
    assert [json.loads(line)["name"] for line in train.splitlines() if line.startswith("  {")] == ["age", "city"]
    assert [json.loads(line)["name"] for line in heldout.splitlines() if line.startswith("  {")] == ["city"]


def test_recorded_answers_in_their_order_with_errors_and_distractors(tmp_path: Path) -> None:
    env = make_env("own_tools", tasks=file(tmp_path, ROW))
    env.reset(seed=0)
    assert answer(env, "age", name="ann") == "31" and "no bob here" in answer(env, "age", name="bob")
    kept = env.state()
    assert [answer(env, "age", name="ann") for _ in range(2)] == ["32", "32"], "the n-th of equal calls, whatever is between them"
    assert len(kept["made"]) == 2 and len(env.state()["made"]) == 4, "a state stays what it was"
    assert not env.toolbox["age"].options.parallel, "several calls of a turn are answered in their order"
    assert [tool["function"]["description"] for tool in env.trajectory.tools] == ["years", "where"]
    assert "no bob here" in answer(env, "age", name="bob") and "tool_error" in answer(env, "age", name="bob")
    assert "there is no answer for these arguments" in answer(env, "age", name="eve")
    assert "there is no answer" in answer(env, "city", name="ann"), "a distractor"
    assert "wrong_type" in answer(env, "age", name=3) and "unexpected_argument" in answer(env, "age", name="ann", x=1)
    env.reset(seed=0)
    assert answer(env, "age", name="ann") == "31", "an episode begins anew"
    other = env.fork()
    assert answer(env, "age", name="ann") == "32" == answer(other, "age", name="ann")
    assert env.step("She is 31.")[1] == 1.0
    env.reset(seed=0)
    assert env.step("She is 31.")[1] == 0.0, "without the call"


def test_a_recorded_answer_is_found_as_rewards_compare_calls(tmp_path: Path) -> None:
    """1 is 1.0 and not true, and a text is the same in both normal forms of Unicode."""
    tool = {"name": "get", "parameters": {"type": "object", "properties": {"key": {}}}}
    answers = [{"name": "get", "arguments": {"key": key}, "content": repr(key)} for key in (1, True, "Zoe\u0301")]
    gold = {"calls": [{"name": "get", "arguments": {"key": "Zo\u00e9"}}]}
    env = make_env("own_tools", tasks=file(tmp_path, {**ROW, "tools": [tool], "answers": answers, "gold": gold}))
    env.reset(seed=0)
    assert [answer(env, "get", key=key) for key in (True, 1.0, "Zo\u00e9")] == ["True", "1", repr("Zoe\u0301")]


FUNCTIONS = """
from agentrl.utils.errors import ToolError


def age(name, task):
    if name not in task.data["prompt"]:
        raise ToolError(f"who is {name}?")
    return 31


async def city(name):
    return {"city": ["Rome"][len(name) - 3]}
"""


def test_functions_of_the_run_answer_and_rows_cannot_name_any(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "own_tools_functions.py").write_text(FUNCTIONS)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    with pytest.raises(ConfigError, match=r"functions\.age: cannot import .*; it is in this folder, .* with PYTHONPATH=\."):
        make_env("own_tools", tasks=file(here, ROW), functions={"age": "own_tools_functions:age"})
    monkeypatch.syspath_prepend(str(here))
    row = {key: value for key, value in ROW.items() if key != "answers"}
    functions = {"age": "own_tools_functions:age", "city": "own_tools_functions:city"}
    env = make_env("own_tools", tasks=file(here, row), functions=functions)
    env.reset(seed=0)
    assert answer(env, "age", name="ann") == "31" and "who is eve" in answer(env, "age", name="eve")
    assert json.loads(answer(env, "city", name="ann")) == {"city": "Rome"}
    with pytest.raises(EnvError, match="city"):
        answer(env, "city", name="annabel")
    age, city = functions.values()
    for task, wrong, error, said in (
        (row, {"age": age}, TaskDataError, r"jsonl:1: field tools/1: nothing answers 'city': params.functions has no function"),
        (ROW, {"citty": city}, ConfigError, r"\.citty: no row declares a tool 'citty'; did you mean 'city'\?.*: age, city"),
        (
            row,
            {"age": f"{age}e", "city": city},
            ConfigError,
            r"env.params.functions.age: own_tools_functions has no function 'agee'",
        ),
    ):
        with pytest.raises(error, match=said):
            make_env("own_tools", tasks=file(here, task), functions=wrong)


def test_a_row_chooses_among_the_run_s_tools_from_a_config(tmp_path: Path) -> None:
    rows = [{**ROW, "tools": [AGE, "calculate"]}, {**ROW, "id": "b", "prompt": "All?", "tools": ["days_between"], "answers": [],
             "gold": {"answer": 1}}, {"id": "c", "split": "train", "prompt": "Any", "gold": {"answer": 1}}]  # fmt: skip
    env_config = {"id": "own_tools", "reward": "own_tools", "params": {"tasks": file(tmp_path, *rows)}}
    config = config_from({"name": "x", "env": env_config, "tools": {"sets": ["calculator", "dates"]}}, [])
    env = EnvRef.of(config.the_env, config.tools).build()
    env.reset(seed=0)
    assert offered(env) == ["age", "calculate"]
    assert answer(env, "calculate", expression="6 * 7") == "42" and answer(env, "age", name="ann") == "31"
    assert "unknown_tool" in answer(env, "days_between", start="2026-01-01", end="2026-01-02")
    env.reset(seed=1)
    assert offered(env) == ["days_between"]
    env.reset(seed=2)
    assert {"calculate", "days_between"} <= set(offered(env)), "a row without tools gets all of the run's"


TRAIN = """
    quickstart steps=2 sft=false stop_at_success=false trajectories_every=1 env.id=own_tools env.params={}
    model.init.layers=1 model.init.hidden=32 model.init.mlp=32 cluster.backend=inline eval.tasks=2 checkpoint.every=1
    rollout.groups=2 rollout.group_size=2 rollout.max_turns=2 rollout.max_turn_tokens=16 rollout.max_episode_tokens=1024
    algorithm.minibatch=4 optim.micro_tokens=8192 optim.prefix_sharing=on
""".split()  # noqa: SIM905
VARIED = ("env.reward=varied.json", "reward.python.varied=own_tools_varied:varied")


@pytest.mark.parametrize(("tools", "message"), [
    (["calculat"], "it wants the run's tool 'calculat'; did you mean 'calculate'"),
    ([{**AGE, "name": "calculate"}], "it declares 'calculate', which is a tool of the run's too"),
])  # fmt: skip
def test_a_row_that_does_not_go_with_the_run_s_tools_is_found_before_the_run(
    tools: list[Any], message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last of 30, which no check of a few tasks plays: it was found when its episode began, and was only unscored."""
    rows = [{**ROW, "id": str(number), "prompt": f"{number}?"} for number in range(29)]
    held = {**ROW, "id": "held", "prompt": "Held?", "split": "heldout"}
    file(here, *rows, held, {**ROW, "id": "last", "prompt": "Last?", "tools": tools, "answers": [], "gold": {"answer": 1}})
    own = ("env.reward=own_tools", "env.params.tasks=rows.jsonl", 'tools.sets=["calculator"]', "health.max_unsolvable=1")
    assert main(["train", *TRAIN, *own]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"rows.jsonl:31: field tools/0: {message}" in said and not Path("runs").exists()


HUGE: dict[str, Any] = {"type": "object", "properties": {"x": {"type": "string"}}}
for _ in range(80):
    HUGE = {"type": "object", "properties": {"x": HUGE}}


def test_a_system_message_a_gold_answer_of_0_and_a_parameter_called_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_tools_tasks.py").write_text("def note(task): return f'noted {task}'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    text = {"type": "object", "properties": {"task": {"type": "string"}}, "required": ["task"]}
    row = {"id": "a", "split": "train", "prompt": "Note it.", "tools": [{"name": "note", "parameters": text}],
           "gold": {"answer": 0}}  # fmt: skip
    for system in ("Be short.", ""):
        env = make_env("own_tools", tasks=file(tmp_path, row), functions={"note": "own_tools_tasks:note"}, system=system)
        observation, _ = env.reset(seed=0)
        assert [message.content for message in observation] == [*([system] if system else []), "Note it."]
        assert answer(env, "note", task="milk") == "noted milk", "what the policy says, and not the Task"
        assert env.gold_turns(env.task)[-1].content == "0"


BAD = {
    "fetches": ({"tools": [{**AGE, "parameters": {"type": "object", "properties": {"a": {"$ref": "http://x/y"}}}}]}, "tools/0"),
    "never ends": ({"tools": [{**AGE, "parameters": {"type": "object", "properties": {"a": {"pattern": "(?R)"}}}}]}, "tools/0"),
    "too deep": ({"tools": [{**AGE, "parameters": HUGE}]}, "tools/0.*nested deeper"),
    "no schema": ({"tools": [{**AGE, "parameters": {"type": "object", "properties": {"a": {"type": "strin"}}}}]}, "tools/0"),
    "no object": ({"tools": [{**AGE, "parameters": {"type": "string"}}]}, "tools/0.*type object"),
    "no name": ({"tools": [{"parameters": NAME}]}, "tools/0: expected"),
    "twice": ({"tools": [AGE, AGE]}, "two tools are called 'age'"),
    "answers of no tool": ({"tools": [CITY]}, "answers: 'age' is none of the row's tools"),
    "gold of no tool": ({"tools": [CITY], "answers": []}, "gold/calls: 'age' is none of the row's tools"),
    "arguments of no call": (
        {"answers": [{"name": "age", "arguments": {"name": 5}, "content": "1"}]},
        "answers/0: no call of 'age' has these arguments: name: expected string",
    ),
    "gold of no call": (
        {"gold": {"calls": [{"name": "age", "arguments": {}}]}},
        "gold/calls/0: no call of 'age' has these arguments: missing argument 'name'",
    ),
    "gold that no tool shows": (
        {"tools": [{**AGE, "parameters": {"properties": {"who": {}}}}, CITY]},
        "gold/calls/0: no call of 'age' .* no argument 'name'; known: who",
    ),
    "gold of nothing": ({"gold": {"calls": []}}, "gold/calls: expects no call and no answer"),
    "a blank answer": ({"gold": {"answer": " "}}, "gold/answer: is blank"),
    "gold that nothing answers": (
        {"gold": {"calls": [*ROW["gold"]["calls"], {"name": "age", "arguments": {"name": "eve"}}]}},
        "gold/calls/1: nothing answers this call of 'age'",
    ),
    "no request": ({"prompt": ""}, "field prompt"),
    "a function": ({"functions": {"age": "os:system"}}, "functions"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_a_row_that_nobody_could_play_is_an_error_when_it_is_read(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(TaskDataError, match=rf"rows.jsonl:2: .*{message}"):
        make_env("own_tools", tasks=file(tmp_path, {**ROW, "id": "0", "prompt": "x"}, {**ROW, **change}))


def test_a_conversation_so_far_and_an_mcp_server(tmp_path: Path) -> None:
    pytest.importorskip("mcp", reason="the MCP SDK is not installed: pip install 'agentrl[mcp]'")
    server = Path(__file__).parents[2] / "envs/mcp/server.py"
    called = {"role": "assistant", "tool_calls": [{"name": "age", "arguments": {"name": "ann"}, "id": "c0"}]}
    answered = {"role": "tool", "content": "31", "tool_call_id": "c0", "name": "age"}
    said = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}, called, answered,
            {"role": "user", "content": "load it"}]  # fmt: skip
    row = {"id": "a", "split": "train", "messages": said, "tools": ["count", AGE], "answers": ANSWERS, "gold": {"answer": "9"}}
    env_config = {"id": "own_tools", "params": {"tasks": file(tmp_path, row)}}
    shop = {"command": [sys.executable, str(server)]}
    env = RunStart(config_from({"name": "x", "env": env_config, "tools": {"mcp": {"shop": shop}}}, [])).env.build()
    observation, _ = env.reset(seed=0)
    assert [message.content for message in observation] == ["s", "hi", "", "31", "load it"]
    assert observation[2].tool_calls == (ToolCall("age", {"name": "ann"}, id="c0"),)
    assert (observation[3].tool_call_id, observation[3].name) == ("c0", "age")
    assert offered(env) == ["count", "age"]
    assert "no item" in answer(env, "count", code="k1") and answer(env, "age", name="ann") == "31"
    env.close()


RIGHT = {"use": "number.close", "args": {"expect": {"$": "/task/gold/answer"}}}


def trained(name: str, *words: str) -> list[dict[str, Any]]:
    """The rows of the episodes that a run trained on, in order."""
    node = {"op": "sum", "of": [RIGHT, {"use": "python", "args": {"name": "varied"}, "weight": 0.5}]}
    Path("varied.json").write_text(json.dumps({"agentrl_reward": 1, "name": "varied", "root": node, "success": RIGHT}))
    Path("own_tools_varied.py").write_text("def varied(view, args): return len(view.turns[0].message.content) % 7 / 7\n")
    assert main(["train", *(words or (*TRAIN, *VARIED, f"name={name}"))]) == 0
    files = sorted(Path(f"runs/{name}/trajectories").glob("step_*.jsonl"))
    return [json.loads(line) for path in files for line in path.open()]


def tools_of(row: dict[str, Any]) -> list[str]:
    return [tool["function"]["name"] for tool in row["tools"]]


def test_a_run_offers_each_group_its_own_tools_which_the_viewer_shows(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(here))
    rows = trained("straight")
    by_task: dict[str, set[tuple[str, ...]]] = {}
    for row in rows:
        assert tools_of(row) == [entry["function"]["name"] for entry in row["task"]["data"]["tools"]]
        by_task.setdefault(row["task"]["id"], set()).add(tuple(tools_of(row)))
    assert len(rows) == 8 and len(by_task) == 4 and all(len(names) == 1 for names in by_task.values()), "a group has one list"
    assert len(set().union(*by_task.values())) > 1, "and groups differ"
    tokenizer = AutoTokenizer.from_pretrained("runs/straight/final")
    for row in rows:
        text = tokenizer.decode(Trajectory.from_json(row).ledgers[0].ids())  # that the model saw and was trained on
        for name in ("price_of", "shelf_of", "platform_of", "height_of"):
            assert (name in text) == (name in tools_of(row)), row["task"]["id"]
    metrics = [json.loads(line) for line in Path("runs/straight/metrics.jsonl").read_text().splitlines()]
    assert all(row["tokens_trained"] > 0 for row in metrics if row["phase"] == "train")
    shown = client(Path("runs/straight")).ask("/runs/straight/episodes/step_000001.0")
    assert [tool["function"]["name"] for tool in shown["tools"]] == tools_of(rows[0])


@proof
def test_a_resumed_run_offers_what_the_whole_one_did(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(here))
    whole = trained("whole")
    trained("cut", *TRAIN, *VARIED, "name=cut", "steps=1")
    cut = trained("cut", "--resume", "runs/cut", "steps=2")
    kept = [(row["task"]["id"], tools_of(row)) for row in whole]
    assert [(row["task"]["id"], tools_of(row)) for row in cut] == kept


def test_a_tool_of_another_form_is_offered_with_its_parameters_and_a_key_that_is_not_read_is_refused(tmp_path: Path) -> None:
    for key in ("inputSchema", "input_schema"):
        tools = [{"name": "age", "description": "years", key: NAME}, CITY]
        env = make_env("own_tools", tasks=file(tmp_path, {**ROW, "tools": tools}))
        env.reset(seed=0)
        assert env.trajectory.tools[0]["function"]["parameters"] == NAME
    with pytest.raises(TaskDataError, match=r"rows.jsonl:1: field tools/0.schema_of: no known key of a tool"):
        make_env("own_tools", tasks=file(tmp_path, {**ROW, "tools": [{"name": "age", "schema_of": NAME}, CITY]}))
    row = {key: value for key, value in ROW.items() if key != "prompt"}
    with pytest.raises(TaskDataError, match=r"messages: user.contnet: no key of a message"):
        make_env("own_tools", tasks=file(tmp_path, {**row, "messages": [{"role": "user", "content": "a", "contnet": "b"}]}))
    with pytest.raises(TaskDataError, match="tasks = '': it names no file"):  # and not the packaged tasks
        make_env("own_tools", tasks="")


def test_a_function_may_be_a_tool_and_a_module_that_raises_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "marked_tools.py").write_text(
        "from agentrl.env import tool\n\n@tool\nasync def age(name: str) -> int:\n    'years'\n    return len(name)\n"
    )
    env = make_env("own_tools", tasks=file(tmp_path, ROW), functions={"age": "marked_tools:age"})
    env.reset(seed=0)
    assert answer(env, "age", name="ann") == "3"
    faults = {
        "1 / 0": "ZeroDivisionError: division by zero",
        "import sys; sys.exit(3)": "SystemExit: 3",
        "def age(:": "SyntaxError: .*",
        "import gone": "ModuleNotFoundError: No module named 'gone'",
    }
    monkeypatch.chdir(tmp_path)
    for line, said in faults.items():
        (tmp_path / f"raises_{len(line)}.py").write_text(f"x = 1\n{line}\n")
        at = rf"\({tmp_path}/raises_{len(line)}\.py:2\)\. Correct it there$"
        with pytest.raises(ConfigError, match=rf"functions.age: cannot import 'raises_{len(line)}': {said} {at}"):
            make_env("own_tools", tasks=file(tmp_path, ROW), functions={"age": f"raises_{len(line)}:age"})

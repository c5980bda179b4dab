"""`agentrl env`: what each subcommand prints, writes and returns."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.env import reference
from agentrl.cli.env_play import NotACallError, parse_line, play_by_hand
from agentrl.cli.main import _shelf_fault, main
from agentrl.data.trajectory import Message, ToolCall
from agentrl.env.catalog import make_env
from agentrl.reward import compile_spec
from agentrl.utils.errors import UserError
from tests.conftest import Agentrl, proof
from tests.e2e.runs import Command, finish


def test_list_and_show(here: Path, agentrl: Agentrl) -> None:
    assert "agentrl/KeyValue-v0" in agentrl("env", "list").out
    assert "key_value" in {row["name"] for row in json.loads(agentrl("env", "list", "--json").out)}
    out = agentrl("env", "show", "key_value", "calls=4", "set_share=0.0").out
    assert "calls: int" in out and "report " in out and '"name": "get"' in out and "key_value.json" in out


def test_a_broken_file_is_shown_as_left_out(here: Path, agentrl: Agentrl) -> None:
    (here / "envs").mkdir()
    (here / "envs" / "bad.py").write_text("def (")
    out = agentrl("env", "list").out
    assert "skipped:" in out and "bad.py" in out


def test_new_writes_an_environment_that_passes_its_checks(here: Path, agentrl: Agentrl) -> None:
    assert "agentrl train" in agentrl("env", "new", "todo").out
    source = (here / "envs" / "todo" / "env.py").read_text()
    assert len(source.splitlines()) < 60
    assert (here / "todo.toml").is_file()
    out = agentrl("env", "check", "todo", "--fuzz", "100").out
    assert "my/Todo-v0: all checks passed" in out and "FAIL" not in out
    # The test it wrote is a real one: it passes, and fails once the environment is broken.
    for code, written in ((0, source), (1, source.replace('task.gold["answer"])]', '"none")]'))):
        (here / "envs" / "todo" / "env.py").write_text(written)
        own = Command(here, "-q", "-p", "no:cacheprovider", "envs/todo", program="pytest")
        finish(own)
        assert own.returncode == code
    assert "exists already" in agentrl("env", "new", "todo", code=2).err
    assert "lower-case" in agentrl("env", "new", "To-do", code=2).err


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("template", "env"), [
    ("sqlite", ["shop"]),
    # A hundred servers are started.
    pytest.param("mcp", ["mcp", 'command=["python", "envs/shop/server.py"]', "tasks=envs/shop/tasks.jsonl"], marks=proof),
])  # fmt: skip
def test_each_template_passes_its_checks_and_has_room_for_its_gold(
    here: Path, agentrl: Agentrl, monkeypatch: pytest.MonkeyPatch, template: str, env: list[str]
) -> None:
    monkeypatch.delenv("AGENTRL_SURVEY", raising=False)
    if template == "mcp":
        pytest.importorskip("mcp", reason="needs agentrl[mcp]")
    agentrl("env", "new", "shop", "--template", template)
    out = agentrl("env", "check", *env, "-n", "3", "--fuzz", "20").out
    assert "all checks passed" in out and "FAIL" not in out
    out = agentrl("train", "shop.toml", "--dry-run").out
    assert out.count("100%") == 1 and "warning" not in out, out


def test_a_tool_without_annotations_is_one_line(here: Path, agentrl: Agentrl) -> None:
    agentrl("env", "new", "todo")
    file = here / "envs" / "todo" / "env.py"
    file.write_text(file.read_text().replace("name: str) -> str", "name)"))
    for words in (["env", "check", "todo"], ["env", "show", "todo"], ["train", "todo.toml", "--dry-run"]):
        said = agentrl(*words, code=2).err
        assert said.count("\n") == 1 and "look" in said and "name" in said and "annotation" in said, said


def test_check_fails_with_evidence(here: Path, agentrl: Agentrl) -> None:
    agentrl("env", "new", "odd")
    path = here / "envs" / "odd" / "env.py"
    path.write_text(path.read_text().replace("summary =", "idle_share = 0.0\n    summary ="))
    stopped = {"agentrl_reward": 1, "name": "odd", "root": {"use": "episode.stopped"}}
    (here / "envs" / "odd" / "reward.json").write_text(json.dumps(stopped))
    report = json.loads(agentrl("env", "check", "odd", "--fuzz", "30", "--json", code=1).out)
    failed = [row for row in report["environments"]["my/Odd-v0"] if row["ok"] is False]
    assert report["failed"] == 1 and failed[0]["check"] == "idling scores nothing" and "paid in full" in failed[0]["evidence"]
    agentrl("env", "check", "odd", "--fuzz", "30", "--reward", "key_value")


def test_a_spec_that_replays_gold_calls_is_checked_on_the_environment(here: Path, agentrl: Agentrl) -> None:
    root = {"use": "state.match", "args": {"replay": {"$": "/task/gold/calls"}, "by": "hash"}}
    (here / "replays.json").write_text(json.dumps({"agentrl_reward": 1, "name": "replays", "root": root}))
    words = ["check", "key_value", "set_share=1.0", "--reward", "replays.json", "--fuzz", "5", "--json"]
    report = json.loads(agentrl("env", *words).out)
    [gold] = [row for row in report["environments"]["agentrl/KeyValue-v0"] if row["check"] == "gold scores most"]
    assert gold["ok"] is True


def test_tools_that_are_the_same_for_each_task_are_shown_once_with_those_of_own_sets(
    here: Path, agentrl: Agentrl, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = here / "elsewhere" / "tools"
    own.mkdir(parents=True)
    (own / "mine.py").write_text('from agentrl.env import tool\n@tool\ndef ring(times: int) -> str:\n    """ring a bell"""\n')
    monkeypatch.setenv("AGENTRL_PATH", str(own.parent))
    out = agentrl("env", "show", "key_value", 'tools.sets=["mine", "calculator"]').out
    names = [json.loads(line)["name"] for line in out.splitlines() if line.startswith('  {"name"')]
    assert names == ["get", "set", "list", "add", "ring", "calculate"] and out.count("tools:") == 1


@pytest.mark.parametrize(("words", "says"), [
    (("check", "key_valu"), "did you mean 'key_value'"),
    (("check", "key_value", "cals=3"), "no parameter 'cals'"),
    (("check", "key_value", "calls"), "KEY=VALUE"),
    (("check", "key_value", "a.b=3"), "one word"),
    (("check",), "give an environment"),
    (("check", "key_value", "--all"), "give an environment"),
    (("show", "nope"), "no environment"),
])  # fmt: skip
def test_mistakes_are_user_errors(words: tuple[str, ...], says: str, here: Path, agentrl: Agentrl) -> None:
    assert says in agentrl("env", *words, code=2).err


def played(lines: list[str], **more: Any) -> tuple[int, str]:
    """The exit code, and what was shown, of an episode with two calls."""
    shown, feed = list[str](), iter(lines)

    def read(prompt: str) -> str:
        try:
            return next(feed)
        except StopIteration:
            raise EOFError from None

    code = play_by_hand(make_env("key_value", calls=2), 3, "train", read, shown.append, **more)
    return code, "\n".join(shown)


def test_a_person_plays_to_the_reward() -> None:
    task = make_env("key_value", calls=2).make_task(3, "train")
    key, value = task.gold["reads"][0], task.gold["answer"]
    code, out = played(["/help", "/tools", f"get key={key}", f"add x={value}", "/state", f"it is {value}"])
    assert code == 0 and f"get: {value}" in out and "reward 1" in out and f'"total": {value}' in out
    code, out = played([f'{{"name": "get", "arguments": {{"key": "{key}"}}}}', "set key=z", ": get key=a"])
    assert code == 0 and f"get: {value}" in out and "missing argument" in out and "reward 0" in out
    code, out = played(["/quit"])
    assert code == 130 and "not scored" in out
    # A slip does not end the episode.
    code, out = played([f"gett key={key}", "gett", f"get key={key}", f"add x={value}", f"it is {value}"])
    assert code == 0 and "reward 1" in out and out.count("no tool 'gett'; did you mean 'get'?") == 2
    scorer = compile_spec({"agentrl_reward": 1, "name": "mine", "root": {"use": "calls.none", "id": "few"}})
    last = played(["it is 3"], scorer=scorer)[1].rpartition("mine: ")[2]
    assert "[few]" in last and "it is 3" not in last, "the reward is explained"


ROOM = {"type": "object", "properties": {"room": {"type": "string"}, "n": {"type": "integer"}, "any": {}}}


@pytest.mark.parametrize(("line", "arguments"), [
    ("book room=101 n=3", {"room": "101", "n": 3}),
    ("book room=true", {"room": "true"}),
    ("book n=x", {"n": "x"}),  # the tool's own answer says what is wrong
    ("book any=101", {"any": 101}),
    ('book any={"a":1}', {"any": "{a:1}"}),  # as a shell reads quotes
    ("book", {}),
    ("book room=a=b", {"room": "a=b"}),
    ('book(room="101", n=3)', {"room": "101", "n": 3}),
    ("book()", {}),
    ("get key=a n=3", {"key": "a", "n": 3}),
    ("get", {}),
])  # fmt: skip
def test_a_line_is_a_call_with_values_that_the_tool_takes(line: str, arguments: dict[str, Any]) -> None:
    assert parse_line(line, {"book": ROOM, "get": {}}).tool_calls == (ToolCall(re.split(r"\W", line)[0], arguments),)


@pytest.mark.parametrize(("line", "why"), [
    *((line, "book") for line in ("boook room=101", "boook", "pay amount=3", "boook(room=1)", "book(1)", "book(room=open())")),
    *((line, "get: a is given twice") for line in ("get a=1 b=2 a=3", "get(a=1, b=2, a=3)")),
])  # fmt: skip
def test_a_slip_is_said_and_is_no_turn(line: str, why: str) -> None:
    with pytest.raises(NotACallError, match=why):
        parse_line(line, {"book": ROOM} if why == "book" else {"get": {}})


@pytest.mark.parametrize("text", ["get the key", "it's", "", "yes", "f(x) = 3 is it", ": list"])
def test_what_is_no_call_is_an_answer(text: str) -> None:
    assert parse_line(text, {"get": {}, "list": {}}) == Message("assistant", text.removeprefix(": "))
    assert parse_line("{oops", {}).tool_calls[0].error is not None


def test_tool_sets_are_named_as_in_a_config_and_are_checked_and_played(
    here: Path, agentrl: Agentrl, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = reference("key_value", ["calls=2", 'tools.sets=["notes", "dates"]', "tools.args.notes.most=3"])
    assert (ref.params, ref.tools.sets, ref.tools.args) == ({"calls": 2}, ["notes", "dates"], {"notes": {"most": 3}})
    lines = iter(["/tools", "/quit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    assert '"name": "write_note"' in agentrl("env", "play", "key_value", 'tools.sets=["notes"]', code=130).out
    for words, says in (
        (["tools.set=[]"], "tools.set"),
        (["calls.x=1"], "a parameter is one word"),
        (['tools.sets=["note"]'], "did you mean 'notes'"),
    ):
        with pytest.raises(UserError, match=says):
            reference("key_value", words).build()


@pytest.mark.parametrize("word", ["calls=3", "env.params.calls=3"])
def test_a_parameter_is_written_in_one_way_for_all_commands(word: str, agentrl: Agentrl, here: Path) -> None:
    """As a bare a=b, or as in a config."""
    pytest.importorskip("agentrl.contrib.suites")
    commands: list[list[str]] = [
        ["env", "show", "key_value", word],
        ["env", "floor", "key_value", word, "-n", "2"],
        ["rollout", "key_value", word, "--policy", "gold", "-n", "1", "--out", "out"],
        ["reward", "lint", "key_value", word, "-n", "2"],
        ["reward", "lint", "rewards/key_value.json", "--env", "key_value", "-n", "2", word],
        ["env", "check", "key_value", "-n", "1", "--fuzz", "2", word],
    ]
    for words in commands:
        agentrl(*words)
    [row] = (here / "out" / "trajectories.jsonl").read_text().splitlines()
    assert sum(len(turn["message"]["tool_calls"]) for turn in json.loads(row)["turns"]) == 3
    wrong = ["key_value", "cals=3", "--policy", "gold", "-n", "1", "--out", "other"]
    assert "did you mean 'calls'" in agentrl("rollout", *wrong, code=2).err


# A beginner's mistakes: each error names environment, hook and place, and none is a stack trace.

HOOKS = {
    "make_task": 'return Task(f"x/{split}/{rng_seed}", rng_seed, split, {}, {"answer": "1"})',
    "prompt": 'return [Message("user", "hi")]',
}


def write_env(folder: Path, more: str = "", **bodies: str) -> Path:
    (folder / "envs").mkdir(exist_ok=True)
    made, file = {**HOOKS, **bodies}, folder / "envs" / "wrong.py"
    file.write_text(
        "from agentrl.env import Message, Task, ToolEnv\n\n\nclass Wrong(ToolEnv):\n    id = 'my/Wrong-v0'\n"
        f"    def make_task(self, rng_seed, split):\n        {made['make_task']}\n"
        f"    def prompt(self, task):\n        {made['prompt']}\n{more}"
    )
    return file


@pytest.mark.parametrize(("bodies", "more", "said"), [
    ({}, "    def setup(self, task):\n        pass\n", "setup is not async. Write `async def setup"),
    ({}, "    def teardown(self):\n        pass\n", "teardown is not async"),
    ({}, "    def setup(self):\n        pass\n", "An environment has setup(self, task"),
    ({}, "    def __init__(self):\n        self.x = 1\n", "its __init__ does not call the base's"),
    ({}, "    def __init__(self):\n        self.x = self.y\n", "__init__ raised AttributeError"),
    ({"prompt": "return 'hi'"}, "", "prompt returned 'hi', expected a list"),
    ({"prompt": "return ['hi']"}, "", "prompt returned ['hi'], expected a list (each a Message)"),
    ({"prompt": "return [Message('user', None)]"}, "", "content = None; expected one of system, user, assistant, tool and a"),
    ({"make_task": "return Task('x', 1, split, None)"}, "", "task 'x': data = None, expected a dict of JSON values"),
    ({"prompt": "return {}['no']"}, "", "wrong.py:9: prompt raised KeyError: 'no'"),
    ({"make_task": "return {'id': 1}"}, "", "make_task returned {'id': 1}, expected a Task"),
    ({"make_task": "raise ValueError('boom')"}, "", "wrong.py:7: make_task raised ValueError: boom"),
    ({"make_task": "raise SystemExit(0)"}, "", "wrong.py:7: make_task raised SystemExit: 0"),
])  # fmt: skip
@pytest.mark.parametrize("action", ["show", "play"])
def test_a_mistake_in_a_hook_is_named(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, action: str, bodies: dict[str, str], more: str, said: str
) -> None:
    write_env(here, more, **bodies)
    monkeypatch.setattr("builtins.input", lambda prompt="": "/quit")
    assert main(["env", action, "wrong"]) in (1, 2)
    ours = TypeError("Saver.close() takes 1 positional argument but 2 were given")  # of a method with a hook's name
    assert said in capsys.readouterr().err and _shelf_fault(ours, None) is None


def test_a_class_without_an_id_is_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_env(here)
    file.write_text(file.read_text().replace("    id = 'my/Wrong-v0'\n", ""))
    assert main(["env", "list"]) == 0 and main(["env", "show", "wrong"]) == 2
    found = capsys.readouterr()
    for text in (found.out, found.err):
        assert 'wrong.py:4: class Wrong has no id, so no name finds it. Write id = "my/Wrong-v0"' in text


def test_the_next_commands_name_a_shelf_elsewhere(
    here: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, agentrl: Agentrl
) -> None:
    tmp_path = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.delenv("AGENTRL_PATH", raising=False)
    said = agentrl("env", "new", "else_where", "--shelf", tmp_path / "a shelf").out
    line = next(line for line in said.splitlines() if line.startswith("next: "))
    script = f'{line.removeprefix("next: ").partition("; ")[0]}; printf %s "$AGENTRL_PATH"'
    path = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
    assert path == str(tmp_path / "a shelf")
    monkeypatch.setenv("AGENTRL_PATH", path)
    assert main(["env", "show", "else_where"]) == 0

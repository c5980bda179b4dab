"""`agentrl eval ENV --policy NAME`: scripted agents and users in the real rollout loop, without a model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import logging as library

from agentrl.cli.env import subject_of
from agentrl.cli.main import main
from agentrl.env.catalog import EnvRef
from agentrl.env.check import check_all
from agentrl.rollout.player import run_tasks
from agentrl.utils.errors import EnvError
from tests.conftest import Agentrl, proof
from tests.strict_json import read_strictly

PHONE = Path(__file__).parents[1] / "env" / "phone.py"
MORE = '''

class Support(Phone):
    """The phone works once the line is on and the user has pressed power afterwards; the user is a model, or scripted."""

    id = "tests/Support-v0"
    reward = "support.json"
    summary = "a phone, its user and its provider"

    def __init__(self, *, model: str = "openai/user", scripted: bool = True, **base):
        super().__init__(opens=True, **base)
        self.model, self.scripted = model, scripted

    async def setup(self, task):
        self.done = []
        from agentrl.contrib.users import ModelUser

        self.user = ModelUser("help", model=self.model, api_base="http://127.0.0.1:9/v1", api_key="none", max_retries=0)

    def gold_user(self, task):
        script = ["My phone is dead.", [("press", {"button": "power"})], "Thanks.", {"parting": "Bye."}]
        return ScriptedUser([line_of(item) for item in script]) if self.scripted else None

    def make_task(self, rng_seed, split):
        calls = [{"name": "line", "arguments": {"on": True}}, {"name": "press", "arguments": {"button": "power"}, "by": "user"}]
        return Task(f"support/{split}/{rng_seed}", rng_seed, split, {"number": f"{split}/{rng_seed}"}, {"calls": calls})

    def task_count(self, split):
        return 3

    def gold_turns(self, task):
        line = Message("assistant", tool_calls=(ToolCall("line", {"on": True}),))
        return [line, Message("assistant", "Please press power."), Message("assistant", "Goodbye.")]

    @tool(read_only=True)
    async def signal(self, tower: int) -> str:
        """how strong it is"""
        return "strong"


class Odd(Support):
    id = "tests/Odd-v0"
    reward = "support.json"
    summary = "a state of values that JSON lacks"

    def state(self):
        return {"odd": [float("inf"), float("nan"), 10**5000, chr(0xD800), chr(0xD83D) + chr(0xDE00), {float("nan"): 1}]}


class Speechless(Support):
    id = "tests/Speechless-v0"
    reward = "support.json"

    def gold_turns(self, task):
        raise NotImplementedError("nobody knows the solution")
'''
CALLS = {"expect": {"$": "/task/gold/calls"}, "by": "both", "order": "ordered", "compare": "superset"}
PARTS = [{"use": "episode.stopped"}, {"use": "calls.match", "id": "calls", "args": CALLS}]
SPEC = {"agentrl_reward": 1, "name": "support", "root": {"op": "product", "of": PARTS}}


@pytest.fixture
def shelf(here: Path) -> Path:
    folder = here / "envs" / "phone"
    folder.mkdir(parents=True)
    (folder / "env.py").write_text(PHONE.read_text() + MORE)
    (folder / "support.json").write_text(json.dumps(SPEC))
    return here


def rows(folder: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(folder, "trajectories.jsonl").read_text().splitlines()]


def said(row: dict[str, Any]) -> list[str]:
    return [turn["message"]["content"] for turn in row["turns"]]


def test_gold_and_four_scripts_that_solve_nothing_without_a_model(shelf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The environment's own user is a model that nobody can reach; all of it runs with the one of its gold solution."""
    names = ("gold", "idle", "refuse", "echo", "spam")
    options = [option for name in names for option in ("--policy", name)]
    assert main(["eval", "tests/Support-v0", *options, "-n", "3", "--out", "out", "rollout.max_turns=6"]) == 0
    found = {name: rows(f"out/policy_{name}") for name in names}
    assert {name: [row["reward"] for row in some] for name, some in found.items()} == {
        "gold": [1.0] * 3, **dict.fromkeys(names[1:], [0.0] * 3)
    }  # fmt: skip
    assert {name: {row["stop"] for row in some} for name, some in found.items()} == {name: {"done"} for name in names}
    gold = found["gold"][0]
    assert [m["content"] for m in gold["messages"] if m["role"] == "user"] == ["My phone is dead.", "Thanks."]
    assert gold["state"] == {"done": [["assistant", "line", True], ["user", "press", "power"]]}
    assert [(one["turn"], one["call"]["name"], one["result"]["content"]) for one in gold["user_calls"]] == [
        (1, "press", "pressed power")
    ]
    assert [(len(row["user_calls"]), row["parting"]) for row in found["gold"]] == [(1, "Bye.")] * 3
    # Those that solve nothing say the same again when the user answers.
    assert said(found["idle"][0]) == ["", ""] and said(found["refuse"][0]) == ["I do not know."] * 2
    assert said(found["echo"][0])[0] == "My phone is dead."
    spam = [turn["message"]["tool_calls"] for turn in found["spam"][0]["turns"]]
    assert [[call["name"] for call in calls] for calls in spam] == [["signal"], ["signal"], [], []]
    report = json.loads(Path("out/policy_gold/report.json").read_text())
    assert (report["pass@1"]["mean"], report["unscored"], report["usd_total"], report["tokens"]) == (1.0, 0, None, None)
    assert "policy_gold" in capsys.readouterr().out


def test_a_tool_that_changes_the_working_folder_moves_no_result(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation ended without a report."""

    async def elsewhere(*args: Any, **options: Any) -> Any:
        played = await run_tasks(*args, **options)
        monkeypatch.chdir("/")
        return played

    monkeypatch.setattr("agentrl.run.evaluate.run_tasks", elsewhere)
    assert main(["eval", "tests/Support-v0", "--policy", "gold", "-n", "1", "--out", "live"]) == 0
    assert len(rows("live")) == 1 and Path("live/report.json").is_file()


def test_a_command_whose_episodes_are_unscored_fails(shelf: Path, agentrl: Agentrl, monkeypatch: pytest.MonkeyPatch) -> None:
    async def setup(env: Any, task: Any) -> None:
        raise EnvError("the backend is gone")

    monkeypatch.setattr(EnvRef("tests/Support-v0").entry.load(), "setup", setup)
    for command in ("rollout", "eval"):
        said = agentrl(command, "tests/Support-v0", "--policy", "gold", "-n", "2", "rollout.retries=0", code=1)
        assert "the backend is gone. Fix that; the same command" in " ".join((said.out + said.err).split())


def test_states_that_json_lacks_are_written_as_strict_json(shelf: Path) -> None:
    assert main(["rollout", "tests/Odd-v0", "--policy", "gold", "-n", "1", "--out", "live"]) == 0
    [row] = dict(read_strictly(shelf / "live"))["trajectories.jsonl"]
    large = "an integer of about 5000 digits"
    assert row["state"]["odd"] == ["Infinity", "NaN", large, chr(0xD800), chr(0x1F600), {"nan": 1}]


def test_checks_of_an_environment_ask_no_model_either(shelf: Path) -> None:
    only = ["contract", "splits apart", "gold scores most", "idling scores nothing", "fork", "no gold shown"]
    findings = check_all(subject_of(EnvRef("tests/Support-v0"), None, tasks=2), only)
    assert {finding.check: finding.ok for finding in findings} == dict.fromkeys(only, True), findings
    assert main(["reward", "lint", "envs/phone/support.json", "--env", "tests/Support-v0", "--tasks", "2"]) == 0


def test_a_person_plays_with_the_gold_user_and_sees_its_calls(
    shelf: Path, agentrl: Agentrl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `--model-user` the environment's model is asked."""

    async def complete(user: Any, messages: Any) -> str:
        return "It is off."

    monkeypatch.setattr("agentrl.contrib.users.ModelUser._complete", complete)
    typed = iter(["line on=true", "Please press power.", "/quit", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    lines = agentrl("env", "play", "tests/Support-v0", code=130).out.splitlines()
    assert "script of the gold solution plays the user; --model-user" in lines[1]
    places = [lines.index(line) for line in ("user: My phone is dead.", '(the user: press {"button": "power"} -> pressed power)')]
    assert places[0] < places[1] and lines[places[1] + 1] == "user: Thanks."
    shown = agentrl("env", "play", "tests/Support-v0", "--model-user", code=130).out
    assert "user: It is off." in shown and "script of the gold" not in shown
    assert "--model-user: its model plays the user" in agentrl("env", "play", "tests/Support-v0", "scripted=false", code=2).err


@proof
def test_in_worker_processes_a_script_plays_the_same_episodes(shelf: Path, agentrl: Agentrl) -> None:
    for workers in ("0", "2"):
        args = ["eval", "tests/Support-v0", "--policy", "gold", "--policy", "spam", "-n", "3", "--out", f"out{workers}"]
        assert main([*args, "rollout.max_turns=6", f"rollout.workers={workers}"]) == 0
    for name, reward in (("gold", 1.0), ("spam", 0.0)):
        here, there = (sorted(rows(f"out{at}/policy_{name}"), key=lambda row: row["seed"]) for at in "02")
        assert [row["reward"] for row in there] == [reward] * 3
        for key in ("reward", "stop", "state", "messages"):
            assert [row[key] for row in here] == [row[key] for row in there], key
    refused = ["eval", "tests/Support-v0", "--policy", "idle", "env.params.scripted=false", "-n", "1", "--out", "no"]
    assert "its user is a model, and a scripted policy" in agentrl(*refused, "rollout.workers=1", code=2).err


@pytest.mark.parametrize(("args", "says"), [
    (["tests/Support-v0", "--policy", "golt"], "expected gold, idle, refuse, echo, spam; did you mean 'gold'?"),
    (["tests/Support-v0", "--policy", "idle", "env.params.scripted=false"], "its user is a model, and a scripted policy"),
    (["tests/Speechless-v0", "--policy", "gold"], "--policy gold: nobody knows the solution"),
    (["tests/Support-v0", "--policy", "gold", "rollout.top_k=3"], "a scripted policy draws nothing"),
    (["tests/Support-v0"], "--policy gold"),
])  # fmt: skip
def test_what_cannot_be_played_is_said(shelf: Path, args: list[str], says: str, agentrl: Agentrl) -> None:
    message = agentrl("eval", *args, "-n", "1", "--out", "out", code=2).err
    assert says in message and "Traceback" not in message


def test_a_script_is_not_trained_and_one_policy_is_rolled_out(shelf: Path, agentrl: Agentrl) -> None:
    assert "not allowed with argument" in agentrl("rollout", "key_value", "--policy", "gold", "--model", "x", code=2).err
    config = shelf / "mine.toml"
    config.write_text('name = "mine"\nsteps = 1\n[env]\nid = "key_value"\n[model]\npath = "policy:gold"\n')
    assert "a scripted policy has no weights" in agentrl("train", str(config), code=2).err


@pytest.fixture(autouse=True)
def loud() -> Iterator[None]:
    """As in a process that has just begun: another test may have silenced the library in this one."""
    library.enable_progress_bar()
    yield
    library.disable_progress_bar()


@pytest.mark.parametrize("command", ["eval", "rollout"])
def test_no_bar_of_transformers_is_drawn(command: str, tiny: str, tmp_path: Path, agentrl: Agentrl) -> None:
    sizes = ["rollout.max_turns=1", "rollout.max_turn_tokens=4", "cluster.backend=inline", "engine=embedded"]
    shown = agentrl(command, "key_value", "--model", tiny, "-n", "1", "--out", str(tmp_path / "out"), *sizes)
    assert "Loading weights" not in shown.err + shown.out


def test_writing_a_random_model_draws_no_bar(tmp_path: Path, agentrl: Agentrl) -> None:
    shown = agentrl("init-model", str(tmp_path / "model"), "--layers", "1", "--hidden", "32", "--mlp", "32")
    assert shown.err == "" and shown.out.startswith("wrote a random model of 1 layers, hidden size 32")

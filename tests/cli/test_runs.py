"""`agentrl runs` and `agentrl show`: what they say, as JSON too, and that nothing hostile reaches the terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.contrib.view.library import overview
from agentrl.contrib.view.terminal import _OVERVIEW, figures
from agentrl.data.trajectory import Message, ToolCall, ToolResult, UserCall
from agentrl.run.reader import load_run
from agentrl.utils.errors import ConfigError
from tests.conftest import Agentrl
from tests.run.made_folders import episode, run_folder, touch, unscored

ESCAPES = "\x1b[2J\x1b]0;owned\x07[bold]x[/bold][link=http://evil.example]y[/link]\u202e\x9b31m\x00"
ROWS = [
    {"step": 0, "phase": "before", "success": 0.25},
    {"step": 1, "phase": "train", "success": 0.5, "reward": 0.5, "tokens": 20},
    {"step": 2, "phase": "eval", "success": 0.875},
    {"step": 2, "phase": "after", "success": 0.75},
]


@pytest.fixture(autouse=True)
def home(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with two runs, the second of another seed, learning rate and outcome."""
    monkeypatch.setenv("COLUMNS", "160")
    run_folder(here / "runs" / "a", {"step_000001": [episode(1), episode(2, 1, 0.0, tool_error="bad"), unscored(3)]}, ROWS)
    other = run_folder(here / "runs" / "b", {"step_000001": [episode(1)]}, [*ROWS[:3], {**ROWS[3], "success": 0.5}])
    other.config.write_text(other.config.read_text().replace("steps = 4", "steps = 4\nseed = 1") + "[optim]\nlr = 0.5\n")
    return here


def said(agentrl: Agentrl, *args: str) -> str:
    out = agentrl(*args)
    assert out.err == ""
    return out.out


def told(agentrl: Agentrl, *args: str) -> Any:
    return json.loads(said(agentrl, *args, "--json"))


def test_the_list(agentrl: Agentrl) -> None:
    text = said(agentrl, "runs")
    assert "runs/a" in text and "runs/b" in text and "0.75" in text
    rows = told(agentrl, "runs", "list", "runs")
    assert [(row["run"], row["status"], row["updates"], row["success_after"]) for row in rows] == [
        ("runs/a", "done", 1, 0.75),
        ("runs/b", "done", 1, 0.5),
    ]
    assert said(agentrl, "runs", "list", "runs/a/trajectories") == "no runs in runs/a/trajectories\n"


def test_what_differs_between_runs(agentrl: Agentrl, home: Path) -> None:
    for name, spec in (("a", "1"), ("b", "2")):
        files = {"the content of env.reward": spec, "the files of env.id": "x"}
        (home / "runs" / name / "provenance.json").write_text(json.dumps({"contents": files}))
        (home / name).mkdir()
        (home / name / "eval.json").write_text(json.dumps({"identity": files}))
        (home / name / "trajectories.jsonl").touch()
    found = told(agentrl, "runs", "compare", "runs/a", "runs/b")
    assert found["config"] == {"seed": [None, 1], "optim.lr": [None, 0.5], "the content of env.reward": ["1", "2"]}
    assert told(agentrl, "runs", "compare", "a", "b")["config"] == {"the content of env.reward": ["1", "2"]}, "evaluations"
    figures = found["figures"]
    assert (figures["success_after"], figures["best evaluation"], figures["at step"]) == ([0.75, 0.5], [0.875, 0.875], [2, 2])
    assert figures["reward (last updates)"] == [0.5, 0.5]
    assert "optim.lr" in said(agentrl, "runs", "compare", "runs/a", "runs/b")


def test_runs_are_compared_by_their_terms_and_unscored_episodes_too() -> None:
    rows = [{"phase": "train", "step": step, "term/polite": step / 4, "unscored": step} for step in (1, 2)]
    found = figures([rows, []], [dict.fromkeys(_OVERVIEW)] * 2)
    assert found["term/polite (last updates)"] == [0.375, None] and found["unscored (last updates)"] == [1.5, None]


def test_why_episodes_failed(agentrl: Agentrl) -> None:
    found = {(one["kind"], one["reason"]): one["episodes"] for one in told(agentrl, "runs", "failures", "runs/a")}
    assert found == {
        ("error", "env_error: connection to '...' lost after N s"): 1,
        ("stop", "env_error"): 1,
        ("tool", "get: bad: N"): 1,
        ("term", "answer (text.equals) below 0.5"): 1,
    }
    assert "lost after N s" in said(agentrl, "runs", "failures", "runs/a", "--step", "1")
    assert said(agentrl, "runs", "failures", "runs/b") == "none of 1 episodes failed\n"


def test_a_run_a_step_and_an_episode(agentrl: Agentrl) -> None:
    run = told(agentrl, "show", "runs/a")
    assert run["status"] == "done" and [one["file"] for one in run["steps"]] == ["step_000001"] and len(run["failures"]) == 4
    assert "step_000001" in said(agentrl, "show", "runs/a")
    step = told(agentrl, "show", "runs/a", "--step", "1")
    assert [row["id"] for row in step["episodes"]] == ["step_000001.0", "step_000001.1", "step_000001.2"]
    assert step["metrics"] == [ROWS[1]] and [group["task"] for group in step["groups"]] == [f"t/train/{n}" for n in (1, 2, 3)]
    text = said(agentrl, "show", "runs/a", "--step", "1")
    assert "step_000001.2" in text and "tokens" in text
    one = told(agentrl, "show", "runs/a", "--episode", "step_000001.1")
    assert one["reward"] == 0.0 and one["turns"][0]["results"][0]["error"] == "bad"
    text = said(agentrl, "show", "runs/a", "--episode", "step_000001.1")
    assert '-> get {"key": "k2"}' in text and "get  error: bad: 2" in text and "text.equals" in text


def test_the_users_calls_stand_where_they_were_made(home: Path, agentrl: Agentrl) -> None:
    one = episode(1, 0)
    for turn, answer in ((-1, "it blinks"), (0, "it rings"), (1, None)):
        made = ToolCall("press", {"button": turn}, f"u{turn}")
        one.user_calls.append(UserCall(turn, 0, made, answer and ToolResult(made.id, "press", answer)))
    run_folder(home / "runs" / "phone", {"step_000001": [one]}, [ROWS[1]])
    lines = [line.strip(" │") for line in said(agentrl, "show", "runs/phone", "--episode", "step_000001.0").splitlines()]
    places = [next(i for i, line in enumerate(lines) if what in line) for what in (
        'the user -> press {"button": -1}: it blinks', "report k1", "turn 0", "   get: 1".strip(),
        'the user -> press {"button": 0}: it rings', "turn 1", 'the user -> press {"button": 1}  error: no answer',
    )]  # fmt: skip
    assert places == sorted(places)
    shown = told(agentrl, "show", "runs/phone", "--episode", "step_000001.0")["user_calls"]
    assert [row["turn"] for row in shown] == [-1, 0, 1]


def test_the_users_words_stand_between_the_turns(home: Path, agentrl: Agentrl) -> None:
    """After a greeting, after a turn, and as it leaves; its opening calls are shown if it said nothing before the first turn."""
    one, silent = episode(1, 0), episode(2, 0)
    first, second = (next(m for m in one.messages if m == turn.message) for turn in one.turns)
    tools = [m for m in one.messages if m.role == "tool"]
    greeting, words, more = Message("assistant", "Hello?"), Message("user", "It is dark."), Message("user", "It is bright.")
    one.messages = [greeting, words, first, *tools, more, second]
    one.parting = "Bye then."
    silent.messages = [Message("system", "Serve."), *(m for m in silent.messages if m.role != "user")]
    silent.user_calls = [UserCall(-1, 0, ToolCall("press", {}, "u"), ToolResult("u", "press", "it blinks"))]
    run_folder(home / "runs" / "talk", {"step_000001": [one, silent]}, [ROWS[1]])
    texts = [said(agentrl, "show", "runs/talk", "--episode", f"step_000001.{n}") for n in (0, 1)]
    whats = (
        ("Hello?", "It is dark.", "turn 0", "It is bright.", "turn 1", "user, leaving", "Bye then."),
        ("Serve.", "the user -> press {}: it blinks", "turn 0", "turn 1"),
    )
    for text, what in zip(texts, whats, strict=True):
        places = [text.index(one) for one in what]
        assert places == sorted(places)


def test_hostile_text_is_written_out(home: Path, agentrl: Agentrl) -> None:
    """In every text of an episode, in the run's name, its error, its environments and its metrics."""
    bad = episode(1, 0, 0.0, said=ESCAPES, answer=ESCAPES, tool_error=ESCAPES, error=ESCAPES, env=ESCAPES, key=ESCAPES)
    bad.task = type(bad.task)(ESCAPES, 1, "train", {}, {})
    bad.messages[0] = type(bad.messages[0])("user", ESCAPES)
    bad.evidence["root"]["of"][0] |= {"evidence": {"text": ESCAPES}, "id": ESCAPES}
    result = ToolResult("u", ESCAPES, ESCAPES, error=ESCAPES)
    bad.user_calls = [UserCall(0, 0, ToolCall(ESCAPES, {ESCAPES: ESCAPES}, "u"), result, ESCAPES)]
    bad.parting = ESCAPES
    bad.timings = {ESCAPES: 1.0}
    bad.metrics = {ESCAPES: 1.0}
    folder = run_folder(home / "runs" / "bad", {"step_000001": [bad]}, [{**ROWS[1], ESCAPES: ESCAPES}])
    folder.config.write_text(f"name = {json.dumps(ESCAPES)}\n[env]\nid = {json.dumps(ESCAPES)}\n[x]\ny = {json.dumps(ESCAPES)}\n")
    folder.write_summary({"status": ESCAPES, "error": ESCAPES, "seconds": 1.0})
    commands = [["runs"], ["runs", "compare", "runs/bad", "runs/a"], ["runs", "failures", "runs/bad"], ["show", "runs/bad"]]
    commands += [["show", "runs/bad", "--step", "1"], ["show", "runs/bad", "--episode", "step_000001.0"]]
    for command in commands:
        for more in ([], ["--json"]):
            text = said(agentrl, *command, *more)
            assert not {c for c in text if (ord(c) < 32 and c != "\n") or 127 <= ord(c) < 160 or c == "\u202e"}, command
            assert more or "\\x1b" in text, command
    text = said(agentrl, "show", "runs/bad", "--episode", "step_000001.0")
    assert text.replace("\n", "").count("[bold]x[/bold]") >= 3, "markup is text"


@pytest.mark.parametrize("args, message", [
    (["show", "runs/c"], "there is no such folder"), (["show", "run"], "did you mean 'runs'"),
    (["show", "."], "expected a run folder"), (["show", "runs.toml"], "runs.toml: expected a run folder"),
    (["show", "runs"], "there are runs in it: runs/a, runs/b"), (["show", "runs/a", "--step", "9"], "there are episodes of 1"),
    (["show", "runs/a", "--episode", "9"], "expected FILE.ROW"),
    (["show", "runs/a", "--episode", "step_000001.7"], "expected FILE.ROW"),
    (["show", "runs/a", "--episode", "step_000002.1"], "trajectories/step_000002.jsonl is not there"),
    (["runs", "list", "nowhere"], "nowhere: there is no such folder"),
    (["runs", "compare", "runs/a", "runs/x"], "there is no such folder"), (["view", "runs/x"], "there is no such folder"),
])  # fmt: skip
def test_mistakes(home: Path, agentrl: Agentrl, args: list[str], message: str) -> None:
    (home / "runs.toml").write_text("")
    out = agentrl(*args, code=2)
    assert out.err.startswith("agentrl: ") and message in out.err and out.out == ""


def test_damaged_runs_are_said(home: Path, agentrl: Agentrl) -> None:
    for name, change in {
        "config": lambda f: f.config.write_text("name = [half"),
        "metrics": lambda f: f.metrics.write_text('{"step": 1, "pha\n{}\n'),
        "summary": lambda f: f.summary.write_text('{"status": '),
        "odd": lambda f: f.summary.write_text("[1]"),
    }.items():
        change(run_folder(home / "runs" / name, {"step_000001": [episode(1)]}, ROWS))
        [row] = told(agentrl, "runs", "list", f"runs/{name}")
        assert row["status"] == "damaged" and "damaged" in row["error"]
        assert "runs/" + name in said(agentrl, "runs")
    data = {**ROWS[0], "phase": "data", "step": 1, "epoch": 1.0}
    emptied = run_folder(home / "runs" / "emptied", {"step_000001": [episode(1)]}, [data])
    emptied.config.write_text("")
    assert [row["updates"] for row in told(agentrl, "runs", "list", "runs/emptied")] == [1]
    assert "metrics.jsonl: damaged" in agentrl("show", "runs/metrics", code=2).err
    assert "config.toml: damaged" in agentrl("runs", "compare", "runs/config", "runs/a", code=2).err
    (home / "runs" / "a" / "trajectories" / "step_000001.jsonl").write_text('{"of": "another version"}\n')
    [file] = told(agentrl, "show", "runs/a")["steps"]
    assert (file["episodes"], file["damaged"], file["problem"]) == (0, 1, "row 1: KeyError: 'task'")


def test_what_a_run_without_a_summary_is(home: Path) -> None:
    folder = run_folder(home / "runs" / "live", {"step_000001": [episode(1)]}, [{**ROWS[1], "time/rollout_s": 100.0}])
    run = load_run(folder.path)
    assert overview(run)["status"] == "running" and overview(run, [{"phase": "sft", "step": 7}])["status"] == "warm start, step 7"
    for ago, live in ((0, True), (390, True), (410, False)):  # four steps of 100 s
        for path in (folder.metrics, folder.trajectories):
            touch(path, -ago)
        assert load_run(folder.path).live is live
    assert overview(load_run(folder.path))["status"] == "unfinished"
    folder.write_summary({"status": "interrupted", "seconds": 1.0})
    for path in (folder.metrics, folder.trajectories):
        touch(path, 0)
    assert overview(load_run(folder.path))["status"] == "interrupted"


def test_a_run_as_python_reads_it(home: Path) -> None:
    run = load_run("runs/a")
    assert run.name == "a" and run.envs == ["key_value"] and run.metrics == ROWS and run.summary["status"] == "done"
    assert [(t.task.id, t.reward) for t in run.episodes()] == [("t/train/1", 1.0), ("t/train/2", 0.0), ("t/train/3", None)]
    assert [t.task.id for t in run.episodes(phase="eval")] == []
    with pytest.raises(ConfigError, match=r"phase = 'trian'; did you mean 'train'\?; phases with episodes in .*: train"):
        run.episodes("trian")
    assert next(run.episodes(step=1)) == episode(1)


def test_figures_that_are_not_finite_are_null_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    """As the page's answers have them: JSON has no NaN."""
    from agentrl.contrib.view.terminal import print_json

    print_json({"a": [float("nan"), 1.5, {"b": float("-inf")}]})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {"a": [None, 1.5, {"b": None}]}

"""What a run says at its end can be typed as it stands: the evaluation that it names asks the same tasks, scored the same way."""

import json
import shlex
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from agentrl.cli.eval import read_plans
from agentrl.cli.main import _parse
from agentrl.config.load import config_from
from agentrl.run.assembly import RunStart
from agentrl.run.display import Display
from agentrl.run.driver import RunDriver, RunOutcome
from agentrl.run.evaluate import RolloutJob
from agentrl.run.folder import RunFolder
from agentrl.run.provenance import FILE, RunModel, model_of, run_folder
from agentrl.utils.errors import CheckpointError, ConfigError

TABLE: dict[str, Any] = {
    "name": "a run",
    "env": {"id": "key_value", "params": {"calls": [3, 4], "set_share": 0.25}, "reward": "re ward.json",
     "wrappers": [{"name": "noise", "args": {"rate": 0.5, "deep": {"a": "it's", "b": [{"c": True}]}}}, {"name": "other"}]},
    "model": {"init": {}},
    "tools": {"sets": ["clock"], "mcp": {"rates": {"url": "http://127.0.0.1:8765/mcp", "env": {"KEY": "sesame"}}}},
    "reward": {"python": {"brevity": "brevity:brevity"}},
    "rollout": {"max_turns": 3, "group_size": 2, "temperature": 0.7},
}  # fmt: skip


def ended(
    out: Path, table: dict[str, Any], status: str = "done", cause: str | None = None, rows: Sequence[dict[str, Any]] = ()
) -> tuple[RunFolder, list[str]]:
    """A run that is over, with a model in `final`, and what it says."""
    config = config_from({**table, "out": str(out)})
    folder, said = RunFolder.create(config), list[str]()
    display: Any = SimpleNamespace(say=said.append)
    folder.final.mkdir()
    (folder.final / "config.json").write_text("{}")
    (folder.path / FILE).write_text(json.dumps({"folder": str(out), "contents": {}}))
    folder.write_summary({"status": status, "steps": 3, "engine": ""})
    for row in rows:
        folder.append_metrics(row)
    outcome, log = RunOutcome(status=status, cause=cause), SimpleNamespace(trackers=[])
    RunDriver(config, display=display, folder=folder, run_log=log, outcome=outcome, interrupt=None).say_end()  # type: ignore[arg-type]
    return folder, said


def commands(lines: list[str]) -> list[list[str]]:
    return [
        shlex.split(part.partition("(")[0])[1:]
        for line in lines
        if "agentrl " in line
        for part in line[line.index("agentrl ") :].split(";  ")
    ]


def plan_of(*words: str) -> Any:
    """The one plan of `agentrl eval WORDS`."""
    [plan] = read_plans(_parse(["eval", *words]))
    return plan


def test_every_command_that_is_advised_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Typed in another folder as it stands: the command line takes it, and what it names is there."""
    pytest.importorskip("agentrl.contrib.view")
    (tmp_path / "elsewhere").mkdir()
    folder, lines = ended(tmp_path, TABLE)
    monkeypatch.chdir(tmp_path / "elsewhere")
    words = commands(lines)
    assert [command[0] for command in words] == ["view", "show", "eval", "train", "env", "env"]
    for command in words:
        named = vars(_parse(command))
        for option in ("run_folder", "resume"):
            assert named.get(option) in (None, str(folder.path))
    assert words[3][1:] == ["--resume", str(folder.path), "steps=100"]


def test_a_run_that_was_longer_is_advised_more_updates_than_it_had(tmp_path: Path) -> None:
    """Resumed with 5 steps after 12 updates: `steps=10` would end again at once."""
    rows = [{"phase": "train", "step": 12, "success": 0.5}, {"phase": "after", "step": 12, "success": 0.5}]
    words = commands(ended(tmp_path, {**TABLE, "steps": 5}, rows=rows)[1])
    assert words[3][-1] == "steps=24"


def test_a_run_that_solves_nothing_is_told_where_to_look(tmp_path: Path) -> None:
    folder, lines = ended(tmp_path, TABLE, rows=[{"phase": "after", "step": 1, "success": 0.0}])
    assert ["runs", "failures", str(folder.path)] in commands(lines)


def test_the_next_evaluation_has_the_runs_environment_tools_reward_and_limits(tmp_path: Path) -> None:
    folder, lines = ended(tmp_path, TABLE)
    words = commands(lines)[2]
    assert words == ["eval", "--run", str(folder.path), "--checkpoint", "0", "--checkpoint", "last"]
    plan = plan_of(*words[1:3], "--checkpoint", "last")
    run, request = config_from(TABLE), plan.requests["key_value"]
    assert request.model == str(folder.final) and request.samples == 1 and request.tasks == 100
    assert plan.start.config.env == run.env and plan.start.config.tools == run.tools and plan.start.config.reward == run.reward
    assert plan.start.config.rollout == run.rollout and plan.start.config.eval == run.eval
    today = {"date": date.today().isoformat()}  # the run's folder keeps the date of its start
    assert plan.start.config.model == run.model.model_copy(update={"path": request.model, "init": None, **today})
    assert str(request.out) == "evals/a run/final" and plan.about["run"]["differs"] == [] == plan.notes


def test_what_differs_from_the_run_is_said_and_is_in_the_report(tmp_path: Path) -> None:
    folder, _ = ended(tmp_path, TABLE)
    more = ["-n", "7", "-k", "2", "--seed", "3", "env.params.calls=9", "eval.temperature=0.5"]
    plan = plan_of("--run", str(folder.path), *more)
    assert plan.about["run"]["differs"] == [
        "env.params.calls was [3, 4], is 9", "eval.temperature was 1.0, is 0.5", "seed was 0, is 3", "tasks were 100, are 7",
        "2 episodes per task, not 1",
    ]  # fmt: skip
    assert plan.notes[:-1] == [f"different from the run: {line}" for line in plan.about["run"]["differs"]]
    assert plan.notes[-1] == (
        "its tasks are not those of the run's own evaluations (100 of heldout), so its figures are not paired with theirs; for "
        "that leave -n 7 out"
    )


@pytest.mark.parametrize(("words", "of", "without"), [
    (["-n", "100", "--split", "heldout"], None, None),  # what the run has
    (["-k", "2"], None, None),  # more episodes of the same tasks
    (["--split", "train"], "100 of heldout", "--split train"),
    (["-n", "101", "--split", "train"], "100 of heldout", "-n 101 and --split train"),
])  # fmt: skip
def test_an_evaluation_of_other_tasks_than_the_runs_says_that_figures_are_not_paired(
    words: list[str], of: str | None, without: str | None, tmp_path: Path
) -> None:
    folder, _ = ended(tmp_path, TABLE)
    plan = plan_of("--run", str(folder.path), *words)
    told = [note for note in plan.notes if "not paired" in note]
    assert len(told) == (of is not None)
    for note in told:
        assert f"({of})" in note and note.endswith(f"leave {without} out")


def test_a_model_of_a_run_without_the_run_is_warned_about_with_each_key_and_the_command(tmp_path: Path) -> None:
    folder, _ = ended(tmp_path, {**TABLE, "rollout": {"max_turns": 3}})
    plan = plan_of("key_value", "--model", str(folder.final))
    (note,) = plan.notes
    unset, fewer = "env.params.calls was [3, 4], is unset", "rollout.max_turns was 3, is 16"
    assert unset in note and fewer in note and f"agentrl eval --run '{folder.path}'" in note
    assert "sesame" not in note  # a screen is no place for keys
    assert str(plan.folder) == "evals/key_value/a_run_final"
    other = plan_of("sql", "--model", str(folder.final))
    assert other.notes == []  # the run has no such environment, so nothing is asked of it


def test_models_have_folders_of_their_own_by_names_that_are_safe(here: Path) -> None:
    for name in ("one/final", "one/checkpoints/step_000004", "two/final"):
        (here / name).mkdir(parents=True)
    models = ["one/final", "one/checkpoints/step_000004", "two/final", "api:openai/gpt-4.1-mini", "Qwen/Qwen3-0.6B",
              "../../etc/x"]  # fmt: skip
    asked = [word for model in models for word in ("--model", model)]
    found = [str(plan.folder) for plan in read_plans(_parse(["eval", "key_value", *asked]))]
    names = ["one_final", "one_step_000004", "two_final", "api_openai_gpt-4.1-mini", "Qwen_Qwen3-0.6B", "etc_x"]
    assert found == [f"evals/key_value/{name}" for name in names]
    assert str(read_plans(_parse(["eval", "key_value", "--model", "two/final", "--out", "here"]))[0].folder) == "here"
    [asked] = plan_of("key_value", "--model", "two/final", "eval.tasks=3", "eval.split=train").requests.values()
    assert (asked.tasks, asked.split) == (3, "train")
    many = plan_of("key_value", "sql", "--model", "two/final", "env.sql.eval.tasks=3").requests
    assert {name: one.tasks for name, one in many.items()} == {"key_value": 100, "sql": 3}


def test_of_several_environments_one_evaluation_has_all_of_the_run(tmp_path: Path) -> None:
    envs = [
        {"id": "key_value", "name": "a", "limits": {"max_turns": 2}, "eval": {"tasks": 7, "temperature": 0.5}},
        {"id": "key_value", "name": "b", "weight": [[0, 1.0], [9, 0.0]], "eval": {"split": "train"}},
    ]
    table = {"name": "two", "env": envs, "model": {"init": {}}, "eval": {"tasks": 30}, "rollout": {"max_turns": 5}}
    folder, _ = ended(tmp_path, table)
    plan = plan_of("--run", str(folder.path))
    assert plan.start.config.envs == config_from(table).envs and plan.start.config.rollout.max_turns == 5
    assert plan.start.config.model.path == str(folder.final) and plan.start.config.model.init is None
    assert [(name, r.tasks, r.samples, r.split, str(r.out)) for name, r in plan.requests.items()] == [
        ("a", 7, 1, "heldout", "evals/two/final/a"),
        ("b", 30, 1, "train", "evals/two/final/b"),
    ]
    show = Display(Console(quiet=True))
    heats = [RolloutJob(RunStart(one), plan.requests[one.envs[0].called], show).temperature for one in plan.start.config.each()]
    assert heats == [0.5, 1.0]
    one = plan_of("b", "--run", str(folder.path), "-n", "2", "env.b.params.calls=3")
    assert [env.called for env in one.start.config.envs] == ["b"] == list(one.requests) and one.start.config.envs[0].params == {
        "calls": 3
    }
    assert (one.requests["b"].tasks, one.requests["b"].split, str(one.requests["b"].out)) == (2, "train", "evals/two/final/b")
    assert one.about["run"]["differs"] == ["env.params.calls was unset, is 3", "tasks were 30, are 2"]
    with pytest.raises(ConfigError, match=r"env\.c: no environment has this name.*there are a, b"):
        plan_of("c", "--run", str(folder.path))


def test_which_checkpoint_is_told_by_name_or_step(tmp_path: Path) -> None:
    folder, _ = ended(tmp_path, {**TABLE, "model": {"path": "some/hub"}})
    for step, score in ((1, 0.5), (2, 0.25), (3, 0.25)):
        (folder.checkpoints / f"step_{step:06d}").mkdir(parents=True)
        (folder.checkpoints / f"step_{step:06d}" / "manifest.json").write_text(
            json.dumps({"step": step, "files": {}, "score": score})
        )
    (folder.exports / "step_000001").mkdir(parents=True)
    (folder.exports / "step_000001" / "config.json").touch()  # was exported before
    first = str(folder.exports / "step_000001")
    assert model_of(folder, "last") == RunModel("final", str(folder.final), 3)
    assert model_of(folder, "3") == RunModel("step_3", str(folder.final), 3)
    assert model_of(folder, "best") == RunModel("best_1", first, 1) and model_of(folder, "1") == RunModel("step_1", first, 1)
    assert model_of(folder, "0") == RunModel("start", "some/hub", 0)
    with pytest.raises(CheckpointError, match="no whole checkpoint; whole ones: 1, 2, 3"):
        model_of(folder, "7")
    with pytest.raises(ConfigError, match="--checkpoint newest: expected last, best or the number of a step"):
        model_of(folder, "newest")
    folder.write_summary({"status": "interrupted", "steps": 3, "engine": "embedded"})  # resumed since: `final` is of before
    with pytest.raises(CheckpointError, match=r"step_000003.*not a whole checkpoint"):
        model_of(folder, "last")  # step_000003 is exported, and has no weights here
    with pytest.raises(ConfigError, match=r"not a run folder .*runs in .*: a run"):
        run_folder(tmp_path / "a rum")


def test_a_path_with_a_space_is_quoted_where_a_run_is_gone_on_with(tmp_path: Path) -> None:
    _, (*_, line) = ended(tmp_path, TABLE, "interrupted")
    assert shlex.split(line)[-1] == str(tmp_path / "a run")


def test_a_run_that_trained_nothing_is_not_said_to_have_trained_a_model(tmp_path: Path) -> None:
    folder, lines = ended(tmp_path, TABLE, "trained nothing", "no token was trained in the 5 updates: so it is. Do that.")
    text = "\n".join(lines)
    assert "THIS RUN FAILED: trained nothing. no token was trained in the 5 updates: so it is. Do that." in lines
    assert "trained model" not in text and "try next" not in text and f"agentrl view '{folder.path}'" in text

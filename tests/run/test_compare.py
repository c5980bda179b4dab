"""Evaluations side by side: the difference is that of the tasks that both have, with the interval of differences."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agentrl.cli.main import main
from agentrl.data.trajectory import Task, Trajectory
from agentrl.env.official import rate_of
from agentrl.run.compare import compare, compare_all, print_comparison, read_results
from agentrl.utils.errors import ConfigError
from tests.conftest import Agentrl


def evaluation(
    folder: Path,
    successes: dict[str, list[bool | None]],
    data: int = 0,
    env: str = "e",
    horizons: dict[str, int] | None = None,
    **identity: Any,
) -> Path:
    """A folder as `agentrl eval` leaves it: episodes by task."""
    folder.mkdir(parents=True)

    def played(number: int, task: str, member: int, success: bool | None) -> Trajectory:
        made = Task(task, number, "heldout", {"n": number + data})
        reward = None if success is None else float(success)
        horizon = (horizons or {}).get(task)
        return Trajectory("test/E-v0", made, member=member, reward=reward, success=success, env=env, horizon=horizon)

    rows = [
        played(number, task, member, success)
        for number, (task, members) in enumerate(successes.items())
        for member, success in enumerate(members)
    ]
    (folder / "trajectories.jsonl").write_text("".join(json.dumps(row.to_json()) + "\n" for row in rows))
    (folder / "eval.json").write_text(json.dumps({"identity": {"model.path": folder.name, **identity}}))
    return folder


def test_the_difference_of_two_models_is_over_the_tasks_that_both_have(tmp_path: Path) -> None:
    """By hand: of tasks a to d the second is better in a by 1, worse in b by 1/2, alike in c and d; e is the first's alone."""
    one = evaluation(tmp_path / "one", {"a": [False, False], "b": [True, True], "c": [True], "d": [False], "e": [True]})
    two = evaluation(tmp_path / "two", {"a": [True, True], "b": [True, False], "c": [True], "d": [False]})
    (first, second) = compare_all([read_results(one), read_results(two)])["envs"]["e"]["rows"]
    assert (first["model"], first["tasks"], first["pass@1"]["mean"]) == ("one", 5, 0.6) and "difference" not in first
    assert (second["tasks"], second["pass@1"]["mean"], second["paired"], second["better"], second["worse"]) == (4, 0.625, 4, 1, 1)
    gained = [1.0, -0.5, 0.0, 0.0]
    mean = sum(gained) / 4
    width = 1.96 * (sum((g - mean) ** 2 for g in gained) / 3 / 4) ** 0.5
    assert second["difference"] == pytest.approx({"mean": 0.125, "low": 0.125 - width, "high": 0.125 + width})
    assert second["also"] == []


def test_success_is_told_by_the_calls_of_the_solution_and_the_difference_over_the_tasks_of_both(tmp_path: Path) -> None:
    """By hand: of 2 calls a and b (the second loses b), of 9 calls c, d, and e, which the second has not; f has no solution."""
    calls = {"a": 2, "b": 2, "c": 9, "d": 9, "e": 9}
    won = {"a": [True], "b": [True], "c": [False, False], "d": [False], "e": [True], "f": [True]}
    one = evaluation(tmp_path / "one", won, horizons=calls)
    lost = {"a": [True], "b": [False], "c": [True, False], "d": [True], "f": [True]}
    part = compare_all([read_results(one), read_results(evaluation(tmp_path / "two", lost, horizons=calls))])["envs"]["e"]
    assert list(part["horizons"].items()) == [
        ("2", [{"model": "one", "tasks": 2, "pass@1": 1.0},
               {"model": "two", "tasks": 2, "pass@1": 0.5, "difference": -0.5, "paired": 2}]),
        ("9-12", [{"model": "one", "tasks": 3, "pass@1": pytest.approx(1 / 3)},
               {"model": "two", "tasks": 2, "pass@1": 0.75, "difference": 0.75, "paired": 2}]),
    ]  # fmt: skip
    alike = [evaluation(tmp_path / name, {"c": [True], "f": [True]}, horizons=calls) for name in ("three", "four")]
    assert compare_all([read_results(folder) for folder in alike])["envs"]["e"]["horizons"] == {}
    console = Console(width=100, file=io.StringIO())
    print_comparison({"envs": {"e": part}}, console)
    text = console.file.getvalue()
    assert "e by calls of the solution" in text and re.search(r"9-12 +│ 3 / 2 +│ 0\.333 +│ 0\.750 \(\+0\.750\)", text)


def test_an_interval_of_equal_differences_is_that_of_the_rule_of_three_and_stays_within_bounds() -> None:
    assert rate_of([0.0] * 60, -1.0) == {"mean": 0.0, "low": -0.05, "high": 0.05}
    assert rate_of([1.0] * 2, -1.0) == {"mean": 1.0, "low": -0.5, "high": 1.0}
    assert rate_of([-1.0], -1.0) == {"mean": -1.0, "low": -1.0, "high": 1.0}


def test_unscored_episodes_are_in_no_difference(tmp_path: Path) -> None:
    one = evaluation(tmp_path / "one", {"a": [None], "b": [True], "c": [None, True]})
    two = evaluation(tmp_path / "two", {"a": [True], "b": [False], "c": [True, None]})
    second = compare([*read_results(one).values(), *read_results(two).values()])["rows"][1]
    assert (second["paired"], second["difference"]["mean"], second["worse"]) == (2, -0.5, 1)


def test_tasks_of_the_same_name_and_other_content_are_not_paired(tmp_path: Path) -> None:
    one = evaluation(tmp_path / "one", {"a": [True]}, **{"env.params.calls": 2})
    two = evaluation(tmp_path / "two", {"a": [False]}, data=1, **{"env.params.calls": 4})
    with pytest.raises(
        ConfigError, match=r"two cannot be compared with one in e: .*other contents \(env\.params\.calls was 2, is 4\)"
    ):
        compare_all([read_results(one), read_results(two)])
    other = evaluation(tmp_path / "other", {"a": [True]}, env="f")
    with pytest.raises(ConfigError, match=r"no environment in common \(e; f\)"):
        compare_all([read_results(one), read_results(other)])


def test_two_tasks_of_one_name_are_two_tasks(tmp_path: Path) -> None:
    """By hand: the first task is won by both, the second by the second model alone. By name they were one, with pass@1 0.5."""
    folders = []
    for name, won in (("one", False), ("two", True)):
        folder = evaluation(tmp_path / name, {"a": [True]})
        second = Task("a", 1, "heldout", {"n": 7})
        row = Trajectory("test/E-v0", second, reward=float(won), success=won, env="e").to_json()
        with (folder / "trajectories.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        folders.append(folder)
    rows = compare_all([read_results(folder) for folder in folders])["envs"]["e"]["rows"]
    assert [(row["tasks"], row["pass@1"]["mean"]) for row in rows] == [(2, 0.5), (2, 1.0)]
    assert (rows[1]["paired"], rows[1]["better"], rows[1]["difference"]["mean"]) == (2, 1, 0.5)


def test_folders_are_compared_by_command_and_what_else_differs_is_said(tmp_path: Path, agentrl: Agentrl) -> None:
    """Also those of several environments, of which those that both have are compared."""
    parts = {
        name: [evaluation(tmp_path / name / env, {"t": [won]}, env=env, **{"eval.temperature": warm}) for env in envs]
        for name, envs, won, warm in (("one", ("e", "f"), False, 1.0), ("two", ("e",), True, 0.5))
    }
    assert len(parts["one"]) == 2
    said = agentrl("eval", "--compare", str(tmp_path / "one"), str(tmp_path / "two"), "--out", str(tmp_path / "out")).out
    assert "two also differs: eval.temperature was 1.0, is 0.5" in said and "+1.000" in said
    found = json.loads((tmp_path / "out" / "comparison.json").read_text())["envs"]
    assert list(found) == ["e"] and [row["model"] for row in found["e"]["rows"]] == ["one", "two"]
    assert main(["eval", "--compare", str(tmp_path / "one")]) == 2
    assert "eval.json" in agentrl("eval", "--compare", str(tmp_path / "one"), str(tmp_path), code=2).err
    (tmp_path / "two" / "report.json").write_text("{")
    assert "two/report.json: damaged" in agentrl("eval", "--compare", str(tmp_path / "one"), str(tmp_path / "two"), code=2).err


def test_an_evaluation_that_was_interrupted_is_compared_with_a_note(tmp_path: Path) -> None:
    folders = [evaluation(tmp_path / name, {"a": [True], "b": [None]}) for name in ("one", "two")]
    for folder, wanted in zip(folders, (2, 5), strict=True):
        note = json.loads((folder / "eval.json").read_text())
        (folder / "eval.json").write_text(json.dumps(note | {"episodes": wanted}))
    row = compare_all([read_results(folder) for folder in folders])["envs"]["e"]["rows"][1]
    assert row["also"] == ['episodes was unset, is "2 of 5, as it was interrupted"']


def test_a_folder_of_several_models_is_not_taken_for_the_last_of_them(tmp_path: Path) -> None:
    for name, won in (("one", True), ("two", False)):
        evaluation(tmp_path / "all" / name, {"t": [won]})
    with pytest.raises(ConfigError, match=r"all: it holds several evaluations of e\. Give their own folders: .*all/\*"):
        read_results(tmp_path / "all")

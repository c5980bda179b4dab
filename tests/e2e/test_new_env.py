"""The tutorial's new environment, step by step in an empty folder: made, checked, tested, played, trained, evaluated."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from agentrl.env.catalog import EnvRef
from tests.e2e.runs import ROOT, Command, finish, updates

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PAGE = (ROOT / "docs" / "tutorials" / "environment.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    """The tutorial's one file of that language."""
    [text] = re.findall(rf"```{language} \S+\n(.*?)```", PAGE, re.DOTALL)
    return str(text)


def commands() -> list[str]:
    """The lines that the tutorial has typed, in order."""
    return [line for text in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in text.splitlines()]


def step(here: Path, line: str, typed: str = "") -> str:
    """Run one line of the tutorial's commands; returns what it printed."""
    program, *args = shlex.split(line, comments=True)
    assert program in ("agentrl", "pytest")
    more = ["-q", "-p", "no:cacheprovider"] if program == "pytest" else []
    command = Command(here, *args, *more, typed=typed, program=program)
    said = finish(command)
    assert command.returncode == 0, f"{line}\n{said}"
    return said


def solution(here: Path) -> str:
    """What a person types to solve task 1: the gold turns, as `env play` reads them."""
    env = EnvRef("my_env", source=str(here / "envs" / "my_env" / "env.py")).build()
    lines = []
    for turn in env.gold_turns(env.make_task(1, "train")):
        calls = [f"{call.name} " + " ".join(f"{k}={v}" for k, v in call.arguments.items()) for call in turn.tool_calls]
        lines += calls or [turn.content]
    return "\n".join(lines) + "\n"


def test_the_tutorial_from_an_empty_folder_to_a_trained_model(tmp_path: Path) -> None:
    new, show, check, test, play, train, judge = commands()
    step(tmp_path, new)
    source = tmp_path / "envs" / "my_env" / "env.py"
    assert source.read_text() == block("python") and len(block("python").splitlines()) < 60
    assert "Look each one up." in step(tmp_path, show)
    assert "all checks passed" in step(tmp_path, check)
    assert "passed" in step(tmp_path, test)
    assert "reward 1" in step(tmp_path, play, solution(tmp_path))
    assert (tmp_path / "my_env.toml").read_text() == block("toml")
    step(tmp_path, train)
    found = updates(tmp_path / "runs" / "my_env")
    assert len(found) == 2 and all(row["unscored"] == 0 and row["turns"] > 1 for row in found)
    assert any(row.get("grad_norm", 0) > 0 for row in found), "no update had anything to learn from"
    step(tmp_path, judge)
    report = json.loads((tmp_path / "evals" / "my_env" / "final" / "report.json").read_text())
    assert "pass@1" in json.dumps(report)
    assert len((tmp_path / "evals" / "my_env" / "final" / "trajectories.jsonl").read_text().splitlines()) == 4

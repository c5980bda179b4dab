"""What `agentrl env difficulty` counts, by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.main import main
from agentrl.contrib.suites.measures import difficulty, measure_tasks
from agentrl.env import Message, ToolCall
from agentrl.env.users import ScriptedUser
from tests.contrib.suites.toysuite import write_source, write_suite
from tests.env.toyenvs import Notes


class Told(Notes):
    """The user says two words, one after the other, and each is written down."""

    id = "tests/Told-v0"

    async def setup(self, task: Any) -> None:
        await super().setup(task)
        self.user = ScriptedUser(["and the other"])

    def gold_turns(self, task: Any) -> list[Message]:
        if task.seed == 1:
            raise NotImplementedError("no gold for seed 1")
        write = ToolCall("write", {"text": "x"})
        return [Message("assistant", "", (write, write)), Message("assistant", "abcdefgh"), Message("assistant", "bye")]


def test_a_task_is_counted_by_hand() -> None:
    env = Told(scorer=None)
    found = difficulty(env, 0, "train", len)
    assert (found.calls, found.turns, found.user_turns, found.user_calls) == (2, 3, 2, 0)
    one = len(json.dumps({"name": "write", "arguments": {"text": "x"}}))
    assert found.gold_tokens == 2 * one + len("abcdefgh") + len("bye")
    words = env.make_task(0, "train").data["words"]
    assert found.prompt_tokens == len("write " + " ".join(words))
    assert found.read_tokens == len("1") + len("2") + len("and the other")
    assert found.writes == 2, "two notes more"
    assert found.tool_tokens == len(json.dumps(env.toolbox.schemas(), ensure_ascii=False))


def test_what_has_no_gold_is_named_and_in_no_number() -> None:
    report = measure_tasks(Told(scorer=None), "train", range(3), len)
    assert [task.task for task in report.tasks] == ["train/0", "train/2"]
    assert report.unplayed == {"train/1": "NotImplementedError: no gold for seed 1"}
    assert report.counts() == {"": 2, "all": 2} and report.by_family()["all"]["calls"] == [2.0] * 6


def test_the_command_prints_families_and_rows(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "220")
    write_suite(here)
    source = write_source(here / "checkout")
    assert main(["env", "difficulty", "sums", f"source={source}", "--all-tasks", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    # One term of "easy", two of the others; each is added by a call, and the total changes.
    assert {row["task"]: (row["calls"], row["turns"], row["writes"]) for row in found["tasks"]} == {
        "easy0": (1, 2, 1), "easy1": (1, 2, 1), "hard0": (2, 3, 1), "hard1": (2, 3, 1), "odd0": (2, 3, 1), "odd1": (2, 3, 1),
    }  # fmt: skip
    assert found["counts"] == {"easy": 2, "hard": 2, "odd": 2, "all": 6} and found["split"] == "all"
    assert found["families"]["all"]["calls"] == pytest.approx([1, 1.25, 2, 2, 2, 2])
    assert main(["env", "difficulty", "sums", f"source={source}"]) == 0
    assert "easy" in (shown := capsys.readouterr().out) and "2 (1 to 2)" in shown
    assert main(["env", "difficulty", "key_value", "--all-tasks"]) == 2
    assert "has no end of tasks; use --tasks N" in capsys.readouterr().err

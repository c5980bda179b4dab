"""What training and held-out tasks share, counted by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.main import main
from agentrl.contrib.suites.measures import find_leaks, ngrams
from agentrl.data.trajectory import Task
from agentrl.env import Message, ToolCall
from tests.contrib.suites.toysuite import write_source, write_suite
from tests.env.toyenvs import Notes

PROMPTS = {
    "train": ["Add one and two to three", "Say hello"],
    "heldout": ["please add ONE and two, to four", "Say  HELLO!", "nothing alike here"],
}
GOLD: dict[str, list[dict[str, Any]]] = {
    "train": [{"text": "a", "n": 1}, {}],
    "heldout": [{"n": 1, "text": "a"}, {}, {"text": "b"}],
}


class Leaky(Notes):
    """Prompts and gold calls from the tables above; the last held-out task has no gold."""

    id = "tests/Leaky-v0"

    def make_task(self, rng_seed: int, split: str) -> Task:
        return Task(f"{split}/{rng_seed}", rng_seed, split, {"words": ["x"]}, {})

    def prompt(self, task: Task) -> list[Message]:
        return [Message("system", "the same for all of them"), Message("user", PROMPTS[task.split][task.seed])]

    def gold_turns(self, task: Task) -> list[Message]:
        if (task.split, task.seed) == ("heldout", 2):
            raise NotImplementedError("no gold")
        return [Message("assistant", "", (ToolCall("write", GOLD[task.split][task.seed]),))]


def test_shared_contents_are_counted_by_kind() -> None:
    functions, grams, gold = find_leaks(Leaky(scorer=None), range(2), range(3), n=4)
    names = len(Leaky(scorer=None).toolbox.names)
    assert (functions.shared, functions.tasks, functions.half, functions.of) == (names, 3, 3, 3)
    # "add one and two", "one and two to" of the first task's four 4-grams, and "say hello", which is shorter.
    assert (grams.shared, grams.tasks, grams.half, grams.of) == (3, 2, 2, 3)
    assert grams.examples == [("add one and two", "heldout/0", "train/0"), ("say hello", "heldout/1", "train/1")]
    # Arguments are compared in any order; calls without arguments are in no count.
    assert (gold.shared, gold.tasks, gold.half, gold.of) == (1, 1, 1, 1)
    assert gold.examples == [('{"n": 1, "text": "a"}', "heldout/0", "train/0")]


def test_ngrams() -> None:
    assert ngrams("A b, c d", 3) == {"a b c", "b c d"} and ngrams("A!", 3) == {"a"} and ngrams("...", 3) == set()


def test_the_command_prints_what_is_shared(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_suite(here)
    source = write_source(here / "checkout", splits=True)
    assert main(["env", "leaks", "sums", f"source={source}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    # Held out are "odd0" (adds 2, 3) and "odd1" (3, 3); training tasks add 2, 3 and 2 (with 2), 3 (with 2).
    assert (found["train"], found["heldout"]) == (4, 2)
    assert [(one["kind"], one["shared"], one["tasks"]) for one in found["leaks"]] == [
        ("functions", 1, 2), ("n-grams", 0, 0), ("gold arguments", 2, 2),
    ]  # fmt: skip
    assert main(["env", "leaks", "sums", f"source={source}", "--ngram", "0"]) == 2
    assert "--ngram 0: expected 1 or more" in capsys.readouterr().err

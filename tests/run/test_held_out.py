"""A run that would train on what it is evaluated on is refused, by the task's name."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.load import config_from
from agentrl.run.assembly import RunStart
from agentrl.run.checks.rollout_checks import check_held_out
from agentrl.utils.errors import ConfigError
from tests.contrib.suites.toysuite import write_source, write_suite


def check(env: Any, **more: Any) -> None:
    check_held_out(RunStart(config_from({"name": "x", "env": env, **more}, [])))


def rows(path: Path, questions: list[str]) -> str:
    tool = {"name": "look", "description": "look up", "parameters": {"type": "dict", "properties": {}, "required": []}}
    lines = [{"messages": [{"role": "user", "content": text}], "tools": [{"type": "function", "function": tool}],
              "calls": [{"name": "look", "arguments": {}}]} for text in questions]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_a_file_of_which_each_row_is_in_both_splits_is_refused(tmp_path: Path) -> None:
    data = rows(tmp_path / "rows.jsonl", [f"question {number}" for number in range(40)])
    params = {"data": data, "layout": "native"}
    check({"id": "function_calling", "params": params})
    with pytest.raises(ConfigError, match=r"task 'function_calling/heldout/.*' of the split 'heldout' is also trained on"):
        check({"id": "function_calling", "params": {**params, "splits_by": "none"}})
    check({"id": "function_calling", "params": {**params, "splits_by": "none"}}, eval={"split": "train"})


def test_no_environment_of_a_run_trains_on_what_another_is_evaluated_on(here: Path) -> None:
    write_suite(here)
    first = str(write_source(here / "first"))
    check([{"id": "sums", "name": "a", "params": {"source": first, "families": ["easy"]}, "eval": {"split": "train"}},
           {"id": "sums", "name": "b", "params": {"source": first}}])  # fmt: skip
    second = write_source(here / "second", splits=True)
    file = second / "data" / "tasks.json"
    # The same tasks with the splits exchanged: what one holds out, the other trains on.
    exchanged = {"train": "heldout", "heldout": "train"}
    own = [{**row, "split": exchanged[row["split"]]} for row in json.loads(file.read_text())]
    third = write_source(here / "third")
    (third / "data" / "tasks.json").write_text(json.dumps(own))
    both = [{"id": "sums", "name": "a", "params": {"source": str(second)}},
            {"id": "sums", "name": "b", "params": {"source": str(third)}}]  # fmt: skip
    with pytest.raises(ConfigError, match=r"env \(a\): task 'odd0' of the split 'heldout' is also trained on by b"):
        check(both)


def test_warm_start_and_sampler_parameters_count_as_training(tmp_path: Path) -> None:
    data = rows(tmp_path / "rows.jsonl", [f"question {number}" for number in range(40)])
    env = {"id": "function_calling", "params": {"data": data, "layout": "native"}}
    with pytest.raises(ConfigError, match="is also trained on"):
        check(env, sft={"params": {"splits_by": "none"}})


def test_a_run_that_would_be_evaluated_on_no_task_is_refused_with_the_families_that_are_held_out(here: Path) -> None:
    write_suite(here)
    source = str(write_source(here / "first", splits=True))  # "odd" is held out
    env = {"id": "sums", "name": "sums", "params": {"source": source, "families": ["easy"]}}
    with pytest.raises(
        ConfigError, match=r"env \(sums\): the split 'heldout' has no task: .* none of its families: odd\. .*eval.split"
    ):
        check(env)
    check(env, eval={"split": "train"})
    with pytest.raises(ConfigError, match=r"the split 'train' has no task: .* none of its families: easy, hard\. Choose other"):
        check({**env, "params": {"source": source, "families": ["odd"]}})

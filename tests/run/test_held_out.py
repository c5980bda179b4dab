"""A run that would train on its evaluation is refused by the task's name; weight 0 only evaluates."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import TrainConfig
from agentrl.config.envs import own_advantages
from agentrl.config.load import config_from
from agentrl.run.assembly import RunStart
from agentrl.run.checks import check_config
from agentrl.run.checks.rollout_checks import check_held_out
from agentrl.run.plan import Planner
from agentrl.utils.errors import ConfigError, UserError
from tests.contrib.suites.toysuite import write_source, write_suite
from tests.run.own_spec import RIGHT


def check(env: Any, **more: Any) -> None:
    check_held_out(RunStart(config_from({"name": "x", "env": env, **more}, [])))


def rows(path: Path, questions: list[str]) -> str:
    tool = {"name": "look", "description": "look up", "parameters": {"type": "dict", "properties": {}, "required": []}}
    lines = [{"messages": [{"role": "user", "content": text}], "tools": [{"type": "function", "function": tool}],
              "calls": [{"name": "look", "arguments": {}}]} for text in questions]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_a_file_of_which_each_row_is_trained_on_and_evaluated_on_is_refused(tmp_path: Path) -> None:
    data = rows(tmp_path / "rows.jsonl", [f"question {number}" for number in range(40)])
    params = {"data": data, "layout": "native"}
    check({"id": "function_calling", "params": params})
    with pytest.raises(ConfigError, match=r"task 'function_calling/heldout/.*' of the split 'heldout' is also trained on"):
        check({"id": "function_calling", "params": {**params, "splits_by": "none"}})
    with pytest.raises(ConfigError, match="is also trained on"):  # by the warm start
        check({"id": "function_calling", "params": params}, sft={"params": {"splits_by": "none"}})
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


# Environments that are only evaluated

IDLE = {"use": "calls.none", "args": {"names": ["erase"]}}


def spec(root: dict[str, Any]) -> str:
    Path("mine.json").write_text(json.dumps({"agentrl_reward": 1, "name": "mine", "root": root, "success": RIGHT}))
    return str(Path("mine.json").resolve())


def suite(**params: Any) -> dict[str, Any]:
    write_suite(Path.cwd())
    return {"id": "sums", "params": {"source": str(write_source(Path("suite").resolve(), splits=True)), **params}}


def in_both() -> dict[str, Any]:
    """One environment of which every task is in both splits."""
    data = rows(Path("rows.jsonl").resolve(), [f"question {n}" for n in range(9)])
    return {"id": "function_calling", "params": {"data": data, "layout": "native", "splits_by": "none"}}


def slow() -> dict[str, Any]:
    """With a wrapper of the user's that goes by the clock."""
    Path("plugins").mkdir()
    lines = (
        "from agentrl.env.wrappers import WRAPPERS, ToolWrapper",
        'WRAPPERS.register("clocked", traits={"wall_clock"})(type("Clocked", (ToolWrapper,), {"__module__": __name__}))',
    )
    Path("plugins", "clocked.py").write_text("\n".join(lines))
    return {"id": "key_value", "wrappers": [{"name": "clocked"}]}


SIBLINGS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "held-out tasks": (in_both, "is also trained on"),
    "a split of its own": (lambda: {"id": "key_value", "params": {"split": "heldout"}}, r"trains only on the split 'train'"),
    "no training task": (lambda: suite(families=["odd"]), r"split 'train' has no task"),
    "an estimator without its critic": (lambda: {"id": "key_value", "advantage": {"name": "gae"}}, "needs a critic"),
    "an estimator without its terms": (
        lambda: {"id": "key_value", "advantage": {"name": "multi_reward", "args": {"terms": ["nowhere"]}}},
        "no node with id 'nowhere'",
    ),
    "a clock in its wrappers": (slow, "counts wall-clock time"),
    "a reward for nothing": (lambda: {"id": "key_value", "reward": spec(IDLE)}, "an empty answer earns 1"),
}


@pytest.mark.parametrize("need", SIBLINGS)
def test_what_training_needs_is_not_asked_of_it(need: str, here: Path) -> None:
    make, refusal = SIBLINGS[need]
    env = {**make(), "name": "other"}
    with pytest.raises(UserError, match=refusal):
        check_config(config({**env, "weight": [[0, 0.0], [5, 1.0]]}))  # 0 at the start only
    check_config(config({**env, "weight": 0.0}))


def test_no_episode_of_it_is_forked() -> None:
    """`rollout.branch` forks episodes of updates, for an estimator that can credit branches."""
    other = {"id": "key_value", "name": "other", "advantage": {"name": "grpo"}}
    branched: dict[str, Any] = {"rollout": {"branch": {}}, "algorithm": {"advantage": {"name": "tree"}}}
    with pytest.raises(ConfigError, match="compares members as if none shared its beginning"):
        check_config(config(other, **branched))
    check_config(config({**other, "weight": 0.0}, **branched))


def test_a_warm_start_that_names_it_trains_on_it(here: Path) -> None:
    """So its held-out tasks must not be among them. Of an environment that the warm start leaves out, `sft.params` is nothing."""
    env = {**in_both(), "name": "other", "weight": 0.0}
    with pytest.raises(ConfigError, match="is also trained on"):
        check_config(config(env, sft={"envs": ["key_value", "other"]}))
    apart = {**env, "params": {**env["params"], "splits_by": "task"}, "weight": 1.0, "sft": {"params": {"splits_by": "none"}}}
    del apart["params"]["splits_by"]
    check_config(config(apart, sft={"envs": ["key_value"]}))


def test_its_limits_and_estimator_are_nothing_to_an_update() -> None:
    long = {"max_turns": 50, "max_turn_tokens": 1000, "max_episode_tokens": 50_000}
    other = {"id": "key_value", "name": "other", "limits": long, "advantage": {"name": "gae"}}
    aggregate: dict[str, Any] = {"algorithm": {"aggregate": "seq_mean_token_sum_norm"}, "optim": {"micro_tokens": 60_000}}
    alone = config(None, **aggregate)
    only, both = config({**other, "weight": 0.0}, **aggregate), config({**other, "weight": 0.5}, **aggregate)
    assert only.longest_sample() == alone.longest_sample() < both.longest_sample() == 50_000
    assert only.settled_algorithm().length_norm == alone.longest_sample()
    assert own_advantages(only.envs) == {} and set(own_advantages(both.envs)) == {"other"}
    assert Planner(only).batches() == Planner(alone).batches() != Planner(both).batches()


def config(other: dict[str, Any] | None, **sections: Any) -> TrainConfig:
    """key_value, which is trained on, and another environment."""
    env = [{"id": "key_value"}, *([] if other is None else [other])]
    return TrainConfig.model_validate({
        "name": "x", "env": env, "model": {"init": {}}, "cluster": {"backend": "inline"}, "engine": "embedded",
        "steps": 8, "rollout": {}, **sections,
    })  # fmt: skip

"""Success, reward and length by horizon, a task's number of gold calls, against counts by hand."""

import io
import json
import random
from pathlib import Path

import pytest
from rich.console import Console

from agentrl.cli.main import main
from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import Group, Message, StopReason, Task, Trajectory, Turn
from agentrl.env.catalog import make_env
from agentrl.rollout.player import combine_evaluations, summarize
from agentrl.run.evaluate import make_report, print_report
from agentrl.run.outcomes import label_of, labels_of, order, summary_of
from agentrl.run.run_log import episodes_row, evaluation_row
from tests.run.made_folders import unknown_keys


def episode(calls: int | None, success: bool | None, *, env: str = "", turns: int = 1, tokens: int = 4, n: int = 0) -> Trajectory:
    ledger = TokenLedger()
    ledger.append_sampled([1] * tokens, [-1.0] * tokens, [0] * tokens, 0)
    played = [Turn(place, Message("assistant", "x"), prompt_tokens=1, sampled_tokens=tokens // turns) for place in range(turns)]
    reward = None if success is None else float(success)
    return Trajectory(
        "x", Task(f"t{n}", n), ledgers=[ledger], turns=played, reward=reward, success=success, env=env, horizon=calls,
        stop=StopReason.ENGINE_ERROR if success is None else StopReason.DONE,
    )  # fmt: skip


# -- ranges ------------------------------------------------------------------------------------------


def test_every_number_has_one_range_and_ranges_grow_with_it() -> None:
    labels = {n: label_of(n) for n in range(200)}
    ranges = [label for label in dict.fromkeys(labels.values()) if int(label.partition("-")[0]) <= 96]
    assert ranges == [
        "0", "1", "2", "3", "4", "5-6", "7-8", "9-12", "13-16", "17-24", "25-32", "33-48", "49-64", "65-96",
    ]  # fmt: skip
    for n, label in labels.items():
        low, _, high = label.partition("-")
        assert int(low) <= n <= int(high or low)
    shuffled = list(dict.fromkeys(labels.values()))
    random.Random(0).shuffle(shuffled)
    assert sorted(shuffled, key=order) == list(dict.fromkeys(labels.values()))


def test_a_task_knows_its_horizon_and_one_without_gold_has_none() -> None:
    env = make_env("key_value", calls=[2, 9], set_share=0.3)
    env.reset(seed=5)
    assert env.trajectory.horizon == len(env.task.gold["calls"])
    class_of = type(env)
    without = type("NoGold", (class_of,), {"gold_turns": lambda self, task: (_ for _ in ()).throw(NotImplementedError())})
    bare = without(calls=4)
    bare.reset(seed=5)
    assert bare.trajectory.horizon is None and "horizon" not in bare.trajectory.to_json()
    row = env.trajectory.to_json()
    assert Trajectory.from_json(row).horizon == env.trajectory.horizon
    del row["horizon"]
    assert Trajectory.from_json(row).horizon is None, "a file from before"


# -- rows --------------------------------------------------------------------------------------------


def test_a_row_has_success_reward_and_length_of_each_horizon_and_unscored_members_are_in_no_mean() -> None:
    members = [episode(3, True, turns=2, tokens=4), episode(3, False, turns=4, tokens=8), episode(3, None, turns=1, tokens=3),
               episode(6, False), episode(None, True)]  # fmt: skip
    row = episodes_row([Group(0, 0, members)], {}, False)
    of3 = {key.split("/")[2]: row[key] for key in row if key.startswith("horizon/3/")}
    assert of3 == {
        "success": 0.5, "reward": 0.5, "scored": 2, "unscored": 1, "turns": pytest.approx(7 / 3), "response_length": 5.0,
    }  # fmt: skip
    assert row["horizon/5-6/success"] == 0.0 and row["success"] == 0.5, (
        "one without a horizon is in the mean of all, and in no bin"
    )
    assert labels_of(row) == ["3", "5-6"] and unknown_keys({"phase": "train", "step": 1, **row}) == []
    lost = episodes_row([Group(0, 0, [episode(7, None)])], {}, False)
    assert lost["horizon/7-8/success"] is lost["horizon/7-8/reward"] is None and lost["horizon/7-8/scored"] == 0
    assert not labels_of(episodes_row([Group(0, 0, [episode(None, True)])], {}, False)), (
        "an environment without gold has no such keys"
    )


def test_an_evaluation_that_knows_only_the_success_says_over_how_many_the_reward_is() -> None:
    compared = episode(3, True)
    compared.reward = None  # a spec that compares members gives a single episode no reward
    row = evaluation_row(summarize([compared, episode(3, False)]), {}, 1.0)
    assert (row["horizon/3/success"], row["horizon/3/reward"], row["horizon/3/scored"]) == (0.5, 0.0, 2)
    assert row["n/horizon/3/reward"] == 1 and "n/horizon/3/success" not in row
    assert unknown_keys({"phase": "eval", "step": 1, **row}) == []


def test_several_environments_keep_theirs_apart() -> None:
    played = {
        "a": summarize([episode(3, True, env="a"), episode(9, False, env="a")]),
        "b": summarize([episode(3, False, env="b")]),
        "bare": summarize([episode(None, True, env="bare")]),
    }
    row = evaluation_row(combine_evaluations(played, dict.fromkeys(played, 1.0)), {}, 1.0)
    assert not labels_of(row), "none of all together: a 3 of one is no 3 of the other"
    assert (labels_of(row, "a"), labels_of(row, "b"), labels_of(row, "bare")) == (["3", "9-12"], ["3"], [])
    assert (row["env/a/horizon/3/success"], row["env/b/horizon/3/success"]) == (1.0, 0.0)
    groups = [Group(0, 0, [episode(3, True, env="a")], env="a"), Group(1, 0, [episode(3, False, env="b")], env="b")]
    trained = episodes_row(groups, {}, True)
    assert not labels_of(trained) and trained["env/a/horizon/3/success"] == 1.0 and trained["env/b/horizon/3/success"] == 0.0
    for phase, one in (("eval", row), ("train", trained)):
        assert unknown_keys({"phase": phase, "step": 1, **one}) == []


def test_an_evaluation_report_and_its_table_say_it_by_horizon() -> None:
    members = [episode(2, True, n=0), episode(2, False, n=0), episode(12, None, n=1), episode(12, False, n=2)]
    report = make_report(members, 2)
    assert report["horizons"]["2"]["success"]["mean"] == 0.5 and report["horizons"]["9-12"]["success"]["mean"] == 0.0
    assert (report["horizons"]["9-12"]["tasks"], report["horizons"]["9-12"]["unscored"]) == (2, 1)
    console = Console(width=120, record=True, file=io.StringIO())
    print_report(report, console)
    shown = console.export_text()
    assert "by calls of the solution" in shown and shown.index("│ 2 ") < shown.index("│ 9-12 ")
    assert "horizons" not in make_report([episode(2, True)], 1), "where all tasks are as long there is nothing to tell apart"


def test_a_report_is_printed_in_eight_rows_and_whole_on_request() -> None:
    members = [episode(2, n % 2 == 0, n=n) for n in range(6)]
    report = make_report(members, 1) | {"metrics": {f"m{n}": 0.5 for n in range(20)}}

    def rows(every: bool) -> list[str]:
        console = Console(width=120, record=True, file=io.StringIO())
        print_report(report, console, every)
        return [line.split("│")[1].strip() for line in console.export_text().splitlines() if line.startswith("│")]

    few, whole = rows(False), rows(True)
    assert (
        len(few) == 8 and "pass@1" in few[0] and any("reward" in line for line in few) and not any("unscored" in x for x in few)
    )
    assert len(whole) > 25 and set(few) <= set(whole) and any("unscored" in line for line in whole)


# -- a run -------------------------------------------------------------------------------------------

CONFIG = """
base = "quickstart"
steps = 1
engine = "embedded"
sft = false
trackers = []
cluster = { backend = "inline" }
env = { params = { calls = [2, 12], set_share = 0.3 } }
rollout = { groups = 2, group_size = 2, max_turns = 14, max_turn_tokens = 4, max_episode_tokens = 1500 }
eval = { tasks = 12, every = 1 }
health = { idle_updates = 1000 }
model = { init = { layers = 1, hidden = 16 } }
"""


def test_a_run_says_it_in_rows_summary_and_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.toml").write_text(CONFIG)
    assert main(["train", str(tmp_path / "c.toml"), f"out={tmp_path}", "name=r"]) in (0, 1)  # it trains nothing
    said, folder = capsys.readouterr().out, tmp_path / "r"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["phase"] for row in rows] == ["before", "train", "after"]
    env = make_env("key_value", calls=[2, 12], set_share=0.3)
    wanted: dict[str, int] = {}
    for seed in range(12):
        label = label_of(len(env.make_task(seed, "heldout").gold["calls"]))
        wanted[label] = wanted.get(label, 0) + 1
    for row in rows:
        assert all(row[f"horizon/{label}/scored"] + row[f"horizon/{label}/unscored"] for label in labels_of(row))
    assert {label: rows[0][f"horizon/{label}/scored"] for label in labels_of(rows[0])} == wanted
    summary = json.loads((folder / "summary.json").read_text())
    assert {label: one["tasks"] for label, one in summary["horizons"].items()} == wanted
    for label, tasks in wanted.items():
        assert f"{label} calls".ljust(26) + "before 0.0 %   after 0.0 %" + f"   of {tasks} tasks" in said


def test_the_summary_has_the_ends_of_each_horizon() -> None:
    row = evaluation_row(summarize([episode(3, True), episode(10, False), episode(5, False)]), {}, 1.0)
    found = summary_of([{"step": step, "phase": phase, **row} for step, phase in ((0, "before"), (2, "after"))])
    assert list(found) == ["3", "5-6", "9-12"], "the shortest first"
    assert [one["success_after"] for one in found.values()] == [1.0, 0.0, 0.0]

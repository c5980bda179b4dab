"""A run of two environments: what it writes of each, a resume to the digit, and the evaluation of both in one command."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.main import main
from agentrl.data.trajectory import Trajectory
from agentrl.run.outcomes import EVALUATED, points
from agentrl.utils.errors import ConfigError
from tests.e2e.inside import config_of, episodes, execute, numbers, rows, updates
from tests.e2e.runs import SHORT
from tests.strict_json import read_strictly

ENVS = (
    f"env=[{{name='sums', id='key_value', reward='{SHORT}', params={{calls=2}}, weight=2.0, limits={{max_turns=3}}}},"
    f" {{name='calls', id='key_value', params={{calls=[3, 4], set_share=1.0}}, reward='{SHORT}',"
    " limits={max_turns=1, max_turn_tokens=6}, eval={tasks=3, weight=3.0}, advantage={name='rloo'}, system='Be brief.'}]"
)
SMALL = [
    "model.init.layers=1", "model.init.hidden=16", "optim.schedule=constant", "eval.every=1", "checkpoint.every=1",
    "rollout.mixture.name=by_tokens", "rollout.groups=4", "rollout.group_size=3", "rollout.max_episode_tokens=700",
    "rollout.filter_zero_variance=true",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return execute(config_of(tmp_path_factory.mktemp("two"), "two", ENVS, *SMALL, "steps=2"))


def test_metrics_trajectories_and_summary_speak_of_each_environment(run: Path) -> None:
    for step, row in enumerate(updates(run), 1):
        played = episodes(run, step)
        counts = Counter(episode.env for episode in played)
        assert counts.total() == 12 and row["scored"] + row["unscored"] == 12
        for name, count in counts.items():
            own = [episode for episode in played if episode.env == name]
            assert row[f"env/{name}/scored"] + row[f"env/{name}/unscored"] == count
            assert row[f"env/{name}/tokens"] == sum(e.sampled_tokens for e in own)
            assert row[f"env/{name}/turns"] == pytest.approx(sum(len(e.turns) for e in own) / count)
            assert row[f"env/{name}/reward"] == pytest.approx(sum(e.reward or 0.0 for e in own) / count)
            # Shares of the episodes, those of an environment by themselves.
            assert {key: value for key, value in row.items() if key.startswith(f"env/{name}/stop/")} == {
                f"env/{name}/stop/{stop}": pytest.approx(n / count) for stop, n in Counter(e.stop.value for e in own).items()
            }
            assert row[f"env/{name}/term/brevity"] == pytest.approx(sum(e.metrics["brevity"] or 0.0 for e in own) / count)
            valid = [value for e in own if (value := e.metrics["valid_calls"]) is not None]
            assert row[f"env/{name}/metric/valid_calls"] == (pytest.approx(sum(valid) / len(valid)) if valid else None)
            assert row.get(f"env/{name}/n/metric/valid_calls", count) == len(valid)
            calls = [result.error for e in own for _, _, result in e.calls() if result is not None]
            wrong = sum(error is not None for error in calls)
            assert row[f"env/{name}/tool_error_rate"] == (pytest.approx(wrong / len(calls)) if calls else None)
            most = {"sums": (3, 24), "calls": (1, 6)}[name]
            assert max(len(e.turns) for e in own) <= most[0] and max(t.sampled_tokens for e in own for t in e.turns) <= most[1]
        assert row["mixture/sums/share"] + row["mixture/calls/share"] == pytest.approx(1.0)
    for episode in episodes(run, 2):
        assert episode.messages[0].content.startswith("Be brief.") == (episode.env == "calls")
    assert {row["phase"] for row in rows(run) if "env/sums/success" in row} == {"before", "train", "eval", "after"}
    found = [row for row in rows(run) if row["phase"] in EVALUATED]
    for row in found:
        assert (row["env/sums/scored"], row["env/calls/scored"], row["scored"]) == (4, 3, 7)
        assert row["success"] == pytest.approx((row["env/sums/success"] + 3 * row["env/calls/success"]) / 4)
        assert row["reward"] == pytest.approx((row["env/sums/reward"] + 3 * row["env/calls/reward"]) / 4)
    assert Counter(episode.env for episode in episodes(run, 2, "after")) == {"sums": 4, "calls": 3}
    summary = json.loads((run / "summary.json").read_text())
    for name, one in summary["envs"].items():
        assert one["tokens"] == sum(row.get(f"env/{name}/tokens", 0) for row in updates(run))
        successes = points(rows(run), EVALUATED, f"env/{name}/success")
        assert one["success_after"] == successes[-1][1] and one["success_before"] == successes[0][1]
        assert one["best"]["success"] == max(value for _, value in successes)
    assert summary["tokens"] == sum(one["tokens"] for one in summary["envs"].values())
    assert (run / "curve.png").stat().st_size > 10_000


def test_a_strict_reader_takes_every_json_file_of_the_run(run: Path) -> None:
    found = dict(read_strictly(run))
    kinds = ("metrics.jsonl", "summary.json", "trajectories/", "manifest.json", "driver.json", "learner.json", "groups.jsonl")
    assert [kind for kind in kinds if not any(kind in name for name in found)] == []
    assert len(found["metrics.jsonl"]) >= 2


def test_a_resumed_run_draws_and_learns_the_same(run: Path) -> None:
    half = config_of(run.parent, "half", ENVS, *SMALL, "steps=1")
    execute(half)
    resumed = execute(half.model_copy(update={"steps": 2}), resumed=True)
    # The half run, which was to end there, has no evaluation between its steps.
    found, expected = ([row for row in numbers(folder) if row["phase"] != "eval"] for folder in (resumed, run))
    assert found == expected and len(updates(run)) == 2
    for step in (1, 2):
        assert [_told(e) for e in episodes(resumed, step)] == [_told(e) for e in episodes(run, step)]


def _told(episode: Trajectory) -> Any:
    return episode.env, episode.task.id, episode.member, [ledger.to_json() for ledger in episode.ledgers]


def test_one_command_evaluates_all_environments(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = shlex.split(f"eval --config {run / 'config.toml'} --model {run / 'final'} -k 2 -n 2 --out {tmp_path / 'all'}")
    assert main(command) == 0
    text = capsys.readouterr().out
    report = json.loads((tmp_path / "all" / "report.json").read_text())
    assert set(report["envs"]) == {"sums", "calls"} and "mean" in text and "sums" in text
    for name, one in report["envs"].items():
        assert (one["tasks"], one["episodes"]) == (2, 4)
        assert one == json.loads((tmp_path / "all" / name / "report.json").read_text())
        played = [json.loads(line) for line in (tmp_path / "all" / name / "trajectories.jsonl").read_text().splitlines()]
        assert {row["env"] for row in played} == {name}
    rates = {name: one["pass@1"]["mean"] for name, one in report["envs"].items()}
    assert report["success"] == pytest.approx((rates["sums"] + 3 * rates["calls"]) / 4)
    assert main(["eval", "calls", *command[1:-1], str(tmp_path / "one")]) == 0
    one = json.loads((tmp_path / "one" / "calls" / "report.json").read_text())
    assert one["pass@1"] == report["envs"]["calls"]["pass@1"]
    named = ["eval", "key_value", "function_calling", "--model", str(run / "final"), "-n", "1", "--out", str(tmp_path / "ids"),
             "engine=embedded", "env.key_value.limits.max_turns=1", "rollout.max_turn_tokens=4"]  # fmt: skip
    assert main(named) == 0
    found = json.loads((tmp_path / "ids" / "report.json").read_text())["envs"]
    assert set(found) == {"key_value", "function_calling"}


def test_a_command_for_one_environment_says_so(tmp_path: Path) -> None:
    config = config_of(tmp_path, "two", ENVS, *SMALL)
    from agentrl.env.catalog import EnvRef

    with pytest.raises(ConfigError, match="this takes one environment, and the config has 2: sums, calls"):
        EnvRef.of(config.the_env, config.tools)

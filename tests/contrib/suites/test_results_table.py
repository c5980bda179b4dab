"""benchmarks/results_table.py: accuracies, paired gains and their intervals of evaluations written by hand."""

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.env.catalog import find_env
from agentrl.utils.search_path import load_module
from benchmarks import results_table

Written = dict[str, list[Any]]
"""By category the successes of its tasks, each one or a list of samples."""
TABLE = load_module(Path(str(find_env("bfcl").path)).with_name("official.py")).MeansTable(
    means={"simple": ("a", "b"), "non-live": ("simple", "c"), "live": ("d", "e"), "all": ("c", "f")},
    weights={},
    over_tasks={"live": {"d": 30, "e": 10}},
)


def write(folder: Path, written: Written) -> Path:
    folder.mkdir(parents=True)
    rows = [
        {"task": {"id": f"{category}_{n}", "data": {"category": category}}, "success": success}
        for category, tasks in written.items()
        for n, own in enumerate(tasks)
        for success in (own if isinstance(own, list) else [own])
    ]
    (folder / "trajectories.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_weights_of_a_mean_are_the_leaderboards() -> None:
    assert results_table.shares(TABLE, "non-live") == {"a": 0.25, "b": 0.25, "c": 0.5}
    assert results_table.shares(TABLE, "live") == {"d": 0.75, "e": 0.25} and results_table.shares(TABLE, "a") == {"a": 1.0}


def test_gain_is_paired_and_its_interval_is_that_of_a_bootstrap_within_categories() -> None:
    differences = {"a": [1.0, 0.0, 0.0, -1.0, 1.0, 0.0], "b": [0.0, 1.0, 1.0, 0.0]}
    weights = {"a": 0.5, "b": 0.5}
    mean, low, high = results_table.gain_of(differences, weights)
    assert mean == pytest.approx(0.5 * (1 / 6) + 0.5 * 0.5)
    spread = np.sqrt(sum(0.25 * np.var(values) / len(values) for values in differences.values()))  # of the mean over draws
    assert low == pytest.approx(mean - 1.96 * spread, abs=0.06) and high == pytest.approx(mean + 1.96 * spread, abs=0.06)
    assert (mean, low, high) == results_table.gain_of(differences, weights), "the draws are the same each time"
    assert results_table.gain_of({"a": [0.0] * 30}, {"a": 1.0}) == pytest.approx((0.0, -0.1, 0.1)), "rule of three"


def test_a_row_has_every_seed_and_a_mean_only_of_played_categories() -> None:
    before = {"a": {"1": 0.0, "2": 1.0}, "b": {"1": 0.0, "2": 0.0}, "c": {"1": 0.0, "2": 0.0}}
    after = {"a": {"1": 1.0, "2": 1.0}, "b": {"1": 0.0, "2": 1.0}, "c": {"1": 0.0, "2": 0.0}}
    worse = {"a": {"1": 0.0, "2": 0.0}, "b": {"1": 0.0, "2": 0.0}, "c": {"1": 0.0, "2": 1.0}}
    rows = {row.name: row for row in results_table.make_rows(TABLE, {"a": {"1": 1.0}}, [(before, after), (before, worse)])}
    assert list(rows) == ["a", "b", "c", "simple", "non-live"], "no mean of d, e or f, which nobody played"
    assert (rows["a"].untouched, rows["simple"].untouched) == (1.0, None)
    row = rows["non-live"]
    assert (row.n, row.sft, row.grpo) == (6, [0.125, 0.125], [0.375, 0.25])
    assert [gain[0] for gain in row.gains] == pytest.approx([0.25, 0.125]) and row.gain[0] == pytest.approx(0.1875)


def test_the_command_prints_all_started_runs(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in range(3):
        (here / "runs" / f"s{seed}").mkdir(parents=True)
    plain = {"simple_python": [False, True, None], "irrelevance": [True] * 12}
    better = {"simple_python": [True, True, True], "irrelevance": [True] * 11 + [False]}
    for seed in range(2):
        write(here / "evals" / f"s{seed}" / "start" / "test", plain)
        write(here / "evals" / f"s{seed}" / "final" / "test", better)
    write(here / "evals" / "s2" / "start", plain)

    def run(*words: str) -> tuple[int, str]:
        names = [f"runs/s{seed}" for seed in range(3)]
        monkeypatch.setattr("sys.argv", ["results_table.py", *names, *words])
        code = results_table.main()
        said = capsys.readouterr()
        return code, said.out + said.err

    code, said = run("--untouched", str(write(here / "evals" / "u", plain)), "--json", "found.json")
    assert code == 0 and "s2: started, without an evaluation of start and final" in said
    lines = {line.split(" | ")[0].strip("| "): line for line in said.splitlines()}
    assert "| simple_python | 2 | 0.500 | 0.500 (0.500, 0.500) | 1.000 (1.000, 1.000) | +0.500 (" in said, (
        "unscored is in no mean"
    )
    assert "-0.083" in lines["irrelevance"] and len(said.splitlines()) == 2 + 2 + 1 + 2 + 2 + 2
    found = json.loads((here / "found.json").read_text())
    assert found["seeds"] == ["s0", "s1"] and found["without"] == ["s2"]
    assert statistics.fmean(found["rows"][0]["grpo"]) == 1.0
    code, said = run("--k", "2")
    assert code == 2 and "simple_python_0 has 1 scored samples. Evaluate with -k 2, or lower --k." in said


def test_pass_at_k_and_evaluations_of_other_tasks(tmp_path: Path) -> None:
    folder = write(tmp_path / "k", {"a": [[True, False, False, False], [False] * 4]})
    assert results_table.read_values(folder, 2) == {"a": {"a_0": pytest.approx(0.5), "a_1": 0.0}}
    write(tmp_path / "run" / "start", {"a": [True] * 10})
    write(tmp_path / "run" / "final", {"a": [True] * 5})
    with pytest.raises(results_table.ConfigError, match="start has 10 tasks, final 5"):
        results_table.read_pair(tmp_path / "run", 1)
    assert results_table.read_pair(tmp_path / "none", 1) is None
    with pytest.raises(results_table.ConfigError, match="no scored episodes"):
        results_table.read_values(tmp_path / "none")

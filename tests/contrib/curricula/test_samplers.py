"""`by_progress`, by how far an arm's success rose or fell, and `predicted`, by a pass rate that is learned from parameters: from
configs and through a resume."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config import Choice, load_config
from agentrl.rollout.mixtures import MixedTasks, parts_of
from agentrl.rollout.samplers import GroupOutcome, TaskSampler, make_sampler
from agentrl.run.assembly import RunStart
from agentrl.run.checks.rollout_checks import check_rollout
from agentrl.run.metrics import info_of
from agentrl.utils.errors import ConfigError

BUCKETS = [{"calls": 2}, {"calls": [4, 6]}, {"calls": 9}]
ARMS = ["calls=2", "calls=[4, 6]", "calls=9"]


def by_progress(**args: Any) -> TaskSampler:
    return make_sampler(Choice(name="by_progress", args={"buckets": BUCKETS, **args}))


def tell(sampler: TaskSampler, arm: str, *successes: float) -> None:
    sampler.observe([GroupOutcome(index, arm, success) for index, success in enumerate(successes)])


def expected(successes: list[float], window: int, floor: float) -> float:
    """By numpy's fit of a line: what it says of the last group minus what it says of the first."""
    last = successes[-window:]
    if len(last) < 4:
        return 1.0
    line = np.polynomial.Polynomial.fit(np.arange(len(last)), last, 1)
    return float(max(floor, min(1.0, abs(line(len(last) - 1) - line(0)))))


def test_what_rises_and_what_falls_is_drawn_and_what_stays_is_not() -> None:
    """By hand: 0, 0.25, 0.5, 0.75 rises by 0.75; all right four times by 0; 1, 0.5, 0.5, 0 falls along -0.3 a group, 0.9."""
    sampler = by_progress(floor=0.1)
    tell(sampler, ARMS[0], 1.0, 1.0, 1.0, 1.0)
    tell(sampler, ARMS[1], 0.0, 0.25, 0.5, 0.75)
    assert sampler.metrics()["calls=9/share"] == pytest.approx(1 / 1.85), "an arm of which nothing is known is seen first"
    tell(sampler, ARMS[2], 1.0, 0.5, 0.5, 0.0)
    row = sampler.metrics()
    assert [row[f"{arm}/progress"] for arm in ARMS] == pytest.approx([0.0, 0.75, -0.9])
    assert [row[f"{arm}/success"] for arm in ARMS] == pytest.approx([1.0, 0.375, 0.5])
    assert [row[f"{arm}/share"] for arm in ARMS] == pytest.approx([0.1 / 1.75, 0.75 / 1.75, 0.9 / 1.75])
    drawn = Counter(sampler.choose(7, index).bucket for index in range(4000))
    assert [drawn[arm] / 4000 for arm in ARMS] == pytest.approx([0.1 / 1.75, 0.75 / 1.75, 0.9 / 1.75], abs=0.02)
    assert all(info_of(f"sampler/{key}") for key in row)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(ARMS), st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])), max_size=60),
    st.integers(4, 12),
    st.sampled_from([0.01, 0.1, 0.5]),
)
def test_weights_are_those_of_a_fit_of_the_last_groups_and_a_resume_keeps_them(
    told: list[tuple[str, float]], window: int, floor: float
) -> None:
    sampler = by_progress(window=window, floor=floor)
    for index, (arm, success) in enumerate(told):
        sampler.observe([GroupOutcome(index, arm, success)])
    kept = json.loads(json.dumps(sampler.state()))
    again = by_progress(window=window, floor=floor)
    again.load(kept)
    weights = [expected([s for of, s in told if of == arm], window, floor) for arm in ARMS]
    for one in (sampler, again):
        row = one.metrics()
        assert [row[f"{arm}/share"] for arm in ARMS] == pytest.approx([weight / sum(weights) for weight in weights], abs=1e-9)
    assert [sampler.choose(3, index) for index in range(40)] == [again.choose(3, index) for index in range(40)]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"buckets": []}, "args.buckets is empty"),
        ({"buckets": [{"calls": 2}, {"calls": 2}]}, "two of args.buckets are the same"),
        ({"window": 3}, "window = 3: Input should be greater than or equal to 4"),
        ({"floor": 0.0}, "floor = 0.0: Input should be greater than 0"),
        ({"bukets": BUCKETS}, "did you mean 'buckets'"),
    ],
)
def test_buckets_that_cannot_be_are_refused_by_name(args: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        by_progress(**args)
    assert said in str(refused.value)


RANGES = {"calls": [2, 12], "keys": [14, 14], "max_value": [3, 5]}
PREDICTED = """
model = { init = { layers = 1, hidden = 16 } }

[rollout.sampler]
name = "predicted"
args = { ranges = { calls = [2, 12, 2] }, candidates = 6, floor = 0.05 }

[[env]]
id = "key_value"
name = "a"
params = { keys = 14, set_share = 0.0 }

[[env]]
id = "key_value"
name = "b"
params = { keys = 14, set_share = 0.0 }
sampler = { name = "predicted", args = { ranges = { calls = [4, 4] } } }
"""


def predicted(**args: Any) -> TaskSampler:
    return make_sampler(Choice(name="predicted", args={"ranges": RANGES, **args}))


class Regression:
    """The same in float64 numpy, from the definition: even draws have variance (high - low)^2 / 12."""

    def __init__(self, ranges: dict[str, list[int]], rate: float) -> None:
        ends = np.array(list(ranges.values()), float)
        self.middle, self.deviation = ends.mean(1), np.ptp(ends, axis=1) / math.sqrt(12)
        self.c, self.rate, self.history = np.zeros(len(ends) + 1), rate, list[tuple[float, float]]()

    def x(self, values: list[float]) -> Any:
        z = (np.array(values, float) - self.middle) / np.where(self.deviation > 0, self.deviation, 1.0)
        return np.concatenate([[1.0], z])

    def p(self, values: list[float]) -> float:
        return float(1 / (1 + np.exp(-self.c @ self.x(values))))

    def learn(self, values: list[float], success: float) -> None:
        self.history.append((self.p(values), success))
        x = self.x(values)
        self.c = self.c + self.rate * (success - self.history[-1][0]) * x / len(x)

    def calibration_error(self) -> float:
        ages = 0.98 ** np.arange(len(self.history))[::-1]
        p, s = np.array(self.history).T
        parts = [np.minimum((p * 5).astype(int), 4) == part for part in range(5)]
        return float(sum(abs((ages * (s - p))[part].sum()) for part in parts) / ages.sum())


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=6), min_size=1, max_size=12),
    st.integers(0, 2**40),
    st.sampled_from([0.2, 1.0, 2.0]),
)
def test_predicted_is_the_logistic_regression_and_a_resume_keeps_it(updates: list[list[float]], seed: int, rate: float) -> None:
    sampler, own, index = predicted(rate=rate), Regression(RANGES, rate), 0
    for successes in updates:
        outcomes, last = [], []
        for success in successes:
            choice = sampler.choose(seed, index)
            assert choice == sampler.choose(seed, index), "a group that is run again gets the same task"
            assert all(low <= choice.params[key] <= high for key, (low, high) in RANGES.items())
            outcomes.append(GroupOutcome(index, choice.bucket, success))
            last.append(list(choice.params.values()))
            index += 1
        for values, success in zip(last, successes, strict=True):
            own.learn(values, success)
        sampler.observe(outcomes)
        row, kept = sampler.metrics(), json.loads(json.dumps(sampler.state()))
        sampler = predicted(rate=rate)
        sampler.load(kept)
        assert sampler.metrics() == row
        recent = np.array(own.history[-len(successes) :])
        assert (row["predicted"], row["observed"]) == pytest.approx(tuple(recent.mean(0)))
        assert row["calibration_error"] == pytest.approx(own.calibration_error(), abs=1e-9)
        ends = {"calls=2": [2, 14, 4], "calls=12": [12, 14, 4], "keys=14": [7, 14, 4]}
        ends |= {"max_value=3": [7, 14, 3], "max_value=5": [7, 14, 5]}
        assert {key: value for key, value in row.items() if "/" in key} == pytest.approx(
            {f"{key}/success": own.p(values) for key, values in ends.items()}
        )
        assert all(info_of(f"sampler/{key}") for key in row)


def test_predicted_finds_what_is_solved_at_times_and_begins_few_others() -> None:
    """A policy that solves up to 5 calls always, 8 and more never: of the groups of an even draw 8 of 11 teach nothing."""

    def success(calls: int) -> float:
        return {6: 0.75, 7: 0.25}.get(calls, float(calls < 6))

    sampler, drawn = predicted(ranges={"calls": [2, 12]}), Counter[int]()
    for update in range(20):
        choices = [(index, sampler.choose(5, index)) for index in range(8 * update, 8 * update + 8)]
        drawn.update(choice.params["calls"] for _, choice in choices if update >= 10)
        sampler.observe([GroupOutcome(index, one.bucket, success(one.params["calls"])) for index, one in choices])
    row = sampler.metrics()
    assert row["calls=2/success"] > 0.95 and row["calls=12/success"] < 0.05
    assert drawn[6] + drawn[7] > 0.4 * drawn.total(), "of an even draw 2 of 11"


def test_candidates_are_drawn_by_weight() -> None:
    """With one candidate the draw is even, whatever is known; with many and no evidence too."""
    one, many = predicted(ranges={"calls": [2, 4]}, candidates=1), predicted(ranges={"calls": [2, 4]}, candidates=30, floor=0.2)
    state = {"coefficients": {"": 0.0, "calls": 2.0}, "bins": [[0.0] * 3] * 5, "last": None}
    one.load(state)
    many.load(state)
    # z = -sqrt(3), 0, sqrt(3): p = 1 / (1 + e^3.46), 1/2, ...: 4 p (1 - p) = 0.118, raised to 0.2, and 1.
    counts = [Counter(sampler.choose(3, index).params["calls"] for index in range(2000)) for sampler in (one, many)]
    assert [counts[0][calls] / 2000 for calls in (2, 3, 4)] == pytest.approx([1 / 3] * 3, abs=0.04)
    assert [counts[1][calls] / 2000 for calls in (2, 3, 4)] == pytest.approx([0.2 / 1.4, 1 / 1.4, 0.2 / 1.4], abs=0.04)


@pytest.mark.parametrize(
    ("ranges", "count"),
    [({"calls": [2, 12]}, 11), ({"calls": [2, 60]}, 32), ({"a": [0, 9], "b": [1, 2]}, 20), ({"a": [0, 9], "b": [0, 9]}, 25),
     ({key: [0, 7] for key in "abcde"}, 32), ({"calls": [4, 4]}, 1), ({"calls": [2, 12, 2]}, 6),
     ({"calls": [1, 100, 3]}, 32)],
)  # fmt: skip
def test_the_check_before_a_run_sees_the_extremes(ranges: dict[str, list[int]], count: int) -> None:
    variants = [dict(params) for params in predicted(ranges=ranges).variants()]
    assert len(variants) == count == len({tuple(params.items()) for params in variants})
    for corner in (min, max):
        assert {key: corner(ends[:2]) for key, ends in ranges.items()} in variants
    for key, (low, high, *_) in ranges.items():
        values = sorted({params[key] for params in variants})
        assert (values[0], values[-1]) == (low, high) and all(isinstance(value, int) for value in values)


def test_from_a_config_with_two_environments_each_learns_by_itself(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(PREDICTED)
    config = load_config(tmp_path / "c.toml")
    for one in config.each():
        check_rollout(RunStart(one))
    tasks = MixedTasks(parts_of(config), config.rollout.mixture, config.seed)
    for update in range(10):
        for index in range(8 * update, 8 * update + 8):
            choice = tasks.draw(index)
            tasks.finish(index, float(choice.params["calls"] < 6) if choice.env == "a" else 0.0, 10)
        tasks.update(update + 1)
    row = tasks.metrics()
    assert row["sampler/a/calls=2/success"] > 0.8 > 0.2 > row["sampler/a/calls=12/success"]
    assert row["sampler/b/calls=4/success"] < 0.2
    again = MixedTasks(parts_of(config), config.rollout.mixture, config.seed)
    again.load_json(json.loads(json.dumps(tasks.to_json())))
    assert again.metrics() == row
    assert [again.draw(index) for index in range(80, 140)] == [tasks.draw(index) for index in range(80, 140)]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"ranges": {}}, "args.ranges has 0 parameters; give 1 to 5"),
        ({"ranges": {key: [0, 1] for key in "abcdef"}}, "args.ranges has 6 parameters; give 1 to 5"),
        ({"ranges": {"calls": [9, 2]}}, "args.ranges.calls = [9, 2]: expected [first, last]"),
        ({"ranges": {"calls": [2, 13, 2]}}, "steps that meet both"),
        ({"ranges": {"calls": [2, 12, 0]}}, "args.ranges.calls = [2, 12, 0]: expected"),
        ({"ranges": {"calls": [2, 12], "max_value": [3, 5, 7, 9]}}, "List should have at most 3 items"),
        ({"ranges": {"calls": [2, 99]}}, "env.params = {'calls': "),
        ({"ranges": {"cals": [2, 4]}}, "cals"),
        ({"ranges": {"calls": [2, 4]}, "rates": 1.0}, "did you mean 'rate'"),
    ],
)
def test_ranges_that_cannot_be_are_refused_before_the_run_by_name(args: dict[str, Any], said: str, tmp_path: Path) -> None:
    lines = json.dumps({"name": "predicted", "args": args})
    (tmp_path / "c.toml").write_text('model = { init = { layers = 1, hidden = 16 } }\nenv = { id = "key_value" }\n')
    config = load_config(tmp_path / "c.toml", [f"rollout.sampler={lines}".replace('": ', '" = ')])
    with pytest.raises(ConfigError) as refused:
        check_rollout(RunStart(config))
    assert said in str(refused.value)

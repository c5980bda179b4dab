"""`by_progress`: the weight of an arm is how far its success rose or fell, from a config and through a resume."""

import json
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
CONFIG = """
model = { init = { layers = 1, hidden = 16 } }
env = { id = "key_value" }

[rollout.sampler]
name = "by_progress"
args = { buckets = [{ calls = 2 }, { calls = [4, 6] }, { calls = 9 }], floor = 0.05, window = 8 }
"""


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


def test_from_a_config_what_is_learned_decides_the_next_draws(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(CONFIG)
    config = load_config(tmp_path / "c.toml")
    check_rollout(RunStart(config))
    tasks, rising = MixedTasks(parts_of(config), config.rollout.mixture, config.seed), 0
    for index in range(64):  # while the middle arm learns, the others stand still
        choice = tasks.draw(index)
        rising += choice.bucket == ARMS[1]
        tasks.finish(index, min(1.0, rising / 16) if choice.bucket == ARMS[1] else float(choice.bucket == ARMS[0]), 10)
        tasks.update(index + 1)
        if rising == 12:
            break
    row = tasks.metrics()
    # Of the middle arm the last 8 groups rose by 7/16; the others are at the floor.
    total = 0.05 + 7 / 16 + 0.05
    assert [row[f"sampler/{arm}/share"] for arm in ARMS] == pytest.approx([0.05 / total, 7 / 16 / total, 0.05 / total])
    again = MixedTasks(parts_of(config), config.rollout.mixture, config.seed)
    again.load_json(json.loads(json.dumps(tasks.to_json())))
    assert [again.draw(index) for index in range(2000, 2050)] == [tasks.draw(index) for index in range(2000, 2050)]


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
def test_what_cannot_be_is_refused_by_name(args: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        by_progress(**args)
    assert said in str(refused.value)

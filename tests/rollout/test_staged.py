"""`staged`: from a config, in order, late and resumed."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config import Choice, load_config
from agentrl.rollout.mixtures import MixedTasks, parts_of
from agentrl.rollout.samplers import GroupOutcome, TaskSampler, make_sampler
from agentrl.run.assembly import RunStart
from agentrl.run.checks.rollout_checks import check_rollout
from agentrl.run.metrics import info_of

STAGES = [{"calls": calls} for calls in (2, 3, 4, 5)]
CONFIG = """
model = { init = { layers = 1, hidden = 16 } }

[rollout.sampler]
name = "staged"
args = { stages = [{ calls = 2 }, { calls = 4 }, { calls = 6 }], threshold = 0.7, window = 4 }

[[env]]
id = "key_value"
name = "up"

[[env]]
id = "key_value"
name = "own"
sampler = { name = "staged", args = { stages = [{ calls = 3 }, { calls = 5 }], review = 0.0 } }
"""


def staged(**args: Any) -> TaskSampler:
    return make_sampler(Choice(name="staged", args={"stages": STAGES, "window": 3, "threshold": 0.6, **args}))


def shares(sampler: TaskSampler, first: int = 0, draws: int = 4000) -> dict[str, float]:
    counts = Counter(sampler.choose(7, index).bucket for index in range(first, first + draws))
    return {bucket: count / draws for bucket, count in counts.items()}


def tell(sampler: TaskSampler, first: int, bucket: str, *successes: float) -> dict[str, float]:
    sampler.observe([GroupOutcome(first + place, bucket, success) for place, success in enumerate(successes)])
    return sampler.metrics()


def test_a_full_window_at_the_threshold_begins_the_next_stage_and_earlier_ones_keep_their_share() -> None:
    sampler = staged(review=0.2)
    assert shares(sampler) == {"0": 1.0}
    assert tell(sampler, 0, "0", 0.6, 0.0, 0.6)["stage"] == 0 and tell(sampler, 3, "0", 1.0)["stage"] == 0, (
        "0.53 of the last three"
    )
    assert tell(sampler, 4, "0", 0.2) == {"stage": 1.0}, "0.6, 1.0 and 0.2, though in floats less than 0.6"
    assert tell(sampler, 5, "0", 1.0, 1.0, 1.0) == {"stage": 1.0}, "of a stage that has passed"
    assert tell(sampler, 8, "2", 1.0, 1.0, 1.0) == {"stage": 1.0}, "of none that has begun"
    assert shares(sampler) == pytest.approx({"0": 0.2, "1": 0.8}, abs=0.02)
    for stage in (1, 2, 3):
        tell(sampler, 4000 * stage, str(stage), 1.0, 1.0, 1.0)
    assert sampler.metrics() == {"stage": 3.0, "stage_success": 1.0}, "after the last comes none"


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 2**32),
    st.lists(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=8), max_size=25),
    st.data(),
)
def test_stages_are_those_of_the_history_however_late_groups_end_and_wherever_it_is_resumed(
    seed: int, updates: list[list[float]], data: st.DataObject
) -> None:
    sampler, running, begun, stage, own = staged(review=0.2), dict[int, int](), 0, 0, list[float]()
    for successes in updates:
        while len(running) < len(successes) + 3:
            running[begun], begun = int(sampler.choose(seed, begun).bucket), begun + 1
        over = sorted(data.draw(st.permutations(sorted(running)))[: len(successes)])
        told = [(index, running.pop(index), success) for index, success in zip(over, successes, strict=True)]
        sampler.observe([GroupOutcome(index, str(of), success) for index, of, success in told])
        for _, of, success in told:
            own += [success] if of == stage else []
            if len(own) >= 3 and sum(own[-3:]) / 3 >= 0.6 - 1e-12 and stage < 3:
                stage, own = stage + 1, []
        assert sampler.metrics()["stage"] == stage
        kept, sampler = json.loads(json.dumps(sampler.state())), staged(review=0.2)
        sampler.load(kept)


def test_from_a_config_with_two_environments_each_has_its_own_stage(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(CONFIG)
    config = load_config(tmp_path / "c.toml")
    for one in config.each():
        check_rollout(RunStart(one))
    tasks = MixedTasks(parts_of(config), config.rollout.mixture, config.seed)
    for index in range(60):
        choice = tasks.draw(index)
        tasks.finish(index, {"up": 1.0, "own": 0.0}[choice.env] if choice.params["calls"] < 4 else 0.5, 10)
    tasks.update(1)
    row = tasks.metrics()
    assert (row["sampler/up/stage"], row["sampler/own/stage"]) == (1.0, 0.0)
    assert all(info_of(key.replace("/up/", "/").replace("/own/", "/")) is not None for key in row if key.startswith("sampler/"))
    again = MixedTasks(parts_of(config), config.rollout.mixture, config.seed)
    again.load_json(json.loads(json.dumps(tasks.to_json())))
    assert [again.draw(index) for index in range(60, 120)] == [tasks.draw(index) for index in range(60, 120)]
    assert again.metrics() == tasks.metrics()

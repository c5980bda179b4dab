"""`staged` with a share of the next stage's tasks, and back when success falls: from a config, in order, late and resumed."""

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
args = { stages = [{ calls = 2 }, { calls = 4 }, { calls = 6 }], ahead = 0.3, back = 0.2, threshold = 0.7, window = 4 }

[[env]]
id = "key_value"
name = "up"

[[env]]
id = "key_value"
name = "own"
sampler = { name = "staged", args = { stages = [{ calls = 3 }, { calls = 5 }], ahead = 0.5, review = 0.0 } }
"""


def staged(**args: Any) -> TaskSampler:
    return make_sampler(Choice(name="staged", args={"stages": STAGES, "window": 3, "threshold": 0.6, **args}))


def shares(sampler: TaskSampler, first: int = 0, draws: int = 4000) -> dict[str, float]:
    counts = Counter(sampler.choose(7, index).bucket for index in range(first, first + draws))
    return {bucket: count / draws for bucket, count in counts.items()}


def tell(sampler: TaskSampler, first: int, bucket: str, *successes: float) -> dict[str, float]:
    sampler.observe([GroupOutcome(first + place, bucket, success) for place, success in enumerate(successes)])
    return sampler.metrics()


def test_a_share_of_all_groups_is_of_the_next_stage_and_its_success_is_known_before() -> None:
    sampler = staged(ahead=0.25, review=0.2)
    assert shares(sampler) == pytest.approx({"0": 0.75, "1": 0.25}, abs=0.02)
    # Of the last three; and however well they go, they begin no stage.
    assert tell(sampler, 0, "1", 1.0, 1.0, 0.0, 1.0) == {"stage": 0.0, "ahead_success": pytest.approx(2 / 3)}
    assert tell(sampler, 4, "0", 0.6, 0.6, 0.6) == {"stage": 1.0}, "what went before the stage began decides nothing in it"
    assert shares(sampler, 4000) == pytest.approx({"0": 0.2, "1": 0.55, "2": 0.25}, abs=0.02)
    for stage in (1, 2):
        tell(sampler, 4000 * (stage + 1), str(stage), 1.0, 1.0, 1.0)
        shares(sampler, 4000 * (stage + 1))
    found = shares(sampler, 16_000)
    assert found["3"] == pytest.approx(0.8, abs=0.02) and set(found) == {"0", "1", "2", "3"}, "after the last stage comes none"


def test_it_goes_back_when_a_full_window_is_under_back_and_not_at_it() -> None:
    sampler = staged(back=0.3, review=0.0)
    assert tell(sampler, 0, "0", 0.0, 0.0, 0.0, 0.0)["stage"] == 0, "before the first there is no stage"
    assert tell(sampler, 4, "0", 1.0, 1.0, 1.0)["stage"] == 1
    assert tell(sampler, 7, "1", 0.0, 0.0)["stage"] == 1, "two groups are no window of three"
    assert tell(sampler, 9, "1", 0.9)["stage"] == 1, "0.3 is not under 0.3"
    assert tell(sampler, 10, "1", 0.5, 0.1, 0.3) == {"stage": 1.0, "stage_success": pytest.approx(0.3)}
    assert tell(sampler, 13, "1", 0.4) == {"stage": 0.0}, "0.1, 0.3 and 0.4 are a mean of 0.267, and the window begins anew"
    assert tell(sampler, 14, "0", 0.6, 0.6, 0.6)["stage"] == 1
    fifths = staged(back=0.2, review=0.0)
    tell(fifths, 0, "0", 1.0, 1.0, 1.0)
    assert tell(fifths, 3, "1", 0.0, 0.0, 0.6)["stage"] == 1, "0.2 in thirds, though in floats it is less than that"


def test_groups_that_were_chosen_before_a_move_say_nothing_of_it() -> None:
    """With `max_staleness` the groups of a stage end after it: those of a stage that is gone back to, of the one that was left,
    and those of the next one that were drawn before it began."""
    sampler = staged(ahead=0.4, back=0.3, review=0.0)
    assert {sampler.choose(7, index).bucket for index in range(30)} == {"0", "1"}
    assert tell(sampler, 0, "0", 1.0, 1.0, 1.0)["stage"] == 1
    assert tell(sampler, 3, "1", 0.0, 0.0, 0.0) == {"stage": 1.0}
    assert {sampler.choose(7, index).bucket for index in range(30, 60)} == {"1", "2"}
    assert tell(sampler, 30, "1", 0.0, 0.0, 0.0)["stage"] == 0
    assert tell(sampler, 6, "0", 1.0, 1.0, 1.0) == {"stage": 0.0}, "of stage 0, from before it was left"
    assert tell(sampler, 33, "1", 1.0, 1.0, 1.0) == {"stage": 0.0}


class Plain:
    """Where a curriculum is after what it was told, from the history alone: for each move, the groups chosen since."""

    def __init__(self, stages: int, window: int, threshold: float, back: float) -> None:
        self.last, self.window, self.threshold, self.back = stages - 1, window, threshold, back
        self.stage, self.chosen_at, self.moves = 0, dict[int, int](), 0
        self.seen: list[tuple[int, int, float]] = []

    def tell(self, index: int, stage: int, success: float) -> None:
        self.seen.append((self.chosen_at[index], stage, success))
        own = [s for at, of, s in self.seen if at == self.moves and of == self.stage][-self.window :]
        if len(own) == self.window and sum(own) / self.window >= self.threshold - 1e-12 and self.stage < self.last:
            self.stage, self.moves = self.stage + 1, self.moves + 1
        elif len(own) == self.window and sum(own) / self.window < self.back - 1e-12 and self.stage:
            self.stage, self.moves = self.stage - 1, self.moves + 1


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 2**32),
    st.lists(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=8), max_size=25),
    st.sampled_from([(0.0, 0.0), (0.3, 0.0), (0.0, 0.5), (0.3, 0.5)]),
    st.data(),
)
def test_stages_are_those_of_the_history_however_late_groups_end_and_wherever_it_is_resumed(
    seed: int, updates: list[list[float]], pair: tuple[float, float], data: st.DataObject
) -> None:
    ahead, back = pair
    args = {"ahead": ahead, "back": back, "review": 0.2}
    sampler, plain, running, begun = staged(**args), Plain(4, 3, 0.6, back), dict[int, int](), 0
    for successes in updates:
        while len(running) < len(successes) + 3:
            running[begun] = int(sampler.choose(seed, begun).bucket)
            plain.chosen_at[begun], begun = plain.moves, begun + 1
        over = sorted(data.draw(st.permutations(sorted(running)))[: len(successes)])
        told = [(index, running.pop(index), success) for index, success in zip(over, successes, strict=True)]
        sampler.observe([GroupOutcome(index, str(stage), success) for index, stage, success in told])
        for index, stage, success in told:
            # A curriculum that never looks ahead or back judges reviews and late groups by their stage alone, which has passed.
            plain.tell(index, stage, success)
        assert sampler.metrics()["stage"] == plain.stage
        kept, sampler = json.loads(json.dumps(sampler.state())), staged(**args)
        sampler.load(kept)


def test_without_the_two_nothing_changes_and_older_checkpoints_are_taken_up() -> None:
    plain, both = staged(review=0.25), staged(review=0.25, ahead=0.0, back=0.0)
    older = {"stage": 1, "recent": [0.5, 0.5]}
    for sampler in (plain, both):
        sampler.load(older)
        assert tell(sampler, 900, "1", 0.9)["stage"] == 2
    assert [plain.choose(3, index) for index in range(300)] == [both.choose(3, index) for index in range(300)]
    with_it = staged(review=0.25, ahead=0.2)
    with_it.load(older)
    draws = [(plain.choose(3, index).seed, with_it.choose(3, index).seed) for index in range(300)]
    assert all(one == other for one, other in draws), "which task it is of a stage does not depend on them"


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
    assert (row["sampler/up/stage"], row["sampler/own/stage"], row["sampler/own/ahead_success"]) == (1.0, 0.0, 0.5)
    assert all(info_of(key.replace("/up/", "/").replace("/own/", "/")) is not None for key in row if key.startswith("sampler/"))
    again = MixedTasks(parts_of(config), config.rollout.mixture, config.seed)
    again.load_json(json.loads(json.dumps(tasks.to_json())))
    assert [again.draw(index) for index in range(60, 120)] == [tasks.draw(index) for index in range(60, 120)]
    assert again.metrics() == tasks.metrics()

"""A run that learns nothing is told from one that does, by its rows alone: what it says, and as what it ends."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from agentrl.config import TrainConfig
from agentrl.config.load import config_from
from agentrl.data.trajectory import StopReason, Task, Trajectory
from agentrl.rollout.player import Evaluation, summarize
from agentrl.run.run_log import MOSTLY_UNSCORED, TRAINED_NOTHING, Health, check_any_scored
from agentrl.utils.errors import NothingScoredError


def config(*overrides: str) -> TrainConfig:
    base = {"env": {"id": "key_value"}, "model": {"init": {}}, "rollout": {"groups": 4, "group_size": 2}}
    return config_from(base, overrides)


def update(step: int, **values: Any) -> dict[str, Any]:
    """A row of an update of 4 groups of 2 that taught something."""
    plain = {"success": 0.5, "reward": 0.5, "scored": 8, "unscored": 0, "grad_norm": 0.3, "optimizer_steps": 1.0}
    return {"phase": "train", "step": step, **plain, "skipped_steps": 0.0, "groups_zero_variance": 1.0, **values}


def alike(step: int, success: float = 0.0) -> dict[str, Any]:
    return update(step, grad_norm=0.0, groups_zero_variance=4.0, success=success, reward=success)


def followed(rows: list[dict[str, Any]], *overrides: str, fault: str | None = None) -> tuple[list[str], Any]:
    """What the run said, and its verdict."""
    said: list[str] = []
    health = Health(config(*overrides), said.append)
    health.begin(0, [], lambda: fault)
    for row in rows:
        health.row(row)
    return said, health.verdict(rows)


def test_a_run_that_teaches_something_is_not_spoken_of() -> None:
    rows = [update(1), alike(2), alike(3), update(4, unscored=3, scored=5), update(5), update(6)]
    assert followed(rows) == ([], None)


def test_after_five_updates_that_teach_nothing_the_run_says_so_once_and_why() -> None:
    said, verdict = followed([alike(step) for step in range(1, 9)])
    assert len(said) == 1 and said[0].startswith(
        "trained nothing: no token was trained in the 5 updates: all episodes of a group"
    )
    assert "none was a success" in said[0] and "[sft]" in said[0]
    assert verdict.status == TRAINED_NOTHING and "no token was trained in the 8 updates" in verdict.cause
    assert followed([alike(step) for step in range(1, 5)])[0] == []  # four are not five,
    short = followed([alike(1), alike(2)])[1]  # but a run of two that taught nothing says so at its end, without having failed
    assert short.status == TRAINED_NOTHING and "in the 2 updates" in short.cause and not short.fails and verdict.fails
    said, _ = followed([*(alike(step) for step in range(1, 7)), update(7), *(alike(step) for step in range(8, 14))])
    assert len(said) == 2 and "in the last 5 updates" in said[1]


def test_a_run_that_has_learned_and_has_nothing_left_to_learn_is_done() -> None:
    learned = [update(step, success=0.1 * step) for step in range(1, 6)]
    for end in (1.0, 0.97):  # all groups are alike, each for itself: a policy that is sure
        said, verdict = followed([*learned, *(alike(step, end) for step in range(6, 12))])
        assert verdict is None and len(said) == (0 if end == 1.0 else 1)
    collapsed = followed([*learned, *(alike(step, 0.0) for step in range(6, 12))])[1]
    assert collapsed.status == TRAINED_NOTHING and "last 6 updates" in collapsed.cause
    solved = followed([alike(step, 1.0) for step in range(1, 7)])[1]  # from the start: nothing was ever trained
    assert solved.status == TRAINED_NOTHING and "solves all training tasks" in solved.advice
    goal = Health(config("stop_at_success=0.9", "eval.every=1"), print)
    assert goal.verdict([alike(1, 1.0), {"phase": "eval", "step": 1, "success": 1.0, "scored": 4, "unscored": 0}]) is None


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"grad_norm": 0.0}, r"every advantage was 0 \(5 of 20 groups had equal rewards\)"),
        ({"skipped_steps": 1.0}, "its numbers were not finite"),
        ({"grad_norm": None, "optimizer_steps": 0.0}, "every advantage was 0"),
    ],
)
def test_the_cause_is_told_apart(row: dict[str, Any], why: str) -> None:
    (said,), _ = followed([update(step, **row) for step in range(1, 6)])
    assert re.search(why, said), said


def test_updates_in_which_only_the_critic_learns_are_not_counted() -> None:
    rows = [{**update(step), "grad_norm": None} for step in range(1, 8)]
    critic = ("algorithm.advantage.name=gae", "critic={warmup=7}")
    assert followed(rows, *critic) == ([], None)
    assert followed([*rows, update(8)], *critic) == ([], None)
    assert followed([*rows, *(alike(step) for step in range(8, 13))], *critic)[1].status == TRAINED_NOTHING


def test_unscored_episodes_are_counted_with_those_of_dropped_groups() -> None:
    lost = {"unscored": 0, "episodes_played": 40.0, "episodes_unscored": 30.0}
    said, verdict = followed([update(step, **lost) for step in range(1, 7)], fault="t/1: env_error: no database")
    assert said[0].startswith("mostly unscored: 150 of 200 episodes could not be scored; the first: t/1: env_error: no database")
    assert len(said) == 1 and verdict.status == MOSTLY_UNSCORED and "180 of 240" in verdict.cause
    last = {"phase": "after", "step": 6, "success": None, "scored": 2, "unscored": 6}
    health = Health(config(), print)
    assert health.verdict([*(update(step) for step in range(1, 7)), last]).status == MOSTLY_UNSCORED  # type: ignore[union-attr]


def test_each_key_of_health_moves_its_limit() -> None:
    lost = [update(step, episodes_played=4.0, episodes_unscored=3.0) for step in range(1, 7)]
    assert followed(lost, "health.max_unscored=0.75") == ([], None) and followed(lost, "health.max_unscored=0.74")[1] is not None
    still = [alike(step) for step in range(1, 7)]
    for updates, said in ((3, "the 3 updates"), (6, "the 6 updates")):
        assert said in followed(still, f"health.idle_updates={updates}")[0][0]
    assert followed(still, "health.idle_updates=7")[0] == []


def test_what_was_before_a_resume_counts_and_what_is_done_again_does_not() -> None:
    said: list[str] = []
    health = Health(config(), said.append)
    health.begin(4, [{"phase": "before", "step": 0}, *(alike(step) for step in range(1, 7))], lambda: None)
    health.row(alike(5))
    assert len(said) == 1 and "in the 5 updates" in said[0]


@pytest.mark.parametrize("of", [update, alike])
def test_a_long_run_keeps_no_rows_but_the_newest(of: Callable[..., dict[str, Any]]) -> None:
    """A row is 15 kB in memory: 150 MB in 10,000 updates."""

    class Row(dict[str, Any]):
        pass

    health, rows = Health(config(), print), list[weakref.ref[Row]]()
    health.begin(0, [], lambda: None)
    for step in range(1, 300):
        row = Row(of(step))
        rows.append(weakref.ref(row))
        health.row(row)
    assert [number for number, kept in enumerate(rows) if kept() is not None] == [294, 295, 296, 297, 298]


def found(*rewards: float | None) -> Evaluation:
    stop = StopReason.ENV_ERROR
    return summarize(
        [
            Trajectory("e", Task(f"t/{n}", n), reward=r, success=None if r is None else r == 1, stop=StopReason.DONE)
            if r is not None
            else Trajectory("e", Task(f"t/{n}", n), stop=stop, error="no database")
            for n, r in enumerate(rewards)
        ]
    )


def test_a_first_evaluation_without_any_score_ends_the_run_with_the_first_error() -> None:
    with pytest.raises(
        NothingScoredError, match=r"none of the 3 episodes of the evaluation before .*t/0: env_error: no database"
    ):
        check_any_scored(found(None, None, None))
    check_any_scored(found(None, 0.0, None))


def test_an_environment_that_fails_in_an_evaluation_is_named() -> None:
    said: list[str] = []
    health = Health(config(), said.append)
    dead, fine = found(None, None, 0.0), found(1.0, 0.0)
    both = Evaluation(None, None, 3, 2, {}, [*dead.trajectories, *fine.trajectories], {"dead": dead, "fine": fine})
    health.evaluation("eval", both)
    assert said == ["[eval] 2 of 3 episodes of dead are unscored; the first: t/0: env_error: no database"]
    assert health.fault == "t/0: env_error: no database"

"""The controls of `make curves`: what the random reward may depend on, and how its curves are judged."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.reward.view import episode_view
from agentrl.trajectory import Message, Task, Trajectory
from tests.curves.report import about_control, drift, table, unexpected
from tests.curves.rewards import coin, spec
from tests.curves.variants import COINS, VARIANTS

MANY = 4000


def tossed(seed: int, member: int = 0, number: int = 0, said: str = "7") -> float:
    messages = [Message("user", "report a + b"), Message("assistant", said)]
    return coin(episode_view(Trajectory("env", Task("id", 0), seed=seed, member=member, messages=messages)), number)


def run(variant: str, seed: int, *later: float) -> dict[str, Any]:
    curve = [[3 * n, 1000 * n, success] for n, success in enumerate([0.25, *later])]
    return {"variant": variant, "seed": seed, "curve": curve, "updates": 3, "ledgers": 0.0, "failed_groups": 0, "cpu_s": 1.0}


def twelve(up: int) -> list[dict[str, Any]]:
    """Runs of four coins on three seeds; the first `up` go up by 0.21 and later lose half of that, the others stay."""
    places = [(coin, seed) for coin in COINS for seed in range(3)]
    return [run(f"random_reward_{c}", s, *((0.46, 0.355) if n < up else (0.25, 0.25))) for n, (c, s) in enumerate(places)]


def test_the_coin_is_not_read_off_what_was_said() -> None:
    assert all(tossed(seed, said="7") == tossed(seed, said="8") for seed in range(100))


@pytest.mark.parametrize("other", [{"member": 1}, {"number": 1}], ids=["member", "coin"])
def test_members_that_say_the_same_toss_a_coin_each(other: dict[str, int]) -> None:
    """Both coins are fair and agree in half of the episodes, to four standard errors (0.5 / sqrt(4000) = 0.008)."""
    ones = [tossed(seed) for seed in range(MANY)]
    others = [tossed(seed, **other) for seed in range(MANY)]
    agree = [a == b for a, b in zip(ones, others, strict=True)]
    for found in (ones, others, agree):
        assert sum(found) / MANY == pytest.approx(0.5, abs=0.032)


def test_each_control_has_a_coin_of_its_own() -> None:
    variants = [VARIANTS[f"random_reward_{number}"] for number in COINS]
    specs = [spec(variant.reward or "", variant.coin) for variant in variants]
    assert [found["root"]["args"] for found in specs] == [{"name": "coin", "args": number} for number in COINS]


def test_a_run_is_judged_by_its_whole_curve() -> None:
    assert drift(run("random_reward_0", 0, 0.46, 0.0, 0.0)) == pytest.approx((0.21 - 0.25 - 0.25) / 3)


def test_one_curve_that_wanders_is_no_alarm_and_eleven_of_twelve_are() -> None:
    """P(at least 10 of 12) = 79 / 4096 = 0.0193; of 11: 13 / 4096 = 0.0032."""
    assert unexpected(twelve(1)) == unexpected(twelve(10)) == []
    assert unexpected(twelve(11)) == ["random reward: must not climb: above its start in 11 of 12 runs, by chance 0.0032"]
    assert about_control(twelve(10)).endswith("in 10 of 12 runs, by chance 0.0193; 11 would be an alarm")
    assert [line.split(" | ")[-1] for line in table(twelve(11))[2:]] == ["**no** |"] * 4
    assert [line.split(" | ")[-1] for line in table(twelve(10))[2:]] == ["yes |"] * 4


def test_six_runs_cannot_tell() -> None:
    """1 / 64 = 0.016."""
    six = [row for row in twelve(12) if row["seed"] < 2 and row["variant"] != "random_reward_3"]
    assert unexpected(six) == []
    assert about_control(six) == "random reward: 6 runs are too few to judge it"
    assert [line.split(" | ")[-1] for line in table(six)[2:]] == ["too few runs |"] * 3


def test_a_reward_that_tells_a_little_must_lift_the_curve() -> None:
    assert unexpected([run("leaky_reward", 0, 0.2, 0.31)]) == []
    assert unexpected([run("leaky_reward", 0, 0.2, 0.29)]) == ["leaky_reward seed 0: must rise: -0.01 on average"]

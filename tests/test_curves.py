"""The controls of `benchmarks/curves.py`: what the random reward may depend on, and how its curves are judged."""

import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.data.trajectory import Message, Task, Trajectory
from agentrl.reward.leaf import episode_view

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks/parts"))

from curves_report import COINS, VARIANTS, about_control, coin, control, spec, table, unexpected, z_score

from benchmarks import seeds
from tests.run.made_folders import episode, run_folder

MANY = 4000


def tossed(seed: int, member: int = 0, number: int = 0, said: str = "7") -> float:
    messages = [Message("user", "report a + b"), Message("assistant", said)]
    return coin(episode_view(Trajectory("env", Task("id", 0), seed=seed, member=member, messages=messages)), number)


def run(variant: str, seed: int, last: float, z: float = 0.0) -> dict[str, Any]:
    curve = [[3 * n, 1000 * n, success] for n, success in enumerate([0.25, 0.46, last])]
    rest = {"updates": 3, "ledgers": 0.0, "failed_groups": 0, "cpu_s": 1.0}
    return {"variant": variant, "seed": seed, "curve": curve, "z": z, **rest}


def twelve(up: int, z: float = 0.0) -> list[dict[str, Any]]:
    """Runs of four coins on three seeds; all wander up by 0.21, the first `up` end above their start."""
    runs = [(coin, seed) for coin in COINS for seed in range(3)]
    return [run(f"random_reward_{c}", s, 0.3 if n < up else 0.25, z) for n, (c, s) in enumerate(runs)]


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


def test_one_curve_that_wanders_is_no_alarm_and_eleven_of_twelve_that_end_above_are() -> None:
    """P(at least 10 of 12) = 79 / 4096 = 0.0193; of 11: 13 / 4096 = 0.0032."""
    assert unexpected(twelve(1)) == unexpected(twelve(10)) == []
    assert control(twelve(10)).up_chance == 79 / 4096
    (alarm,) = unexpected(twelve(11))
    assert alarm.startswith("alarm: random reward: success ended above its start in 11 of 12 runs (chance 0.0032)")
    assert [line.split(" | ")[-1] for line in table(twelve(11))[2:]] == ["**no** |"] * 4
    assert [line.split(" | ")[-1] for line in table(twelve(10))[2:]] == ["yes |"] * 4


def test_a_small_correlation_in_every_run_is_an_alarm() -> None:
    """12 runs of 0.8 standard errors: 0.8 * sqrt(12) = 2.77, two sides 0.0056; of 0.82: 2.84, 0.0045."""
    assert unexpected(twelve(6, 0.8)) == []
    assert control(twelve(6, 0.8)).z_chance == pytest.approx(0.0056, abs=5e-5)
    assert unexpected(twelve(6, 0.82)) and unexpected(twelve(6, -0.82))


def test_seven_runs_cannot_tell() -> None:
    """1 / 128 = 0.008."""
    seven = twelve(12)[:7]
    assert unexpected(seven) == []
    assert about_control(seven).endswith("; too few runs to judge")
    assert {line.split(" | ")[-1] for line in table(seven)[2:]} == {"too few runs |"}


def test_the_correlation_is_within_groups() -> None:
    """Group a: s - mean = 1/2, -1/2, r - 1/2 the same: 1/2, variance (1/4 + 1/4) / 4 = 1/8. Group b has no contrast."""
    a = [("a", 1.0, 1.0), ("a", 0.0, 0.0)]
    b = [("b", 1.0, 1.0), ("b", 1.0, 1.0)]
    assert z_score([*a, *b]) == pytest.approx(0.5 / (1 / 8) ** 0.5)
    assert z_score(b) == 0.0


def test_a_reward_that_tells_a_little_must_lift_the_curve() -> None:
    assert unexpected([run("leaky_reward", 0, 0.26)]) == []
    assert unexpected([run("leaky_reward", 0, 0.24)]) == ["leaky_reward seed 0: must rise: 0.25 -> 0.24"]


def test_the_table_of_seeds_counts_every_run_and_task(tmp_path: Path) -> None:
    """Also runs of one name, and tasks of one id in two environments."""

    def played(success: bool) -> list[Trajectory]:
        first, second = (episode(0, 0, reward, split="heldout", env=env) for env, reward in (("a", 1.0), ("b", float(success))))
        second.task = first.task
        return [first, second]

    for at, success in (("x", True), ("y", False)):
        run_folder(tmp_path / at / "seed1", {"before_000000": played(False), "after_000002": played(success)}, [])
    lines = seeds.table([tmp_path / "x" / "seed1", tmp_path / "y" / "seed1"]).splitlines()[2:]
    assert [line.split("|")[1:6] for line in lines] == [
        [" seed1 ", " 2 ", " 0.500 ", " 1.000 ", " +0.500 "],
        [" seed1 ", " 2 ", " 0.500 ", " 0.500 ", " +0.000 "],
        [" all 2 ", " 4 ", " 0.500 ", " 0.750 ", " +0.250 "],
    ]

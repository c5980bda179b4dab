"""Results of learning: what the random reward of `benchmarks/curves.py` may depend on, and the table of seeds."""

import sys
from pathlib import Path

import pytest

from agentrl.data.trajectory import Message, Task, Trajectory
from agentrl.reward.leaf import episode_view

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks/parts"))

from curves_report import coin, z_score

from benchmarks import seeds
from tests.run.made_folders import episode, run_folder

MANY = 4000


def tossed(seed: int, member: int = 0, number: int = 0, said: str = "7") -> float:
    messages = [Message("user", "report a + b"), Message("assistant", said)]
    return coin(episode_view(Trajectory("env", Task("id", 0), seed=seed, member=member, messages=messages)), number)


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


def test_the_correlation_is_within_groups() -> None:
    """Group a: s - mean = 1/2, -1/2, r - 1/2 the same: 1/2, variance (1/4 + 1/4) / 4 = 1/8. Group b has no contrast."""
    a = [("a", 1.0, 1.0), ("a", 0.0, 0.0)]
    b = [("b", 1.0, 1.0), ("b", 1.0, 1.0)]
    assert z_score([*a, *b]) == pytest.approx(0.5 / (1 / 8) ** 0.5)
    assert z_score(b) == 0.0


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

"""The rows of a suite's own table, computed from episodes by hand here."""

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.contrib.suites.benchmarks import mean_row, pass_hat_rows, pass_hat_table, weighted_row
from agentrl.data.trajectory import StopReason
from agentrl.env.official import OfficialRow, Played, pass_at_k, pass_hat_k, rate_of


def played(task: str, sample: int, success: bool | None, family: str = "a") -> Played:
    cause = "env_error" if success is None else None
    value = None if success is None else float(success)
    return Played(task, family, {}, sample, value, success, StopReason.DONE, 1, 0, cause)


def test_a_task_counts_once_and_an_outage_in_no_mean() -> None:
    # Task a: 1 of 2; task b: 1 of 1, the other was an outage; task c: outages alone. (0.5 + 1) / 2.
    episodes = [played("a", 0, True), played("a", 1, False), played("b", 0, None), played("b", 1, True), played("c", 0, None)]
    assert mean_row("all", episodes, 0.3) == OfficialRow("all", 0.75, 2, 0.3, "2 of 5 episodes unscored, in no mean")
    assert mean_row("none", episodes[-1:]).value is None
    assert mean_row("turns", episodes, value=lambda one: float(one.turns)).value == 1.0


def test_pass_hat_k_goes_to_the_least_number_of_samples_as_in_tau2() -> None:
    episodes = [played("a", n, n < 3) for n in range(4)] + [played("b", n, True) for n in range(3)] + [played("c", 0, None)]
    # a: 3 of 4, b: 3 of 3. By hand: k=1 (3/4 + 1) / 2; k=2 (C(3,2)/C(4,2) + 1) / 2 = (1/2 + 1) / 2; k=3 (1/4 + 1) / 2.
    assert [(row.name, row.value, row.n) for row in pass_hat_rows(episodes)] == [
        ("pass^1", 0.875, 2), ("pass^2", 0.75, 2), ("pass^3", 0.625, 2),
    ]  # fmt: skip
    assert pass_hat_rows(episodes)[0].note == "1 of 8 episodes unscored, in no mean"
    assert pass_hat_rows([played("c", 0, None)]) == []


def test_a_group_that_was_not_scored_at_all_has_a_row_and_is_named_by_the_mean_of_groups() -> None:
    """Of three domains one was an outage: its place in the table says so, and so does the mean over the other two."""
    made = {"a": [True, False], "b": [True], "c": [None, None]}
    episodes = [replace(played(f"{kind}{n}", 0, one), data={"kind": kind}) for kind in made for n, one in enumerate(made[kind])]
    rows = {row.name: row for row in pass_hat_table(episodes, "kind")}
    assert rows["c pass^1"] == OfficialRow("c pass^1", None, 0, None, "2 of 2 episodes unscored, in no mean")
    mean = rows["mean of kinds pass^1"]
    assert (mean.value, mean.n, mean.note) == (pytest.approx((0.5 + 1) / 2), 3, "without c pass^1")


def test_weights_are_scaled_over_known_rows() -> None:
    rows = [OfficialRow("x", 0.5, 10, 0.2), OfficialRow("y", 1.0, 5, 0.6), OfficialRow("z", None, 0, 0.2), OfficialRow("w", 0, 9)]
    overall = weighted_row("overall", rows)
    assert (overall.value, overall.n, overall.note) == (pytest.approx((0.1 + 0.6) / 0.8), 15, "without z")


@given(st.integers(1, 7), st.data())
def test_against_all_subsets(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    right = [index < c for index in range(n)]
    subsets = list(combinations(right, k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))
    assert pass_hat_k(n, c, k) == pytest.approx(sum(all(s) for s in subsets) / len(subsets))


@pytest.mark.parametrize(("n", "c", "k"), [(3, 4, 1), (3, 1, 0), (3, 1, 4)])
def test_impossible_counts_are_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="need 0 <= c"):
        pass_at_k(n, c, k)


def test_interval() -> None:
    assert rate_of([0, 1] * 50) == pytest.approx({"mean": 0.5, "low": 0.402, "high": 0.598}, abs=5e-4)
    assert rate_of([1.0] * 100) == {"mean": 1.0, "low": 0.97, "high": 1.0}

"""pass@k and pass^k against counting every subset."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.env.official import mean_with_interval, pass_at_k, pass_hat_k


@given(st.integers(1, 7), st.data())
def test_against_all_subsets(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    right = [index < c for index in range(n)]
    subsets = list(combinations(right, k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))
    assert pass_hat_k(n, c, k) == pytest.approx(sum(all(s) for s in subsets) / len(subsets))


def test_by_hand() -> None:
    assert pass_at_k(4, 1, 2) == pytest.approx(0.5)
    assert pass_hat_k(4, 2, 2) == pytest.approx(1 / 6)


@pytest.mark.parametrize(("n", "c", "k"), [(3, 4, 1), (3, 1, 0), (3, 1, 4)])
def test_impossible_counts_are_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="need 0 <= c"):
        pass_at_k(n, c, k)


def test_interval() -> None:
    mean, low, high = mean_with_interval([0, 1] * 50)
    assert (mean, round(low, 3), round(high, 3)) == (0.5, 0.402, 0.598)
    assert mean_with_interval([1.0] * 100) == (1.0, 0.97, 1.0)

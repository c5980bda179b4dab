"""The exact gradient of `benchmarks/credit.py`, against finite differences of success counted over all sequences of calls."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import credit


def success(logits: credit.Floats) -> float:
    """The mean over tasks, by playing every sequence of calls to its end."""
    chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    total = 0.0
    for task, needed in enumerate(credit.NEEDED):
        for calls in product(range(3), repeat=credit.HORIZON):
            probability, done = 1.0, 0
            for turn, call in enumerate(calls):
                probability *= chances[task, turn, done, call]
                done += call == 0
                if call == 2 or done == needed:
                    break
            # Sequences that differ after the end are counted once each: 3 per turn that is not played.
            total += probability * (done == needed) / 3 ** (credit.HORIZON - 1 - turn)
    return total / len(credit.NEEDED)


def test_the_gradient_is_that_of_success() -> None:
    policy, step = credit.make_policy(np.random.default_rng(3)), 1e-5
    logits = np.log(policy.chances)
    assert policy.values[:, 0, 0].mean() == pytest.approx(success(logits), rel=1e-12)
    for place in [(0, 0, 0, 0), (1, 2, 1, 2), (2, 3, 2, 1), (3, 5, 4, 0), (3, 1, 1, 1)]:
        up, down = logits.copy(), logits.copy()
        up[place] += step
        down[place] -= step
        assert policy.gradient[place] == pytest.approx((success(up) - success(down)) / (2 * step), rel=1e-5, abs=1e-11)


def test_the_true_advantages_estimate_it_without_bias() -> None:
    found = credit.measure(credit.make_policy(np.random.default_rng(0)), "exact", np.random.default_rng(1), 200, 256)
    assert found["bias"] < 4 * found["noise"] / 200**0.5

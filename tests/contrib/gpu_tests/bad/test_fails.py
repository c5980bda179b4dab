"""One test passes, one fails plainly."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.gpus(1)


def test_passes() -> None:
    assert 1 + 1 == 2


def test_fails() -> None:
    assert sum([20, 21]) == 42

"""Is well, but begins when only one card is left."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.gpus(2)


@pytest.mark.parametrize("number", [1, 2])
def test_would_pass(number: int) -> None:
    assert number

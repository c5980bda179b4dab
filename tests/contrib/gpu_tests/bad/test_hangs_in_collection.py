"""It waits for ever while it is imported."""

from __future__ import annotations

import time

import pytest

pytestmark = [pytest.mark.gpus(1)]
time.sleep(100_000)


def test_is_never_seen() -> None:
    pass

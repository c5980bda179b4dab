"""Says what it needs in a way that cannot be read without importing it."""

from __future__ import annotations

import os

import pytest

pytestmark = pytest.mark.gpus(len(os.sched_getaffinity(0)))


def test_would_pass() -> None:
    pass

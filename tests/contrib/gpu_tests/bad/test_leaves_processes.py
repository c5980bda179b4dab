"""Passes, and leaves a process behind that holds its card's memory and does not end on SIGTERM."""

from __future__ import annotations

import pytest

from tests.contrib.gpu_tests.bad.orphans import orphan

pytestmark = pytest.mark.gpus(1)


def test_leaves_a_process() -> None:
    orphan(mib=5000, card=0)

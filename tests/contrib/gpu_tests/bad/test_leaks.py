"""Passes, but the memory of its second card does not come back."""

from __future__ import annotations

import pytest

from agentrl.contrib.gpu_tests.cards import leak

pytestmark = pytest.mark.gpus(2, timeout=60)


def test_leaks() -> None:
    leak(4096, card=1)

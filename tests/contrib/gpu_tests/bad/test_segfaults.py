"""A test reads address 0, with a card's memory in use."""

from __future__ import annotations

import ctypes

import pytest

from agentrl.contrib.gpu_tests.cards import hold

pytestmark = pytest.mark.gpus(1)


def test_segfaults() -> None:
    with hold(2000):
        ctypes.string_at(0)


def test_comes_after() -> None:
    pass

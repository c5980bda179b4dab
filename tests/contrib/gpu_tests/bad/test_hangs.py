"""A test waits for ever. Processes of it that left its process group, and that SIGTERM does not end, hold the cards' memory."""

from __future__ import annotations

import threading

import pytest

from tests.contrib.gpu_tests.bad.orphans import orphan

pytestmark = pytest.mark.gpus(2, timeout=25)


def test_begins() -> None:
    orphan(mib=3000, card=0)
    orphan(mib=3000, card=1)


def test_hangs() -> None:
    threading.Event().wait()


def test_comes_after() -> None:
    pass

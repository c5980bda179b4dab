"""Cyclic garbage is looked for rarely in a run, and a setting of the user's own stays."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from agentrl.utils.processor import YOUNG_OBJECTS, raise_gc_threshold


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize(("before", "after"), [(700, YOUNG_OBJECTS), (0, 0), (50_000, 50_000)])
def test_only_a_more_frequent_setting_is_changed(before: int, after: int) -> None:
    gc.set_threshold(before, 10, 10)
    raise_gc_threshold()
    assert gc.get_threshold() == (after, 10, 10)

"""Shared by the whole suite."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

# One thread a process: on two cores more threads only fight each other, and results stay reproducible.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def _process_groups_end_with_their_test() -> Iterator[None]:
    """A process group that a worker class opened here would have every later engine of this process shard itself: other
    digits, many times the time, and which tests those are hangs on which files share the process."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()

"""Shared by the whole suite."""

from __future__ import annotations

import os

# One thread a process: on two cores more threads only fight each other, and results stay reproducible.
os.environ.setdefault("OMP_NUM_THREADS", "1")

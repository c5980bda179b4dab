"""Where a row of an update comes from: this update's rollouts, or what was added to them.

Rows that were added stand behind the fresh ones, and the row column `ORIGIN` marks them. Without that column every row is fresh.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from agentrl.algorithm.ragged import spread
from agentrl.batch.rows import Ragged

ORIGIN = "origin"
FRESH, KEPT, IMITATED, SHOWN = range(4)
"""Played for this update; a kept episode in the policy loss; a kept episode in the supervised term; a demonstration."""
SUPERVISED = (IMITATED, SHOWN)


def origins(view: Ragged) -> np.ndarray:
    """The origin of each row, int64 [N]."""
    return view.numbers(ORIGIN) if ORIGIN in view else np.full(len(view), FRESH)


def fresh_only(view: Ragged, rows: np.ndarray) -> np.ndarray:
    """Those of `rows` that were played for this update."""
    found: np.ndarray = rows[origins(view)[rows] == FRESH]
    return found


def supervised_tokens(view: Ragged) -> Tensor:
    """The tokens of rows that are trained by a supervised term, bool [T]."""
    return spread(torch.from_numpy(np.isin(origins(view), SUPERVISED)), view.offsets, int(view.offsets[-1]))

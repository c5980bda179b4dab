"""Numbers for the states in which turns were taken: equal contexts get equal numbers."""

from __future__ import annotations

import torch
from torch import Tensor

# A hash of our own: Python's differs between processes, and every run and rank must give a state the same number.
_PRIME, _MODULUS = 1_000_003, (1 << 31) - 1


def anchors_of(token_ids: Tensor, mask: Tensor, offsets: Tensor) -> Tensor:
    """A hash of the context tokens since the last turn (the answer of the tools or the user), int64 [T].

    All tokens of a turn share it. `token_ids`, `mask` (true where sampled) are [T].
    """
    out = torch.zeros(len(token_ids), dtype=torch.int64)
    ids, sampled = token_ids.tolist(), mask.tolist()
    values = out.tolist()
    for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        state, fresh = 0, True
        for place in range(start, stop):
            if not sampled[place]:
                state = (0 if fresh else state) * _PRIME % _MODULUS + ids[place] + 1
                fresh = False
            else:
                fresh = True
            values[place] = state
    return torch.tensor(values, dtype=torch.int64)

"""Ragged batches for the tests."""

from collections.abc import Sequence

import torch
from tensordict import TensorDict

from agentrl.data.rows import build, items_column, nested_tensor, wide


def ragged_batch(sizes: Sequence[int]) -> TensorDict:
    """Rows of the given lengths; token value = 1000 * row + position."""
    offsets = torch.tensor([0, *torch.tensor(list(sizes), dtype=torch.int64).cumsum(0).tolist()])
    flat = [1000 * row + at for row, size in enumerate(sizes) for at in range(size)]
    return build(
        {
            "token_ids": nested_tensor(torch.tensor(flat, dtype=torch.int64), offsets),
            "half": nested_tensor(torch.tensor(flat, dtype=torch.bfloat16), offsets),
            "id": torch.arange(len(sizes)),
            "name": items_column([f"row{i}" for i in range(len(sizes))]),
            "note": wide({"k": 1}, len(sizes)),
        },
        len(sizes),
    )

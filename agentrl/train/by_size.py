"""What a model's size decides if the config leaves it open."""

from __future__ import annotations

LARGE = 1_000_000_000
"""Numbers from which memory is worth more than time. Kept whole, float32 gradients of 1B parameters are 4 GB on every card, and
activations of 8,192 tokens of a 1.7B model without checkpointing about 30 GB. Below, both fit beside the rest on any card that
trains, and the time counts: checkpointing adds a forward pass, a third of the products, and reducing every time as much
communication as gathering the weights."""


def by_size(asked: bool | None, size: int) -> bool:
    """What the config asks for; if it leaves that open, whether there are at least LARGE numbers."""
    return size >= LARGE if asked is None else asked

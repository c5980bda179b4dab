"""Random streams by name: a stream depends only on its purpose, never on what else is running."""

from __future__ import annotations

from hashlib import blake2b


def derive(*parts: int | str) -> int:
    """A 63-bit seed from a path such as (run_seed, "train", group, member, turn).

    Unlike `hash()` it is the same in every process, and unlike a sum of the parts it does not give neighboring streams
    the same seed.
    """
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1

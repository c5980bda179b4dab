"""Tasks from seeds, with disjoint train and held-out content by construction.

The split of a piece of content is determined by the content itself (a hash of it), not by the seed: a
generator proposes content until some belongs to the wanted split, so that no two splits can share any.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from hashlib import blake2b
from typing import TypeVar

from agentrl.errors import TaskDataError

SPLITS = ("train", "heldout")
HELD_OUT_SHARE = 0.125

T = TypeVar("T")


def task_rng(env_id: str, split: str, seed: int) -> random.Random:
    """The random stream of one task: the same in every process, different for every seed, split and environment."""
    digest = blake2b(f"{env_id}/{split}/{seed}".encode(), digest_size=8).digest()
    return random.Random(int.from_bytes(digest, "big"))


def content_split(fingerprint: str) -> str:
    """The split that content belongs to: an eighth of all content, by a uniform hash, is held out."""
    digest = blake2b(fingerprint.encode(), digest_size=4).digest()
    return "heldout" if int.from_bytes(digest, "big") < HELD_OUT_SHARE * 2**32 else "train"


def draw(
    rng: random.Random,
    split: str,
    propose: Callable[[random.Random], T],
    fingerprint: Callable[[T], str],
    tries: int = 1000,
) -> T:
    """Propose content until some belongs to `split`.

    `fingerprint` must cover everything that makes two tasks the same problem. Raises TaskDataError for an
    unknown split, and if none of `tries` proposals belongs to it (the content is too uniform to be split).
    """
    if split not in SPLITS:
        raise TaskDataError(f"no split {split!r}; expected one of {', '.join(SPLITS)}")
    for _ in range(tries):
        content = propose(rng)
        if content_split(fingerprint(content)) == split:
            return content
    raise TaskDataError(f"none of {tries} generated tasks belongs to split {split!r}: too few different tasks")

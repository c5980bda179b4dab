"""A reward by chance, which the episode's own words decide."""

import zlib
from typing import Any


def luck(view: Any, args: Any) -> float:
    return (zlib.crc32("".join(turn.message.content for turn in view.turns).encode(errors="replace")) % 1000) / 1000

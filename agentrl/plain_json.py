"""JSON that every reader takes (RFC 8259): Python's own writes NaN and Infinity, and neither reads nor writes a long integer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

MOST_BITS = 1023
"""Of an integer that a double, as which most readers take numbers, can hold."""


def json_text(value: Any, *, indent: int | None = None, default: Callable[[Any], Any] | None = None) -> str:
    """`json.dumps`, with null for the numbers that JSON cannot represent: NaN, the infinities, and integers that Python refuses
    to write (over 4,300 digits). Raises TypeError for what has no JSON form."""
    try:
        return json.dumps(value, indent=indent, default=default, allow_nan=False)
    except ValueError:  # rare, so the others pay for no look at each number
        return json.dumps(_plain(value, default), indent=indent, allow_nan=False)


def unbounded(value: Any) -> bool:
    """Whether it is a number that JSON cannot represent, or that most of its readers cannot."""
    if isinstance(value, float):
        return not math.isfinite(value)
    return isinstance(value, int) and value.bit_length() > MOST_BITS


def _plain(value: Any, default: Callable[[Any], Any] | None) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item, default) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, default) for item in value]
    if value is None or isinstance(value, str | int | float):
        return None if unbounded(value) else value
    return value if default is None else _plain(default(value), default)

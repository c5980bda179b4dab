"""JSON and TOML of others, read: whatever they are given, the result is a value or a ValueError, in linear time."""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any

MOST_TOML = 1_000_000
"""Characters of a TOML text."""
MOST_DOTS = 64
"""Dots in a key of TOML, each of which makes a table; `tomllib` takes quadratic time and memory for them."""
_PART = r"""[\w"'-]"""
_DOTTED = re.compile(rf"(?<!{_PART})(?:{_PART}++[ \t]*+\.[ \t]*+){{{MOST_DOTS}}}")


def read_json(text: str | bytes | bytearray) -> Any:
    """`json.loads`. Raises ValueError, also for what is nested too deep for it."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


def toml_table(text: str) -> dict[str, Any]:
    """`tomllib.loads`. Raises ValueError, also for what is nested too deep for it, long, or has a key of very many parts."""
    if len(text) > MOST_TOML:
        raise ValueError(f"{len(text)} characters; at most {MOST_TOML} are read")
    if _DOTTED.search(text):
        raise ValueError(f"a key with more than {MOST_DOTS} dots")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None

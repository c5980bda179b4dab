"""Judges on engines of a run's own: how a leaf names one (`"model": "engine:NAME"`), and what a verdict's grammar is made of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

PREFIX = "engine:"
SHORTEST, LONGEST = 16, 500
"""Characters that a text in a verdict may have at least and at most; evidence keeps no more."""
FRAME = 48
"""Tokens of a verdict that are not its text: braces, names of keys, the score."""


def own_name(model: str) -> str | None:
    """NAME of a model "engine:NAME"; None of any other."""
    return model.removeprefix(PREFIX) if model.startswith(PREFIX) else None


def form_of(schema: Mapping[str, Any], max_tokens: int) -> dict[str, Any]:
    """The schema of a verdict as a grammar is made of it, without what a weak model never ends by itself: white space of choice,
    texts that are longer than `max_tokens`, and digits without number (a score has between 100 and 1000 steps)."""
    most = min(LONGEST, max(SHORTEST, max_tokens - FRAME))
    properties = {}
    for name, part in schema.get("properties", {}).items():
        if part.get("type") == "string":
            part = {**part, "maxLength": most}
        elif part.get("type") == "number" and "minimum" in part and "maximum" in part:
            steps = math.floor(math.log10(part["maximum"] - part["minimum"])) - 2
            part = {**part, "multipleOf": 10**steps if steps >= 0 else round(10.0**steps, -steps)}
        properties[name] = part
    spaced = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return {**schema, "properties": properties, "x-guidance": spaced}

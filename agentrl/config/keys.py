"""List every config key with type, default, unit and meaning."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import tomli_w
from pydantic import BaseModel

from agentrl.config.schema import AgentConfig, Choice, EnvConfig, ToolsConfig, TrainConfig, VllmConfig
from agentrl.utils.errors import ConfigError, hint_text
from agentrl.utils.parsing import parts_of

# Values as TOML


def inline(value: Any) -> str:
    """Format a value as TOML on one line. Raises TypeError for a value that TOML does not have."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{bare(key)} = {inline(inner)}" for key, inner in value.items()) + " }" if value else "{}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(inline, value)) + "]"
    return tomli_w.dumps({"x": value}).removeprefix("x = ").rstrip("\n")


def bare(key: str) -> str:
    """Format a TOML key, quoted if necessary."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else inline(key)


# Keys

NAME = "NAME"
"""Placeholder in a key for a user-defined name, as in `tools.mcp.NAME.command`."""
SHARED = (AgentConfig, ToolsConfig, VllmConfig)
"""Sections that occur at the top level and inside another section; their keys are listed once, at the top level."""
UNSET, REQUIRED = "unset", "required"


@dataclass(frozen=True, slots=True)
class Key:
    """A key that holds a value, or, if `section`, a table of keys. `unit`: of a number; "1" is a ratio. `default`: as TOML, or
    `UNSET` or `REQUIRED`."""

    name: str
    type: str
    default: str
    unit: str | None
    meaning: str
    section: bool = False


@cache
def all_keys() -> tuple[Key, ...]:
    """Return all sections and keys in schema order, a section before its keys."""
    return tuple(_keys_of(TrainConfig, ""))


def find_keys(name: str) -> list[Key]:
    """Return the key `name`, or a section with all its keys. Part of a Choice counts as the Choice (`algorithm.loss.name`),
    content of a free table as the table (`env.params.calls`), and user-defined names are kept (`tools.mcp.shop.command`).

    Raises ConfigError, with the nearest key, for an unknown name.
    """
    name = name.strip("[]")
    if shared := re.match(r"(env\.)(?:agent|tools)\.|(reward\.judge\.engines\.[^.]+\.)vllm\.", name):
        at = shared[1] or shared[2]  # the same keys as the run's section
        return [replace(key, name=f"{at}{key.name}") for key in find_keys(name.removeprefix(at))]
    keys = all_keys()
    found = [key for key in keys if _fits(key.name, name) or (_below(key.name, name) and not key.section)]
    if any(_fits(key.name, name) and key.section for key in keys):
        return [key for key in keys if _fits(key.name, name) or _below(key.name, name)]
    if found:
        return [key for key in found if _fits(key.name, name)] or found
    tables = [key for key in keys if not key.section and "table" in key.type and _below(name, key.name)]
    if tables:
        return tables
    raise ConfigError(f"{name}: unknown key{hint_text(name, [key.name for key in keys])}; agentrl config docs lists all")


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the section class in a key's type (also optional or in a union), or None."""
    if get_origin(annotation) is Annotated:
        return section_of(get_args(annotation)[0])
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, UnionType):
        return next((section for arg in get_args(annotation) if (section := section_of(arg))), None)
    return None


def section_at(path: Sequence[str]) -> type[BaseModel] | None:
    """Return the section at the keys `path`, which may name an entry of `[[env]]`; else None."""
    section: type[BaseModel] | None = TrainConfig
    rest = list(path)
    while rest and section is not None:
        key = rest.pop(0)
        field = section.model_fields.get(key)
        if field is None:
            # The part after `env` is the name of an entry.
            section = section if section is EnvConfig and len(path) - len(rest) == 2 else None
            continue
        kind = field.annotation
        if (each := section_of(get_args(kind)[-1]) if get_origin(kind) in (dict, list) else None) is not None:
            section, rest = each if rest else None, rest[1:]  # of the named or listed sections
        else:
            section = section_of(kind)
    return section


def named_sections_of(annotation: Any) -> type[BaseModel] | None:
    """Return the section class of a table of user-defined names (`dict[str, PoolConfig]`), or None."""
    return section_of(get_args(annotation)[1]) if get_origin(annotation) is dict else None


def takes_switch(annotation: Any) -> bool:
    """Return True if the key accepts true and false."""
    return annotation is bool or any(takes_switch(part) for part in get_args(annotation) if isinstance(part, type))


def unit_of(section: type[BaseModel], name: str) -> str | None:
    """Return the unit of a section's key; "1" for a ratio, None for other types than numbers."""
    return _unit_in(_section_schemas()[section.__name__]["properties"][name])


def _keys_of(section: type[BaseModel], prefix: str) -> Iterator[Key]:
    """Yield the keys with values, then the inner sections with their keys."""
    inside: list[tuple[Key, type[BaseModel], str]] = []
    for name, field in section.model_fields.items():
        described: dict[str, Any] = _section_schemas()[section.__name__]["properties"][name]
        default = REQUIRED if field.is_required() else _show_default(field.get_default(call_default_factory=True))
        meaning = " ".join((field.description or "").split())
        found = Key(f"{prefix}{name}", _type_of(described), default, _unit_in(described), meaning)
        inner, named = section_of(field.annotation), named_sections_of(field.annotation)
        if named is not None:
            inside.append((replace(found, section=True), named, f"{found.name}.{NAME}."))
        elif inner is None or issubclass(inner, Choice):
            yield found
        elif prefix and inner in SHARED:
            yield replace(found, default=found.default or "{}", type=f"section, with the keys of [{name}]")
        else:
            inside.append((replace(found, section=True), inner, f"{found.name}."))
    for found, inner, below in inside:
        yield found
        yield from _keys_of(inner, below)


@cache
def _section_schemas() -> Mapping[str, Any]:
    """Return the JSON Schema of every section, by class name."""
    whole = TrainConfig.model_json_schema()
    return {**whole["$defs"], TrainConfig.__name__: whole}


def _show_default(default: Any) -> str:
    if default is None:
        return UNSET
    if isinstance(default, Choice):
        return inline({"name": default.name, **({"args": default.args} if default.args else {})})
    if isinstance(default, list) and default and isinstance(default[0], Choice):
        return "[" + ", ".join(map(_show_default, default)) + "]"
    return "" if isinstance(default, BaseModel) else inline(default)


def _unit_in(described: Any) -> str | None:
    """Return the first `unit` in a key's JSON Schema."""
    return next((str(part["unit"]) for part in parts_of(described) if isinstance(part, dict) and "unit" in part), None)


def _type_of(described: Mapping[str, Any]) -> str:
    """Describe a key's type: "integer >= 1", "list of strings", '"a" or "b"'."""
    parts = [part for part in described.get("anyOf", described.get("oneOf", ())) if part.get("type") != "null"]
    if parts:
        return " or ".join(map(_type_of, parts))
    if "$ref" in described:
        return "table of name and args" if described["$ref"].endswith("/Choice") else "section"
    if "enum" in described or "const" in described:
        return " or ".join(json.dumps(value) for value in described.get("enum", [described.get("const")]))
    kind = described.get("type")
    if kind == "array":
        if pair := [_type_of(part) for part in described.get("prefixItems", ())]:
            return f"pair of {_plural(pair[0]) if len({*pair}) == 1 else ' and '.join(pair)}"
        return f"list of {_plural(_type_of(described['items']))}"
    if kind == "object":
        values = described.get("additionalProperties")
        return f"table of {_plural(_type_of(values))}" if isinstance(values, dict) and values else "table"
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    return "".join([kind or "value", *(f" {sign} {described[word]:g}" for word, sign in signs.items() if word in described)])


def _plural(kind: str) -> str:
    """ "integer >= 0" -> "integers >= 0"."""
    return re.sub(r"^(integer|number|string|table|section|pair)\b", r"\1s", kind)


def _fits(key: str, name: str) -> bool:
    """Return True if `name` matches the key, with user-defined names in it."""
    parts, given = key.split("."), name.split(".")
    return len(parts) == len(given) and all(part in (NAME, one) for part, one in zip(parts, given, strict=True))


def _below(inner: str, outer: str) -> bool:
    """Return True if the key `inner` is inside of `outer`."""
    size = len(outer.split("."))
    return inner.count(".") >= size and _fits(".".join(inner.split(".")[:size]), outer)

"""Reads a TOML config, applies overrides, and validates the result before anything starts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from agentrl.config.envs import as_list, check_envs, entry_name, find_entry, name_of
from agentrl.config.keys import section_at, section_of, takes_none, takes_switch
from agentrl.config.layers import Find, Layers, Table, joined, read_layers
from agentrl.config.overrides import overridden, parse_overrides
from agentrl.config.schema import ONE, SEVERAL, Choice, EnvConfig, TrainConfig
from agentrl.errors import ConfigError, hinted
from agentrl.redaction import learn

_ABSENT = object()


def load_config(path: str | Path, overrides: Sequence[str] = (), find: Find = Path) -> TrainConfig:
    """The validated config of a TOML file, on top of its `base`, with overrides applied.

    `find` locates a base that is not a file next to the one that names it, for example on a shelf. Raises ConfigError, which
    names the file or override, the key, what was expected and the nearest key.
    """
    return config_of_layers(read_layers(Path(path), find), overrides)


def config_of_layers(layers: Layers, overrides: Sequence[str] = ()) -> TrainConfig:
    """The validated config of tables, the topmost first, with overrides applied. Raises ConfigError as `load_config`."""
    return config_from(joined(layers), overrides, layers)


def config_from(table: Table, overrides: Sequence[str] = (), layers: Layers = ()) -> TrainConfig:
    """The validated config of a table with overrides applied; errors name the file in `layers` that has the key.

    Raises ConfigError.
    """
    table = _without_false(overridden(table, parse_overrides(overrides)), TrainConfig)
    if table.get("env") is None and not table.get("data"):
        raise ConfigError(f"{layers[0][0] if layers else 'command line'}: env: required key is missing")
    try:
        config = TrainConfig.model_validate(table)
    except ValidationError as error:
        raise ConfigError(_explain(error, as_list(table), layers, overrides)) from None
    check_envs(config)
    learn(config.model_dump(mode="json", exclude_none=True))
    return config


def _without_false(table: Table, model: type[BaseModel]) -> Table:
    """`table` without the sections and keys that are false. TOML has no null; this is how one of the base's is unset."""
    kept: Table = {}
    for key, value in table.items():
        field = model.model_fields.get(key)
        section = section_of(field.annotation) if field is not None else None
        if field is not None and value is False and takes_none(field.annotation) and not takes_switch(field.annotation):
            if field.default is not None:
                kept[key] = None
            continue
        if section is not None and isinstance(value, dict):
            value = _without_false(value, section)
        elif section is EnvConfig and isinstance(value, list):
            value = [_without_false(entry, section) if isinstance(entry, dict) else entry for entry in value]
        kept[key] = value
    return kept


def _explain(error: ValidationError, entries: Sequence[Any], layers: Layers, overrides: Sequence[str]) -> str:
    lines = []
    for item in error.errors():
        location = [str(part) for part in item["loc"] if part not in (ONE, SEVERAL)]
        keys = [".".join(location)]
        if entries and len(location) > 1 and location[0] == "env":
            name = name_of(entries[int(location[1])])
            keys = [".".join([entry_name(int(location[1]), name), *location[2:]]), *keys, ".".join(["env", name, *location[2:]])]
            location[1] = name or location[1]
        override = next((f"override {text!r}" for key in keys for text in overrides if text.startswith(f"{key}=")), None)
        file = _file_of(location[:-1] if item["type"] == "missing" else location, layers)
        if override is None and file is None:  # an override below it made the table in which a key is unknown or missing
            over = ".".join(location[:-1] if item["type"] == "missing" else location)
            override = next((f"override {text!r}" for text in overrides if text.startswith(f"{over}.")), None)
        top = str(layers[0][0]) if layers else "command line"
        lines.append(f"{override or file or top}: {keys[0]}: {_problem(item, location)}")
    return "\n".join(lines)


def _file_of(location: Sequence[str], layers: Layers) -> str | None:
    """The topmost file that has the key; None if no file has it."""
    for file, table in layers:
        inner: Any = table
        for part in location:
            if isinstance(inner, list) and (place := find_entry(inner, part)) is not None:
                inner = inner[place]
            else:
                inner = inner.get(part, _ABSENT) if isinstance(inner, dict) else _ABSENT
        if inner is not _ABSENT:
            return str(file)
    return None


def _default_name(location: Sequence[str]) -> str:
    """What to add if the missing key is the name of a component with a default: arguments alone do not say whose they are."""
    section = section_at(location[:-2]) if len(location) > 2 and location[-1] == "name" else None
    field = None if section is None else section.model_fields.get(location[-2])
    default = None if field is None else field.get_default(call_default_factory=True)
    name = getattr(default, "name", None)
    return "" if name is None else f"; arguments are given with the name that they are of (default: {name!r})"


def _no_table(value: object, location: list[str]) -> str:
    """What is said of a value where a table belongs."""
    at, section = ".".join(location), section_at(location)
    if isinstance(value, list):
        return f"expected one table, got a list of {len(value)}; write [{at}], not [[{at}]]"
    if section is not None and issubclass(section, Choice) and isinstance(value, str):
        return f"expected a table, got {value!r}; write {location[-1]} = {{ name = {json.dumps(value)} }}"
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    return f"expected a table, got {shown}; write [{at}] with keys below it (agentrl config docs {at})"


def _problem(item: Mapping[str, Any], location: list[str]) -> str:
    if item["type"] == "extra_forbidden":
        section = ".".join(location[:-1])
        at = section_at(location[:-1])
        valid = [] if at is None else [*([] if section else ["base"]), *at.model_fields]
        hint = hinted(location[-1], valid, show=lambda name: repr(".".join([*location[:-1], name])))
        where = f"[{section}]" if section else "the top level"
        return f"unknown key{hint} (keys of {where}: {', '.join(valid)})"
    if item["type"] == "missing":
        return f"required key is missing{_default_name(location)}"
    if item["type"] == "value_error":  # one of the schema's own, which says it whole
        return f"{item['ctx']['error']}"
    if item["type"] in ("model_type", "model_attributes_type"):
        return _no_table(item["input"], location)
    message = str(item["msg"])
    if isinstance(item["input"], bool):
        return f"{message[0].lower()}{message[1:]}, got {str(item['input']).lower()}"
    return f"{message[0].lower()}{message[1:]}, got {item['input']!r}"

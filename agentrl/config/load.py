"""Read a TOML config, apply `a.b=c` overrides, and validate the whole before anything starts."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import tomli_w
from pydantic import BaseModel, ValidationError

from agentrl.config.schema import TrainConfig
from agentrl.errors import ConfigError

Table = dict[str, Any]


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """The validated config of a TOML file with overrides applied.

    Raises ConfigError: it names the file or override, the key, what was expected and the nearest key.
    """
    file = Path(path)
    return config_from(read_toml(file), overrides, str(file))


def config_from(table: Table, overrides: Sequence[str] = (), source: str = "command line") -> TrainConfig:
    """The validated config of a table with overrides applied; errors name `source`. Raises ConfigError."""
    for keys, value, text in parse_overrides(overrides):
        _assign(table, keys, value, text)
    try:
        return TrainConfig.model_validate(table)
    except ValidationError as error:
        raise ConfigError(_explain(error, source, overrides)) from None


def read_toml(file: Path) -> Table:
    """The file as a table. Raises ConfigError where it is missing, unreadable or not TOML."""
    try:
        text = file.read_text()
    except FileNotFoundError:
        near = difflib.get_close_matches(file.stem, [p.stem for p in file.parent.glob("*.toml")], n=1, cutoff=0.4)
        hint = f"; did you mean {file.parent / near[0]}.toml?" if near else ""
        raise ConfigError(f"{file}: no such config file{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: not valid TOML: {error}") from None


def parse_overrides(overrides: Sequence[str]) -> list[tuple[list[str], Any, str]]:
    """`a.b=c` -> (["a", "b"], value, text). A value that is not TOML is taken as a string."""
    parsed = []
    for text in overrides:
        key, equals, raw = text.partition("=")
        keys = [part.strip() for part in key.split(".")]
        if not equals or not all(keys):
            raise ConfigError(f"override {text!r}: expected KEY=VALUE, for example rollout.group_size=8")
        try:
            value = tomllib.loads(f"value = {raw}")["value"]
        except tomllib.TOMLDecodeError:
            value = raw
        parsed.append((keys, value, text))
    return parsed


def to_toml(config: BaseModel) -> str:
    """The config as TOML that `load_config` reads back to an equal config."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def _assign(table: Table, keys: list[str], value: Any, text: str) -> None:
    for key in keys[:-1]:
        inner = table.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"override {text!r}: {key!r} is a value, not a section")
        table = inner
    table[keys[-1]] = value


def _explain(error: ValidationError, file: str, overrides: Sequence[str]) -> str:
    lines = []
    for item in error.errors():
        location = [str(part) for part in item["loc"]]
        key = ".".join(location)
        source = next((f"override {text!r}" for text in overrides if text.startswith(f"{key}=")), file)
        lines.append(f"{source}: {key}: {_problem(item, location)}")
    return "\n".join(lines)


def _problem(item: Mapping[str, Any], location: list[str]) -> str:
    if item["type"] == "extra_forbidden":
        section = ".".join(location[:-1])
        valid = _keys_at(location[:-1])
        near = difflib.get_close_matches(location[-1], valid, n=1, cutoff=0.5)
        hint = f"; did you mean {'.'.join([*location[:-1], near[0]])!r}?" if near else ""
        where = f"[{section}]" if section else "the top level"
        return f"unknown key{hint} (keys of {where}: {', '.join(valid)})"
    if item["type"] == "missing":
        return "required key is missing"
    message = str(item["msg"])
    return f"{message[0].lower()}{message[1:]}, got {item['input']!r}"


def _keys_at(path: Sequence[str]) -> list[str]:
    """The valid keys of the section at `path`, found by walking the config's own types."""
    model: type[BaseModel] = TrainConfig
    for part in path:
        field = model.model_fields.get(part)
        inner = _section(field.annotation) if field is not None else None
        if inner is None:
            return []
        model = inner
    return list(model.model_fields)


def _section(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, UnionType):
        return next((section for arg in get_args(annotation) if (section := _section(arg))), None)
    return None

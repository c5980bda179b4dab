"""The files of a config: one on top of its base, on top of that one's base, joined to one table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from agentrl.config.envs import entry_of, name_of
from agentrl.config.keys import section_of
from agentrl.config.paths import beside
from agentrl.config.schema import AgentConfig, Choice, EnvConfig, McpServerConfig, ModelConfig, TrainConfig
from agentrl.errors import ConfigError, UserError, hinted
from agentrl.files import read_text
from agentrl.plain_data import toml_table

Table = dict[str, Any]
Find = Callable[[str], Path]
Layers = Sequence[tuple[Path, Table]]

ALTERNATIVES: dict[type[BaseModel], tuple[str, ...]] = {
    ModelConfig: ("path", "init"),
    McpServerConfig: ("command", "url"),
    AgentConfig: ("command", "python", "url"),
}
"""Keys of which a section has one: the one that a file or an override sets replaces the others of what is below it."""


def read_layers(file: Path, find: Find = Path) -> Layers:
    """The file and those that it builds on by `base`, each with its own keys, the topmost first.

    Raises ConfigError for a missing file and for circular bases.
    """
    layers: list[tuple[Path, Table]] = []
    while True:
        if any(file.resolve() == above.resolve() for above, _ in layers):
            circle = " -> ".join(part.name for part in (*(above for above, _ in layers), file))
            raise ConfigError(f"{layers[-1][0]}: base: the configs build on one another in a circle: {circle}")
        table = read_toml(file)
        base = table.pop("base", None)
        layers.append((file, beside(file, table)))
        if base is None:
            return layers
        file = _base_of(file, base, find)


def joined(layers: Layers) -> Table:
    """The layers as one table. Raises ConfigError, which names the file."""
    table: Table = {}
    for file, layer in reversed(layers):
        try:
            table = _joined(table, layer, TrainConfig)
        except ConfigError as problem:
            raise ConfigError(f"{file}: {problem}") from None
    return table


def read_toml(file: Path) -> Table:
    """The file as a table. Raises ConfigError if it is missing, unreadable or not TOML."""
    try:
        text = read_text(file)
    except FileNotFoundError:
        there = [p.stem for p in file.parent.glob("*.toml")]
        hint = hinted(file.stem, there, show=lambda name: f"{file.parent / name}.toml")
        raise ConfigError(f"{file}: no such config file{hint}") from None
    except IsADirectoryError:
        raise ConfigError(f"{file}: a folder; name a TOML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from None
    try:
        return toml_table(text)
    except ValueError as error:
        raise ConfigError(f"{file}: not valid TOML: {error}") from None


def _base_of(file: Path, name: Any, find: Find) -> Path:
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{file}: base: expected the name of a config or a path to one, got {name!r}")
    beside = file.parent / (name if name.endswith(".toml") else f"{name}.toml")
    try:
        return beside if beside.is_file() else find(name)
    except UserError as error:
        raise ConfigError(f"{file}: base: {error}") from None


def _joined(below: Table, table: Table, model: type[BaseModel]) -> Table:
    """`table` on top of `below`, which are tables of the section `model`.

    Sections are merged key by key. The value of a key replaces that of the base even if it is a table, because the arguments
    of one loss are of no use to another. And [env] has the parameters and the reward spec of one environment: with another
    `id`, nothing of the base's [env] is kept.
    """
    if model is EnvConfig and below.get("id") != table.get("id", below.get("id")):
        return table
    joined = _without_alternatives(below, table, model)
    for key, value in table.items():
        field = model.model_fields.get(key)
        section = section_of(field.annotation) if field is not None else None
        old = joined.get(key)
        if section is EnvConfig and isinstance(old, list):
            joined[key] = _joined_envs(old, value)
        elif section is None or issubclass(section, Choice) or not (isinstance(old, dict) and isinstance(value, dict)):
            joined[key] = value
        else:
            joined[key] = _joined(old, value, section)
    return joined


def _without_alternatives(below: Table, table: Table, model: type[BaseModel]) -> Table:
    """`below` without what has an alternative in `table`."""
    keys = ALTERNATIVES.get(model, ())
    if not any(table.get(key) not in (None, False) for key in keys):
        return dict(below)
    return {key: value for key, value in below.items() if key not in keys or key in table}


def _joined_envs(below: list[Any], given: Any) -> Any:
    """`[[env]]`, `[env]` or `[env.NAME]` on top of the base's `[[env]]`."""
    if isinstance(given, dict) and "id" not in given:
        joined = list(below)
        for key, entry in given.items():
            place = entry_of(joined, key)
            if isinstance(entry, dict):
                joined[place] = _joined(joined[place], {"id": joined[place].get("id"), **entry}, EnvConfig)
            else:
                raise ConfigError(f"env.{key}: expected a table, got {entry!r}; the base has several environments")
        return joined
    if not isinstance(given, list):
        return given
    named = {name_of(entry): entry for entry in below}
    return [
        _joined({"id": None, **named[name]}, {"id": named[name].get("id"), **entry}, EnvConfig)
        if (name := name_of(entry)) in named
        else entry
        for entry in given
    ]

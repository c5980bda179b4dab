"""Trace each config value to its file, override or default; annotate a config; compare two configs."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from agentrl.config import load
from agentrl.config.envs import Keys, as_list, leaves, name_of, named_leaves
from agentrl.config.keys import bare, inline, named_sections_of, section_of, unit_of
from agentrl.config.load import Find, Layers, Override, Table
from agentrl.config.schema import Choice, TrainConfig
from agentrl.utils.errors import ConfigError
from agentrl.utils.files import shown_path

# Origins of values

DEFAULT = "default"
COMMAND_LINE = "command line"
"""Origin of a value set by a command-line option or argument that is no override."""


class Origins:
    """Origins of the values of one config. `Origins()` knows none and returns ""."""

    def __init__(self, layers: Layers = (), overrides: Sequence[str] = ()) -> None:
        """Raises ConfigError for layers that cannot be joined and overrides that cannot be applied."""
        self._layers, self._overrides = layers, load.parse_overrides(overrides)
        self._joined = load.join_layers(layers)
        self._table = load.apply_overrides(self._joined, self._overrides)

    def of(self, keys: Keys) -> str:
        """Return the origin of the value at `keys`, or "default"; several for a table joined from them."""
        if not self._layers:
            return ""
        value = load.value_at(self._table, keys)
        if value is load.ABSENT:
            by = self._find_source(keys, unset=True)
            return f"{DEFAULT}, by override {by.text}" if isinstance(by, Override) else DEFAULT
        found = [self._find_source((*keys, *rest)) for rest, _ in leaves(value)]
        places = [f"override {by.text}" if isinstance(by, Override) else str(by) for by in found if by]
        return ", ".join(dict.fromkeys(places)) or DEFAULT

    def _find_source(self, keys: Keys, unset: bool = False) -> Override | Path | None:
        way, place = [str(key) for key in keys], keys[1] if len(keys) > 1 else None
        # An entry of [[env]] may be named by its name, its name before an override, or its index.
        lists = [as_list(table) for table in (self._table, self._joined)] if isinstance(place, int) else []
        names = [name_of(entries[place]) for entries in lists if isinstance(place, int) and place < len(entries) == len(lists[0])]
        ways = [*(["env", name, *way[2:]] for name in names if name), way]
        # `~env.NAME` removes an entry, so another one now has its index.
        overrides = [one for one in self._overrides if (one.value is load.UNSET) == unset and not (lists and len(one.keys) == 2)]
        return load.find_source(ways, () if unset else self._layers, overrides)


def read_origins(path: str | Path, overrides: Sequence[str] = (), find: Find = Path) -> Origins:
    """Trace the values that `load_config` reads with the same arguments. Raises its ConfigErrors."""
    layers = load.read_layers(Path(path), find)
    return Origins([(Path(shown_path(file.absolute())), table) for file, table in layers], overrides)


def typed_origins(table: Table, overrides: Sequence[str] = ()) -> Origins:
    """Trace a config without a file, from the table built by a command's options. Raises ConfigError for invalid overrides."""
    return Origins([(Path(COMMAND_LINE), table)], overrides)


# Annotated TOML

WIDTH = 120
HEAD = """\
# Every key of a run's config: its meaning is above it, its unit and the origin of its value after it.
# `agentrl config docs KEY` explains more; `agentrl config diff` compares two configs."""


def to_toml(config: TrainConfig, origins: Origins | None = None) -> str:
    """Format the complete config as commented TOML, which `load_config` reads back as an equal config. `origins` adds the origins
    of values.

    Raises ConfigError for a value that TOML does not have, such as None inside `params`."""
    return "\n".join([HEAD, "", *ConfigText((origins or Origins()).of).section(config)]) + "\n"


@dataclass(frozen=True, slots=True)
class ConfigText:
    """Layout of a written config. `origin`: comment after a value; `meanings`: write each key's meaning above it; `shown`:
    selects keys by path (`("env", 0, "params")`)."""

    origin: Callable[[Keys], str]
    meanings: bool = True
    shown: Callable[[Keys], bool] = lambda keys: True

    def section(self, section: BaseModel, header: tuple[str, ...] = (), keys: Keys = ()) -> Iterator[str]:
        """Yield the lines of a section: keys with values first, then inner sections, as TOML requires. `header`: TOML name;
        `keys`: path with the indices of `[[env]]`."""
        later: list[tuple[str, Any]] = []
        for name, field in type(section).model_fields.items():
            value = getattr(section, name)
            inner = section_of(field.annotation)
            opens = (inner is not None and not issubclass(inner, Choice)) or named_sections_of(field.annotation) is not None
            if opens and value:
                later.append((name, value))
            elif self.shown((*keys, name)):
                yield from self._key(section, (*keys, name))
        for name, value in later:
            parts = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else [(None, value)]
            for place, part in parts:
                inside = (*header, name, *([place] if isinstance(place, str) else []))
                lines = list(self.section(part, inside, (*keys, name, *([] if place is None else [place]))))
                # A section that is off by default carries information even without keys: [model.init].
                kept = isinstance(place, int) or type(section).model_fields[name].default is None
                if not lines and not kept:
                    continue
                title = ".".join(map(bare, inside))
                yield ""
                yield from _comment(_first_sentence(type(part).__doc__ or "")) if self.meanings else ()
                yield f"[[{title}]]" if isinstance(place, int) else f"[{title}]"
                yield from lines

    def _key(self, section: BaseModel, keys: Keys) -> Iterator[str]:
        """Yield the meaning and `key = value  # unit; origin`. A key unset by default is a comment; an unset key with another
        default is false."""
        name, origin = str(keys[-1]), self.origin(keys)
        field = type(section).model_fields[name]
        meaning = _first_sentence(field.description or "")
        value = section.model_dump(include={name}, exclude_none=True).get(name)
        if value is None and field.default is None:
            said = f": {meaning}" if self.meanings else f"  ({origin})" if origin else ""
            yield _printable(textwrap.shorten(f"# {name} is unset{said}", WIDTH, placeholder=" ..."))
            return
        unit = unit_of(type(section), name)
        notes = "; ".join(note for note in ("" if unit in (None, "1") else f"{unit}", _printable(origin)) if note)
        yield from _comment(meaning) if self.meanings else ()
        try:
            said = inline(False if value is None else value)
        except TypeError as problem:
            raise ConfigError(f"{'.'.join(map(str, keys))}: {value} cannot be written to config.toml: {problem}") from None
        yield f"{bare(name)} = {said}" + (f"  # {notes}" if notes else "")


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, WIDTH - 2)]


def _first_sentence(text: str) -> str:
    whole = " ".join(text.split())
    return whole.split(". ")[0].rstrip(".") + "." if whole else ""


def _printable(text: str) -> str:
    """Replace characters that would end a comment line."""
    return "".join(char if char.isprintable() else " " for char in text)


# Differences between configs


def differing(one: TrainConfig, other: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Return the keys with different values, with both values; None is unset."""
    before, after = (
        {key: value for key, _, value in named_leaves(config.model_dump(exclude_none=True), config.envs)}
        for config in (one, other)
    )
    keys = [*before, *(key for key in after if key not in before)]
    pairs = {key: (before.get(key), after.get(key)) for key in keys}
    # Compare types too: 1 and true are equal in Python.
    return {key: (a, b) for key, (a, b) in pairs.items() if (type(a), a) != (type(b), b)}

"""Where each value of a config comes from: a line of a file, an override, or the schema's default."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from agentrl.config.layers import Find, Table, joined, read_layers
from agentrl.config.overrides import UNSET, Override, overridden, parse_overrides
from agentrl.errors import ConfigError
from agentrl.files import read_text
from agentrl.plain_data import toml_table

Keys = tuple[str | int, ...]
DEFAULT = "default"
COMMAND_LINE = "command line"
"""The origin of what an option, or a word that is no override, says."""


class _Said:
    """A value that is no string, with where it was said."""

    def __init__(self, value: Any, origin: str) -> None:
        self.value, self.origin = value, origin

    def __eq__(self, other: object) -> bool:
        return bool((other.value if isinstance(other, _Said) else other) == self.value)

    __hash__ = None  # type: ignore[assignment]


class _SaidText(str):
    """A string, with where it was said: the files of a config are joined by the names and ids in them."""

    origin: str = ""


class Origins:
    """Of every key of one config. `Origins()` knows none: it says nothing. `unset`: the overrides that unset keys."""

    def __init__(self, table: Table | None = None, unset: Sequence[Override] = ()) -> None:
        self._table, self._unset = table, unset

    def of(self, keys: Keys) -> str:
        """Where the value at the keys is from, or "default"; several places for a table that was put together from them."""
        if self._table is None:
            return ""
        found: Any = self._table
        for key in keys:
            inside = found if isinstance(found, dict) else dict(enumerate(found)) if isinstance(found, list) else {}
            if key not in inside:
                return next((f"{DEFAULT}, by override {one.text}" for one in self._unset if _starts(keys, one.keys)), DEFAULT)
            found = inside[key]
        return ", ".join(dict.fromkeys(_origins(found))) or DEFAULT


def read_origins(path: str | Path, overrides: Sequence[str] = (), find: Find = Path) -> Origins:
    """The origins of what `load_config` reads with the same arguments. Raises ConfigError as it does."""
    layers = read_layers(Path(path), find)
    return _overridden(joined([(file, _marked(table, (), _places(file))) for file, table in layers]), overrides)


def typed_origins(table: Table, overrides: Sequence[str] = ()) -> Origins:
    """The origins of a config without a file: of a table that the options of a command make. Raises ConfigError for overrides
    that cannot be applied."""
    return _overridden(_everywhere(table, COMMAND_LINE), overrides)


def _overridden(table: Table, overrides: Sequence[str]) -> Origins:
    given = [Override(o.keys, o.value if o.value is UNSET else _everywhere(o.value, f"override {o.text}"), o.text)
             for o in parse_overrides(overrides)]  # fmt: skip
    return Origins(overridden(table, given), [one for one in given if one.value is UNSET])


def lines_of(text: str) -> dict[Keys, int]:
    """The line (from 1) on which each key of a TOML text begins, found by reading the text up to each of its lines."""
    found: dict[Keys, int] = {}
    lines, begins = text.split("\n"), 1
    for number in range(1, len(lines) + 1):
        if not _says(lines[number - 1]) and begins == number:
            begins = number + 1  # comments and empty lines begin nothing
            continue
        try:
            table = toml_table("\n".join(lines[:number]))
        except ValueError:
            continue  # in the middle of a value
        for keys in _paths(table, ()):
            found.setdefault(keys, begins)
        begins = number + 1
    return found


def _starts(keys: Keys, unset: Sequence[str]) -> bool:
    return [str(key) for key in keys[: len(unset)]] == list(unset)


def _says(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _paths(value: Any, keys: Keys) -> Iterator[Keys]:
    """The keys of all values in a table, of its tables too."""
    if keys:
        yield keys
    inner: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield from _paths(part, (*keys, key))


def _places(file: Path) -> dict[Keys, str]:
    try:
        return {keys: f"{_shown(file)}:{line}" for keys, line in lines_of(read_text(file)).items()}
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from None


def _shown(file: Path) -> str:
    """The file's path from the working folder, if it is in it."""
    whole, here = file.absolute(), Path.cwd()
    return str(whole.relative_to(here) if whole.is_relative_to(here) else whole)


def _marked(value: Any, keys: Keys, places: dict[Keys, str]) -> Any:
    """A copy of the value in which each part that is no table says where it stands."""
    if isinstance(value, dict):
        return {key: _marked(part, (*keys, key), places) for key, part in value.items()}
    if isinstance(value, list) and any(isinstance(part, dict) for part in value):
        return [_marked(part, (*keys, place), places) for place, part in enumerate(value)]
    return _said(value, places[keys])


def _everywhere(value: Any, origin: str) -> Any:
    if isinstance(value, dict):
        return {key: _everywhere(part, origin) for key, part in value.items()}
    if isinstance(value, list) and any(isinstance(part, dict) for part in value):
        return [_everywhere(part, origin) for part in value]
    return _said(value, origin)


def _said(value: Any, origin: str) -> Any:
    if not isinstance(value, str):
        return _Said(value, origin)
    text = _SaidText(value)
    text.origin = origin
    return text


def _origins(value: Any) -> Iterator[str]:
    if isinstance(value, _Said | _SaidText):
        yield value.origin
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _origins(part)

"""A whole config as TOML that says what it is: every key with its meaning, its unit and where its value is from."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from agentrl.config.keys import named_sections_of, section_of, unit_of
from agentrl.config.origin import Keys, Origins
from agentrl.config.schema import Choice, TrainConfig
from agentrl.config.toml import bare, inline
from agentrl.errors import ConfigError

WIDTH = 120
HEAD = """\
# Every key of a run's config: above it what it means, behind it its unit and where its value is from.
# `agentrl config docs KEY` says more, and `agentrl config diff` what differs from another config."""


def to_toml(config: TrainConfig, origins: Origins | None = None) -> str:
    """The config as TOML, complete and commented, which `load_config` reads back as an equal config. Without `origins` nothing
    is said of where values are from.

    Raises ConfigError for a value that TOML does not have, such as a None inside `params`."""
    given = origins or Origins()
    return "\n".join([HEAD, "", *ConfigText(lambda keys: given.of(keys)).section(config)]) + "\n"


@dataclass(frozen=True, slots=True)
class ConfigText:
    """How a config is written. `origin`: what is said of a value behind it; `meanings`: whether what a key means stands above it;
    `shown`: which keys are there at all, by the way to them (`("env", 0, "params")`)."""

    origin: Callable[[Keys], str]
    meanings: bool = True
    shown: Callable[[Keys], bool] = lambda keys: True

    def section(self, section: BaseModel, header: tuple[str, ...] = (), keys: Keys = ()) -> Iterator[str]:
        """The lines of a section: the keys that hold values, then its own sections, as TOML needs it. `header`: its name in TOML;
        `keys`: the way to it, with the numbers of `[[env]]`."""
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
                # A section that is off unless it is there says something without a key, too: [model.init].
                kept = isinstance(place, int) or type(section).model_fields[name].default is None
                yield from self._titled(part, ".".join(map(bare, inside)), isinstance(place, int), lines, kept)

    def _titled(self, section: BaseModel, title: str, listed: bool, lines: list[str], kept: bool) -> Iterator[str]:
        if not lines and not kept:
            return
        yield ""
        yield from _comment(_first_sentence(type(section).__doc__ or "")) if self.meanings else ()
        yield f"[[{title}]]" if listed else f"[{title}]"
        yield from lines

    def _key(self, section: BaseModel, keys: Keys) -> Iterator[str]:
        """The meaning and `key = value  # unit; origin`. What is unset by default is one comment; what is unset and has another
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
    """What stays on its line as a comment."""
    return "".join(char if char.isprintable() else " " for char in text)

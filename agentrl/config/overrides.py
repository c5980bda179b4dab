"""What the command line changes in a config: `a.b=c` sets a key, `~a.b` unsets it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import deepcopy
from typing import Any, NamedTuple

from agentrl.config.envs import as_list, entry_of
from agentrl.config.keys import find_keys, section_at
from agentrl.config.layers import ALTERNATIVES, Table
from agentrl.errors import ConfigError, hinted
from agentrl.plain_data import toml_table

_ONE = r"""(?:"(?:[^"\\]|\\.)*"|'[^']*'|[^."'=]+)"""
_PART = re.compile(_ONE)
_KEY = re.compile(rf"~?{_ONE}(?:\.{_ONE})*")
_NO_TOML = re.compile(r"\b(?:None|null|Null|NULL|True|TRUE|False|FALSE)\b")
"""What Python, JSON and YAML have for TOML's true and false, and for null, which TOML has not."""
_QUOTED = re.compile(r"""\"(?:[^"\\]|\\.)*"|'[^']*'""")

UNSET = object()
"""The value of an override that unsets its key."""


class Override(NamedTuple):
    """One override: the parts of its key, the value (or `UNSET`), and how it was written."""

    keys: list[str]
    value: Any
    text: str


def parse_overrides(overrides: Sequence[str]) -> list[Override]:
    """`a.b=c` -> (["a", "b"], value, text); `~a.b` has the value `UNSET`. A value that is not TOML is taken as a string.

    Raises ConfigError for what is neither.
    """
    return [_parsed(text) for text in overrides]


def overridden(table: Table, overrides: Sequence[Override]) -> Table:
    """A copy of a config's table with the overrides applied, the first one first.

    A key that they set replaces its alternatives in `table`: `model.path=X` a `[model.init]`, and the other way round.
    Raises ConfigError, which names the override.
    """
    table = deepcopy(table)
    _replace_alternatives(table, overrides)
    for keys, value, text in overrides:
        if keys == ["base"]:
            raise ConfigError(f"override {text!r}: base can only be set in a config file; name the other config instead")
        if value is UNSET:
            _unset(table, keys, text)
        else:
            _assign(table, keys, value, text)
    return table


def _parsed(text: str) -> Override:
    found = _KEY.match(text)
    key = "" if found is None else found[0]
    rest, unsets = text[len(key) :], key.startswith("~")
    equals, raw = rest[:1] == "=", rest[1:]
    keys = [_unquoted(part) for part in _PART.findall(key.removeprefix("~"))]
    if unsets and equals:
        raise ConfigError(f"override {text!r}: ~ unsets a key and takes no value; write {'.'.join(keys)}=VALUE to set it")
    if not (equals or (unsets and not rest)) or not keys or not all(keys):
        raise ConfigError(f"override {text!r}: expected KEY=VALUE or ~KEY, for example rollout.group_size=8")
    if unsets:
        return Override(keys, UNSET, text)
    try:
        read = toml_table(f"value = {raw}")
    except ValueError:
        # A bare word: name=seed3 needs no quotes inside the shell's.
        read = {"value": raw}
        _check_words(".".join(keys), raw.strip(), text)
    # More than one key: a text with a line break that looks like TOML. A comment in a value is none: it swallows the bracket.
    return Override(keys, read["value"] if len(read) == 1 and _is_whole(raw) else raw, text)


def _check_words(key: str, raw: str, text: str) -> None:
    """Raise ConfigError for None, null or True, alone or in a list: taken as a text, it would be a name or a path."""
    found = _NO_TOML.search(_QUOTED.sub("", raw))
    if found is None or (found[0] != raw and raw[:1] not in ("[", "{")):
        return
    word = found[0].lower()
    if found[0] != raw:
        fix = f"{word} there" if word in ("true", "false") else "the list without it"
    else:
        fix = f"{key}=true" if word == "true" else f"{key}=false, or ~{key} for its default"
    raise ConfigError(f"override {text!r}: {key}: TOML has no {found[0]}. Write {fix} (a text of that name in quotes)")


def _is_whole(raw: str) -> bool:
    """Whether TOML reads all of a value, and takes no part of it for a comment (`4#2`)."""
    try:
        return "#" not in raw or bool(toml_table(f"value = [{raw}]"))
    except ValueError:
        return False


def _unquoted(part: str) -> str:
    """A part of a key, without the quotes that TOML has for one with dots or spaces."""
    try:
        return next(iter(toml_table(f"{part} = 0"))) if part[:1] in ('"', "'") else part.strip()
    except ValueError:
        return ""


def _replace_alternatives(table: Table, overrides: Sequence[Override]) -> None:
    """Remove from `table` what has an alternative among the keys that the overrides set."""
    named: dict[tuple[str, ...], set[str]] = {}
    for keys, value, _ in overrides:
        for place, key in enumerate(keys if value is not UNSET and value is not False else ()):
            section = section_at(keys[:place])
            if section is not None and key in ALTERNATIVES.get(section, ()):
                named.setdefault(tuple(keys[:place]), set()).add(key)
    for parents, keys_set in named.items():
        section, inner = section_at(parents), _inner(table, parents)
        for other in ALTERNATIVES[section] if section is not None and inner is not None else ():
            if other not in keys_set:
                inner.pop(other, None)


def _inner(table: Any, keys: Sequence[str]) -> Any:
    """The table at `keys`; None if there is none."""
    for place, key in enumerate(keys):
        if place == 1 and keys[0] == "env" and isinstance(table, list):
            table = table[entry_of(table, key)]
        else:
            table = table.get(key) if isinstance(table, dict) else None
    return table if isinstance(table, dict) else None


def _entry(table: Table, keys: list[str], text: str) -> int | None:
    """The place in `[[env]]` of the environment that the key names; None if the key is no environment's."""
    if keys[0] != "env" or len(keys) == 1 or not (entries := as_list(table)):
        return None
    try:
        return entry_of(entries, keys[1])
    except ConfigError as problem:
        raise ConfigError(f"override {text!r}: {problem}") from None


def _assign(table: Table, keys: list[str], value: Any, text: str) -> None:
    place = _entry(table, keys, text)
    if place is not None:
        if len(keys) == 2:
            raise ConfigError(f"override {text!r}: expected a key of this environment, for example env.{keys[1]}.weight=2")
        table, keys = table["env"][place], keys[2:]
    for key in keys[:-1]:
        inner = table.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"override {text!r}: {key!r} is a value, not a section")
        table = inner
    table[keys[-1]] = value


def _unset(table: Table, keys: list[str], text: str) -> None:
    """Take the key away as if nothing had set it, so that it has its default; of `[[env]]`, `~env.NAME` takes away the entry."""
    name, place = ".".join(keys), _entry(table, keys, text)
    if place is not None:
        if len(keys) == 2:
            del table["env"][place]
            return
        table, keys = table["env"][place], keys[2:]
    for key in keys[:-1]:
        table = table.get(key, {})
        if not isinstance(table, dict):
            raise ConfigError(f"override {text!r}: {key!r} is a value, not a section")
    if keys[-1] in table:
        del table[keys[-1]]
        return
    parents = keys[:-1] if place is None else ["env", *keys[:-1]]
    section = section_at(parents)
    if section is None:  # a table of the user's names, where only what is set is known
        raise ConfigError(f"override {text!r}: {name} is not set{hinted(keys[-1], table)}")
    if keys[-1] not in section.model_fields:
        try:
            find_keys(".".join([*parents, keys[-1]]))
        except ConfigError as problem:
            raise ConfigError(f"override {text!r}: {problem}") from None

"""JSON and TOML as every program takes them. Read: what others wrote is a value or a ValueError, in linear time. Written: JSON of
RFC 8259 (Python's own writes NaN and Infinity, and neither reads nor writes a long integer)."""

from __future__ import annotations

import copy
import json
import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic_core import to_jsonable_python

MOST_BITS = 1023
"""Of an integer that a double, as which most readers take numbers, can hold."""
MOST_TOML = 1_000_000
"""Characters of a TOML text."""
MOST_DOTS = 64
"""Dots in a key of TOML, each of which makes a table; `tomllib` takes quadratic time and memory for them."""
_PART = r"""[\w"'-]"""
_DOTTED = re.compile(rf"(?<!{_PART})(?:{_PART}++[ \t]*+\.[ \t]*+){{{MOST_DOTS}}}")


def read_json(text: str | bytes | bytearray) -> Any:
    """`json.loads`. Raises ValueError, also for what is nested too deep for it."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


def toml_table(text: str) -> dict[str, Any]:
    """`tomllib.loads`. Raises ValueError, also for what is nested too deep for it, long, or has a key of very many parts, and for
    an integer of more than 64 bits, which TOML need not hold."""
    if len(text) > MOST_TOML:
        raise ValueError(f"{len(text)} characters; at most {MOST_TOML} are read")
    if _DOTTED.search(text):
        raise ValueError(f"a key with more than {MOST_DOTS} dots")
    try:
        table = tomllib.loads(text)
        large = next(_large(table), None)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if large is not None:
        raise ValueError(f"{str(large)[:24]}... is beyond the integers of TOML, which have 64 bits")
    return table


def _large(value: Any) -> Iterator[int]:
    """The integers of more than 64 bits in a TOML value."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _large(item)
    elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        yield value


def json_text(
    value: Any,
    *,
    indent: int | None = None,
    default: Callable[[Any], Any] | None = None,
    ensure_ascii: bool = True,
    sort_keys: bool = False,
    separators: tuple[str, str] | None = None,
) -> str:
    """`json.dumps`, with null for the numbers that JSON cannot represent: NaN, the infinities, and integers that Python refuses
    to write (over 4,300 digits). Raises TypeError for what has no JSON form."""
    form: dict[str, Any] = {"indent": indent, "ensure_ascii": ensure_ascii, "sort_keys": sort_keys, "separators": separators}
    try:
        return json.dumps(value, default=default, allow_nan=False, **form)
    except ValueError:  # rare, so the others pay for no look at each number
        return json.dumps(_plain(value, default), allow_nan=False, **form)


def unbounded(value: Any) -> bool:
    """Whether it is a number that JSON cannot represent, or that most of its readers cannot."""
    if isinstance(value, float):
        return not math.isfinite(value)
    return isinstance(value, int) and value.bit_length() > MOST_BITS


def in_json(value: Any) -> Any:
    """A Python value (dataclasses, pydantic models, enums and dates included) as one that JSON can represent: NaN and the
    infinities are texts ("NaN", "-Infinity"), integers beyond a double a text that names their size. Raises ValueError for what
    has no JSON form."""
    # pydantic's own `inf_nan_mode` leaves floats as they are in Python's form.
    return _in_words(to_jsonable_python(value))


def _in_words(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _in_words(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_in_words(item) for item in value]
    if not unbounded(value):
        return value
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return f"an integer of about {int(value.bit_length() * math.log10(2))} digits"


def _plain(value: Any, default: Callable[[Any], Any] | None) -> Any:
    if isinstance(value, Mapping):
        return {None if unbounded(key) else key: _plain(item, default) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, default) for item in value]
    if value is None or isinstance(value, str | int | float):
        return None if unbounded(value) else value
    return value if default is None else _plain(default(value), default)


_SCALARS = frozenset({str, int, float, bool, type(None)})


def detached(value: Any) -> Any:
    """A copy of a JSON value that shares no list and no dictionary with it, however deep it is nested."""
    if not isinstance(value, dict | list):
        return value
    whole = value.copy()
    rest = [whole]
    while rest:  # not by recursion: a policy may nest deeper than Python's stack
        part = rest.pop()
        # Values are replaced under keys that stay, which an iteration allows.
        for key, item in part.items() if isinstance(part, dict) else enumerate(part):
            if type(item) in _SCALARS:
                continue
            if isinstance(item, dict | list):
                part[key] = item.copy()
                rest.append(part[key])
            elif not isinstance(item, str | int | float):
                part[key] = copy.deepcopy(item)  # an author's data may hold more than JSON has: a tuple of lists, say
    return whole


def identical(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal and of the same types throughout: 1 is neither true nor 1.0, as it is in Python."""
    if one is other:
        return True
    if type(one) is not type(other) or one != other:
        return False
    rest = [(one, other)]
    while rest:
        here, there = rest.pop()
        keyed = isinstance(here, Mapping)
        for a, b in ((item, there[key]) for key, item in here.items()) if keyed else zip(here, there, strict=True):
            if a is b:
                continue
            if type(a) is not type(b):
                return False
            if isinstance(a, Mapping | list | tuple):
                rest.append((a, b))
    return True

"""Random texts that match a regular expression, for the `pattern` keyword of JSON Schema."""

from __future__ import annotations

import re
from collections.abc import Iterable
from re import _constants as sre  # type: ignore[attr-defined]  # the standard library's own parse tree
from re import _parser  # type: ignore[attr-defined]
from typing import Any

import numpy as np

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_CLASSES = {sre.CATEGORY_DIGIT: "0123456789", sre.CATEGORY_WORD: _LETTERS + "0123456789_", sre.CATEGORY_SPACE: " "}
_PRINTABLE = "".join(map(chr, range(32, 127)))
_MORE = 6


class Unsupported(ValueError):
    """The pattern uses something that is not supported: look-around, a back reference, a flag."""


def sample_pattern(pattern: str, rng: np.random.Generator) -> str:
    """A random text in which `pattern` is found (JSON Schema searches, so that only anchors bind the ends).

    Raises Unsupported if none was found, and re.error if `pattern` is not a regular expression.
    """
    made = "".join(_text(_parser.parse(pattern), rng))
    if re.search(pattern, made) is None:
        raise Unsupported(f"no text found for the pattern {pattern!r}")
    return made


def _text(items: Iterable[tuple[Any, Any]], rng: np.random.Generator) -> list[str]:
    return [_one(kind, value, rng) for kind, value in items]


def _one(kind: Any, value: Any, rng: np.random.Generator) -> str:
    if kind is sre.LITERAL:
        return chr(value)
    if kind is sre.AT:
        return ""
    if kind is sre.ANY:
        return _pick(_LETTERS, rng)
    if kind is sre.NOT_LITERAL:
        return _pick(_PRINTABLE.replace(chr(value), ""), rng)
    if kind is sre.IN:
        return _pick(_members(value), rng)
    if kind is sre.BRANCH:
        branches = value[1]
        return "".join(_text(branches[int(rng.integers(len(branches)))], rng))
    if kind is sre.SUBPATTERN:
        return "".join(_text(value[3], rng))
    if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
        low, high, inner = value
        times = int(rng.integers(low, min(int(high), low + _MORE) + 1))
        return "".join("".join(_text(inner, rng)) for _ in range(times))
    raise Unsupported(f"{kind} in a pattern")


def _members(items: Iterable[tuple[Any, Any]]) -> str:
    """The characters of a class; complements are taken within printable ASCII."""
    chosen: set[str] = set()
    negated = False
    for kind, value in items:
        if kind is sre.NEGATE:
            negated = True
        elif kind is sre.LITERAL:
            chosen.add(chr(value))
        elif kind is sre.RANGE:
            chosen.update(map(chr, range(value[0], min(value[1], value[0] + 255) + 1)))
        elif value in _CLASSES:
            chosen.update(_CLASSES[value])
        else:
            opposite = {sre.CATEGORY_NOT_DIGIT: "0123456789", sre.CATEGORY_NOT_SPACE: " ",
                        sre.CATEGORY_NOT_WORD: _CLASSES[sre.CATEGORY_WORD]}.get(value)  # fmt: skip
            if opposite is None:
                raise Unsupported(f"{value} in a pattern")
            opposite += opposite.upper()
            chosen.update(set(_PRINTABLE) - set(opposite))
    members = sorted(set(_PRINTABLE) - chosen if negated else chosen)
    if not members:
        raise Unsupported("a character class without printable members")
    return "".join(members)


def _pick(letters: str, rng: np.random.Generator) -> str:
    return letters[int(rng.integers(len(letters)))]

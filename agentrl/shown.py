"""Text of others for a terminal: what a policy, a tool or a file wrote may clear the screen, set its title or type for a user."""

from __future__ import annotations

import unicodedata

_KEPT = "\n\t"
_UNSAFE = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
"""Kinds of characters that a terminal may act on or not show: controls, directions and joiners, surrogates, line separators."""


def safe(value: object, most: int = 0) -> str:
    """The text with what a terminal could act on written out (`\\x1b`); cut to `most` characters if that is not 0."""
    text = "" if value is None else str(value)
    if most and len(text) > most:
        text = text[: most - 3] + "..."
    if text.isprintable():
        return text
    return "".join(c if c in _KEPT or unicodedata.category(c) not in _UNSAFE else _escaped(c) for c in text)


def cell(value: object) -> str:
    """`safe`, for a cell or a title of a table of rich, which takes [brackets] for its own marks."""
    from rich.markup import escape

    return escape(safe(value))


def _escaped(character: str) -> str:
    number = ord(character)
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}" if number < 65536 else f"\\U{number:08x}"

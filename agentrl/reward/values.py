"""JSON values: equality as in reward specs, string normalization, number tokens, short evidence."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import cache
from typing import Any

from agentrl.numerals import LONGEST, numeral
from agentrl.trajectory import Json

Normalizer = Callable[[str], str]

_SPACES = re.compile(r"\s+")
_RAISED = {"<super>": "^", "<sub>": "_"}
_SAME_DIGIT = frozenset({"<wide>", "<font>", "<narrow>", "<noBreak>"})
_BFCL_TABLE = str.maketrans("'", '"', " ,./-_*^")
_BFCL_SAID_TABLE = str.maketrans("'", '"', ",./-_*^()")


def _fold(text: str) -> str:
    if not text.isascii():
        text = unicodedata.normalize("NFKC", "".join(map(_apart, text)))
    return _SPACES.sub(" ", text).strip().casefold()


@cache
def _apart(character: str) -> str:
    """A character that NFKC would make a digit of the number before it: 10³ is not 103, nor 1½ 11/2, nor 5① 51."""
    kind, _, made = unicodedata.decomposition(character).partition(" ")
    if not kind.startswith("<") or kind in _SAME_DIGIT or not any(chr(int(code, 16)).isdigit() for code in made.split()):
        return character
    return f"{_RAISED.get(kind, ' ')}{unicodedata.normalize('NFKC', character)}{'' if kind in _RAISED else ' '}"


def _bfcl(text: str) -> str:
    return text.translate(_BFCL_TABLE).lower()


def _bfcl_said(text: str) -> str:
    return text.translate(_BFCL_SAID_TABLE).lower()


def _exact(text: str) -> str:
    return text


def _tau(text: str) -> str:
    return text.lower().replace(",", "")


class _Remembered(dict[str, str]):
    """What a normalizer makes of texts; short ones are kept, since the same few are compared in pairs, and for all of a group."""

    def __missing__(self, text: str) -> str:
        made = _bfcl(text)
        if len(text) <= 200:
            if len(self) >= 16_384:
                self.clear()
            self[text] = made
        return made

    def __reduce__(self) -> str:
        return "_BFCL"


_BFCL = _Remembered()


NORMALIZERS: Mapping[str, Normalizer] = {
    "exact": _exact,
    "fold": _fold,
    "bfcl": _BFCL.__getitem__,
    "bfcl_said": _bfcl_said,
    "tau": _tau,
}
"""`exact`: unchanged. `fold`: Unicode NFKC, case-folded, runs of white space as one space, ends trimmed.
`bfcl`: spaces and `, . / - _ * ^` removed, lower case, ' as " (the Berkeley leaderboard's rule for arguments).
`bfcl_said`: `, . / - _ * ^ ( )` removed, lower case, ' as " (its rule for answers in words).
`tau`: lower case, commas removed (tau-bench)."""


@dataclass(frozen=True, slots=True)
class EqualityRule:
    """When two JSON values count as equal. `absolute` and `relative` are tolerances for |a - b| of numbers."""

    absolute: float = 0.0
    relative: float = 0.0
    normalize: Normalizer = _exact

    @property
    def strict(self) -> bool:
        """Whether numbers have no tolerance: equality is then an equivalence relation, with `canonical` as its key."""
        return self.absolute == 0.0 and self.relative == 0.0


LITERAL = EqualityRule()
_SURE = frozenset({str, int, float})


def same(a: Json, b: Json, rule: EqualityRule = LITERAL) -> bool:
    """True if two JSON values are equal: 1 equals 1.0, True does not equal 1, NaN equals nothing."""
    if type(a) in _SURE and type(a) is type(b) and a == b:
        return True  # the most usual, four times as quick
    if isinstance(a, str):
        if not isinstance(b, str):
            return False
        return a == b or (rule.normalize is not _exact and rule.normalize(a) == rule.normalize(b))
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, (int, float)):
        return isinstance(b, (int, float)) and (a == b or close(a, b, rule.absolute, rule.relative))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(v, b[k], rule) for k, v in a.items())
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(same(x, y, rule) for x, y in zip(a, b, strict=True))
    return a is None and b is None


def equality_key(value: Json, normalize: Normalizer = _exact) -> Hashable:
    """A key that is equal for two values exactly if `same` finds them equal without a tolerance."""
    if isinstance(value, str):
        return normalize(value)
    if isinstance(value, bool):
        return ("boolean", value)
    if isinstance(value, (int, float)):
        return value if value == value else object()  # NaN equals nothing, itself included
    if isinstance(value, dict):
        return ("object", frozenset((key, equality_key(item, normalize)) for key, item in value.items()))
    if isinstance(value, (list, tuple)):
        return ("array", *(equality_key(item, normalize) for item in value))
    return None if value is None else object()


def close(a: float, b: float, absolute: float = 0.0, relative: float = 0.0) -> bool:
    """|a - b| <= max(absolute, relative * |b|), exactly for integers of any size; False for NaN."""
    if a == b:
        return True
    if absolute == 0.0 and relative == 0.0:
        return False
    try:
        gap, size = abs(a - b), abs(float(b))
    except OverflowError:  # integers beyond the range of a float
        return False
    return gap <= max(absolute, relative * size) and math.isfinite(gap)


def as_number(value: Json) -> Fraction | None:
    """A finite number, or a text that is one as a whole; None for anything else (booleans included)."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return Fraction(value) if value.bit_length() < 3 * LONGEST else None
    if isinstance(value, float):
        return Fraction(repr(value)) if math.isfinite(value) else None
    found = numeral(value) if isinstance(value, str) else None
    return None if found is None else found.value


def numbers_close(a: Fraction, b: Fraction, absolute: float, relative: float) -> bool:
    """|a - b| <= max(absolute, relative * |b|), exactly."""
    return a == b or abs(a - b) <= max(Fraction(repr(absolute)), Fraction(repr(relative)) * abs(b))


def shown(value: Fraction) -> str:
    """A number in decimals if it ends in a few, else as a fraction."""
    digits = Decimal(value.numerator) / Decimal(value.denominator)
    return str(f"{digits:f}" if Fraction(digits) == value else str(value))


def leaves_of(value: Json, path: str = "", kinds: str = "") -> Iterator[tuple[tuple[str, str], Json]]:
    """((JSON Pointer, "l" or "o" for each step into a list or an object), scalar or empty container) for every leaf, in order."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from leaves_of(item, f"{path}/{str(key).replace('~', '~0').replace('/', '~1')}", f"{kinds}o")
    elif isinstance(value, (list, tuple)) and value:
        for index, item in enumerate(value):
            yield from leaves_of(item, f"{path}/{index}", f"{kinds}l")
    else:
        yield (path, kinds), value


def brief(value: Any, limit: int = 200, items: int = 20, depth: int = 6) -> Json:
    """A JSON value short enough for evidence: long strings and lists are cut with a mark, NaN becomes a string."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) < 10**18 else f"{str(value)[:limit] if abs(value) < 10**400 else 'integer'}..."
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, str):
        return value if len(value) <= limit else f"{value[:limit]}... ({len(value)} characters)"
    if depth == 0:
        return "..."
    if isinstance(value, Mapping):
        short = {str(k)[:limit]: brief(v, limit, items, depth - 1) for k, v in list(value.items())[:items]}
        return short if len(value) <= items else {**short, "...": f"{len(value)} keys"}
    if isinstance(value, Sequence):
        cut = [brief(item, limit, items, depth - 1) for item in list(value)[:items]]
        return cut if len(value) <= items else [*cut, f"... ({len(value)} items)"]
    return str(value)[:limit]

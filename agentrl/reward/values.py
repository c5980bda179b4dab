"""JSON values, pointers, predicates and rounds for reward specs."""

from __future__ import annotations

import math
import operator
import re
import unicodedata
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import cache, lru_cache, partial
from typing import Any, Final, SupportsFloat

import regex

from agentrl.data.trajectory import Json, Message, Trajectory
from agentrl.utils.parsing import LONGEST, nfc, numeral


class UnscorableError(Exception):
    """A leaf cannot score this episode (malformed gold, no state): its value is None, never 0."""


# JSON values

Normalizer = Callable[[str], str]

_SPACES = re.compile(r"\s+")
# What Unicode shows as nothing, without its operators (2\u20623 is 2 times 3); and where that changes what stands next to it, by
# UAX 31: a joiner between letters that join, or after a virama; of emoji a joiner (a family), and tags behind a flag (England).
_UNSEEN = regex.compile(r"(?V1)[\p{DI}--[\u2061-\u2064]]")
_SEEN = regex.compile(
    r"\u200c(?<=[\p{jt=D}\p{jt=L}]\p{jt=T}*\u200c)(?=\p{jt=T}*[\p{jt=D}\p{jt=R}])|[\u200c\u200d](?<=\p{ccc=9}.)(?=\p{L})"
    r"|\u200d(?<=[\p{ExtPict}\p{EMod}]\ufe0f?\u200d)(?=\p{ExtPict})|[\U000e0020-\U000e007f](?<=\U0001f3f4[\U000e0020-\U000e007f]{1,32})"
)
_SCRIPT_SIGNS = {"<super>": "^", "<sub>": "_"}
_SAME_DIGIT = frozenset({"<wide>", "<font>", "<narrow>", "<noBreak>"})
_BFCL_TABLE = str.maketrans("'", '"', " ,./-_*^")
_BFCL_SAID_TABLE = str.maketrans("'", '"', ",./-_*^()")
exact = nfc


def _fold(text: str) -> str:
    if not text.isascii():
        shown = _UNSEEN.sub(lambda found: found[0] if _SEEN.match(text, found.start()) else "", text)
        text = unicodedata.normalize("NFKC", "".join(map(separate_digit, shown)))
    return _SPACES.sub(" ", text).strip().casefold()


@cache
def separate_digit(character: str) -> str:
    """Separate a character that NFKC would append to a number: 10³ is not 103, nor 1½ 11/2, nor 5① 51."""
    kind, _, made = unicodedata.decomposition(character).partition(" ")
    if not kind.startswith("<") or kind in _SAME_DIGIT or not any(chr(int(code, 16)).isdigit() for code in made.split()):
        return character
    return f"{_SCRIPT_SIGNS.get(kind, ' ')}{unicodedata.normalize('NFKC', character)}{'' if kind in _SCRIPT_SIGNS else ' '}"


@lru_cache(16_384)
def _bfcl_short(text: str) -> str:
    return text.translate(_BFCL_TABLE).lower()


NORMALIZERS: Mapping[str, Normalizer] = {
    "exact": exact,
    "fold": _fold,
    # Short texts are cached, since the same few are compared for all pairs and group members.
    "bfcl": lambda text: _bfcl_short(text) if len(text) <= 200 else _bfcl_short.__wrapped__(text),
    "bfcl_said": lambda text: text.translate(_BFCL_SAID_TABLE).lower(),
    "tau": lambda text: text.lower().replace(",", ""),
}
"""`exact`: only Unicode NFC. `fold`: NFKC, case-folded, without invisible characters (zero-width space, soft hyphen; not
a joiner that makes another word or emoji), runs of white space as one space, ends trimmed.
`bfcl`: spaces and `, . / - _ * ^` removed, lower case, ' as " (the Berkeley leaderboard's rule for arguments).
`bfcl_said`: `, . / - _ * ^ ( )` removed, lower case, ' as " (its rule for text answers).
`tau`: lower case, commas removed (tau-bench)."""


@dataclass(frozen=True, slots=True)
class EqualityRule:
    """Equality of two JSON values. `absolute` and `relative` are tolerances for |a - b| of numbers."""

    absolute: float = 0.0
    relative: float = 0.0
    normalize: Normalizer = exact

    @property
    def strict(self) -> bool:
        """True if numbers have no tolerance: equality is then an equivalence relation, with `equality_key` as its key."""
        return self.absolute == 0.0 and self.relative == 0.0

    @classmethod
    def of(cls, args: Mapping[str, Any], strings: str = "exact") -> EqualityRule:
        """Make the rule of a leaf's arguments `abs`, `rel` and `strings` (the parameter `strings` is its default)."""
        return cls(float(args.get("abs", 0.0)), float(args.get("rel", 0.0)), NORMALIZERS[args.get("strings", strings)])


LITERAL = EqualityRule()
_PLAIN_TYPES = frozenset({str, int, float})


def same(a: Json, b: Json, rule: EqualityRule = LITERAL) -> bool:
    """Return True if two JSON values are equal: 1 equals 1.0, True does not equal 1, NaN equals nothing."""
    if type(a) in _PLAIN_TYPES and type(a) is type(b) and a == b:
        return True  # the common case, four times as fast
    if isinstance(a, str):
        if not isinstance(b, str):
            return False
        return a == b or rule.normalize(a) == rule.normalize(b)
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, (int, float)):
        return isinstance(b, (int, float)) and (a == b or close(a, b, rule.absolute, rule.relative))
    if isinstance(a, dict):
        if isinstance(b, dict) and a.keys() != b.keys():
            a, b = with_nfc_keys(a), with_nfc_keys(b)
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(v, b[k], rule) for k, v in a.items())
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(same(x, y, rule) for x, y in zip(a, b, strict=True))
    return a is None and b is None


def with_nfc_keys(value: Mapping[Any, Json]) -> Mapping[Any, Json]:
    """Return an object with its keys in NFC (`exact`), or unchanged if two keys would coincide."""
    if "".join(map(str, value)).isascii():  # the common case
        return value
    made = {exact(key) if isinstance(key, str) else key: item for key, item in value.items()}
    return made if len(made) == len(value) else value


def equality_key(value: Json, normalize: Normalizer = exact) -> Hashable:
    """Make a key that two values share exactly if they are the `same` without tolerances."""
    if isinstance(value, str):
        return normalize(value)
    if isinstance(value, bool):
        return ("boolean", value)
    if isinstance(value, (int, float)):
        return value if value == value else object()  # NaN equals nothing, itself included
    if isinstance(value, dict):
        return ("object", frozenset((key, equality_key(item, normalize)) for key, item in with_nfc_keys(value).items()))
    if isinstance(value, (list, tuple)):
        return ("array", *(equality_key(item, normalize) for item in value))
    return None if value is None else object()


def by_kind(values: Sequence[Json], rule: EqualityRule) -> tuple[dict[Hashable, dict[int, list[float]]], list[int]]:
    """By all but its numbers, the numbers of each value by its place, in the order in which they stand in it; and the places of
    values with a number whose differences no double holds exactly."""
    shapes: dict[Hashable, dict[int, list[float]]] = {}
    odd: list[int] = []
    for place, value in enumerate(values):
        leaves = sorted(leaves_of(value), key=operator.itemgetter(0))
        numbers = [leaf for _, leaf in leaves if isinstance(leaf, int | float) and not isinstance(leaf, bool)]
        if not all(type(number) in (int, float) and -(2**52) < number < 2**52 for number in numbers):
            odd.append(place)
        elif numbers:  # others are equal by their keys
            shape = tuple((at, ... if type(leaf) in (int, float) else equality_key(leaf, rule.normalize)) for at, leaf in leaves)
            shapes.setdefault(shape, {})[place] = [float(number) for number in numbers]
    return shapes, odd


def close(a: float, b: float, absolute: float = 0.0, relative: float = 0.0) -> bool:
    """Test |a - b| <= max(absolute, relative * |b|); equal integers of any size are close, NaN never is."""
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
    """Convert a finite number, or a text that is one as a whole; None for anything else, booleans included."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return Fraction(value) if value.bit_length() < 3 * LONGEST else None
    if isinstance(value, float):
        return Fraction(repr(float(value))) if math.isfinite(value) else None  # the repr of a numpy number is no number
    found = numeral(value) if isinstance(value, str) else None
    return None if found is None else found.value


def plain_float(value: Any) -> float:
    """Convert a number or boolean of Python, numpy or torch to a float; NaN for anything else."""
    kind = getattr(getattr(value, "dtype", None), "kind", "f")  # numpy would convert texts and complex numbers too
    if isinstance(value, SupportsFloat) and not isinstance(value, str | bytes) and kind in "biufO":
        with suppress(ArithmeticError, RuntimeError, TypeError, ValueError):
            return float(value)
    return math.nan


def show_number(value: Fraction) -> str:
    """Format a number as a decimal if that is exact, else as a fraction."""
    digits = Decimal(value.numerator) / Decimal(value.denominator)
    return str(f"{digits:f}" if Fraction(digits) == value else str(value))


def leaves_of(value: Json, path: str = "", kinds: str = "") -> Iterator[tuple[tuple[str, str], Json]]:
    """Yield each leaf (a scalar or empty container) as ((JSON Pointer, step kinds), leaf), in order.

    The step kinds have one letter per step: "l" into a list, "o" into an object.
    """
    if isinstance(value, Mapping) and value:
        for key, item in with_nfc_keys(value).items():
            yield from leaves_of(item, join(path, key), f"{kinds}o")
    elif isinstance(value, (list, tuple)) and value:
        for index, item in enumerate(value):
            yield from leaves_of(item, f"{path}/{index}", f"{kinds}l")
    else:
        yield (path, kinds), value


def brief(value: Any, limit: int = 200, items: int = 20, depth: int = 6) -> Json:
    """Shorten a JSON value for evidence: long strings and lists are cut with a mark, NaN becomes a string."""
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


# JSON Pointers

_ESCAPE = re.compile(r"~(?![01])")
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")


class Absent:
    """The type of `ABSENT`, the result of a dangling pointer (None is a JSON value)."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Final = Absent()


@lru_cache(maxsize=4096)
def parse_pointer(text: str) -> tuple[str, ...]:
    """Split a JSON Pointer into its tokens, in NFC, as keys are compared. Raises ValueError if it is invalid."""
    if text == "":
        return ()
    if not text.startswith("/"):
        raise ValueError(f"a JSON Pointer is empty or starts with '/', not {text!r}")
    if _ESCAPE.search(text):
        raise ValueError(f"in a JSON Pointer '~' is written ~0 and '/' is written ~1: {text!r}")
    return tuple(exact(token.replace("~1", "/").replace("~0", "~")) for token in text[1:].split("/"))


def join(pointer: str, *tokens: str | int) -> str:
    """Extend a pointer by tokens, escaped."""
    return pointer + "".join("/" + str(token).replace("~", "~0").replace("/", "~1") for token in tokens)


def follow(document: Json, tokens: tuple[str, ...]) -> Json | Absent:
    """Return the value at a pointer's tokens in a JSON document, or ABSENT."""
    for token in tokens:
        if type(document) is dict or isinstance(document, Mapping):  # a check against the abstract class is ten times as slow
            if token not in document and (token.isascii() or token not in (document := with_nfc_keys(document))):
                return ABSENT
            document = document[token]
        elif isinstance(document, (list, tuple)):
            if not _INDEX.fullmatch(token) or int(token) >= len(document):
                return ABSENT
            document = document[int(token)]
        else:
            return ABSENT
    return document


def is_ref(value: Json) -> bool:
    """Return True for `{"$": pointer}`, with or without `at`."""
    return isinstance(value, Mapping) and "$" in value and set(value) <= {"$", "at"}


def references(value: Json, pointer: str = "") -> Iterator[tuple[str, Mapping[str, Json]]]:
    """Yield each object with a "$" in a value and its pointer: references and a predicate's comparisons."""
    if isinstance(value, Mapping):
        if "$" in value:
            yield pointer, value
        for key, item in value.items():
            yield from references(item, join(pointer, key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from references(item, join(pointer, index))


def evidence_nodes(evidence: Json, skipped: bool = True) -> Iterator[Mapping[str, Json]]:
    """Yield the nodes of an evidence tree, parents first. It omits the parts of a scoped node, which share its id, and without
    `skipped` also skipped nodes and all below them."""
    rest = [evidence]
    while rest:
        node = rest.pop()
        if isinstance(node, list):
            rest += reversed(node)
        elif isinstance(node, dict) and (skipped or "skipped" not in node):
            yield node
            rest += [node[key] for key in ("else", "then", "if", "of") if key in node]


# Predicates

_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "string": (str,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (Mapping,),
    "null": (type(None),),
}


def _compare_ordered(test: Callable[[Any, Any], bool], found: Json, wanted: Json, rule: EqualityRule) -> bool:
    for kinds in (str, (int, float)):
        if isinstance(found, kinds) and isinstance(wanted, kinds):
            return not isinstance(found, bool) and not isinstance(wanted, bool) and test(found, wanted)
    return False


def _contains(found: Json, wanted: Json, rule: EqualityRule) -> bool:
    if isinstance(found, str):
        return isinstance(wanted, str) and rule.normalize(wanted) in rule.normalize(found)
    if isinstance(found, Mapping):
        return isinstance(wanted, str) and not isinstance(follow(found, (exact(wanted),)), Absent)
    return isinstance(found, (list, tuple)) and any(same(item, wanted, rule) for item in found)


COMPARISONS: Final[Mapping[str, Callable[[Json, Json, EqualityRule], bool]]] = {
    "eq": lambda found, wanted, rule: same(found, wanted, rule),
    "ne": lambda found, wanted, rule: not same(found, wanted, rule),
    "lt": partial(_compare_ordered, operator.lt),
    "lte": partial(_compare_ordered, operator.le),
    "gt": partial(_compare_ordered, operator.gt),
    "gte": partial(_compare_ordered, operator.ge),
    "in": lambda found, wanted, rule: isinstance(wanted, (list, tuple)) and any(same(found, x, rule) for x in wanted),
    "contains": _contains,
    "type": lambda found, wanted, rule: isinstance(found, _TYPES[wanted]) and isinstance(found, bool) == (wanted == "boolean"),
}
"""Comparisons of a found with a wanted value; order tests of types that have no order are false."""

COMPARISON_SCHEMA: Final[dict[str, Any]] = {
    **{key: {} for key in ("eq", "ne", "lt", "lte", "gt", "gte", "contains")},
    "in": {"type": ["array", "object"]},
    "type": {"enum": list(_TYPES)},
    "exists": {"type": "boolean"},
}


def holder(comparison: Mapping[str, Json], rule: EqualityRule = LITERAL) -> Callable[[Json | Absent], bool | None]:
    """Make a function that tests a value with every comparison of the object.

    For ABSENT it returns the truth of `exists` if that is given, else None (unknown).
    """
    exists = comparison.get("exists")
    tests = [(test, comparison[key]) for key, test in COMPARISONS.items() if key in comparison]

    def hold(found: Json | Absent) -> bool | None:
        if isinstance(found, Absent):
            return None if exists is None else not exists
        if exists is False:
            return False
        for test, wanted in tests:  # noqa: SIM110 - a generator takes twice as long, and this runs for every part of every episode
            if not test(found, wanted, rule):
                return False
        return True

    return hold


Reader = Callable[[Mapping[str, Json]], "Json | Absent"]


def decider(predicate: Mapping[str, Json]) -> Callable[[Reader], bool | None]:
    """Make a function that decides a predicate, given a reader of references; None: unknown (three-valued logic). Predicates are
    `{"$", ...comparisons}`, `{"not"}`, `{"all"}` and `{"any"}`."""
    if "not" in predicate:
        inner = decider(predicate["not"])
        return lambda read: None if (value := inner(read)) is None else not value
    for key, absorbing in (("all", False), ("any", True)):
        if key in predicate:
            return partial(_join_predicates, [decider(part) for part in predicate[key]], absorbing)
    hold = holder({key: value for key, value in predicate.items() if key not in ("$", "at")})
    return lambda read: hold(read(predicate))


def _join_predicates(parts: Sequence[Callable[[Reader], bool | None]], absorbing: bool, read: Reader) -> bool | None:
    values = [part(read) for part in parts]
    return absorbing if absorbing in values else None if None in values else not absorbing


# Rounds of an episode


@dataclass(frozen=True, slots=True)
class EpisodeRounds:
    """The rounds of an episode. `opening`: number of messages before the first turn. `said`: per turn, the user's messages
    between it and the next turn. `rounds`: per turn, the index of its round; a round ends where the user speaks."""

    opening: int
    said: list[list[Message]]
    rounds: list[int]


def turn_places(trajectory: Trajectory) -> list[int]:
    """Return the positions of the policy's turns in the messages: the last ones of role "assistant".

    Earlier ones belong to the opening history.
    """
    spoken = [place for place, message in enumerate(trajectory.messages) if message.role == "assistant"]
    return spoken[max(0, len(spoken) - len(trajectory.turns)) :]


def course_of(trajectory: Trajectory) -> EpisodeRounds:
    """Compute the rounds of the turns, without the opening history. A record with fewer assistant messages than turns (such as
    one without messages) is one round."""
    turns, messages = trajectory.turns, trajectory.messages
    places = turn_places(trajectory)
    if len(places) < len(turns):
        return EpisodeRounds(len(messages), [[] for _ in turns], [0] * len(turns))
    said: list[list[Message]] = []
    rounds: list[int] = []
    for number, place in enumerate(places):
        end = places[number + 1] if number + 1 < len(places) else len(messages)
        # Consecutive user messages end one round: the policy did nothing in between.
        rounds.append(rounds[-1] + bool(said[-1]) if rounds else 0)
        said.append([message for message in messages[place + 1 : end] if message.role == "user"])
    return EpisodeRounds(places[0] if places else len(messages), said, rounds)

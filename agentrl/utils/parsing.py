"""Read and write JSON and TOML, parse Python source, and read numbers as people write them.

Readers take untrusted text in linear time and raise ValueError if they cannot read it."""

from __future__ import annotations

import ast
import copy
import json
import math
import re
import threading
import tomllib
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MappingView
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from math import gcd
from numbers import Real
from typing import Any, NoReturn, TypeVar

from pydantic_core import to_json, to_jsonable_python

from agentrl.utils.errors import fault_text, is_alien
from agentrl.utils.threads import fork_safe

# JSON and TOML

MOST_BITS = 1023
"""Bits of an integer that a double can hold, as which most readers parse numbers."""
MOST_TOML = 1_000_000
"""Maximum characters of a TOML text."""
MOST_DOTS = 64
"""Maximum dots in a TOML key: each makes a table, for which `tomllib` takes quadratic time and memory."""
_PART = r"""[\w"'-]"""
_DOTTED = re.compile(rf"(?<!{_PART})(?:{_PART}++[ \t]*+\.[ \t]*+){{{MOST_DOTS}}}")


def read_json(text: str | bytes | bytearray, *, once: bool = False) -> Any:
    """`json.loads`. Raises ValueError also for text nested too deep, and if `once` for a duplicate key."""
    try:
        return json.loads(text, object_pairs_hook=no_twice if once else None)
    except RecursionError:
        raise ValueError("nested too deep") from None


class TwiceError(ValueError):
    """A duplicate key in one object: JSON readers differ in the value that they keep."""

    def __init__(self, key: str) -> None:
        super().__init__(f"key {key[:80]!r} is given twice in one object")


def no_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object from its pairs. Raises TwiceError for a duplicate key."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise TwiceError(Counter(key for key, _ in pairs).most_common(1)[0][0])
    return found


def put_once(found: dict[str, Any], key: str, value: Any) -> None:
    """Set a new key of an object. Raises TwiceError if it exists."""
    if key in found:
        raise TwiceError(key)
    found[key] = value


def refuse_constant(name: str) -> NoReturn:
    """Reject NaN and infinities, as `parse_constant` of a JSON reader."""
    raise ValueError(f"{name} is not JSON")


def toml_table(text: str) -> dict[str, Any]:
    """`tomllib.loads`. Raises ValueError also for text that is too long or nested too deep, a key with too many dots, and an
    integer of more than 64 bits, which TOML need not support."""
    if len(text) > MOST_TOML:
        raise ValueError(f"{len(text)} characters; at most {MOST_TOML} are read")
    if _DOTTED.search(text):
        raise ValueError(f"a key with more than {MOST_DOTS} dots")
    try:
        table = tomllib.loads(text)
        large = next((item for item in parts_of(table) if isinstance(item, int) and not -(1 << 63) <= item < 1 << 63), None)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if large is not None:
        raise ValueError(f"{str(large)[:24]}... is beyond the integers of TOML, which have 64 bits")
    return table


def parts_of(value: Any) -> Iterator[Any]:
    """Yield a value and everything in its dicts, lists and tuples."""
    yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        yield from parts_of(part)


def json_text(value: Any, *, default: Callable[[Any], Any] | None = None, **form: Any) -> str:
    """`json.dumps` (with arguments `form`) that writes null for numbers that JSON cannot represent: NaN, infinities, and integers
    that Python refuses to write (over 4,300 digits). Raises TypeError for a value without JSON form."""
    try:
        return json.dumps(value, default=default, allow_nan=False, **form)
    except ValueError:  # rare, so that other values need no check per number
        return json.dumps(_plain(value, default), allow_nan=False, **form)


def is_unbounded(value: Any) -> bool:
    """Return True for a number that JSON, or most of its readers, cannot represent."""
    if isinstance(value, float):
        return not math.isfinite(value)
    return isinstance(value, int) and value.bit_length() > MOST_BITS


def in_json(value: Any) -> Any:
    """Convert a Python value (also dataclasses, pydantic models, enums, dates) to JSON values. NaN and infinities become texts
    ("NaN", "-Infinity"), integers beyond a double a text with their size. Raises ValueError for a value without JSON form, and
    instead of an exception of its methods."""
    with as_value_error():
        # pydantic's `inf_nan_mode` does not change floats in Python mode.
        try:
            return _in_words(to_jsonable_python(value, fallback=_of_array))
        except UnicodeEncodeError:  # a lone surrogate in a key, which a policy may write and pydantic refuses
            return _in_words(json.loads(json.dumps(value, default=partial(to_jsonable_python, fallback=_of_array))))


@contextmanager
def as_value_error() -> Iterator[None]:
    """Convert exceptions of a user value's methods, and endless recursion, into ValueError."""
    try:
        yield
    except BaseException as fault:
        if not is_alien(fault):
            raise
        why = fault_text(fault).removeprefix("ValueError: ")
        deep = isinstance(fault, RecursionError) or re.search("Circular reference|depth exceeded", why)
        raise ValueError("it contains itself, or is nested too deep" if deep else why) from fault


def json_form(value: Any) -> Any:
    """Return the value itself if it is JSON, else `in_json` of it, as a reader of its stored text sees it. Raises ValueError for
    a value without JSON form, and for a set (no order)."""
    read = None
    with suppress(ValueError), as_value_error():
        # In C, as states may be large. An array fails the second test, an unbounded number the others (an integer that Python
        # does not write has over 4,300 digits); a text with these words passes the last.
        if (read := to_jsonable_python(value, fallback=_of_array)) == value and (
            (len(text := to_json(value)) < 4300 and b"NaN" not in text and b"Infinity" not in text)
            or json.dumps(value, allow_nan=False)
        ):
            return value
    form = in_json(value if read is None else read)  # convert once: iterators such as `map` are exhausted then
    for part in parts_of(value):
        if isinstance(part, set | frozenset):
            raise ValueError(f"a set has no order ({part!r:.60})")
    return form


def _of_array(value: Any) -> Any:
    """Convert a scalar or array of numpy or torch, a dict view, or an iterator such as `map`."""
    if isinstance(value, MappingView | range | map | filter | zip):
        return [*value]  # type: ignore[misc]  # a dict view's base class has no __iter__
    made = value.tolist() if hasattr(value, "tolist") else value
    if type(made) is not type(value):
        return made
    if not isinstance(value, Real):
        raise ValueError(f"a {type(value).__name__} has no JSON form")
    return float(value)  # of numpy's longdouble, whose `tolist` returns itself


def _in_words(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _in_words(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_in_words(item) for item in value]
    if not is_unbounded(value):
        return value
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return f"an integer of about {int(value.bit_length() * math.log10(2))} digits"


def _plain(value: Any, default: Callable[[Any], Any] | None) -> Any:
    if isinstance(value, Mapping):
        return {None if is_unbounded(key) else key: _plain(item, default) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, default) for item in value]
    if value is None or isinstance(value, str | int | float):
        return None if is_unbounded(value) else value
    return value if default is None else _plain(default(value), default)


_SCALARS = frozenset({str, int, float, bool, type(None)})


def deep_copy_json(value: Any) -> Any:
    """Copy a JSON value of any nesting depth without sharing lists or dicts."""
    if not isinstance(value, dict | list):
        return value
    whole = value.copy()
    rest = [whole]
    while rest:  # iterative: a policy may nest deeper than Python's stack
        part = rest.pop()
        # Replacing the values of existing keys is allowed during iteration.
        for key, item in part.items() if isinstance(part, dict) else enumerate(part):
            if type(item) in _SCALARS:
                continue
            if isinstance(item, dict | list):
                part[key] = item.copy()
                rest.append(part[key])
            elif not isinstance(item, str | int | float):
                part[key] = copy.deepcopy(item)  # an author's data may hold more than JSON, for example a tuple of lists
    return whole


def identical(one: Any, other: Any) -> bool:
    """Return True if two JSON values are equal and of equal types throughout: 1 is neither true nor 1.0."""
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


def nfc(text: str) -> str:
    """Normalize a text to Unicode NFC."""
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def own_name(name: str, names: Mapping[str, Any]) -> str:
    """Return the name in `names` that is equal in NFC, else `name`."""
    return name if name.isascii() or name in names else {nfc(one): one for one in names}.get(nfc(name), name)


# Parsing Python source

_LOCK = fork_safe(threading.RLock())
T = TypeVar("T")
_WRONG = "recursion depth mismatch"
_TIMES = 8


def module_of(source: str | bytes) -> ast.Module:
    """`ast.parse(source)`, with its exceptions: SyntaxError, ValueError, RecursionError and MemoryError."""
    found: ast.Module = parse_alone(partial(ast.parse, source))
    return found


def expression_of(text: str) -> ast.expr:
    """Parse a text as one expression. Raises the errors of `module_of`."""
    found = parse_alone(partial(ast.parse, text, mode="eval"))
    assert isinstance(found, ast.Expression)
    return found.body


def parse_alone(parse: Callable[[], T]) -> T:
    """Parse with retries: Python 3.11 counts the tree depth in a variable that all threads share, so a parse during another one
    (in a thread, or in a finalizer) ends the outer one with a SystemError (CPython issue 106905). The lock serializes agentrl's
    own threads; other threads rarely parse, so retries suffice."""
    for left in reversed(range(_TIMES)):
        try:
            with _LOCK:
                return parse()
        except SystemError as problem:
            if not left or _WRONG not in str(problem):
                raise
    raise AssertionError


# Numbers as people write them

LONGEST = 400
"""Maximum characters of a number."""
_SCRIPTS = (
    r"\u0e01-\u0e2e\u0e30-\u0e45\u0e81-\u0ece\u1000-\u1021\u1780-\u17b3\u1100-\u11ff\u3005\u3007\u3040-\u30ff\u3130-\u318f"
    r"\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff\uff66-\uffdc\U00020000-\U0003ffff"
)
_LETTER = rf"(?:\d|(?![{_SCRIPTS}])\w)"
"""A character that continues a word or number. In scripts without spaces between words, no character does."""
_TIMES_TEN = "[十百万萬億亿만억조천백십]|[千兆](?![克米瓦卡赫])"
_SIGN = "[-+\u2212\u2010\u2011\u2013\ufe63\u00b1\u2213]"
MONEY = r"(?:[$€£¥₹₩]|\\\$)"
_GROUPS = "|".join(
    rf"[1-9][0-9]{{0,2}}(?:{between}[0-9]{{3}})+(?![0-9])"
    for between in (",", r",\\! ?", r"\{,\}", r"\\[,;: ]", " ", "\u00a0", "\u2009", "\u202f", "'", "\u2019")
)
_INTEGER = rf"(?:{_GROUPS}|[0-9]+)"
_PLAIN = rf"(?:(?:{_INTEGER}(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+\u2212]?[0-9]{{1,4}})?)"
_RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹"
_VULGAR = "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑⅒"
_REPEATED = r"(?:\\(?:overline|bar|dot)\s?\{(?P<again>[0-9]{1,20})\}|\((?P<round>[0-9]{1,20})\))"
_FRACTION = (
    rf"(?:\\[dtc]?frac\s?(?:\{{\s?(?P<top_sign>{_SIGN}?)\s?(?P<top>{_PLAIN})\s?\}}|(?P<top1>[0-9]))\s?"
    rf"(?:\{{\s?(?P<bottom>{_PLAIN})\s?\}}|(?P<bottom1>[0-9]))|(?P<vulgar>[{_VULGAR}]))"
)
# Most numbers are digits not followed by anything that could belong to them; testing this first is ten times as fast.
_SIMPLE = (
    rf"(?P<simple>[0-9]+(?![0-9.eE{{(\\\u2044/×x*·⋅^√{_VULGAR}])(?!(?:,\\! ?|.)?[0-9]{{3}}(?![0-9]))"
    rf"(?!\s?[-/\\×x*·⋅\u2044{_VULGAR}])(?!\s+[0-9.,]+\s?[/\u2044]))"
)
_VALUE = (
    rf"(?:{_SIMPLE}|(?P<repeated>(?P<before>{_INTEGER}?\.[0-9]{{0,40}}){_REPEATED})"
    rf"|(?P<whole>{_INTEGER})?\s?{_FRACTION}"
    rf"|(?:(?P<and>{_INTEGER})(?:\s+|-))?(?P<over>{_PLAIN})\s?[/\u2044]\s?(?P<under>{_PLAIN})"
    rf"|(?P<mantissa>{_PLAIN})\s?(?:[x×*·⋅]|\\times|\\cdot)\s?10\s?"
    rf"(?:(?:\^|\*\*)\s?[{{(]?\s?(?P<power>{_SIGN}?[0-9]{{1,4}})\s?[}})]?|(?P<raised>[⁺⁻]?[{_RAISED}]{{1,4}}))"
    rf"|(?P<plain>{_PLAIN}))"
)
_POWERS = {"dozen": Fraction(12)} | {
    word: Fraction(10) ** power for power, words in {
        2: "hundred", 3: "thousand tausend tsd тыс", 5: "lakh", 6: "million millionen millones mio mln mn млн", 7: "crore",
        9: "billion milliard milliarde milliarden mrd bn bln млрд", 12: "trillion trn tn", 15: "quadrillion", 18: "quintillion",
        -1: "tenths", -2: "hundredths", -3: "thousandths", -6: "millionths", -9: "billionths",
    }.items() for word in words.split()
}  # fmt: skip
_LETTERS = {"k": Fraction(1000), "m": Fraction(10**6), "b": Fraction(10**9), "t": Fraction(10**12)}
MAGNITUDE = rf"(?i:{'|'.join(sorted(_POWERS, key=len, reverse=True))})s?(?!{_LETTER})"
"""A word after a number that multiplies it."""
GAP = r"(?:[ \t\u00a0\u2009\u202f~*_-]|\\[,;: ]|\\text\s?\{\s?|</?b>|\((?:in )?){0,6}"
_TOKEN = re.compile(
    rf"(?P<sign>(?:(?<!\w)(?i:minus|negative)\s+|{_SIGN})?)(?P<money>(?:{MONEY}\s?)?)(?P<sign2>{_SIGN}?){_VALUE}"
    rf"(?:(?!\s?[0-9.,;:?!)])(?:(?P<times>(?:{GAP}{MAGNITUDE}\}}?){{1,3}})|(?P<letter>\s?[kmbtKMBT](?!{_LETTER}))))?"
    r"(?P<percent>\s?(?:\\?%|per ?cent\b|pct\b|\\text\s?\{\s?(?:\\?%|per ?cent)\s?\}))?"
)
# Next to these, a number is part of another number or of something else: a power, product, date, version or name.
_BEFORE = re.compile(
    rf"(?:{_LETTER}|[.√∛^]|[{_VULGAR}]|\d[,:/'\u2019*×·⋅]|\d[-\u2013][0-9]{{1,4}}[-\u2013]|[/:]\s?\d|\d\s?/\s?|[_^}}]\{{|\\sqrt\s?\{{|[十百千万萬億亿만억조천백십]|%[0-9a-fA-F]?)\Z"
)
_AFTER = re.compile(
    rf"{_LETTER}|{_TIMES_TEN}|[.,:/'\u2019*×·⋅][0-9]|[-\u2013][0-9]{{1,4}}[-\u2013][0-9]|\s?\^(?!\{{?\\circ)|\*\*[({{0-9]|\s?√|\s?\\sqrt"
    rf"|[{_VULGAR}]|\s?/\s?[0-9]|\s?\\frac|\s?[‰‱万萬億亿만억]|(?i:\s+(?:squared|cubed|and\s+(?:an?|one|two|three)[\s-]+(?:half|thirds?|quarters?))\b)"
)
_FULL = str.maketrans({0xFF01 + i: 0x21 + i for i in range(94)})
_MINUS = frozenset("-\u2212\u2010\u2011\u2013\ufe63⁻")
_LOOSE_MINUS = re.compile(rf"(?<=[=≈<>≤≥(]) ?([-\u2212\u2013])\s(?={MONEY}?[0-9.])")


@dataclass(frozen=True, slots=True)
class Numeral:
    """A number and its written form. `exact`: without decimals; `lowest`: not a reducible fraction."""

    value: Fraction
    text: str
    exact: bool
    lowest: bool = True
    percent: bool = False


def numerals(text: str) -> Iterator[Numeral]:
    """Yield every complete number of a text: 170 does not contain 17, nor 5/2 a 5, nor 10³ a 10, and v17 has no number."""
    text = _LOOSE_MINUS.sub(r"\1", text.translate(_FULL))
    start = 0
    while (found := _TOKEN.search(text, start)) is not None:
        token, end = _match_number(text, found)
        if token is not None:
            yield token
        start = max(end, found.start() + 1)


def _match_number(text: str, found: re.Match[str]) -> tuple[Numeral | None, int]:
    """Return the number of a match, if it stands alone, and the position to continue from."""
    begin, value_at = found.start(), found.end("sign2")
    before = text[max(0, begin - 8) : begin]
    if found["sign"] and re.search(rf"(?:{_LETTER}|[)\]}}!])\Z", before):
        # A dash between two words or numbers is no sign: 10-20, A-5.
        begin, before = found.start("money"), text[max(0, found.start("money") - 8) : found.start("money")]
        signed = ""
    else:
        signed = found["sign"]
    if signed[:1] in ("m", "M") and re.search(r"(?:[\d)\]}%]|(?<!\w)[A-Za-z])\s*\Z", before):
        begin, signed = found.start("money"), ""  # a difference: 7 minus 5, x minus 5
    end, letter = found.end(), found["letter"] or ""
    if letter and not (found["money"] or letter in ("k", "K", "M", "B", " k") or text[end : end + 1] in tuple("€$£¥₹₩")):
        end, letter = found.start("letter"), ""  # a unit, or a name
    if _BEFORE.search(before) or _AFTER.match(text, end) or len(found.group()) > LONGEST:
        joined = _JOINED.match(text, end)  # no number either
        return None, end if joined is None else joined.end()
    if {signed, found["sign2"]} & {"±", "∓"} or (signed and found["sign2"]):
        return None, end
    value = _value(found, text[begin:end])
    if value is None:
        return None, max(value_at + 1, end)
    negative = signed in _MINUS or signed[:1].isalpha() or found["sign2"] in _MINUS
    times = _LETTERS.get(letter.strip().lower(), Fraction(1))
    for word in re.findall(MAGNITUDE, found["times"] or ""):
        times *= _POWERS.get(word.lower()) or _POWERS[word.lower().removesuffix("s")]
    return replace(value, value=value.value * (-times if negative else times), percent=found["percent"] is not None), end


_JOINED = re.compile(rf"(?:{_LETTER}|[.,:/'\u2019^*×·⋅√{_VULGAR}\-\u2212\u2010\u2011\u2013{{}}](?=[\w{{]))*")


def _plain_number(text: str) -> Fraction:
    return Fraction(re.sub(r"[^0-9.eE+-]", "", text.replace("\u2212", "-")).lstrip("+"))


def _value(found: re.Match[str], text: str) -> Numeral | None:
    """Parse the number without its sign; None for a fraction over zero."""
    if found["simple"] is not None:
        return Numeral(Fraction(int(found["simple"])), text, True)
    if found["repeated"] is not None:
        whole, _, digits = re.sub(r"[^0-9.]", "", found["before"]).partition(".")
        again = found["again"] or found["round"]
        share = Fraction(int(again), (10 ** len(again) - 1) * 10 ** len(digits))
        return Numeral(Fraction(f"{whole or 0}.{digits or 0}") + share, text, True)
    if found["mantissa"] is not None:
        raised = found["raised"] and found["raised"].translate(str.maketrans(_RAISED + "⁺⁻", "0123456789+-"))
        power = int((raised or found["power"]).replace("\u2212", "-").replace("\u2013", "-"))
        mantissa = _plain_number(found["mantissa"])
        # 3 × 10² is an uncomputed product; 1.6 × 10⁻¹⁹ is standard notation.
        return Numeral(mantissa * Fraction(10) ** power, text, False, abs(power) > 3 and 1 <= mantissa < 10)
    if found["plain"] is not None:
        return Numeral(_plain_number(found["plain"]), text, re.search("[.eE]", found["plain"]) is None)
    if found["vulgar"] is not None:
        share = Fraction(unicodedata.numeric(found["vulgar"])).limit_denominator(10)
        top, bottom, negative, exact = Fraction(share.numerator), Fraction(share.denominator), False, True
    else:
        over = found["over"] or found["top"] or found["top1"]
        under = found["under"] or found["bottom"] or found["bottom1"]
        top, bottom = _plain_number(over), _plain_number(under)
        exact = re.search("[.eE]", over + under) is None
        negative = (found["top_sign"] or "") in _MINUS
    if not bottom or (found["top_sign"] or "") in ("±", "∓"):
        return None
    first = found["whole"] or found["and"]
    lowest = exact and gcd(top.numerator, bottom.numerator) == 1 and bottom > 1 and (first is None or top < bottom)
    value = (_plain_number(first) if first else 0) + top / bottom
    return Numeral(-value if negative else value, text, exact, lowest)


def numeral(text: str) -> Numeral | None:
    """Parse a text that is one number as a whole; else None."""
    text = text.strip()
    if len(text) > LONGEST + 8:
        return None
    while len(text) > 1 and text[0] in "({" and text[-1] == {"(": ")", "{": "}"}[text[0]]:
        text = text[1:-1].strip()
    text = re.sub(rf"^({_SIGN})\s+", r"\1", text).translate(_FULL)
    found = _TOKEN.fullmatch(text) or _TOKEN.fullmatch(text.removesuffix("."))
    number, end = (None, 0) if found is None else _match_number(found.string, found)
    return number if found is not None and end == found.end() else None


def digits(text: str) -> str | None:
    """Return a plain number without group separators or currency; None for other texts and for leading zeros (a name)."""
    found = numeral(text)
    if found is None or found.percent or re.search(r"[^-+\u2212$€£¥₹₩0-9., '\u2019\u00a0\u202f]|^0[0-9]", found.text):
        return None
    return f"{'-' * (found.value < 0)}{re.sub('[^0-9.]', '', found.text)}"


def is_letter(character: str) -> bool:
    """Return True if a character continues a word; in scripts without spaces between words, only marks and joiners do."""
    continues = character in ("\u200c", "\u200d") or (bool(character) and unicodedata.category(character) in ("Mn", "Mc"))
    return continues or re.fullmatch(_LETTER, character) is not None

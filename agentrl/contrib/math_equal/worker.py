"""Program that compares answers with gold by math-verify, in a process started by `leaf.py`.

It answers JSON requests one at a time. math-verify's own time limit is an alarm, which works only in the main thread of a
program and cannot interrupt a long multiplication; here the kernel ends the process."""

from __future__ import annotations

import json
import math
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
from latex2sympy2_extended.math_normalization import extract_boxed_content
from math_verify import verify
from math_verify.grader import get_pct_val, should_treat_as_complex

from agentrl.utils.parsing import GAP, MAGNITUDE, Numeral, numeral

MEMORY = 1 << 30
"""Limit of the address space in bytes; SymPy and its parser take a fifth of it."""
WORN_BYTES = 1 << 29
"""Resident bytes from which on the process ends after an answer."""
DIGITS = 40
"""Significant digits in which numbers without decimals must agree."""
PLACES = Fraction(1, 10**6)
"""Tolerance of decimals; below 0.1 it shrinks to keep the number of significant digits."""

# -- read a whole text ---------------------------------------------------------------------------------


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


NAMES = _words(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp sqrt max min mod gcd lcm det pi inf infinity"
)
_NO_UNIT = _words(
    "or and to through half third thirds quarter quarters dozen hundred thousand million billion trillion times squared cubed "
    "minus plus over by divided factorial mod remainder base point negative not no than more less at least most about if is are "
    "was equals equal percent pct either neither nor between from sum product difference true false yes none"
)
"""Words after a number that change its value, or show that it is not the answer."""
_SHORT_UNITS = _words(
    "mm cm dm km mg kg ml mL cl dl ft in yd mi oz lb hr ms ns Hz kW cc GB MB of per sq cu an the a m/s km/h kg/m g/mL mi/h ft/s "
    "m/min L/min g/L mol/L"
)
_SYMBOLS = _words("mm cm dm m km mg g kg t ms s min h ml cl l in ft yd mi oz lb c f k d wk mo yr ct usd")
"""Units that are compared: 5 km is not 5 m or 5 meters."""
_BASES = {
    "meter": "m", "metre": "m", "gram": "g", "liter": "l", "litre": "l", "second": "s", "minute": "min", "hour": "h", "hr": "h",
    "day": "d", "week": "wk", "month": "mo", "year": "yr", "cent": "ct", "dollar": "usd",
    "inch": "in", "inche": "in", "foot": "ft", "feet": "ft", "yard": "yd", "mile": "mi", "ounce": "oz", "pound": "lb",
}  # fmt: skip
_PREFIXES = ("", "milli", "centi", "deci", "kilo")
_SPELLED = {f"{prefix}{word}{s}": prefix[:1] + short for prefix in _PREFIXES for word, short in _BASES.items() for s in ("", "s")}
_SHORT_WORDS = _words("is or to no in if it at of on by as an so we he up do go my me us be am pm")
_TEXT = r"\\(?:text|mathrm|mbox|textrm|textit|textbf|mathbf|mathit|operatorname)\s?\{([^{}\\]*)\}"
_UNIT = re.compile(
    r"(?<=[\d)}!%])(?:\s|\\[,;: ]|~)*(?P<degree>(?:\^\s?\{?\s?\\circ\s?\}?|°|\\degree\b)\s*(?:[CFK](?![A-Za-z]))?)?\s*"
    rf"(?:{_TEXT}|(?P<words>(?:(?<![A-Za-z\\}}])|(?<=\d))[A-Za-z][A-Za-z./ ]*[A-Za-z.]))?"
    r"\s*(?P<raised>\^\s?\{?-?[1-9]\}?|[²³])?$"
)
_UPRIGHT = re.compile(r"\\(?:mathbf\s?\{([a-z])\}|(?:text|mathrm|textrm|textit|mathit|operatorname)\s?\{([abeijn-ru-z])\})")
"""A letter that is a constant, name or vector, and no unit: 3 + 2\\mathrm{i}."""
_UNIT_FORMS = (
    (r"(?<=\{)\\[,;: ]\s*", ""),
    (r"(\d(?:\s|\\[,;: ]|~)*\\(?:text|mathrm)\s?\{[^{}]*)\}\s*/\s*\\(?:text|mathrm)\s?\{[\s~]*", r"\1/"),
    (r"(\\(?:text|mathrm)\s?\{[^{}\\^]*)\^([1-9])\}$", r"\1}^\2"),
)
"""Other forms of a unit: \\mathrm{\\,m}, \\mathrm{m} / \\mathrm{s}, \\mathrm{m^2}."""
_LABEL = re.compile(rf"(?:{_TEXT}|[A-Za-z][A-Za-z ]{{2,40}}?)\s*(?:=|:|\bis\b)\s*")
_ELLIPSIS = re.compile(r"\.\.\.|…|\\[lcvd]?dots")
_GROUPED = re.compile(r"(?<![\d.])[1-9]\d{0,2}(?P<between>\\[,;: ]|\{,\}|[ \u00a0\u2009\u202f])\d{3}(?:(?P=between)\d{3})*(?!\d)")
_MIXED = re.compile(r"(?<![\d.])(\d{1,9})(?:\s+(\d{1,9})\s?/\s?(\d{1,9})|\s*\\[dt]?frac\{(\d{1,9})\}\{(\d{1,9})\})(?![\d.])")
_JOINED = re.compile(r"\d\s+[\d.]|\d\.\d+\.|\d[eE][-+]?\d|\.\s*\.|\d_|\d\s+[A-Za-z]\s+\d|(?<![\d.,])0\d|^[nN]/[aA]$")
"""Adjacent numbers, other bases, remainders, dates: the parser would multiply, add or drop parts of them."""
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_COMMAND = re.compile(r"\\(?:begin|end)\s?\{[a-z]+\*?\}|\\[A-Za-z]+")
_SIGNS = str.maketrans({
    "\u2212": "-", "\u2013": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "∞": r"\infty ", "π": r"\pi ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "≈": r"\approx ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ",
    "∅": r"\emptyset ", "~": " ", "\n": " ", "\t": " ", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "′": "'",
    "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
})  # fmt: skip
_HIGH = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_ROOT = re.compile(r"([√∛])\s?(?:\{([^{}]*)\}|\(([^()]*)\)|(\d+(?:\.\d+)?|[A-Za-z]))")
_LATEX = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none")


@dataclass(frozen=True)
class Read:
    """A text that was read completely. `number`: its numeral, if it is one; `name`: the x of x = 5."""

    text: str
    value: Any
    number: Numeral | None = None
    name: str = ""
    unit: str = ""

    @property
    def is_number(self) -> bool:
        return _is_number(self.value)

    def as_text(self) -> str:
        """Return the value as text, at most 200 characters."""
        try:
            return str(self.value if self.number is None else f"{self.number.value}{'%' * self.number.percent}")[:200]
        except ValueError:  # more digits than Python converts to text
            return "a number of more than 4300 digits"


def read(text: str) -> Read | None:
    """Read a whole text, without dollar signs, blanks, a label before and a unit after it; None if a part cannot be read."""
    bare = _bare(_UPRIGHT.sub(r" \1\2", text))
    for form, plain in _UNIT_FORMS:
        bare = re.sub(form, plain, bare)
    if not bare or _ELLIPSIS.search(text):
        return None
    whole = _with_unit(bare)
    if whole is None and (label := _LABEL.match(bare)) is not None:
        whole = _with_unit(_bare(bare[label.end() :]))
    return whole


def _bare(text: str) -> str:
    """Strip blanks, math delimiters, emphasis, a final period and a currency after a number."""
    text, before = text.strip(), None
    while text != before:
        before = text
        text = text.strip("*").strip().removesuffix(".").removesuffix("\\").strip()
        text = re.sub(r"^(?:\\[,;:! ]|\\quad|\\approx|[~≈])\s*|\s*(?:\\[,;:! ]|\\quad|~)$", "", text)
        for begin, end in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
            inner = text[len(begin) : -len(end)]
            if (
                len(text) > len(begin + end)
                and text.startswith(begin)
                and text.endswith(end)
                and end not in inner.replace("\\$", "")
            ):
                text = inner.strip()
    return re.sub(r"(?<=[0-9])\s?(?:\\\$|[€£¥₹₩])$", "", text)


def _with_unit(bare: str) -> Read | None:
    unit = _UNIT.search(bare)
    if unit is None or not unit.group().strip():
        return _expression(bare)
    words = (unit[2] or unit["words"] or "").replace("~", " ").strip()
    first = re.split(r"[ /.]", words, maxsplit=1)[0]
    if first.lower() in NAMES or (unit["words"] and not words[:1].isspace() and _is_product(words.replace(" ", ""))):
        return _expression(bare)  # 2 sin x, 3xyz
    parts = words.replace(".", " ").split()
    changes = _NO_UNIT.intersection(map(str.lower, parts)) or re.search(rf"\b{MAGNITUDE}|\d", words)
    letters = unit[2] is None and not all(len(part) > 2 or part in _SHORT_UNITS for part in parts)
    if changes or letters or (unit["raised"] and not words):  # the last: a power
        return _expression(bare)
    found = _expression(bare[: unit.start()].strip())
    scale = (unit["degree"] or "")[-1:] if not words else ""
    name = words + scale * (scale in "CFK") + "".join(filter(str.isdigit, (unit["raised"] or "").translate(_HIGH)))
    return None if found is None else replace(found, unit=name)


def _is_product(letters: str) -> bool:
    """Return True if letters are factors (ab, xyz) and not a word."""
    if len(letters) < 2 or letters.lower() in _SHORT_WORDS or letters in _SHORT_UNITS:
        return len(letters) < 2
    codes = sorted(map(ord, letters))
    return len(letters) == 2 or all(b - a == 1 for a, b in pairwise(codes))


def _expression(bare: str) -> Read | None:
    """Read mathematics without words."""
    if (found := _number(bare, bare)) is not None:
        return found
    # 3:4:5 is no quotient
    latex = _latex("=".join(f"({side.replace(':', ',')})" if side.count(":") > 1 else side for side in bare.split("=")))
    if latex is None:
        return None
    if (found := _number(latex, bare)) is not None:
        return found
    sides = re.split(r"(?<![<>!\\:])=", latex)
    if len(sides) > 1 and not re.search(r"[,;<>]|\\(?:le|ge|lt|gt|ne|in|approx|cup|pm)\b", latex) and (
        all(_is_name(side) or not re.search("[A-Za-z]", _COMMAND.sub("", re.sub(_TEXT, "", side))) for side in sides[:-1])
    ):  # fmt: skip
        last = _expression(sides[-1].strip())
        if last is not None and last.is_number and not any(_contradicts(side, last) for side in sides[:-1]):
            return replace(last, text=bare, name=sides[0].replace(" ", "") if _is_name(sides[0]) else "")
    try:
        real = not (should_treat_as_complex(latex) or re.search(r"(?<![A-Za-z\\_])[A-Za-z]*i(?![A-Za-z])", latex))
        value = latex2sympy(latex, is_real=real, convert_degrees=False, normalization_config=None)
    except Exception:  # the parser raises many kinds of exceptions
        return None
    if isinstance(value, sympy.FiniteSet) and all(isinstance(one, sympy.Eq) for one in value.args):
        names = {one.lhs for one in value.args}
        if len(names) == 1 and all(name.is_Symbol for name in names):  # x = 2 or x = 3
            return Read(bare, type(value)(*(one.rhs for one in value.args)), name=str(names.pop()))
        if {"x", "y", "z"}.issuperset(map(str, names)):  # y = 3, x = 4 is the point (4, 3)
            value = type(value)(*sorted(value.args, key=lambda one: str(one.lhs)))
    if isinstance(value, sympy.And) and all(getattr(one, "rel_op", "=")[0] in "<>" for one in value.args):
        less = (one.reversed if one.rel_op.startswith(">") else one for one in value.args)  # a > b > c is c < b < a
        value = type(value)(*sorted(less, key=sympy.default_sort_key))
    return Read(bare, value)


def _contradicts(side: str, last: Read) -> bool:
    """Return True if a side differs from the last one by more than rounding: 3 = 7, but not 1/3 = 0.33."""
    found = None if _is_name(side) else _with_unit(side.strip())
    if found is None or not found.is_number or found.unit or last.unit:
        return False
    a, b = (complex(_complex(one.value).evalf()) for one in (found, last))
    return abs(a - b) > abs(b) / 50 + 1e-9


def _number(text: str, bare: str) -> Read | None:
    # (2,500) is a pair, and 5k a product.
    number = None if (text[:1] == "(" and "," in text) or re.search(r"\d\s?[A-Za-z]$", text) else numeral(text)
    return None if number is None else Read(bare, sympy.Rational(number.value), number)


def _is_name(text: str) -> bool:
    return re.fullmatch(r"\s*(?:(?:\\angle\s*)?\\?[A-Za-z]+'?(?:_\{?\w+\}?)?(?:\([^()]*\))?)\s*", text) is not None


def _latex(bare: str) -> str | None:
    """Return LaTeX that the parser reads as intended; None for words and for adjacent numbers."""
    text = _GROUPED.sub(lambda found: re.sub(r"\D", "", found.group()), bare)
    text = _MIXED.sub(_improper, re.sub(r"(?<=\d)([½⅓⅔¼¾])", r" \1", text).translate(_SIGNS))
    text = _ROOT.sub(lambda found: rf"\sqrt{'[3]' if found[1] == '∛' else ''}{{{found[2] or found[3] or found[4]}}}", text)
    text = re.sub(r"[⁻⁺]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+", lambda found: f"^{{{found.group().translate(_HIGH)}}}", text)
    text = re.sub(r"\\\\(?![A-Za-z])|\\\\(?=.*\\end)|&", r" \g<0> ", text.replace("**", "^"))
    text = re.sub(r"(?<![A-Za-z\\])d(?=\s*\\)", "{d}", text)  # otherwise the d of a differential
    text = re.sub(r"_(\w)\s+", r"_{\1} ", text).replace("\\left", "").replace("\\right", "").replace("\\varnothing", "\\emptyset")
    if _JOINED.search(text) or any(
        word.lower() not in NAMES and not _is_product(word)
        for word in _WORD.findall(_COMMAND.sub(" ", re.sub(_TEXT, " ", text)))
        if word not in ("and", "or")
    ):
        return None
    text = re.sub(
        r"\b(sqrt|pi|sin|cos|tan|log|ln)(?![A-Za-z])",
        lambda f: f.group() if text[f.start() - 1 : f.start()] == "\\" else rf"\{f.group()} ",
        text,
    )
    return str(normalize_latex(text, _LATEX))


def _improper(found: re.Match[str]) -> str:
    whole, top, bottom = (int(found[n] or found[n + 2]) if n > 1 else int(found[1]) for n in (1, 2, 3))
    return rf"\frac{{{whole * bottom + top}}}{{{bottom}}}"


# -- find an answer in a text --------------------------------------------------------------------------

_SPAN = r"\$\$(?P<a>.+?)\$\$|\\\[(?P<b>.+?)\\\]|(?<!\\)\$(?P<c>[^$\n]+?)(?<!\\)\$|\\\((?P<d>.+?)\\\)"
_ATOM = (
    r"(?:\\[a-zA-Z]+(?:\{[^{}\n]*\})*|\\[%$]|[\[({][^()\[\]{}\n]{0,60}[)\]}]|[0-9π∞½⅓⅔¼¾]|[-+*/^=<>≤≥≠≈×÷·±√∛%°!|_{}()\u2212\u2013$€£¥₹⁰¹²³⁴-⁹⁻]"
    r"|(?<![A-Za-z])(?:[a-zA-Z]|sqrt|sin|cos|tan|log|ln|pi)(?![A-Za-z'])|[.,:](?=[0-9])|(?<=[0-9] ):(?= [0-9]))"
)
_RUN = re.compile(rf"{_SPAN}|(?P<e>{_ATOM}(?:[ ]?{_ATOM})*)", re.DOTALL)
_ANCHOR, _BOX = re.compile(r"(?i)\banswer\b"), re.compile(r"\\f?box(?:ed)?(?![A-Za-z])")
_CHOICE = re.compile(r"(?:\s|is\b|[:=*(])*([A-Z])[)*]*(?=[.;\s]*$|[.;:]\s|\n)")
_WORDS = re.compile(r"[A-Za-z]+(?:[ '-][A-Za-z]+)*")
_CORRECTS = re.compile(r"(?i)\b(?:wait|hmm|no|but|actually|rather|instead|wrong|mistake|sorry|oops|recheck)\b")
_TIMES = re.compile(
    rf"(?:\$\$?|\\[)\]])?(?P<times>(?:{GAP}{MAGNITUDE}){{1,3}}|{GAP}(?:\\?%|per ?cent\b)| (?P<power>squared|cubed)\b)"
)
_BETWEEN = re.compile(r"\s*(?:,\s*)?(?:and|or)\s*")


def answer_in(text: str) -> str | None:
    """Return the part of a text that is its answer: in a box, else in a tag, else the first after "answer", else the last; or
    None."""
    if boxes := list(_BOX.finditer(text)):
        # Boxes next to each other are one answer, unless the text between them takes the first ones back.
        text = text[max((found.end() for found in _CORRECTS.finditer(text, 0, boxes[-1].start())), default=0) :]
        inner = str(extract_boxed_content(text, "last"))
        return inner + _magnitude(text, text.rfind(f"{inner}}}") + len(inner) + 1)
    _, tag, after = text.rpartition("<answer>")
    if tag:
        inner = after.partition("</answer>")[0].strip()
        return inner if _WORDS.fullmatch(inner) or read(inner) else next(iter(_parts(inner)), None)
    if anchors := list(_ANCHOR.finditer(text)):
        after = text[anchors[-1].end() :]
        if found := [letter[1]] if (letter := _CHOICE.match(after)) else _parts(after):
            return found[0]
    found = _parts(text)
    return found[-1] if found else None


def _magnitude(text: str, end: int) -> str:
    """Return the words or power after a number's `end` that change its value: million, percent, squared."""
    found = _TIMES.match(text, end)
    return "" if found is None else "^2" if found["power"] == "squared" else "^3" if found["power"] else found["times"]


def _parts(text: str) -> list[str]:
    """Return the mathematical parts of prose, in order; alternatives joined by "and" or "or" are one part."""
    found: list[str] = []
    end = -1
    for match in _RUN.finditer(text):
        part = next(filter(None, match.groups()), "").strip()
        if match["e"] is not None:
            part = re.sub(
                r"^(?:[A-Za-z]\s+(?=[\d$\\-])|[=:*!)}\]/]\s*|-\s+)+|(?:\s+[a-zA-Z]|[\s!*:(\[{=]|(?<![\d])\.)+$", "", part
            )
            if not re.search(r"[0-9π∞½⅓⅔¼¾]|\\[a-z]", part):
                continue
        part += _magnitude(text, match.end()) * part[-1:].isdigit()
        if re.search(r"(?i)(?<![\d)] )\b(?:minus|negative) \Z", text[max(0, match.start() - 11) : match.start()]):
            part = f"-{part}"
        if end >= 0 and _BETWEEN.fullmatch(text[end : match.start()]):
            found[-1] += f", {part}"
        else:
            found.append(part)
        end = match.end()
    return found


# -- compare an answer with gold -----------------------------------------------------------------------

_FORMS = (
    sympy.Number, sympy.NumberSymbol, sympy.Add, sympy.Mul, sympy.Pow, sympy.Symbol, sympy.UnevaluatedExpr, sympy.exp,
    sympy.FiniteSet, sympy.Interval, sympy.Union, sympy.Tuple, sympy.MatrixBase, type(sympy.I), type(sympy.oo), type(-sympy.oo),
    sympy.core.relational.Relational, sympy.And, sympy.core.function.AppliedUndef, type(sympy.S.EmptySet), type(sympy.S.Reals),
    type(sympy.true), type(sympy.false),
)  # fmt: skip
"""Types of expressions allowed in every answer; others (integrals, sums, matrix products, ...) only if gold has them."""
_COMPUTED = (sympy.factorial, sympy.binomial, sympy.gamma, sympy.Mod, sympy.floor, sympy.ceiling, sympy.Max, sympy.Min)


def _is_number(value: Any) -> bool:
    return isinstance(value, sympy.Expr) and bool(value.is_number or {str(symbol) for symbol in value.free_symbols} == {"i"})


def _nodes(value: Any) -> Iterator[Any]:
    yield value
    for part in value.flat() if isinstance(value, sympy.MatrixBase) else getattr(value, "args", ()):
        yield from _nodes(part)


def is_settled(said: Read, wanted: Read) -> bool:
    """Return True if an answer is worked out: gold's text, a number in lowest terms, or an expression in final form."""
    plain = [re.sub(r"\\left|\\right|\\[,;:!]|(?<=\\)[dt](?=frac)|[\s$]", "", text) for text in (said.text, wanted.text)]
    if plain[0] == plain[1]:
        return True
    if said.number is not None:
        return said.number.lowest
    kinds = {type(node) for node in _nodes(wanted.value)}
    symbolic = bool(getattr(said.value, "free_symbols", ())) and not wanted.is_number
    for node in _nodes(said.value):
        elementary = symbolic and isinstance(node, sympy.Function) and not isinstance(node, _COMPUTED)
        if not (isinstance(node, _FORMS) or elementary or type(node) in kinds):
            return False
    if isinstance(said.value, sympy.Rational):
        return False  # the text was not a number: the parser has computed it
    if said.text.count("\\begin") > wanted.text.count("\\begin"):
        return False  # a matrix product, which the parser has computed
    return all(_lowest(part, wanted) for part in _elements(said.value))


def _elements(value: Any) -> Iterator[Any]:
    """Yield the numbers in a value: itself, or the elements of a set, tuple, interval, relation or matrix."""
    if _is_number(value):
        yield value
    elif isinstance(value, (sympy.Set, sympy.Tuple, sympy.MatrixBase, sympy.core.relational.Relational, sympy.And)):
        for part in value.flat() if isinstance(value, sympy.MatrixBase) else value.args:
            yield from _elements(part)


def _lowest(value: Any, wanted: Read) -> bool:
    """Return True if a number needs no more computation: no sum or power of numbers, no like terms, no integer root."""
    if isinstance(value, (sympy.Number, sympy.NumberSymbol)) or get_pct_val(value) is not None:
        return True
    simple = sympy.count_ops(value) <= sympy.count_ops(wanted.value) and not wanted.number
    if any(
        isinstance(node, sympy.Pow) and node.base.is_Rational and node.exp.is_Integer and node.exp != -1 for node in _nodes(value)
    ):
        return bool(simple)
    done = sympy.expand(_complex(value).doit())
    if done.is_Rational:
        return False
    return bool(simple or sympy.count_ops(value) <= sympy.count_ops(done))


def equal(wanted: Read, said: Read, strict: bool) -> bool:
    """Return True if two answers are equal: numbers to six places, all else by math-verify."""
    if strict and wanted.name and said.name and wanted.name != said.name:
        return False
    units = [_symbols(one.unit) for one in (wanted, said)]
    if all(units) and units[0] != units[1]:
        return False
    if _is_equation(wanted.value) != _is_equation(said.value):
        return False  # 2x = 7 is not 7
    if wanted.number is not None and said.number is not None:
        return _same_number(wanted.number, said.number)
    if wanted.is_number and said.is_number:
        inexact = any(one.value.has(sympy.Float) or (one.number is not None and not one.number.exact) for one in (wanted, said))
        return _close(wanted.value, said.value, inexact)
    if not verify(wanted.value, said.value, strict=strict, timeout_seconds=0):
        return False
    pairs = [sorted(_elements(one.value), key=sympy.default_sort_key) for one in (wanted, said)]
    return len(pairs[0]) != len(pairs[1]) or all(map(_close, *pairs))


def _symbols(unit: str) -> list[str] | None:
    """Return the symbols of a unit and its power, or None if a symbol is unknown."""
    bare = unit.rstrip("0123456789").lower()
    found = [_SPELLED.get(part.strip(), part.strip()) for part in re.split(r"/|\bper\b", bare)]
    return [*found, unit[len(bare) :]] if _SYMBOLS.issuperset(found) else None


def _is_equation(value: Any) -> bool:
    """Return True if a value is an equation that does not define a name."""
    return isinstance(value, sympy.Eq) and not (value.lhs.is_Symbol or isinstance(value.lhs, sympy.core.function.AppliedUndef))


def _same_number(wanted: Numeral, said: Numeral) -> bool:
    size = abs(wanted.value)
    near = PLACES
    while size and size < near * 10**5 and near > Fraction(1, 10**400):
        near /= 10
    room = Fraction(0) if wanted.exact and said.exact else near if size else Fraction(0)
    if wanted.percent == said.percent:
        return said.value == wanted.value or abs(said.value - wanted.value) < room
    if said.value == wanted.value and (wanted.percent or wanted.value.denominator == 1):
        return True  # 50% equals 50, as in math-verify
    share = said.value / 100 if said.percent else said.value
    return abs(share - (wanted.value / 100 if wanted.percent else wanted.value)) <= (near / 100 if wanted.percent else room)


def _complex(value: Any) -> Any:
    """Replace the letter i, the only one in a number, by the imaginary unit."""
    return value.subs(dict.fromkeys(value.free_symbols, sympy.I))


def _close(wanted: Any, said: Any, inexact: bool | None = None) -> bool:
    if wanted == said:
        return True
    a, b = (_complex(value).evalf(DIGITS + 20) for value in (wanted, said))
    if not (a.is_finite and b.is_finite):
        return False
    if inexact is None:
        inexact = wanted.has(sympy.Float) or said.has(sympy.Float)
    room = min(1, 10 * abs(a)) / sympy.Integer(10) ** 6 if inexact else (abs(a) or 1) / sympy.Integer(10) ** DIGITS
    return bool(abs(a - b) < room)


@cache
def gold(text: str) -> Read | None:
    """Read a gold answer; None if it is not mathematics as a whole."""
    found = read(extract_boxed_content(text, "last"))
    return None if found is None or found.value in (sympy.nan, sympy.zoo) else found


def right(wanted: Read, text: str, strict: bool) -> bool:
    said = read(text)
    if said is None:
        return False
    *named, last = text.split("=")
    if not said.name and "=" not in wanted.text and named and all(_is_name(_bare(side)) for side in named):
        said = read(last) or said
    if isinstance(said.value, sympy.Expr) and "\\approx" in text.replace("≈", "\\approx"):
        sides = (read(side) for side in text.replace("≈", "\\approx").split("\\approx") if not _is_name(_bare(side)))
        said = next((side for side in sides if side is not None and is_settled(side, wanted)), said)
    return is_settled(said, wanted) and equal(wanted, said, strict)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Compare an answer with gold; return "right" and how both were read, or `{"unread": text}` for unreadable gold."""
    wanted: list[Read] = []
    for text in request["gold"]:
        try:
            found = gold(text)
        except (Exception, RecursionError):  # the gold is at fault, not the answer
            found = None
        if found is None:
            return {"unread": text}
        wanted.append(found)
    reply = {"right": False, "wanted": [one.as_text() for one in wanted]}
    if request["answer"] is None:
        return reply
    if request["boxed"] and not _BOX.search(request["answer"]):
        return {**reply, "why": "no \\boxed{} in it"}
    text = answer_in(request["answer"])
    if text is None or not text.strip():
        return {**reply, "why": "no mathematics in it" if text is None else "an empty \\boxed{}"}
    if _WORDS.fullmatch(text) and read(text) is None:
        text = rf"\text{{{text}}}"  # as gold has words
    said = read(text)
    reply |= {"said": text[:400], "as": None if said is None else said.as_text()}
    if said is None:
        return {**reply, "why": "it could not be read as a whole"}
    if any(right(one, text, request["strict"]) for one in wanted):
        return {**reply, "right": True}
    return reply if any(is_settled(said, one) for one in wanted) else {**reply, "why": "not worked out"}


def serve(pipe: Connection) -> None:
    """Answer requests until the pipe closes or memory reaches WORN_BYTES. The kernel sends SIGXCPU at the CPU limit."""
    worn = False
    while not worn:
        request = json.loads(pipe.recv_bytes())
        used = resource.getrusage(resource.RUSAGE_SELF)
        until = math.ceil(used.ru_utime + used.ru_stime) + request["seconds"]
        resource.setrlimit(resource.RLIMIT_CPU, (until, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        try:
            reply = answer(request)
        except (Exception, RecursionError) as fault:  # caused by the policy's text: gold was read before
            reply = {"right": False, "why": type(fault).__name__}
        # Not `ru_maxrss`, which starts at the size of the parent process.
        worn = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() > WORN_BYTES
        pipe.send_bytes(json.dumps({**reply, "worn": worn}).encode())


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(EOFError, OSError):
        serve(Connection(int(sys.argv[1])))

"""Calls as Python: `[f(a=1), g()]` (Llama 4), the same between control tokens (LFM2), one per line in a tag (Olmo 3).

Python's own parser reads less than a policy needs: a tool `get-weather`, an argument `from`, a month `07` and a line break in a
string are no Python. The reader here takes them, so that every name that a tool may have can be called.
"""

from __future__ import annotations

import ast
import keyword
import re
import warnings
from collections.abc import Sequence

from agentrl.render.parsers.syntax import Parsed, Parser, Syntax, numbered
from agentrl.render.toolcalls import MOST_VALUES, blocks, check_json, malformed, within_most
from agentrl.trajectory import Json, ToolCall

_NAME = re.compile(r"[^\s()\[\]{},='\"<>`;]+")
_LOOKS_LIKE_CALLS = re.compile(r"\[\s*(?!\d)[^\s()\[\]{},='\"<>`;]+\s*\(")
_BLANK = re.compile(r"\s*")
_NUMBER = re.compile(r"[+-]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?")
_WORD = re.compile(r"[A-Za-z_]\w*")
_STRING = re.compile(
    r"(?P<prefix>[rRuU]?)(?:\"\"\"(?P<d3>(?:[^\\]|\\.)*?)\"\"\"|'''(?P<s3>(?:[^\\]|\\.)*?)'''"
    r"|\"(?P<d>(?:[^\"\\]|\\.)*)\"|'(?P<s>(?:[^'\\]|\\.)*)')",
    re.DOTALL,
)
_WORDS: dict[str, Json] = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_MOST = 200_000
"""Characters of a list of calls."""
_MAX_DEPTH = 64
_START, _END = "<|python_start|>", "<|python_end|>"


def parse_pythonic(text: str) -> Parsed:
    """A list of calls as the whole turn, or between Llama 4's tokens after what is said; anything else is prose."""
    said, mark, body = text.partition(_START)
    body = (body.partition(_END)[0] if mark else text).strip()
    if _LOOKS_LIKE_CALLS.match(body) is None:
        return text.strip(), ()
    return said.strip() if mark else "", within_most(_calls(body, body, "call_0"))


def _between(opening: str, closing: str) -> Parser:
    def parse(text: str) -> Parsed:
        def read(start: int, call_id: str) -> tuple[list[ToolCall], int]:
            close = text.find(closing, start)
            stop = len(text) if close < 0 else close + len(closing)
            raw = text[start:stop]
            if close < 0:
                return [malformed(call_id, raw, f"no {closing}")], stop
            return _calls(text[start + len(opening) : close].strip(), raw, call_id), stop

        return blocks(text, opening, closing, read)

    return parse


def _calls(body: str, raw: str, call_id: str) -> list[ToolCall]:
    if len(body) > _MOST:
        return [malformed(call_id, raw, f"calls of {len(body)} characters; at most {_MOST} are read")]
    try:
        calls = [ToolCall(name, arguments, raw=raw) for name, arguments in _Reader(body).calls()]
    except ValueError as problem:
        return [malformed(call_id, raw, f"not a list of calls in Python: {problem}")]
    return numbered(calls, call_id) if calls else [malformed(call_id, raw, "expected a call, got an empty list")]


class _Reader:
    """Reads calls and literals of Python from `text`; every method raises ValueError at what is neither."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.values = text, 0, 0

    def calls(self) -> list[tuple[str, dict[str, Json]]]:
        """`[f(), g()]`, or calls separated by commas or line breaks."""
        closing = "]" if self.take("[") else ""
        found: list[tuple[str, dict[str, Json]]] = []
        while not self.ends(closing):
            found.append(self.call())
            self.take(",")
        if self.at < len(self.text):
            raise self.unexpected("the end")
        return found

    def ends(self, closing: str) -> bool:
        """Whether the list is over: its bracket is taken, or, without one, the text is at its end."""
        self.blank()
        return self.take(closing) if closing else self.at == len(self.text)

    def call(self) -> tuple[str, dict[str, Json]]:
        name = self.match(_NAME, "the name of a function")
        self.need("(")
        arguments: dict[str, Json] = {}
        while not self.take(")"):
            if self.take("**"):  # how a name is written that Python takes for no argument
                more = self.value(1)
                if not isinstance(more, dict):
                    raise ValueError("** is no argument, unless a dict follows")
            else:
                more = self.argument()
            if twice := arguments.keys() & more.keys():
                raise ValueError(f"the argument {min(twice)} is given twice")
            arguments |= more
            if not self.take(","):
                self.need(")")
                break
        check_json(arguments)
        return name, arguments

    def argument(self) -> dict[str, Json]:
        begin = self.at
        named = _NAME.match(self.text, self.at)
        self.at = named.end() if named else self.at
        if named is None or not self.take("=") or self.text.startswith("=", self.at):
            self.at = begin
            self.value(1)  # a broken value is named as such
            raise ValueError("an argument without a name")
        return {named.group(): self.value(1)}

    def value(self, depth: int) -> Json:
        self.values += 1
        if self.values > MOST_VALUES or depth > _MAX_DEPTH:
            raise ValueError("nested too deep" if depth > _MAX_DEPTH else f"more than {MOST_VALUES} values")
        if self.take("["):
            return self.items("]", depth)[0]
        if self.take("("):
            items, comma = self.items(")", depth)
            return items if comma or not items else items[0]
        if self.take("{"):
            return self.members(depth)
        if _STRING.match(self.text, self.at):
            return self.string()
        number = _NUMBER.match(self.text, self.at)
        if number is not None and not re.match(r"\w", self.text[number.end() : number.end() + 1]):
            self.at = number.end()
            return _number(number.group())
        word = _WORD.match(self.text, self.at)
        if word is None or word.group() not in _WORDS:
            raise self.unexpected("a string in quotes, a number, True, False, None, a list or a dict")
        self.at = word.end()
        return _WORDS[word.group()]

    def items(self, closing: str, depth: int) -> tuple[list[Json], bool]:
        """The values up to `closing`, and whether a comma stands between or after them."""
        found: list[Json] = []
        comma = False
        while not self.take(closing):
            found.append(self.value(depth + 1))
            if not self.take(","):
                self.need(closing)
                break
            comma = True
        return found, comma

    def members(self, depth: int) -> dict[str, Json]:
        found: dict[str, Json] = {}
        while not self.take("}"):
            key = self.value(depth + 1)
            if not self.take(":"):
                raise ValueError(f"{self.unexpected(repr(':'))} (a set is not JSON)")
            if not isinstance(key, str):
                raise ValueError("the keys of a dict must be strings")
            found[key] = self.value(depth + 1)
            if not self.take(","):
                self.need("}")
                break
        return found

    def string(self) -> str:
        """One literal, or several in a row, which Python joins."""
        parts: list[str] = []
        while (found := _STRING.match(self.text, self.at)) is not None:
            inner = next(part for part in found.group("d3", "s3", "d", "s") if part is not None)
            parts.append(inner if found.group("prefix") in ("r", "R") else _unescaped(inner))
            self.at = found.end()
            self.blank()
        return "".join(parts)

    def blank(self) -> None:
        found = _BLANK.match(self.text, self.at)
        self.at = found.end() if found else self.at

    def take(self, mark: str) -> bool:
        """Step over `mark`, if it stands here after blanks; then over the blanks that follow it, too."""
        self.blank()
        if not self.text.startswith(mark, self.at):
            return False
        self.at += len(mark)
        self.blank()
        return True

    def need(self, mark: str) -> None:
        if not self.take(mark):
            raise self.unexpected(repr(mark))

    def match(self, pattern: re.Pattern[str], expected: str) -> str:
        self.blank()
        found = pattern.match(self.text, self.at)
        if found is None:
            raise self.unexpected(expected)
        self.at = found.end()
        return found.group()

    def unexpected(self, expected: str) -> ValueError:
        rest = self.text[self.at : self.at + 20]
        return ValueError(f"expected {expected}, got {rest!r}" if rest else f"expected {expected}, but the text ends")


def _number(text: str) -> Json:
    digits = text.replace("_", "")
    try:
        value: int | float = int(digits)
    except ValueError:
        value = float(digits)
    return value  # `check_json` refuses infinities


def _unescaped(inner: str) -> str:
    if "\\" not in inner:
        return inner
    # Line breaks and quotes stand for themselves in a policy's strings, whatever Python says.
    quoted = re.sub(r"\\.|[\n\r\"\x00]", lambda found: _SAFE.get(found.group(), found.group()), inner, flags=re.DOTALL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an unknown escape stays as it is, as in Python
        try:
            return str(ast.literal_eval(f'"{quoted}"'))
        except SyntaxError as problem:
            raise ValueError(f"a string with a broken escape: {problem.msg}") from None


_SAFE = {"\n": "\\n", "\r": "\\r", '"': '\\"', "\x00": "\\x00"}


def _write(calls: Sequence[ToolCall]) -> str:
    return "[" + ", ".join(_written(call) for call in calls) + "]"


def _written(call: ToolCall) -> str:
    return f"{call.name}({', '.join(_argument(key, value) for key, value in (call.arguments or {}).items())})"


def _argument(key: str, value: Json) -> str:
    plain = key.isidentifier() or keyword.iskeyword(key)
    return f"{key}={value!r}" if plain else f"**{ {key: value}!r}"


_LFM, _LFM_END = "<|tool_call_start|>", "<|tool_call_end|>"
_OLMO, _OLMO_END = "<function_calls>", "</function_calls>"
LFM2 = Syntax(
    "lfm2",
    _between(_LFM, _LFM_END),
    seen=lambda call: _LFM in call,
    write=lambda calls: _LFM + _write(calls) + _LFM_END,
    asked=lambda prompt: "<|tool_list_start|>" in prompt,
    opens=(_LFM, _LFM_END),
)
OLMO = Syntax("olmo", _between(_OLMO, _OLMO_END), seen=lambda call: _OLMO in call and "(" in call, opens=(_OLMO, _OLMO_END))
PYTHONIC = Syntax("pythonic", parse_pythonic, seen=lambda call: _LOOKS_LIKE_CALLS.search(call) is not None, write=_write)

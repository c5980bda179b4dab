"""Tool-call syntaxes in tags or as Python calls."""

from __future__ import annotations

import ast
import keyword
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from agentrl.data.trajectory import Json, ToolCall
from agentrl.render.tool_calls import (
    CLOSE,
    MOST_VALUES,
    OPEN,
    ForTools,
    Parsed,
    Parser,
    Syntax,
    argument_value,
    blocks,
    broken_call,
    check_json,
    malformed_call,
    number_block,
    skip_blanks,
    strict_json,
    within_most,
)

# Gemma

_NAME = re.compile(r"call:([^{}\s<]+)\{")
_BARE = re.compile(r"[^,{}\[\]<]*")
_KEY = re.compile(r"([^:{}\[\],<]*):")
_MAX_DEPTH = 64


@dataclass(frozen=True)
class _Tokens:
    open: str
    close: str
    quote: str


def _parser(tokens: _Tokens) -> Parser:
    def parse(text: str) -> Parsed:
        def read(start: int, call_id: str) -> tuple[list[ToolCall], int]:
            name = ""
            try:
                head = _NAME.match(text, start + len(tokens.open))
                if head is None:
                    raise ValueError("expected call:NAME{")
                name = head.group(1)
                arguments, end = _GemmaReader(text, tokens.quote).members(head.end(), 1)
                end = skip_blanks(text, end)
                if not text.startswith(tokens.close, end):
                    raise ValueError(f"expected {tokens.close} after the arguments")
            except ValueError as problem:
                return broken_call(text, start, (tokens.open, tokens.close), call_id, str(problem), name)
            stop = end + len(tokens.close)
            return [ToolCall(name, arguments, id=call_id, raw=text[start:stop])], stop

        return blocks(text, tokens.open, tokens.close, read)

    return parse


class _GemmaReader:
    """Reads values of the form at a position of `text`; every method raises ValueError for anything else."""

    def __init__(self, text: str, quote: str) -> None:
        self.text, self.quote, self.values = text, quote, 0

    def value(self, at: int, depth: int) -> tuple[Json, int]:
        text = self.text
        self.values += 1
        if self.values > MOST_VALUES:
            raise ValueError(f"more than {MOST_VALUES} values")
        if depth > _MAX_DEPTH:
            raise ValueError(f"nested deeper than {_MAX_DEPTH}")
        at = skip_blanks(text, at)
        if text.startswith(self.quote, at):
            return self.string(at)
        if text.startswith("{", at):
            return self.members(at + 1, depth + 1)
        if text.startswith("[", at):
            return self.items(at + 1, depth + 1)
        bare = _BARE.match(text, at)
        word = bare.group().strip() if bare else ""
        if not bare or not word:
            raise ValueError("expected a value")
        try:
            value, end = strict_json(word)
        except ValueError:
            value, end = "", 0
        if word[end:].strip() or isinstance(value, str):
            raise ValueError(f"expected true, false, null, a number or a string between {self.quote}, got {word[:40]!r}")
        return value, bare.end()

    def string(self, at: int) -> tuple[str, int]:
        begin = at + len(self.quote)
        end = self.text.find(self.quote, begin)
        if end < 0:
            raise ValueError(f"no {self.quote} at the end of a string")
        return self.text[begin:end], end + len(self.quote)

    def members(self, at: int, depth: int) -> tuple[dict[str, Json], int]:
        found: dict[str, Json] = {}
        at = skip_blanks(self.text, at)
        if self.text.startswith("}", at):
            return found, at + 1
        while True:
            at = skip_blanks(self.text, at)
            if self.text.startswith(self.quote, at):
                key, at = self.string(at)
                at = skip_blanks(self.text, at)
                if not self.text.startswith(":", at):
                    raise ValueError("expected ':' after a key")
                at += 1
            else:
                match = _KEY.match(self.text, at)
                if match is None:
                    raise ValueError("expected a key and ':'")
                key, at = match.group(1).strip(), match.end()
            found[key], at = self.value(at, depth)
            at = skip_blanks(self.text, at)
            if self.text.startswith("}", at):
                return found, at + 1
            if not self.text.startswith(",", at):
                raise ValueError("expected ',' or '}' after a value")
            at += 1

    def items(self, at: int, depth: int) -> tuple[list[Json], int]:
        found: list[Json] = []
        at = skip_blanks(self.text, at)
        if self.text.startswith("]", at):
            return found, at + 1
        while True:
            item, at = self.value(at, depth)
            found.append(item)
            at = skip_blanks(self.text, at)
            if self.text.startswith("]", at):
                return found, at + 1
            if not self.text.startswith(",", at):
                raise ValueError("expected ',' or ']' after an item")
            at += 1


_GEMMA4 = _Tokens("<|tool_call>", "<tool_call|>", '<|"|>')
_FUNCTION_GEMMA = _Tokens("<start_function_call>", "<end_function_call>", "<escape>")


def _syntax(name: str, tokens: _Tokens, end: str) -> Syntax:
    seen = f"{tokens.open}call:"
    return Syntax(name, _parser(tokens), seen=lambda call: seen in call, ends=(end,), opens=(tokens.open, tokens.close))


GEMMA = _syntax("gemma", _GEMMA4, "<|tool_response>")
FUNCTION_GEMMA = _syntax("function_gemma", _FUNCTION_GEMMA, "<start_function_response>")


# GLM

_GLM_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


def parse_glm(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Parsed:
    """Strings are written as they are and all else as JSON, so values are read by the tools' schemas as in `parse_qwen_xml`."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}

    def read(start: int, call_id: str) -> tuple[list[ToolCall], int]:
        close = text.find(CLOSE, start)
        stop = len(text) if close < 0 else close + len(CLOSE)
        raw = text[start:stop]
        if close < 0:
            return [malformed_call(call_id, raw, f"no {CLOSE}")], stop
        return [_call(text[start + len(OPEN) : close], raw, call_id, schemas if tools else None)], stop

    return blocks(text, OPEN, CLOSE, read)


def _call(body: str, raw: str, call_id: str, schemas: Mapping[str, Mapping[str, Any]] | None) -> ToolCall:
    position = body.find(_GLM_KEY) if _GLM_KEY in body else len(body)
    name = body[:position].strip()
    if not name or "<" in name or "\n" in name:
        return malformed_call(call_id, raw, "expected a function name")
    schema = None if schemas is None else schemas.get(name, {})
    arguments: dict[str, Json] = {}
    while (pair := _pair(body, position)) is not None:
        key, value, position = pair
        arguments[key] = argument_value(value, key, schema)
    if body[position:].strip():
        return malformed_call(call_id, raw, "expected <arg_key>KEY</arg_key> and <arg_value>value</arg_value>", name)
    return ToolCall(name=name, arguments=arguments, id=call_id, raw=raw)


def _pair(body: str, position: int) -> tuple[str, str, int] | None:
    """Key, value and the position after the pair that begins at `position`; None without a pair. Each find looks only at the text
    that it takes: an expression for the pair would look through the rest of the text for every key without a value."""
    begin = skip_blanks(body, position)
    key_end = body.find(_KEY_END, begin) if body.startswith(_GLM_KEY, begin) else -1
    if key_end < 0:
        return None
    value = skip_blanks(body, key_end + len(_KEY_END))
    end = body.find(_VALUE_END, value) if body.startswith(_VALUE, value) else -1
    if end < 0 or body.find(_GLM_KEY, value, end) >= 0:  # the value has no end of its own
        return None
    return body[begin + len(_GLM_KEY) : key_end].strip(), body[value + len(_VALUE) : end], end + len(_VALUE_END)


GLM = Syntax(
    "glm",
    ForTools(lambda tools: partial(parse_glm, tools=tools)),
    seen=lambda call: "<arg_key>" in call,
    ends=("<|observation|>",),
    opens=(OPEN, CLOSE),
    close=CLOSE,
)


# Qwen3-Coder

_BEGINS = re.compile("<tool_call>|<function=")
"""The policy may leave out the tag around a function, as both servers allow."""
_FUNCTION, _FUNCTION_END = re.compile(r"<function=([^>\n]*)>"), "</function>"
_PARAMETER, _PARAMETER_END = re.compile(r"\s*<parameter=([^>\n]*)>\n?"), "</parameter>"


def parse_qwen_xml(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Parsed:
    """`<tool_call><function=NAME><parameter=KEY>value</parameter>...</function></tool_call>`.

    Values in this syntax are untyped. With the tools' schemas a value is read as its declared type (as a string
    if none is declared); without any tools, as JSON if it is valid JSON and as a string otherwise.
    """
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    known = schemas if tools else None

    def read(start: int, call_id: str) -> tuple[list[ToolCall], int]:
        wrapped = text.startswith(OPEN, start)
        mark = CLOSE if wrapped else _FUNCTION_END
        close = text.find(mark, start)
        stop = len(text) if close < 0 else close + len(mark)
        body = text[start + len(OPEN) : close] if wrapped else text[start:stop]
        if not wrapped and text.startswith(CLOSE, end := skip_blanks(text, stop)):
            stop = end + len(CLOSE)
        return [_xml_call(body, text[start:stop], call_id, known, "" if close >= 0 else mark)], stop

    return blocks(text, _BEGINS, CLOSE, read)


def _xml_call(body: str, raw: str, call_id: str, schemas: Mapping[str, Mapping[str, Any]] | None, missing: str) -> ToolCall:
    body = "" if missing else body.strip()
    head = _FUNCTION.match(body)
    if head is None or head.end() > len(body) - len(_FUNCTION_END) or not body.endswith(_FUNCTION_END):
        return malformed_call(call_id, raw, f"no {missing}" if missing else "expected <function=NAME>...</function>")
    name, inner = head.group(1).strip(), body[head.end() : len(body) - len(_FUNCTION_END)]
    if not name:
        return malformed_call(call_id, raw, "expected a function name")
    schema = None if schemas is None else schemas.get(name, {})
    arguments: dict[str, Json] = {}
    position = 0
    # From one to the next, and never by a search: what stands between two parameters would be dropped without a word.
    while (parameter := _PARAMETER.match(inner, position)) is not None:
        end = inner.find(_PARAMETER_END, parameter.end())
        # A value that goes on over the next parameter has lost its end, and the call would be made with a wrong argument.
        if end < 0 or inner.find("<parameter=", parameter.end(), end) >= 0:
            return malformed_call(call_id, raw, f"no {_PARAMETER_END} after the value of {parameter.group(1).strip()!r}", name)
        key = parameter.group(1).strip()
        arguments[key] = argument_value(inner[parameter.end() : end].removesuffix("\n"), key, schema)
        position = end + len(_PARAMETER_END)
    if inner[position:].strip():
        return malformed_call(call_id, raw, "expected <parameter=KEY>value</parameter>", name)
    return ToolCall(name=name, arguments=arguments, id=call_id, raw=raw)


QWEN_XML = Syntax(
    "qwen_xml",
    ForTools(lambda tools: partial(parse_qwen_xml, tools=tools)),
    seen=lambda call: "<function=" in call,
    opens=(OPEN, "<function=", CLOSE),
    close=CLOSE,
)


# Calls as Python: `[f(a=1), g()]` (Llama 4), the same between control tokens (LFM2), one per line in a tag (Olmo 3).
#
# Python's own parser reads less than a policy needs: a tool `get-weather`, an argument `from`, a month `07` and a line break in a
# string are no Python. The reader here takes them, so that every name that a tool may have can be called.

_PYTHON_NAME = re.compile(r"[^\s()\[\]{},='\"<>`;]+")
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
_START, _END = "<|python_start|>", "<|python_end|>"


def parse_pythonic(text: str) -> Parsed:
    """A list of calls as the whole turn, or between Llama 4's tokens after the spoken text; anything else is prose."""
    first, *parts = text.split(_START)
    said, calls = ([first], list[ToolCall]()) if parts else ([], [])
    for part in parts or [text]:
        body, _, after = part.partition(_END) if parts else (text, "", "")
        if _LOOKS_LIKE_CALLS.match(body.strip()) is None:
            said.append(body)
        else:
            calls += _calls(body.strip(), body.strip(), f"call_{len(calls)}")
        said.append(after)
    return ("".join(said) if calls else text).strip(), within_most(calls)


def _parse_between(opening: str, closing: str) -> Parser:
    def parse(text: str) -> Parsed:
        def read(start: int, call_id: str) -> tuple[list[ToolCall], int]:
            close = text.find(closing, start)
            stop = len(text) if close < 0 else close + len(closing)
            raw = text[start:stop]
            if close < 0:
                return [malformed_call(call_id, raw, f"no {closing}")], stop
            return _calls(text[start + len(opening) : close].strip(), raw, call_id), stop

        return blocks(text, opening, closing, read)

    return parse


def _calls(body: str, raw: str, call_id: str) -> list[ToolCall]:
    if len(body) > _MOST:
        return [malformed_call(call_id, raw, f"calls of {len(body)} characters; at most {_MOST} are read")]
    try:
        calls = [ToolCall(name, arguments, raw=raw) for name, arguments in _PythonReader(body).calls()]
    except ValueError as problem:
        return [malformed_call(call_id, raw, f"not a list of calls in Python: {problem}")]
    return number_block(calls, call_id) if calls else [malformed_call(call_id, raw, "expected a call, got an empty list")]


class _PythonReader:
    """Reads calls and literals of Python from `text`; every method raises ValueError for anything else."""

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
            raise self.unexpected_text("the end")
        return found

    def ends(self, closing: str) -> bool:
        """Return True if the list is over: its bracket is taken, or, without one, the text is at its end."""
        self.blank()
        return self.take(closing) if closing else self.at == len(self.text)

    def call(self) -> tuple[str, dict[str, Json]]:
        name = self.match(_PYTHON_NAME, "the name of a function")
        self.require("(")
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
                self.require(")")
                break
        check_json(arguments)
        return name, arguments

    def argument(self) -> dict[str, Json]:
        begin = self.at
        named = _PYTHON_NAME.match(self.text, self.at)
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
            raise self.unexpected_text("a string in quotes, a number, True, False, None, a list or a dict")
        self.at = word.end()
        return _WORDS[word.group()]

    def items(self, closing: str, depth: int) -> tuple[list[Json], bool]:
        """The values up to `closing`, and whether a comma stands between or after them."""
        found: list[Json] = []
        comma = False
        while not self.take(closing):
            found.append(self.value(depth + 1))
            if not self.take(","):
                self.require(closing)
                break
            comma = True
        return found, comma

    def members(self, depth: int) -> dict[str, Json]:
        found: dict[str, Json] = {}
        while not self.take("}"):
            key = self.value(depth + 1)
            if not self.take(":"):
                raise ValueError(f"{self.unexpected_text(repr(':'))} (a set is not JSON)")
            if not isinstance(key, str):
                raise ValueError("the keys of a dict must be strings")
            found[key] = self.value(depth + 1)
            if not self.take(","):
                self.require("}")
                break
        return found

    def string(self) -> str:
        """One literal, or several in a row, which Python joins."""
        parts: list[str] = []
        while (found := _STRING.match(self.text, self.at)) is not None:
            inner = next(part for part in found.group("d3", "s3", "d", "s") if part is not None)
            parts.append(inner if found.group("prefix") in ("r", "R") else _unescape_text(inner))
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

    def require(self, mark: str) -> None:
        if not self.take(mark):
            raise self.unexpected_text(repr(mark))

    def match(self, pattern: re.Pattern[str], expected: str) -> str:
        self.blank()
        found = pattern.match(self.text, self.at)
        if found is None:
            raise self.unexpected_text(expected)
        self.at = found.end()
        return found.group()

    def unexpected_text(self, expected: str) -> ValueError:
        rest = self.text[self.at : self.at + 20]
        return ValueError(f"expected {expected}, got {rest!r}" if rest else f"expected {expected}, but the text ends")


def _number(text: str) -> Json:
    digits = text.replace("_", "")
    try:
        value: int | float = int(digits)
    except ValueError:
        value = float(digits)
    return value  # `check_json` refuses infinities


def _unescape_text(inner: str) -> str:
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
    return "[" + ", ".join(_write_value(call) for call in calls) + "]"


def _write_value(call: ToolCall) -> str:
    return f"{call.name}({', '.join(_argument(key, value) for key, value in (call.arguments or {}).items())})"


def _argument(key: str, value: Json) -> str:
    plain = key.isidentifier() or keyword.iskeyword(key)
    return f"{key}={value!r}" if plain else f"**{ {key: value}!r}"


_LFM, _LFM_END = "<|tool_call_start|>", "<|tool_call_end|>"
_OLMO, _OLMO_END = "<function_calls>", "</function_calls>"
LFM2 = Syntax(
    "lfm2",
    _parse_between(_LFM, _LFM_END),
    seen=lambda call: _LFM in call,
    write=lambda calls: _LFM + _write(calls) + _LFM_END,
    asked=lambda prompt: "<|tool_list_start|>" in prompt,
    opens=(_LFM, _LFM_END),
)
OLMO = Syntax("olmo", _parse_between(_OLMO, _OLMO_END), seen=lambda call: _OLMO in call and "(" in call, opens=(_OLMO, _OLMO_END))
PYTHONIC = Syntax("pythonic", parse_pythonic, seen=lambda call: _LOOKS_LIKE_CALLS.search(call) is not None, write=_write)

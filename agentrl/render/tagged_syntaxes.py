"""Tool-call syntaxes with tags or Python calls."""

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
    Syntax,
    argument_value,
    blocks,
    broken_call,
    check_json,
    closed_blocks,
    limit_calls,
    malformed_call,
    skip_blanks,
    strict_json,
)
from agentrl.utils.parsing import own_name, put_once

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


def _parse_gemma(text: str, tokens: _Tokens) -> Parsed:
    def read(start: int, call_id: str) -> tuple[list[ToolCall], int]:
        name = ""
        try:
            head = _NAME.match(text, start + len(tokens.open))
            if head is None:
                raise ValueError("expected call:NAME{")
            name = head.group(1)
            reader = _GemmaReader(text, head.end(), tokens.quote)
            arguments, end = reader.members(1), skip_blanks(text, reader.at)
            if not text.startswith(tokens.close, end):
                raise ValueError(f"expected {tokens.close} after the arguments")
        except ValueError as problem:
            return broken_call(text, start, (tokens.open, tokens.close), call_id, str(problem), name)
        stop = end + len(tokens.close)
        return [ToolCall(name, arguments, id=call_id, raw=text[start:stop])], stop

    return blocks(text, tokens.open, tokens.close, read)


class _Reader:
    """Reader of values from a position of `text`; its methods raise ValueError for other text."""

    def __init__(self, text: str, at: int = 0) -> None:
        self.text, self.at, self.values = text, at, 0

    def count(self, depth: int) -> None:
        """Count a value before it is read."""
        self.values += 1
        if self.values > MOST_VALUES:
            raise ValueError(f"more than {MOST_VALUES} values")
        if depth > _MAX_DEPTH:
            raise ValueError(f"nested too deep: more than {_MAX_DEPTH} levels")

    def take(self, mark: str) -> bool:
        """Skip blanks, then `mark` and the blanks after it if it is next; returns True if it was."""
        self.at = skip_blanks(self.text, self.at)
        if not self.text.startswith(mark, self.at):
            return False
        self.at = skip_blanks(self.text, self.at + len(mark))
        return True


class _GemmaReader(_Reader):
    def __init__(self, text: str, at: int, quote: str) -> None:
        super().__init__(text, at)
        self.quote = quote

    def value(self, depth: int) -> Json:
        self.count(depth)
        if self.take("{"):
            return self.members(depth + 1)
        if self.take("["):
            return self.items(depth + 1)
        if self.text.startswith(self.quote, self.at):
            return self.string()
        bare = _BARE.match(self.text, self.at)
        word = bare.group().strip() if bare else ""
        if not bare or not word:
            raise ValueError("expected a value")
        try:
            value, end = strict_json(word)
        except ValueError:
            value, end = "", 0
        if word[end:].strip() or isinstance(value, str):
            raise ValueError(f"expected true, false, null, a number or a string between {self.quote}, got {word[:40]!r}")
        self.at = bare.end()
        return value

    def string(self) -> str:
        begin = self.at + len(self.quote)
        end = self.text.find(self.quote, begin)
        if end < 0:
            raise ValueError(f"no {self.quote} at the end of a string")
        self.at = end + len(self.quote)
        return self.text[begin:end]

    def members(self, depth: int) -> dict[str, Json]:
        """Read the members of an object, after its opening bracket."""
        found: dict[str, Json] = {}
        if self.take("}"):
            return found
        while True:
            if self.text.startswith(self.quote, self.at):
                key = self.string()
                if not self.take(":"):
                    raise ValueError("expected ':' after a key")
            else:
                match = _KEY.match(self.text, self.at)
                if match is None:
                    raise ValueError("expected a key and ':'")
                key, self.at = match.group(1).strip(), match.end()
            put_once(found, key, self.value(depth))
            if self.take("}"):
                return found
            if not self.take(","):
                raise ValueError("expected ',' or '}' after a value")

    def items(self, depth: int) -> list[Json]:
        found: list[Json] = []
        if self.take("]"):
            return found
        while True:
            found.append(self.value(depth))
            if self.take("]"):
                return found
            if not self.take(","):
                raise ValueError("expected ',' or ']' after an item")


def _gemma_syntax(name: str, tokens: _Tokens, end: str) -> Syntax:
    return Syntax(
        name,
        partial(_parse_gemma, tokens=tokens),
        seen=lambda call: f"{tokens.open}call:" in call,
        ends=(end,),
        opens=(tokens.open, tokens.close),
    )


GEMMA = _gemma_syntax("gemma", _Tokens("<|tool_call>", "<tool_call|>", '<|"|>'), "<|tool_response>")
FUNCTION_GEMMA = _gemma_syntax(
    "function_gemma", _Tokens("<start_function_call>", "<end_function_call>", "<escape>"), "<start_function_response>"
)


# GLM

_GLM_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


def parse_glm(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Parsed:
    """Parse calls of GLM. Strings are unquoted and other values JSON, so the tools' schemas are used as in `parse_qwen_xml`."""
    known = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools} if tools else None
    return closed_blocks(text, OPEN, CLOSE, lambda body, raw, call_id: [_parse_glm_call(body, raw, call_id, known)])


def _parse_glm_call(body: str, raw: str, call_id: str, schemas: Mapping[str, Mapping[str, Any]] | None) -> ToolCall:
    position = body.find(_GLM_KEY) if _GLM_KEY in body else len(body)
    name = body[:position].strip()
    if not name or "<" in name or "\n" in name:
        return malformed_call(call_id, raw, "expected a function name")
    schema = None if schemas is None else schemas.get(own_name(name, schemas), {})
    arguments: dict[str, Json] = {}
    while body.startswith(_GLM_KEY, begin := skip_blanks(body, position)):
        # Each find scans only the text that it consumes: a regular expression for the pair would scan the rest of the text for
        # every key without a value.
        key_end = body.find(_KEY_END, begin)
        value = skip_blanks(body, key_end + len(_KEY_END))
        end = body.find(_VALUE_END, value) if key_end >= 0 and body.startswith(_VALUE, value) else -1
        if end < 0 or body.find(_GLM_KEY, value, end) >= 0:  # the value lacks its end mark
            break
        key = body[begin + len(_GLM_KEY) : key_end].strip()
        try:
            put_once(arguments, key, argument_value(body[value + len(_VALUE) : end], key, schema))
        except ValueError as problem:
            return malformed_call(call_id, raw, str(problem), name)
        position = end + len(_VALUE_END)
    if body[position:].strip():
        return malformed_call(call_id, raw, "expected <arg_key>KEY</arg_key> and <arg_value>value</arg_value>", name)
    return ToolCall(name=name, arguments=arguments, id=call_id, raw=raw)


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
"""The policy may omit the tag around a function, as inference servers allow."""
_FUNCTION, _FUNCTION_END = re.compile(r"<function=([^>\n]*)>"), "</function>"
_PARAMETER, _PARAMETER_END = re.compile(r"\s*<parameter=([^>\n]*)>\n?"), "</parameter>"


def parse_qwen_xml(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Parsed:
    """Parse `<tool_call><function=NAME><parameter=KEY>value</parameter>...</function></tool_call>`. A value is read as the type
    that the tool's schema declares (`argument_value`); without any tools, as JSON if that is valid, else as a string."""
    known = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools} if tools else None

    def read(start: int, call_id: str) -> tuple[list[ToolCall], int]:
        wrapped = text.startswith(OPEN, start)
        mark = CLOSE if wrapped else _FUNCTION_END
        close = text.find(mark, start)
        stop = len(text) if close < 0 else close + len(mark)
        body = (text[start + len(OPEN) : close] if wrapped else text[start:stop]).strip()
        if not wrapped and text.startswith(CLOSE, end := skip_blanks(text, stop)):
            stop = end + len(CLOSE)
        raw, name = text[start:stop], ""
        try:
            head = _FUNCTION.match(body)
            if close < 0:
                raise ValueError(f"no {mark}")
            if head is None or head.end() > len(body) - len(_FUNCTION_END) or not body.endswith(_FUNCTION_END):
                raise ValueError("expected <function=NAME>...</function>")
            if not (named := head.group(1).strip()):
                raise ValueError("expected a function name")
            name, inner = named, body[head.end() : len(body) - len(_FUNCTION_END)]
            schema = None if known is None else known.get(own_name(name, known), {})
            arguments: dict[str, Json] = {}
            position = 0
            # Matched one after the other, since a search would silently drop text between two parameters.
            while (parameter := _PARAMETER.match(inner, position)) is not None:
                key = parameter.group(1).strip()
                end = inner.find(_PARAMETER_END, parameter.end())
                # A value that includes the next parameter lacks its end mark, and would be a wrong argument.
                if end < 0 or inner.find("<parameter=", parameter.end(), end) >= 0:
                    raise ValueError(f"no {_PARAMETER_END} after the value of {key!r}")
                put_once(arguments, key, argument_value(inner[parameter.end() : end].removesuffix("\n"), key, schema))
                position = end + len(_PARAMETER_END)
            if inner[position:].strip():
                raise ValueError("expected <parameter=KEY>value</parameter>")
        except ValueError as problem:
            return [malformed_call(call_id, raw, str(problem), name)], stop
        return [ToolCall(name=name, arguments=arguments, id=call_id, raw=raw)], stop

    return blocks(text, _BEGINS, CLOSE, read)


QWEN_XML = Syntax(
    "qwen_xml",
    ForTools(lambda tools: partial(parse_qwen_xml, tools=tools)),
    seen=lambda call: "<function=" in call,
    opens=(OPEN, "<function=", CLOSE),
    close=CLOSE,
)


# Calls in Python: `[f(a=1), g()]` (Llama 4), the same between control tokens (LFM2), one per line in a tag (Olmo 3).
#
# Python's parser accepts less than a policy needs: a tool `get-weather`, an argument `from`, a month `07` and a line break in a
# string are not valid Python. The reader here accepts them, so that every tool can be called.

_PYTHON_NAME = re.compile(r"[^\s()\[\]{},='\"<>`;]+")
_LOOKS_LIKE_CALLS = re.compile(r"\[\s*(?!\d)[^\s()\[\]{},='\"<>`;]+\s*\(")
_NUMBER = re.compile(r"[+-]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?")
_WORD = re.compile(r"[A-Za-z_]\w*")
_STRING = re.compile(
    r"(?P<prefix>[rRuU]?)(?:\"\"\"(?P<d3>(?:[^\\]|\\.)*?)\"\"\"|'''(?P<s3>(?:[^\\]|\\.)*?)'''"
    r"|\"(?P<d>(?:[^\"\\]|\\.)*)\"|'(?P<s>(?:[^'\\]|\\.)*)')",
    re.DOTALL,
)
_WORDS: dict[str, Json] = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_MAX_LIST = 200_000
"""Most characters of a list of calls."""
_START, _END = "<|python_start|>", "<|python_end|>"


def parse_pythonic(text: str) -> Parsed:
    """Parse a list of calls that is the whole turn or is between Llama 4's tokens after text; other text is prose."""
    first, *parts = text.split(_START)
    said, calls = ([first], list[ToolCall]()) if parts else ([], [])
    for part in parts or [text]:
        body, _, after = part.partition(_END) if parts else (text, "", "")
        if _LOOKS_LIKE_CALLS.match(body.strip()) is None:
            said.append(body)
        else:
            calls += _parse_call_list(body, body.strip(), f"call_{len(calls)}")
        said.append(after)
    return ("".join(said) if calls else text).strip(), limit_calls(calls)


def _parse_call_list(body: str, raw: str, call_id: str) -> list[ToolCall]:
    body = body.strip()
    if len(body) > _MAX_LIST:
        return [malformed_call(call_id, raw, f"calls of {len(body)} characters; at most {_MAX_LIST} are read")]
    try:
        calls = _PythonReader(body).calls()
    except ValueError as problem:
        return [malformed_call(call_id, raw, f"not a list of calls in Python: {problem}")]
    if not calls:
        return [malformed_call(call_id, raw, "expected a call, got an empty list")]
    first = int(call_id.removeprefix("call_"))  # the block's other calls get the next numbers
    return [ToolCall(name, arguments, id=f"call_{first + i}", raw=raw) for i, (name, arguments) in enumerate(calls)]


class _PythonReader(_Reader):
    """Reader of Python calls and literals."""

    def calls(self) -> list[tuple[str, dict[str, Json]]]:
        """Read `[f(), g()]`, or calls separated by commas or line breaks."""
        bracket = self.take("[")
        found: list[tuple[str, dict[str, Json]]] = []
        # The list ends at its bracket or, without one, at the end of the text (`take` has skipped blanks).
        while not (self.take("]") if bracket else self.at == len(self.text)):
            found.append(self.call())
            self.take(",")
        if self.at < len(self.text):
            raise self.unexpected_text("the end")
        return found

    def call(self) -> tuple[str, dict[str, Json]]:
        named = _PYTHON_NAME.match(self.text, self.at)
        if named is None:
            raise self.unexpected_text("the name of a function")
        name, self.at = named.group(), named.end()
        self.require("(")
        arguments: dict[str, Json] = {}
        while not self.take(")"):
            if self.take("**"):  # the notation for argument names that are not valid in Python
                more = self.value(1)
                if not isinstance(more, dict):
                    raise ValueError("** is no argument, unless a dict follows")
            else:
                begin, named = self.at, _PYTHON_NAME.match(self.text, self.at)
                self.at = named.end() if named else self.at
                if named is None or not self.take("=") or self.text.startswith("=", self.at):
                    self.at = begin
                    self.value(1)  # raises the better error for a broken value
                    raise ValueError("an argument without a name")
                more = {named.group(): self.value(1)}
            if twice := arguments.keys() & more.keys():
                raise ValueError(f"the argument {min(twice)} is given twice")
            arguments |= more
            if not self.take(","):
                self.require(")")
                break
        check_json(arguments)
        return name, arguments

    def value(self, depth: int) -> Json:
        self.count(depth)
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
            digits = number.group().replace("_", "")
            try:
                return int(digits)
            except ValueError:
                return float(digits)  # `check_json` refuses infinities
        word = _WORD.match(self.text, self.at)
        if word is None or word.group() not in _WORDS:
            raise self.unexpected_text("a string in quotes, a number, True, False, None, a list or a dict")
        self.at = word.end()
        return _WORDS[word.group()]

    def items(self, closing: str, depth: int) -> tuple[list[Json], bool]:
        """Read the values up to `closing`; also returns True if a comma separates or follows them."""
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
            put_once(found, key, self.value(depth + 1))
            if not self.take(","):
                self.require("}")
                break
        return found

    def string(self) -> str:
        """Read one string literal, or several in a row, which Python joins."""
        parts: list[str] = []
        while (found := _STRING.match(self.text, self.at)) is not None:
            inner = next(part for part in found.group("d3", "s3", "d", "s") if part is not None)
            self.at = skip_blanks(self.text, found.end())
            if found.group("prefix") in ("r", "R") or "\\" not in inner:
                parts.append(inner)
                continue
            # Line breaks and quotes in a policy's strings are literal, unlike in Python.
            quoted = re.sub(r"\\.|[\n\r\"\x00]", lambda one: _SAFE.get(one.group(), one.group()), inner, flags=re.DOTALL)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # an unknown escape is kept, as in Python
                try:
                    parts.append(str(ast.literal_eval(f'"{quoted}"')))
                except SyntaxError as problem:
                    raise ValueError(f"a string with a broken escape: {problem.msg}") from None
        return "".join(parts)

    def require(self, mark: str) -> None:
        if not self.take(mark):
            raise self.unexpected_text(repr(mark))

    def unexpected_text(self, expected: str) -> ValueError:
        rest = self.text[self.at : self.at + 20]
        return ValueError(f"expected {expected}, got {rest!r}" if rest else f"expected {expected}, but the text ends")


_SAFE = {"\n": "\\n", "\r": "\\r", '"': '\\"', "\x00": "\\x00"}


def _write_calls(calls: Sequence[ToolCall]) -> str:
    written = []
    for call in calls:
        arguments = [
            f"{key}={value!r}" if key.isidentifier() or keyword.iskeyword(key) else f"**{ {key: value}!r}"
            for key, value in (call.arguments or {}).items()
        ]
        written.append(f"{call.name}({', '.join(arguments)})")
    return f"[{', '.join(written)}]"


_LFM, _LFM_END = "<|tool_call_start|>", "<|tool_call_end|>"
_OLMO, _OLMO_END = "<function_calls>", "</function_calls>"
LFM2 = Syntax(
    "lfm2",
    lambda text: closed_blocks(text, _LFM, _LFM_END, _parse_call_list),
    seen=lambda call: _LFM in call,
    write=lambda calls: _LFM + _write_calls(calls) + _LFM_END,
    asked=lambda prompt: "<|tool_list_start|>" in prompt,
    opens=(_LFM, _LFM_END),
)
OLMO = Syntax(
    "olmo",
    lambda text: closed_blocks(text, _OLMO, _OLMO_END, _parse_call_list),
    seen=lambda call: _OLMO in call and "(" in call,
    opens=(_OLMO, _OLMO_END),
)
PYTHONIC = Syntax("pythonic", parse_pythonic, seen=lambda call: _LOOKS_LIKE_CALLS.search(call) is not None, write=_write_calls)

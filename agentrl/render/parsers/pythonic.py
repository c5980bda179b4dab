"""Calls as Python: `[f(a=1), g()]` (Llama 4), the same between control tokens (LFM2), one a line in a tag (Olmo 3)."""

from __future__ import annotations

import ast
import math
import re
import warnings
from collections.abc import Sequence

from agentrl.python_source import expression_of
from agentrl.render.parsers.syntax import Parsed, Parser, Syntax, blocks, numbered
from agentrl.render.toolcalls import check_json, malformed, within_most
from agentrl.trajectory import Json, ToolCall

_LOOKS_LIKE_CALLS = re.compile(r"\[\s*[A-Za-z_][\w.]*\s*\(")
_MOST = 200_000
"""Characters of a list of calls. Python's parser takes 400 bytes and 2 us for each of the worst: 80 MB and 0.4 s."""
_WORDS = {"true": True, "false": False, "null": None}


def parse_pythonic(text: str) -> Parsed:
    """A list of calls as the whole turn; anything else is prose."""
    body = text.strip()
    if _LOOKS_LIKE_CALLS.match(body) is None:
        return body, ()
    return "", within_most(_calls(body, body, "call_0"))


def _between(opening: str, closing: str) -> Parser:
    def parse(text: str) -> Parsed:
        def read(start: int, call_id: str) -> tuple[list[ToolCall], int]:
            close = text.find(closing, start)
            stop = len(text) if close < 0 else close + len(closing)
            raw = text[start:stop]
            if close < 0:
                return [malformed(call_id, raw, f"no {closing}")], stop
            return _calls(text[start + len(opening) : close].strip(), raw, call_id), stop

        return blocks(text, opening, read)

    return parse


def _calls(body: str, raw: str, call_id: str) -> list[ToolCall]:
    if len(body) > _MOST:
        return [malformed(call_id, raw, f"calls of {len(body)} characters; at most {_MOST} are read")]
    try:
        nodes = _nodes(body)
        calls = [ToolCall(_name(node), _arguments(node), raw=raw) for node in nodes]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as problem:
        return [malformed(call_id, raw, f"not a list of calls in Python: {problem}")]
    return numbered(calls, call_id) if calls else [malformed(call_id, raw, "expected a call, got an empty list")]


def _nodes(body: str) -> list[ast.expr]:
    """The calls of `[f(), g()]`, or of one call a line. Raises SyntaxError and ValueError."""
    listed = body if body.startswith("[") else "[" + ",".join(line for line in body.splitlines() if line.strip()) + "]"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # an odd escape in what a model wrote is no news
        try:
            node = expression_of(listed)
        except SyntaxError:
            if "\n" not in listed:
                raise
            # Some templates write line breaks of a string as they are, which Python does not allow.
            node = expression_of(listed.replace("\n", "\\n"))
    if not isinstance(node, ast.List):
        raise ValueError("expected [call, ...]")
    return node.elts


def _name(node: ast.expr) -> str:
    if not isinstance(node, ast.Call):
        raise ValueError("expected a call")
    parts: list[str] = []
    inner: ast.expr = node.func
    while isinstance(inner, ast.Attribute):
        parts.append(inner.attr)
        inner = inner.value
    if not isinstance(inner, ast.Name):
        raise ValueError("expected the name of a function")
    return ".".join([inner.id, *reversed(parts)])


def _arguments(node: ast.expr) -> dict[str, Json]:
    assert isinstance(node, ast.Call)
    if node.args:
        raise ValueError("an argument without a name")
    arguments: dict[str, Json] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("** is no argument")
        arguments[keyword.arg] = _value(keyword.value)
    check_json(arguments)
    return arguments


def _value(node: ast.expr) -> Json:
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_value(key) if key is not None else None for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("the keys of a dict must be strings")
        return {str(key): _value(item) for key, item in zip(keys, node.values, strict=True)}
    value = ast.literal_eval(node)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not JSON")
    if value is not None and not isinstance(value, str | int | float | bool):
        raise ValueError(f"{type(value).__name__} is not JSON")
    return value


def _write(calls: Sequence[ToolCall]) -> str:
    return "[" + ", ".join(_written(call) for call in calls) + "]"


def _written(call: ToolCall) -> str:
    return f"{call.name}({', '.join(f'{key}={value!r}' for key, value in (call.arguments or {}).items())})"


_LFM, _LFM_END = "<|tool_call_start|>", "<|tool_call_end|>"
_OLMO, _OLMO_END = "<function_calls>", "</function_calls>"
LFM2 = Syntax(
    "lfm2",
    _between(_LFM, _LFM_END),
    seen=lambda call: _LFM in call,
    write=lambda calls: _LFM + _write(calls) + _LFM_END,
    asked=lambda prompt: "<|tool_list_start|>" in prompt,
    opens=(_LFM,),
)
OLMO = Syntax("olmo", _between(_OLMO, _OLMO_END), seen=lambda call: _OLMO in call and "(" in call, opens=(_OLMO,))
PYTHONIC = Syntax("pythonic", parse_pythonic, seen=lambda call: _LOOKS_LIKE_CALLS.search(call) is not None, write=_write)

"""Readers of conversation layouts, ToolACE and Hermes. Every assistant turn that makes calls is one task."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from agentrl.plain_data import read_json
from agentrl.trajectory import Json

from .rows import Row, bad, check_row
from .schemas import as_sets, from_schema, function

Call = tuple[str, dict[str, Json]]
_ROLES = {"user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant", "tool": "tool",
          "system": "system"}  # fmt: skip
_TOOLS_TAG = re.compile(r"<tools>(.*?)</tools>", re.S)
_CALL_TAG = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.S)
_RESPONSE_TAG = re.compile(r"<tool_response>\s*(.*?)\s*</tool_response>", re.S)
_WORDS: dict[str, Json] = {"true": True, "false": False, "null": None, "none": None}


def toolace(row: Mapping[str, Json], number: int) -> Iterator[Row]:
    """{"system": text with a JSON list of functions, "conversations": [{"from", "value"}, ...]}; calls are
    written `[Name(key=value, ...), ...]`, and names may contain spaces."""
    system = row.get("system")
    if not isinstance(system, str):
        bad("system", "expected a string that lists the functions")
    tools = _declared(_first_list(system), "system")
    yield from _turns(row, number, tools, bracket_calls, _toolace_results)


def hermes(row: Mapping[str, Json], number: int) -> Iterator[Row]:
    """{"conversations": [{"from": "system" | "human" | "gpt" | "tool", "value"}, ...], "tools"?: JSON text};
    without "tools" they are in <tools> tags in the system turn; calls are in <tool_call> tags."""
    listed = row.get("tools")
    if listed is None:
        texts = [str(turn.get("value")) for turn in _conversation(row) if turn.get("from") == "system"]
        found = _TOOLS_TAG.findall("\n".join(texts))
        listed = next((text for text in found if text.strip().startswith("[")), None)
        if listed is None:
            bad("conversations", "no <tools> list in the system turn, and no field 'tools'")
    tools = _declared(_value(listed, "tools") if isinstance(listed, str) else listed, "tools")
    yield from _turns(row, number, tools, tagged_calls, lambda text, count: _RESPONSE_TAG.findall(text))


def _turns(row: Mapping[str, Json], number: int, tools: list[dict[str, Json]], read_calls: Any, results: Any) -> Iterator[Row]:
    """One task for each assistant turn with calls; the turns before it are the task's history."""
    history: list[dict[str, Json]] = []
    open_calls: list[dict[str, Json]] = []
    for index, turn in enumerate(_conversation(row)):
        place = f"conversations[{index}]"
        role, text = _ROLES.get(str(turn.get("from"))), turn.get("value")
        if role is None or not isinstance(text, str):
            bad(place, f"expected 'from' (one of {', '.join(_ROLES)}) and a string 'value'")
        if role == "system":
            continue
        if role == "tool":
            history += _answers(open_calls, results(text, len(open_calls)), text, place)
            open_calls = []
            continue
        calls: list[Call] = read_calls(text, place) if role == "assistant" else []
        if calls and history and history[-1]["role"] in ("user", "tool"):
            gold = [as_sets(name, arguments, tools) for name, arguments in calls]
            yield check_row(Row(f"{number}.{index}", list(history), tools, "sets", gold))
        open_calls = [{"id": f"h{index}_{i}", "name": name, "arguments": arguments} for i, (name, arguments) in enumerate(calls)]
        history.append({"role": role, "content": "" if calls else text, "tool_calls": open_calls})


def _answers(calls: list[dict[str, Json]], parts: list[str], text: str, place: str) -> list[dict[str, Json]]:
    """A tool message for each open call; if the parts do not match the calls, the whole text goes to the first call."""
    if not calls:
        bad(place, "a tool result without a call before it")
    if len(parts) != len(calls):
        parts = [text] + [""] * (len(calls) - 1)
    return [
        {"role": "tool", "content": part, "tool_call_id": call["id"], "name": call["name"]}
        for call, part in zip(calls, parts, strict=True)
    ]


def _toolace_results(text: str, count: int) -> list[str]:
    try:
        listed = read_json(text)
    except ValueError:
        return []
    return [json.dumps(item, ensure_ascii=False) for item in listed] if isinstance(listed, list) else []


def _conversation(row: Mapping[str, Json]) -> list[Mapping[str, Json]]:
    turns = row.get("conversations")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, Mapping) for turn in turns):
        bad("conversations", "expected a list of {'from', 'value'}")
    return turns


def _declared(listed: Json, where: str) -> list[dict[str, Json]]:
    """Declarations, bare or wrapped as {"type": "function", "function": {...}}."""
    if not isinstance(listed, list):
        bad(where, "expected a JSON list of functions")
    tools = []
    for item in listed:
        inner = item.get("function", item) if isinstance(item, Mapping) else None
        if not isinstance(inner, Mapping):
            bad(where, f"a function must be an object, not {item!r}"[:200])
        name = inner.get("name")
        parameters = from_schema(inner.get("parameters", inner.get("arguments")), f"{where}.{name}")
        tools.append(function(name, inner.get("description"), parameters))
    return tools


def _first_list(text: str) -> Json:
    """The first JSON list of objects within a text."""
    decoder = json.JSONDecoder()
    for match in re.finditer(r"\[\s*[{\]]", text):
        try:
            return decoder.raw_decode(text, match.start())[0]
        except ValueError:
            continue
    bad("system", "no JSON list of functions in it")


# -- calls as text -----------------------------------------------------------------------------------


def tagged_calls(text: str, place: str) -> list[Call]:
    """Calls in <tool_call> tags, as JSON or as a Python literal. Raises BadRowError for anything else."""
    calls = []
    for body in _CALL_TAG.findall(text):
        value = _value(body, place)
        if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
            bad(place, f"a call needs a name and arguments: {body[:100]!r}")
        arguments = value.get("arguments", {})
        calls.append((value["name"], _value(arguments, place) if isinstance(arguments, str) else arguments))
    return calls


def bracket_calls(text: str, place: str) -> list[Call]:
    """`[Name one(key=value, ...), Name two(...)]`; an empty list if the text is not such a list of calls.

    Raises BadRowError if it starts as one but is malformed.
    """
    text = text.strip()
    if not re.match(r"^\[[^\[\](){}\"']+\(", text) or not text.endswith(")]"):
        return []
    calls = []
    for part in _pieces(text[1:-1], place):
        name, _, inside = part.strip().partition("(")
        if not inside.endswith(")"):
            bad(place, f"not a call: {part[:100]!r}")
        arguments: dict[str, Json] = {}
        for pair in _pieces(inside[:-1], place):
            key, equals, value = pair.partition("=")
            if not equals:
                bad(place, f"an argument must be key=value, not {pair.strip()[:100]!r}")
            arguments[key.strip()] = _value(value.strip(), place)
        calls.append((name.strip(), arguments))
    return calls


def _pieces(text: str, place: str) -> list[str]:
    """Parts between commas outside brackets and quotes. Raises BadRowError if one is never closed."""
    parts, stack, quote, skip = [""], 0, "", False
    for letter in text:
        if skip:
            skip = False
        elif quote:
            skip = letter == "\\"
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            # An apostrophe inside a name or an unquoted word does not open a string.
            quote = letter if parts[-1].rstrip()[-1:] in ("=", "(", "[", "{", ",", ":", "") else ""
        elif letter == "," and stack == 0:
            parts.append("")
            continue
        else:
            stack += (letter in "([{") - (letter in ")]}")
        parts[-1] += letter
    if stack or quote:
        bad(place, f"brackets or quotes that do not close: {text[:100]!r}")
    return [part for part in parts if part.strip()]


def _value(text: str, place: str) -> Json:
    """A JSON value, or a Python literal that may contain true, false and null."""
    try:
        return read_json(text)
    except ValueError:
        pass
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in the data are not a fault of the user's code
            return _literal(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        bad(place, f"neither JSON nor a literal: {text[:100]!r}")


def _literal(node: ast.AST) -> Json:
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, int, float, bool, type(None))):
        return node.value
    if isinstance(node, ast.Name) and node.id.lower() in _WORDS:
        return _WORDS[node.id.lower()]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {str(_literal(key)): _literal(value) for key, value in zip(node.keys, node.values, strict=True) if key}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _literal(node.operand)
        if isinstance(value, (int, float)):
            return -value
    raise ValueError(f"not a literal: {ast.dump(node)[:80]}")

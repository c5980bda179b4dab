"""Parse tool calls written as text in data sets."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress

from agentrl.data.trajectory import Json
from agentrl.utils.parsing import TwiceError, expression_of, no_twice, read_json

Call = tuple[str, Json]
"""Name and arguments of a call; the arguments of a well-formed call are an object."""
TAGGED = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.S)
RESULT = re.compile(r"<tool_response>\s*(.*?)\s*</tool_response>", re.S)
_THOUGHT = re.compile(
    r"<tool_call>.*?</tool_call>|```.*?```|<(?P<tag>think|thinking|scratch_?pad|reasoning)>(?P<thought>.*?)</(?P=tag)>\s*",
    re.S | re.I,
)
_CLOSED = re.compile(r"</think>(?=<)|</think>[ \t]*(?:\n\s*|\Z)|(?<=\n)</think>\s*")
_WORDS: dict[str, Json] = {"true": True, "false": False, "null": None, "none": None}


def thoughts(text: str) -> tuple[str, str]:
    """Split an assistant's text into its reasoning (in <think> or similar tags) and the rest. Calls inside the reasoning do not
    count; such tags inside a call or code stay unchanged."""
    if text.lstrip().startswith("["):  # calls without tags
        return "", text
    found, rest, end = list[str](), "", 0
    for match in _THOUGHT.finditer(text):
        rest += text[end : match.start()] + ("" if match["tag"] else match[0])
        end = match.end()
        found += [match["thought"]] if match["tag"] else []
    rest += text[end:]
    closed = _CLOSED.search(rest)
    if closed is not None and not any(mark in rest[: closed.start()] for mark in ("<tool_call>", "<think>", "```")):
        found, rest = [rest[: closed.start()], *found], rest[closed.end() :]  # the chat template opened the tag
    return "\n".join(part.strip("\n") for part in found), rest


def result_names(results: Sequence[str], calls: Sequence[str]) -> list[str | None]:
    """Return each result's JSON field `name` if it is the name of a call, else None."""
    found, left = list[str | None](), Counter[str | None](calls)
    for text in results:
        try:
            value = read_json(text)
        except ValueError:
            value = None
        name = value.get("name") if isinstance(value, Mapping) else None
        found.append(name if isinstance(name, str) and left[name] > 0 else None)
        left[found[-1]] -= 1
    return found


def tagged_results(text: str) -> list[str]:
    """Return the results in <tool_response> tags; the whole text if it has other content."""
    found = RESULT.findall(text)
    return found if found and not RESULT.sub("", text).strip() else [text.strip()]


def tagged_calls(text: str) -> list[Call]:
    """Parse calls in <tool_call> tags, as JSON or a Python literal. Raises ValueError for anything else."""
    calls: list[Call] = []
    for body in TAGGED.findall(text):
        value = literal(body)
        if not isinstance(value, Mapping) or not isinstance(name := value.get("name"), str):
            raise ValueError(f"a call needs a name and arguments: {body[:100]!r}")
        given = [key for key in ("arguments", "parameters", "input", "args") if key in value]
        if len(given) > 1 or (not given and value.keys() - {"name", "id", "type"}):
            raise ValueError(f"a call needs arguments: {body[:100]!r}")
        arguments = value[given[0]] if given else {}
        calls.append((name, literal(arguments) if isinstance(arguments, str) else arguments))
    return calls


def bracket_calls(text: str) -> list[Call]:
    """Parse `[Name one(key=value, ...), Name two(...)]`; return an empty list for any other text.

    Raises ValueError for a malformed list of calls.
    """
    text = text.strip()
    if not re.match(r"^\[[^\[\](){}\"']+\(", text) or not text.endswith(")]"):
        return []
    calls: list[Call] = []
    for part in _pieces(text[1:-1]):
        name, _, inside = part.strip().partition("(")
        if not inside.endswith(")"):
            raise ValueError(f"not a call: {part[:100]!r}")
        arguments: dict[str, Json] = {}
        for pair in _pieces(inside[:-1]):
            key, equals, value = pair.partition("=")
            if not equals:
                raise ValueError(f"an argument must be key=value, not {pair.strip()[:100]!r}")
            if key.strip() in arguments:
                raise ValueError(f"the argument {key.strip()[:100]!r} twice")
            arguments[key.strip()] = literal(value.strip())
        calls.append((name.strip(), arguments))
    return calls


def literal(text: str) -> Json:
    """Parse JSON, or a Python literal that may contain true, false and null. Raises ValueError, also for duplicate keys."""
    try:
        with suppress(json.JSONDecodeError):
            return read_json(text, once=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes are in the data, not in the user's code
            return _value(expression_of(text.strip()))
    except TwiceError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"neither JSON nor a literal: {text[:100]!r}") from None


def _pieces(text: str) -> list[str]:
    """Split at commas outside brackets and quotes. Raises ValueError for an unclosed bracket or quote."""
    parts, begin, depth, quote, before, skip = list[str](), 0, 0, "", "", False
    for at, letter in enumerate(text):
        if skip:
            skip = False
        elif quote:
            skip = letter == "\\"
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            # An apostrophe inside a name or an unquoted word does not open a string.
            quote = letter if before in ("=", "(", "[", "{", ",", ":", "") else ""
        elif letter == "," and depth == 0:
            parts.append(text[begin:at])
            begin, before = at + 1, ""
            continue
        else:
            depth += (letter in "([{") - (letter in ")]}")
        before = before if letter.isspace() else letter  # the last non-space character of this part
    if depth or quote:
        raise ValueError(f"brackets or quotes that do not close: {text[:100]!r}")
    return [part for part in [*parts, text[begin:]] if part.strip()]


def _value(node: ast.AST) -> Json:
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, int, float, bool, type(None))):
        return node.value
    if isinstance(node, ast.Name) and node.id.lower() in _WORDS:
        return _WORDS[node.id.lower()]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict) and not any(isinstance(key, (type(None), ast.List, ast.Tuple, ast.Dict)) for key in node.keys):
        return no_twice([(str(_value(key)), _value(value)) for key, value in zip(node.keys, node.values, strict=True) if key])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _value(node.operand)
        if isinstance(value, (int, float)):
            return -value
    raise ValueError(f"not a literal: {ast.dump(node)[:80]}")

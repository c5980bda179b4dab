"""Readers of conversation layouts, ToolACE and Hermes. Every assistant turn that makes calls is one task."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from agentrl.contrib.offline import text_calls
from agentrl.contrib.offline.text_calls import Call, result_names, tagged_results, thoughts
from agentrl.data.chat_forms import pair_results
from agentrl.data.trajectory import Json, Message, ToolCall
from agentrl.utils.parsing import read_json

from .rows import Row, bad, check_row
from .schemas import as_sets, read_tools

T = TypeVar("T")
_ROLES = {"user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant", "tool": "tool",
          "system": "system"}  # fmt: skip
_TOOLS_TAG = re.compile(r"<tools>(.*?)</tools>", re.S)


def toolace(row: Mapping[str, Json], number: int) -> Iterator[Row]:
    """{"system": text with a JSON list of functions, "conversations": [{"from", "value"}, ...]}; calls are
    written `[Name(key=value, ...), ...]`, and names may contain spaces."""
    system = row.get("system")
    if not isinstance(system, str):
        bad("system", "expected a string that lists the functions")
    tools = read_tools(_first_list(system), "system")
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
    tools = read_tools(_value(listed, "tools") if isinstance(listed, str) else listed, "tools")
    yield from _turns(row, number, tools, tagged_calls, lambda text, count: tagged_results(text))


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
        if role == "assistant":
            text = thoughts(text)[1].strip() or text  # a call that it only thought of is none
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
    names = result_names(parts, [call["name"] for call in calls])
    made = Message("assistant", tool_calls=tuple(ToolCall(call["name"], call["arguments"], call["id"]) for call in calls))
    _, *results = pair_results([made, *(Message("tool", part, name=name) for part, name in zip(parts, names, strict=True))])
    return [{"role": "tool", "content": one.content, "tool_call_id": one.tool_call_id, "name": one.name} for one in results]


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


def _first_list(text: str) -> Json:
    """The first JSON list of objects within a text."""
    decoder = json.JSONDecoder()
    for match in re.finditer(r"\[\s*[{\]]", text):
        try:
            return decoder.raw_decode(text, match.start())[0]
        except (ValueError, RecursionError):
            continue
    bad("system", "no JSON list of functions in it")


# -- calls as text -----------------------------------------------------------------------------------


def tagged_calls(text: str, place: str) -> list[Call]:
    """`text_calls.tagged_calls`. Raises BadRowError."""
    return _at(place, text_calls.tagged_calls, text)


def bracket_calls(text: str, place: str) -> list[Call]:
    """`text_calls.bracket_calls`. Raises BadRowError."""
    return _at(place, text_calls.bracket_calls, text)


def _value(text: str, place: str) -> Json:
    return _at(place, text_calls.literal, text)


def _at(place: str, read: Callable[[str], T], text: str) -> T:
    try:
        return read(text)
    except ValueError as problem:
        bad(place, str(problem))

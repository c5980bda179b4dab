"""A row of a file of tasks that bring their own tools, and its check."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.env.taskdata import CALL_SCHEMA, Row
from agentrl.errors import ConfigError, TaskDataError, did_you_mean
from agentrl.tool.validate import Check, compile_validator
from agentrl.trajectory import Json, Message, ToolCall

ANSWER: dict[str, Json] = {
    "type": "object",
    "properties": {**CALL_SCHEMA["properties"], "content": {"type": "string"}, "error": {"type": "boolean"}},
    "required": ["name", "arguments", "content"],
    "additionalProperties": False,
}
MESSAGE: dict[str, Json] = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "user", "assistant", "tool"]},
        "content": {"type": "string"},
        "tool_calls": {
            "type": "array",
            "items": {**CALL_SCHEMA, "properties": {**CALL_SCHEMA["properties"], "id": {"type": "string"}}},
        },
        "tool_call_id": {"type": "string"},
        "name": {"type": "string"},
    },
    "required": ["role"],
    "additionalProperties": False,
}
ROW: dict[str, Json] = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "split": {"type": "string"},
        "weight": {"type": "number", "exclusiveMinimum": 0},
        "prompt": {"type": "string", "minLength": 1},
        "messages": {"type": "array", "items": MESSAGE, "minItems": 1},
        "tools": {"type": "array", "items": {"type": ["string", "object"]}},
        "answers": {"type": "array", "items": ANSWER},
        "gold": {
            "type": "object",
            "properties": {"answer": {"type": ["string", "number"]}, "calls": {"type": "array", "items": CALL_SCHEMA}},
            "minProperties": 1,
            "additionalProperties": False,
        },
    },
    "required": ["gold"],
    "oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}],
    "additionalProperties": False,
}
FORM = (
    'expected {"name", "description", "parameters"}, that as "function" beside "type": "function", or the name of a run\'s tool'
)


def declared(entry: Json) -> dict[str, Json]:
    """A declaration in OpenAI's form or without its wrapping, as {"name", "description", "parameters"}. Raises ValueError."""
    body: Any = entry.get("function") if isinstance(entry, Mapping) and entry.get("type") == "function" else entry
    if not isinstance(body, Mapping) or not isinstance(body.get("name"), str) or not body["name"]:
        raise ValueError(FORM)
    parameters = body.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise ValueError(f"the parameters of {body['name']!r} must be a schema of type object")
    return {"name": body["name"], "description": str(body.get("description") or ""), "parameters": dict(parameters)}


def check_task(where: str, data: Mapping[str, Json], gold: Mapping[str, Json], functions: Collection[str]) -> None:
    """Raises TaskDataError, which names the row and the field, for a task whose tools nobody can offer or answer."""

    def bad(field: str, problem: object) -> None:
        raise TaskDataError(f"{where}: field {field}: {problem}")

    names, checks = list[str](), dict[str, Check]()
    for number, entry in enumerate(data.get("tools", ())):
        field = f"tools/{number}"
        if isinstance(entry, str):
            names.append(entry)
            continue
        try:
            body = declared(entry)
            checks[body["name"]] = compile_validator(body["name"], body["parameters"])
        except (TypeError, ValueError) as problem:
            bad(field, problem)
        names.append(body["name"])
        if body["name"] not in functions and "answers" not in data:
            bad(field, f'nothing answers {body["name"]!r}: params.functions has no function for it, and the row has no "answers"')
    if twice := [name for name in names if names.count(name) > 1]:
        bad("tools", f"two tools are called {twice[0]!r}")
    used = [("answers", data.get("answers", ())), ("gold/calls", gold.get("calls", ()))]
    for field, calls in used if "tools" in data else ():
        for number, call in enumerate(calls):
            if call["name"] not in names:
                bad(field, f"{call['name']!r} is none of the row's tools ({', '.join(names[:8]) or 'it has none'})")
            if call["name"] in checks and (wrong := checks[call["name"]](call["arguments"])) is not None:
                bad(f"{field}/{number}", f"no call of {call['name']!r} has these arguments: {wrong.message}")
    recorded = [(item["name"], item["arguments"]) for item in data.get("answers", ())]
    for number, call in enumerate(gold.get("calls", ())):
        if call["name"] in checks and call["name"] not in functions and (call["name"], call["arguments"]) not in recorded:
            bad(f"gold/calls/{number}", f'nothing answers this call of {call["name"]!r}: "answers" has none for its arguments')


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Of all rows of a file: the names of the run's tools that one wants, and those that one declares, each with the first row
    that does."""

    wanted: Mapping[str, str]
    declared: Mapping[str, str]

    @classmethod
    def of(cls, rows: Iterable[Row]) -> ToolUse:
        wanted, own = dict[str, str](), dict[str, str]()
        for row in rows:
            for number, entry in enumerate(row.data.get("tools", ())):
                name = entry if isinstance(entry, str) else str(declared(entry)["name"])
                (wanted if isinstance(entry, str) else own).setdefault(name, f"{row.where}: field tools/{number}")
        return cls(wanted, own)

    def check_functions(self, functions: Collection[str]) -> None:
        """Raises ConfigError for a function of a tool that no row declares: recorded answers would be taken in its place."""
        for name in functions:
            if name not in self.declared:
                hint = did_you_mean(name, self.declared)
                raise ConfigError(
                    f"own_tools: functions.{name}: no row declares a tool {name!r}; {f'{hint} ' if hint else ''}"
                    f"they declare: {', '.join(list(self.declared)[:8]) or 'none'}"
                )

    def check(self, known: Collection[str]) -> None:
        """Raises TaskDataError for a row that wants a tool which the run does not have (`known`: those it has), or declares one
        of the same name."""
        for name, where in self.wanted.items():
            if name not in known:
                hint = did_you_mean(name, known)
                has = ", ".join(known) or "none ([tools] adds some)"
                raise TaskDataError(f"{where}: it wants the run's tool {name!r}; {f'{hint} ' if hint else ''}the run has: {has}")
        for name, where in self.declared.items():
            if name in known:
                raise TaskDataError(
                    f"{where}: it declares {name!r}, which is a tool of the run's too; one of them needs another name"
                )


def messages(items: Iterable[Mapping[str, Json]]) -> list[Message]:
    """The messages of a row."""
    return [
        Message(
            item["role"],
            item.get("content", ""),
            tuple(ToolCall(call["name"], call["arguments"], id=call.get("id", "")) for call in item.get("tool_calls", ())),
            tool_call_id=item.get("tool_call_id"),
            name=item.get("name"),
        )
        for item in items
    ]

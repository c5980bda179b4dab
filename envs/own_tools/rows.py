"""A row of a file of tasks that bring their own tools, and its check."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.contrib.offline.layouts import Chat, messages_of
from agentrl.contrib.toolkit.chat_forms import declaration, without_padding
from agentrl.contrib.toolkit.taskdata import CALL_SCHEMA, Row
from agentrl.data.chat_forms import FormError, pair_results, parse_field
from agentrl.data.trajectory import Json, Message
from agentrl.env.call_options import call_fault, compile_validator
from agentrl.reward.values import same
from agentrl.utils.errors import BadRowError, ConfigError, TaskDataError, did_you_mean

ANSWER: dict[str, Json] = {
    "type": "object",
    "properties": {**CALL_SCHEMA["properties"], "content": {"type": "string"}, "error": {"type": "boolean"}},
    "required": ["name", "arguments", "content"],
    "additionalProperties": False,
}
ROW: dict[str, Json] = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "split": {"type": "string"},
        "weight": {"type": "number", "exclusiveMinimum": 0},
        "prompt": {"type": "string", "minLength": 1},
        "messages": {"type": "array", "items": {"type": "object", "required": ["role"]}, "minItems": 1},
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


def settled(row: Any, table: bool) -> Any:
    """A row whose calls are read, without the nulls that none of its tools takes. `table`: of a file that has each column in each
    row. What is wrong with it is left to the checks."""
    if not isinstance(row, Mapping):
        return row
    row = {key: _parsed(value) if key in ("tools", "messages", "answers", "gold") else value for key, value in row.items()}
    plain = without_padding(row, ROW, table=table)
    tools = row["tools"] if isinstance(row.get("tools"), list) else []
    if table and tools:
        plain["tools"] = [entry if isinstance(entry, str) else _read(entry) for entry in tools]
    schemas = {name: schema for entry in tools for name, schema in _parameters(entry)}
    gold, plain_gold = row.get("gold"), plain.get("gold")
    for before, after in ((row, plain), (gold, plain_gold)):
        key = "answers" if before is row else "calls"
        given, kept = ((part or {}).get(key) if isinstance(part, Mapping | None) else None for part in (before, after))
        for one, other in zip(given, kept, strict=True) if isinstance(given, list) and isinstance(kept, list) else ():
            if isinstance(one, Mapping) and isinstance(arguments := _parsed(one.get("arguments")), dict):
                other["arguments"] = without_padding(arguments, schemas.get(str(one.get("name")), {}), table=table)
    return plain


def _parsed(value: Any) -> Any:
    """A value that a table may keep as JSON text."""
    try:
        return parse_field(value, "") if isinstance(value, str) else value
    except FormError:
        return value


def _read(entry: Any) -> Any:
    try:
        return declaration(entry, "", table=True)
    except FormError:
        return entry


def _parameters(entry: Any) -> Iterator[tuple[str, Any]]:
    read = None if isinstance(entry, str) else _read(entry)
    if isinstance(read, Mapping) and isinstance(read.get("function"), Mapping):
        yield read["function"].get("name", ""), read["function"].get("parameters")


def check_task(where: str, data: Mapping[str, Json], gold: Mapping[str, Json], functions: Collection[str]) -> None:
    """Raises TaskDataError, which names the row and the field, for a task whose tools nobody can offer or answer."""

    def bad(field: str, problem: object) -> None:
        raise TaskDataError(f"{where}: field {field}: {problem}")

    try:
        messages(data.get("messages", ()))
    except BadRowError as problem:
        bad("messages", problem)
    names, schemas = list[str](), dict[str, Mapping[str, Json]]()
    for number, entry in enumerate(data.get("tools", ())):
        field = f"tools/{number}"
        if isinstance(entry, str):
            names.append(entry)
            continue
        try:
            body = declaration(entry, field)["function"]
            compile_validator(body["name"], body["parameters"])
            schemas[body["name"]] = body["parameters"]
        except FormError as problem:
            bad(problem.key, problem.problem)
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
            shown = field == "gold/calls"  # what was recorded may be more than a policy asks for
            if call["name"] in schemas and (
                wrong := call_fault(call["name"], call["arguments"], schemas[call["name"]], shown=shown)
            ):
                bad(f"{field}/{number}", f"no call of {call['name']!r} has these arguments: {wrong}")
    if not gold.get("calls", True) and "answer" not in gold:
        bad("gold/calls", "expects no call and no answer, so that anything would be right. Name a call, or give an answer")
    if not str(gold.get("answer", "x")).strip():
        bad("gold/answer", "is blank, which no episode can be scored by. Give a text, or leave it out")
    recorded = [{"name": item["name"], "arguments": item["arguments"]} for item in data.get("answers", ())]
    for number, call in enumerate(gold.get("calls", ())):
        if call["name"] in schemas and call["name"] not in functions and not any(same(call, one) for one in recorded):
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
                name = entry if isinstance(entry, str) else str(declaration(entry, "tools")["function"]["name"])
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


def messages(items: Sequence[Json]) -> list[Message]:
    """The messages of a row. Raises BadRowError, also for a key that is not read: it would be missing in silence."""
    read = messages_of(list(items), "messages") if items else Chat((), (), ())
    if read.unread:
        raise BadRowError(f"{', '.join(read.unread)}: no key of a message. Leave it out")
    return list(pair_results(read.messages, strict=False))

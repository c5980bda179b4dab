"""Chat requests and messages of OpenAI's form: read, checked field by field, and refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl.data.chat_forms import REASONING, arguments_of, declaration, pair_results, reasoning_of
from agentrl.data.trajectory import Json, Message, ToolCall
from agentrl.render.tool_calls import write_call
from agentrl.utils.errors import AgentrlError, BadRowError, PromptTooLongError, RenderError, UserError
from agentrl.utils.schemas import BadSchemaError, check_schema


class RequestError(UserError):
    """A request that is not answered; the message begins with the field at fault, if it is one.

    `status`: of HTTP. `code`: OpenAI's word for it, where clients look at one.
    """

    def __init__(self, message: str, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


def refusal_of(problem: Exception) -> RequestError:
    """Any failure of a request, as the client hears of it. A prompt that is too long is the client's (a server's error would
    make it try again); what fails in the engine is the server's."""
    if isinstance(problem, RequestError):
        return problem
    if isinstance(problem, PromptTooLongError):
        return RequestError(f"messages: {problem}", code="context_length_exceeded")
    if isinstance(problem, RenderError):
        return RequestError(f"messages: {problem}")
    if isinstance(problem, UnicodeEncodeError):
        return RequestError("the request has half of a character (a lone surrogate)")
    if isinstance(problem, AgentrlError):
        return RequestError(str(problem), status=503, code="engine_failed")
    return RequestError(f"{type(problem).__name__}: {problem}", status=500)


# Types of fields

Types = Mapping[str, str]
"""Fields, and for each one of "text", "a number", "true or false", "a list", "an object"."""
_IS: dict[str, type | tuple[type, ...]] = {
    "text": str,
    "a number": (int, float),
    "true or false": bool,
    "a list": list,
    "an object": dict,
}
RANGES: Mapping[str, tuple[float, float]] = {"temperature": (0, 1e6), "top_p": (0, 1), "top_k": (-1, 2**31 - 1)}
"""Numbers and what they may be, both ends included: the client hears of a value that no engine knows."""

COMMON: Types = {
    "model": "text", "stream": "true or false", "temperature": "a number", "top_p": "a number", "top_k": "a number",
    "tools": "a list", "metadata": "an object", "service_tier": "text", "user": "text", "store": "true or false",
    "prompt_cache_key": "text", "safety_identifier": "text", "stream_options": "an object",
    "parallel_tool_calls": "true or false", "logprobs": "true or false",
}  # fmt: skip
"""Of the bodies of all protocols that have them."""
SCHEMA: Types = {"properties": "an object", "required": "a list"}


def check_types(row: Any, types: Types, where: str = "") -> dict[str, Json]:
    """An object whose fields have their `types`, or are null or missing. `where`: its own name; empty for a body.

    Raises RequestError."""
    if not isinstance(row, dict):
        raise RequestError(f"{where}: expected an object")
    for key, kind in types.items():
        value = row.get(key)
        if value is not None and (not isinstance(value, _IS[kind]) or (isinstance(value, bool) and kind == "a number")):
            raise RequestError(f"{f'{where}.' if where else ''}{key}: expected {kind}")
        least, most = RANGES.get(key, (None, None))
        if isinstance(value, int | float) and least is not None and most is not None and not least <= value <= most:
            raise RequestError(f"{key}: expected a number from {least:g} to {most:g}, got {repr(value)[:80]}")
    return row


def parameter_schema(value: Json, where: str) -> dict[str, Json]:
    """A tool's parameters, whose properties are schemas. Raises RequestError."""
    schema = check_types(value, SCHEMA, where)
    if None in (schema.get(key, ()) for key in SCHEMA):
        raise RequestError(f"{where}: properties and required cannot be null")
    for name, inner in schema.get("properties", {}).items():
        if not isinstance(inner, dict | bool):
            raise RequestError(f"{where}.properties.{name}: expected a schema")
    if not all(isinstance(name, str) for name in schema.get("required", [])):
        raise RequestError(f"{where}.required: expected a list of text")
    return schema


# Requests

CHOICES = 128
"""The most choices of one request; OpenAI's own limit."""
STOPS = 16
"""The most stop strings of one request."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request: a conversation to be continued, and how.

    `tools`: function schemas in the form of OpenAI's chat completions. `max_tokens`, `seed`: None leaves them to the run.
    `choices`: how many answers. `schema`: what an answer that is no call must fit as JSON, if that is not None. `schema_field`
    and `stop_field`: the request's names for these. `calls`: whether the turn must be a call; `only`: of this tool. `single`:
    at most one call a turn. `other`: sampling that the request asks for, in place of which the run's own is used.
    """

    messages: list[Message]
    tools: list[dict[str, Json]] = field(default_factory=list)
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    choices: int = 1
    logprobs: bool = False
    stop_field: str = "stop"
    schema: Json = None
    schema_field: str = "response_format"
    calls: bool = False
    only: str | None = None
    single: bool = False
    other: Mapping[str, Json] = field(default_factory=dict)


def only(body: Mapping[str, Json], known: Iterable[str], harmless: Mapping[str, Sequence[Json]]) -> None:
    """Raise RequestError for a field that is neither `known` nor `harmless`: one that has this value asks for nothing."""
    unknown = sorted(
        key
        for key, value in body.items()
        if value is not None and key not in known and not (key in harmless and value in harmless[key])
    )
    if unknown:
        raise RequestError(f"{', '.join(unknown)}: not supported")


def list_field(body: Mapping[str, Json], key: str, where: str = "") -> list[Json]:
    """A field that holds a list; empty if it is missing. `where`: the object that it is a field of. Raises RequestError for
    anything else."""
    value = body.get(key)
    if value is not None and not isinstance(value, list):
        raise RequestError(f"{f'{where}.' if where else ''}{key}: expected a list")
    return list(value or [])


def number(body: Mapping[str, Json], key: str, least: int = 1, most: int = 2**63 - 1) -> int | None:
    """A field that holds a whole number in [least, most], or None. Raises RequestError for anything else."""
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise RequestError(f"{key}: expected a whole number of at least {least}, got {repr(value)[:80]}")
    return value


def stops(value: Json, key: str) -> tuple[str, ...]:
    """Stop strings. Raises RequestError if they are not valid."""
    texts = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or len(texts) > STOPS or not all(isinstance(text, str) and text for text in texts):
        raise RequestError(f"{key}: expected a string or up to {STOPS} of them, none of them empty")
    return tuple(texts)


def tool_choice(choice: Json, tools: Sequence[Mapping[str, Json]]) -> tuple[bool, str | None]:
    """`Ask.calls` and `Ask.only`, from the name of a tool or one of "auto", "none", "required". Raises RequestError."""
    if choice in (None, "auto", "none"):
        return False, None
    names = [tool["function"]["name"] for tool in tools]
    if choice == "required" and names:
        return True, None
    if isinstance(choice, Mapping) and choice.get("name") in names:
        return True, str(choice["name"])
    raise RequestError(f"tool_choice: expected 'auto', 'none', 'required' or a function among {', '.join(names) or 'none'}")


def json_schema(form: Json, where: str) -> Json:
    """The schema of a response format: None for text. Raises RequestError for one that is not known."""
    kind = as_dict(form, where).get("type") if form is not None else "text"
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    schema = form.get("schema") or as_dict(form.get("json_schema") or {}, where).get("schema")
    if kind != "json_schema" or not isinstance(schema, dict):
        raise RequestError(f"{where}: expected the type 'text', 'json_object' or 'json_schema' with a schema")
    _check(schema, f"{where}: schema")
    return schema


def _check(schema: Json, where: str) -> None:
    """Raises RequestError if a grammar should not be made of the schema."""
    try:
        check_schema(schema)
    except BadSchemaError as problem:
        raise RequestError(f"{where}: {problem}") from None


def in_order(messages: Sequence[Message]) -> list[Message]:
    """The same with the results of each turn in the order of its calls, and named as these, for templates that write no ids."""
    return list(pair_results(messages, strict=False))


def other_sampling(body: Mapping[str, Json], own: Mapping[str, float]) -> dict[str, Json]:
    """The request's sampling that differs from the run's `own`."""
    return {key: body[key] for key, value in own.items() if body.get(key) is not None and body[key] != value}


def tool(row: Json, schema: Json, where: str) -> dict[str, Json]:
    """A tool of the client's in OpenAI's form; `schema`: what it gives under the protocol's own key. Raises RequestError if it is
    none, or its parameters are no schema."""
    if schema is not None:
        parameter_schema(schema, f"{where}: parameters")
    with read_by_form():
        found = declaration(row, where)
    _check(found["function"]["parameters"], f"{where}: parameters")
    return found


@contextmanager
def read_by_form() -> Iterator[None]:
    """Refuse the request if a reader of forms refuses its parts."""
    try:
        yield
    except BadRowError as problem:
        raise RequestError(str(problem)) from None


def text_of(content: Json, where: str, kinds: Sequence[str] = ("text",)) -> str:
    """A content that is text, or a list of parts of text. Raises RequestError for anything else (images, audio)."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") in kinds for part in content):
        texts = [part.get("text", "") for part in content]
        if all(isinstance(text, str) for text in texts):
            return "".join(texts)
    raise RequestError(f"{where}: expected text")


def identity(message: Message) -> str:
    """A key that is equal for equal messages of a history, however a client writes them on the way back. Without reasoning,
    which clients drop, and the white space around an assistant's text, which some strip."""
    calls = [(call.id, call.name, call.arguments) for call in message.tool_calls]
    content = message.content.strip() if message.role == "assistant" else message.content
    return json.dumps([message.role, content, calls, message.tool_call_id], sort_keys=True)


def client_message(message: Message, *, tools: bool) -> Message:
    """A sampled turn as the client sees it: a call that is malformed, or of a tool where none was offered, can only be shown
    as text."""
    shown = [call for call in message.tool_calls if call.arguments is not None and tools]
    rest = [call.raw for call in message.tool_calls if call.arguments is None or not tools]
    return replace(message, content="\n".join(part for part in (message.content, *rest) if part), tool_calls=tuple(shown))


def cut(message: Message, texts: Sequence[str]) -> tuple[Message, str | None]:
    """A turn that a stop string ended, without it and whatever follows it in the last token; and the stop string."""
    reasoning, content = message.reasoning or "", message.content
    found = min(((at, text) for text in texts if (at := content.find(text)) >= 0), default=None)
    if found is None:
        thought = min(((at, text) for text in texts if (at := reasoning.find(text)) >= 0), default=None)
        kept = message if thought is None else replace(message, reasoning=reasoning[: thought[0]])
        return kept, None if thought is None else thought[1]
    return replace(message, content=content[: found[0]]), found[1]


def number_calls(message: Message, turn: int) -> Message:
    """The same turn with call ids that are unique in the session."""
    calls = tuple(replace(call, id=f"call_{turn}_{i}") for i, call in enumerate(message.tool_calls))
    return replace(message, tool_calls=calls)


def call_of(name: Json, arguments: Json, number: Json, where: str) -> ToolCall:
    """A call in a history. Raises RequestError if it is not one."""
    if not isinstance(name, str) or not isinstance(number, str) or arguments is None:
        raise RequestError(f"{where}: expected a call with a name, an id and arguments")
    with read_by_form():
        return ToolCall(name, arguments_of(arguments, f"{where}.arguments"), id=number)


def as_dict(value: Any, where: str) -> dict[str, Json]:
    """Raises RequestError if the value is not an object."""
    if not isinstance(value, dict):
        raise RequestError(f"{where}: expected an object")
    return value


_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def read_messages(rows: Json) -> list[Message]:
    """Raises RequestError for a message of another form (images, unknown roles, arguments that are not JSON)."""
    if not isinstance(rows, list) or not rows:
        raise RequestError("messages: expected a non-empty list")
    return [_message(row, f"messages[{index}]") for index, row in enumerate(rows)]


def write_message(message: Message) -> dict[str, Json]:
    """An assistant's message."""
    row: dict[str, Json] = {"role": "assistant", "content": message.content or None}
    if message.reasoning is not None:
        row["reasoning_content"] = message.reasoning
    if message.tool_calls:
        row["tool_calls"] = [write_call(call) for call in message.tool_calls]
    return row


def _message(row: Json, where: str) -> Message:
    check_types(row, {"role": "text", "tool_call_id": "text", "name": "text", **dict.fromkeys(REASONING, "text")}, where)
    if row.get("role") not in _ROLES:
        raise RequestError(f"{where}: expected an object with a role among {', '.join(_ROLES)}")
    if row.get("function_call") is not None:
        raise RequestError(f"{where}.function_call: the older layout. Send it as tool_calls")
    with read_by_form():
        reasoning = reasoning_of(row, where)
    calls = []
    for index, item in enumerate(list_field(row, "tool_calls", where)):
        here = f"{where}.tool_calls[{index}]"
        function = as_dict(as_dict(item, here).get("function"), here)
        calls.append(call_of(function.get("name"), function.get("arguments"), item.get("id"), here))
    return Message(
        role=_ROLES[row["role"]],  # type: ignore[arg-type]
        content=text_of(row.get("content"), f"{where}.content", ("text", "refusal")),
        tool_calls=tuple(calls),
        tool_call_id=row.get("tool_call_id"),
        name=row.get("name"),
        reasoning=reasoning,
    )

"""JSON messages between a client and a server of an environment."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

from agentrl.data.images import Image
from agentrl.data.trajectory import Json, Message, Task, ToolCall, ToolResult, Trajectory, Turn, UserCall, message_of
from agentrl.env.call_options import Options
from agentrl.env.spaces import Action
from agentrl.env.toolbox import Toolbox
from agentrl.env.tools import Tool
from agentrl.env.users import Parting, RecordedUser
from agentrl.utils import errors
from agentrl.utils.errors import EnvError, ToolTimeoutError, UserError

PROTOCOL = 3
"""Increased when a message changes its meaning; client and server must agree."""

WAIT_SECONDS = 20.0
"""Seconds after which a server answers that a request is still running; the client then asks again."""

SECRET = 32
"""Minimum characters of a session id, which must be random."""


new_id = partial(secrets.token_urlsafe, 24)
"""Generates an unguessable id of 192 random bits."""


def dumps(value: Json) -> bytes:
    """Serialize plain values and dataclasses of an episode as JSON. Raises TypeError for other values."""
    return json.dumps(value, default=_fields, separators=(",", ":")).encode()


def _fields(item: object) -> dict[str, Json]:
    if isinstance(item, Task | Message | ToolCall | Turn | ToolResult | UserCall | Image):
        fields = {name: getattr(item, name) for name in item.__dataclass_fields__}
        return fields if fields.get("images", True) else {name: value for name, value in fields.items() if name != "images"}
    if isinstance(item, Mapping):
        return dict(item)
    raise TypeError(f"{type(item).__name__} has no JSON form")


def messages_of(rows: Sequence[Mapping[str, Json]]) -> list[Message]:
    """Parse a list of messages."""
    return [message_of(row) for row in rows]


def action_of(row: Json) -> Action:
    """Parse an action. Raises ValueError for other values."""
    if isinstance(row, str):
        return row
    if isinstance(row, dict):
        try:
            return message_of({"tool_calls": (), **row})
        except (TypeError, KeyError) as problem:
            raise ValueError(f"action: {problem}") from None
    raise ValueError(f"action: expected text or an assistant message, got {type(row).__name__}")


def toolbox_row(toolbox: Toolbox, known: Json = None) -> dict[str, Json]:
    """Return the tools' digest, and their schemas and options unless the other side knows that digest."""
    options = Options.__dataclass_fields__
    rows = [{**item.schema, "options": {name: getattr(item.options, name) for name in options}} for item in toolbox]
    digest = hashlib.sha256(dumps(rows)).hexdigest()[:16]
    return {"digest": digest} if digest == known else {"digest": digest, "rows": rows}


def tools_of(rows: Sequence[Mapping[str, Json]], where: str) -> dict[str, Tool]:
    """Build stand-ins of a server's tools by name, for schemas, options and blame of their time."""

    async def refuse_call(**arguments: Any) -> None:
        raise EnvError(f"a tool of {where} runs there, in a step of its episode, and cannot be called alone")

    made = {}
    for row in rows:
        options = Options(**{**row["options"], "process": False, "inline": False})
        declared = {"type": "function", **{key: value for key, value in row.items() if key != "options"}}
        made[row["function"]["name"]] = Tool.from_declaration(declared, refuse_call, options)
    return made


# -- the record ------------------------------------------------------------------------------------

OUTCOME = ("env_id", "seed", "stop", "error", "terminated", "truncated")


def user_row(user: RecordedUser) -> dict[str, Json]:
    """Serialize the user of a recorded episode; `user_of` is the inverse."""

    def line(said: Message | Parting | None) -> Json:
        if isinstance(said, Message):
            calls = [{"name": call.name, "arguments": call.arguments} for call in said.tool_calls]
            return {"text": said.content, "calls": calls}
        return said and {"parting": said.text}

    return {"before": user.before, "answers": [list(map(line, steps)) for steps in user.answers]}


def user_of(row: Mapping[str, Json]) -> RecordedUser:
    """Invert `user_row`."""

    def line(said: Json) -> Message | Parting | None:
        if said is None or "parting" in said:
            return said and Parting(said["parting"])
        return Message("user", said["text"], tuple(ToolCall(call["name"], call["arguments"]) for call in said["calls"]))

    return RecordedUser(row["before"], [list(map(line, steps)) for steps in row["answers"]])


def record_row(record: Trajectory, keep_messages: int = 0, keep_turns: int = 0, keep_calls: int = 0) -> dict[str, Json]:
    """Serialize an environment's record of an episode, without the leading parts that the client has."""
    return {
        "task": record.task,
        "messages": [keep_messages, record.messages[keep_messages:]],
        "turns": [keep_turns, record.turns[keep_turns:]],
        **({"user_calls": [keep_calls, record.user_calls[keep_calls:]]} if record.user_calls else {}),
        **({"parting": record.parting} if record.parting else {}),
        **({} if record.horizon is None else {"horizon": record.horizon}),
        "tools": record.tools,
        "state": record.state,
        "outcome": {name: getattr(record, name) for name in OUTCOME},
    }


def fault_row(fault: BaseException) -> dict[str, Json]:
    """Serialize an error; `fault_of` restores one that an episode treats alike."""
    kinds = (UserError, ToolTimeoutError, EnvError, NotImplementedError, TypeError, ValueError)
    kind = next((kind.__name__ for kind in kinds if isinstance(fault, kind)), type(fault).__name__)
    if isinstance(fault, UserError):  # by the nearest class that the client has
        kind = next(one.__name__ for one in type(fault).__mro__ if getattr(errors, one.__name__, None) is one)
    return {"type": kind, "message": str(fault)}


def fault_of(row: Mapping[str, Json], *also: type[Exception]) -> Exception:
    """Return a UserError, ToolTimeoutError or one of `also` in its class on the server; else an EnvError."""
    name, message = str(row["type"]), str(row["message"])
    known: Any = next((kind for kind in also if kind.__name__ == name), getattr(errors, name, None))
    if isinstance(known, type) and issubclass(known, (UserError, ToolTimeoutError, *also)):
        made: Any = known
        return cast(Exception, made(message))
    return EnvError(message if name == EnvError.__name__ else f"{name}: {message}")

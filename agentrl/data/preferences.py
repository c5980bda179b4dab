"""Pairs of conversations of which one is preferred, in two layouts.

TRL's: `{"prompt": [messages], "chosen": [messages], "rejected": [messages], "tools": [...]}`; without `prompt` it is what both
begin with. OpenAI's: `{"input": {"messages": [...], "tools": [...]}, "preferred_output": [...], "non_preferred_output": [...]}`.

Messages and tools are as in agentrl/data/chats.py. Only the assistant's messages after the prompt count.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from agentrl.data.chats import Chat, checked, messages_of
from agentrl.errors import BadRowError
from agentrl.tool.forms import declarations


def preference(row: Mapping[str, Any], *, table: bool = False) -> tuple[Chat, Chat]:
    """The chosen and the rejected conversation of a row. `table`: of a file that has each column in each row. Raises
    BadRowError, which says what is wrong with it."""
    if row.get("preferred_output") is not None:
        given = row.get("input")
        if not isinstance(given, Mapping):
            raise BadRowError("input: expected an object with messages")
        row = {"prompt": given.get("messages"), "tools": given.get("tools"), "chosen": row["preferred_output"],
               "rejected": row.get("non_preferred_output")}  # fmt: skip
    for key in ("prompt", "chosen", "rejected"):
        if isinstance(row.get(key), str) and not row[key].lstrip().startswith("["):
            raise BadRowError(f"{key}: is text; only conversations, lists of messages, can be trained on")
    tools = declarations(row.get("tools"), table=table)
    shared = Chat((), (), tools) if row.get("prompt") is None else messages_of(row["prompt"], "prompt", tools, table=table)
    sides = [messages_of(row.get(key), key, tools, table=table) for key in ("chosen", "rejected")]
    prompt, begun = shared.messages, 0
    for key, side in zip(("chosen", "rejected"), sides, strict=True):
        if prompt and side.messages[: len(prompt)] == prompt:
            raise BadRowError(f"{key}: begins with the prompt, which is in `prompt` too; leave one of the two out")
    if row.get("prompt") is None:
        both = zip(sides[0].messages, sides[1].messages, strict=False)
        prompt = tuple(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], both))
        begun = len(prompt)
    if sides[0].messages == sides[1].messages:
        raise BadRowError("chosen and rejected are equal")
    chosen, rejected = (
        Chat(
            prompt + side.messages[begun:],
            (False,) * len(prompt) + side.trained[begun:],
            tools,
            shared.unread + side.unread,
        )
        for side in sides
    )
    return _side(chosen, "chosen"), _side(rejected, "rejected")


def _side(chat: Chat, name: str) -> Chat:
    try:
        return checked(chat)
    except BadRowError as problem:
        raise BadRowError(f"{name}: {problem}") from None

"""Pairs of conversations of which one is preferred, in two layouts.

TRL's: `{"prompt": [messages], "chosen": [messages], "rejected": [messages], "tools": [...]}`; without `prompt` it is what both
begin with. OpenAI's: `{"input": {"messages": [...], "tools": [...]}, "preferred_output": [...], "non_preferred_output": [...]}`.

Messages and tools are as in agentrl/data/chats.py. Only the assistant's messages after the prompt count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import takewhile
from typing import Any

from agentrl.data.chats import Chat, checked, messages_of, tools_of
from agentrl.data.files import BadRowError


def preference(row: Mapping[str, Any]) -> tuple[Chat, Chat]:
    """The chosen and the rejected conversation of a row. Raises BadRowError, which says what is wrong with it."""
    if "preferred_output" in row:
        given = row.get("input")
        if not isinstance(given, Mapping):
            raise BadRowError("input: expected an object with messages")
        row = {"prompt": given.get("messages"), "tools": given.get("tools"), "chosen": row["preferred_output"],
               "rejected": row.get("non_preferred_output")}  # fmt: skip
    for key in ("prompt", "chosen", "rejected"):
        if isinstance(row.get(key), str) and not row[key].lstrip().startswith("["):
            raise BadRowError(f"{key}: is text; only conversations, lists of messages, can be trained on")
    tools = tools_of(row.get("tools"))
    prompt = messages_of(row["prompt"], "prompt")[0] if row.get("prompt") is not None else ()
    sides = [messages_of(row.get(key), key) for key in ("chosen", "rejected")]
    for key, (messages, _) in zip(("chosen", "rejected"), sides, strict=True):
        if prompt and messages[: len(prompt)] == prompt:
            raise BadRowError(f"{key}: begins with the prompt, which is in `prompt` too; leave one of the two out")
    if row.get("prompt") is None:
        both = zip(sides[0][0], sides[1][0], strict=False)
        prompt = tuple(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], both))
        sides = [(messages[len(prompt) :], trained[len(prompt) :]) for messages, trained in sides]
    if sides[0][0] == sides[1][0]:
        raise BadRowError("chosen and rejected are equal")
    shared = Chat(prompt, (False,) * len(prompt), tools)
    chosen, rejected = (
        replace(shared, messages=prompt + messages, trained=shared.trained + trained) for messages, trained in sides
    )
    return _side(chosen, "chosen"), _side(rejected, "rejected")


def _side(chat: Chat, name: str) -> Chat:
    try:
        return checked(chat)
    except BadRowError as problem:
        raise BadRowError(f"{name}: {problem}") from None

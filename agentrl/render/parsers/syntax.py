"""What a tool-call syntax is: its parser, how it is recognized, and how a call is written in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.render.grammar import Mark, Rules
from agentrl.trajectory import ToolCall

Parsed = tuple[str, tuple[ToolCall, ...]]
Parser = Callable[[str], Parsed]
"""Takes the text of a turn, returns (prose, calls) and never raises: text that cannot be parsed is kept verbatim in a
call with `error` set."""


class ForTools:
    """A parser that needs the schemas of the available tools; `make` returns the parser for a list of tools."""

    def __init__(self, make: Callable[[Sequence[Mapping[str, Any]]], Parser]) -> None:
        self._make = make
        self._made: dict[str, Parser] = {}

    def bind(self, tools: Sequence[Mapping[str, Any]]) -> Parser:
        """The parser for these tools, cached for equal lists: building one may mean reading a whole vocabulary."""
        key = json.dumps(tools, sort_keys=True, default=str)
        if key not in self._made:
            if len(self._made) >= _TOOL_LISTS_REMEMBERED:
                del self._made[next(iter(self._made))]
            self._made[key] = self._make(tools)
        return self._made[key]


_TOOL_LISTS_REMEMBERED = 64


@dataclass(frozen=True)
class Syntax:
    """One way in which models write tool calls.

    name: what `model.tool_parser` calls it.
    seen: whether a call that a chat template rendered is written in it.
    write: the text of a turn's calls, for templates that leave calls to the content of a turn and write none themselves.
    asked: whether the prompt of such a template asks for this syntax.
    ends: control tokens that end a turn of calls, if another one ends an answer.
    opens: marks before which a turn's text is prose: those that begin a call, and a closing one, which without the other is a
        malformed call; none if calls may begin otherwise.
    close: what ends each call; empty if nothing does.
    grammar: the grammar of a turn of calls of some tools (one, or one or more; render/grammar.py).
    """

    name: str
    parser: Parser | ForTools
    seen: Callable[[str], bool]
    write: Callable[[Sequence[ToolCall]], str] | None = None
    asked: Callable[[str], bool] = lambda prompt: False
    ends: tuple[str, ...] = ()
    opens: tuple[str, ...] = ()
    close: str = ""
    grammar: Callable[[Sequence[Mapping[str, Any]], bool, Mark], Rules] | None = None


def numbered(calls: Sequence[ToolCall], call_id: str) -> list[ToolCall]:
    """The calls of one block with ids that count on from the block's first, `call_N`."""
    first = int(call_id.removeprefix("call_"))
    return [
        ToolCall(call.name, call.arguments, id=f"call_{first + index}", raw=call.raw, error=call.error)
        for index, call in enumerate(calls)
    ]

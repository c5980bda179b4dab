"""Serve a renderer's turns: stream their text while they are sampled, and constrain them by grammars."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from agentrl.data.trajectory import Json
from agentrl.render.base import REPLACEMENT, Codec, Renderer
from agentrl.render.syntaxes import HARMONY, SYNTAXES
from agentrl.utils.errors import RenderError
from agentrl.utils.schemas import with_nulls

# Streaming passes on only text that later tokens cannot change. Incomplete characters, white space that may end the turn, and
# a possible start of a tool call are held back. Calls are read from whole turns only, so no text after the first call is passed
# on before the turn ends.

_LONGEST_CHARACTER = 32  # token IDs, enough for a joined emoji
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class TurnReader:
    """Read a turn's token IDs in order. This base passes on nothing before the turn ends, which is correct for any renderer."""

    def read(self, token_ids: Sequence[int]) -> str:
        """Return the settled text that the next IDs add to the turn's content. Later IDs cannot change it; `parse` agrees."""
        return ""


class SettledText:
    """Decode token IDs incrementally, into pieces whose concatenation is the text of all IDs."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._last_ids: list[int] = []  # IDs of the last piece: the next ones may decode differently without them
        self._new: list[int] = []
        self._tried = 0

    def read(self, token_ids: Sequence[int]) -> str:
        """Return the next piece; empty while a character is incomplete."""
        self._new += token_ids
        # Read raw bytes together: earlier ones may still turn out to be an invalid character.
        if not self._new or _BYTE.fullmatch(self._codec.piece(self._new[-1])):
            return ""
        # Retry IDs that do not make a whole character only after their number has doubled.
        if len(self._new) < 2 * self._tried:
            return ""
        before, text = self._codec.decode(self._last_ids), self._codec.decode([*self._last_ids, *self._new])
        if text.endswith(REPLACEMENT) or not text.startswith(before):
            self._tried = len(self._new) if len(self._new) > _LONGEST_CHARACTER else 0
            return ""
        self._last_ids, self._new, self._tried = self._new, [], 0
        return text[len(before) :]


class ProseReader(TurnReader):
    """Read turns with optional reasoning between marks first, and calls that start with known marks."""

    def __init__(
        self,
        codec: Codec,
        frame: tuple[str, str],
        ends: Sequence[str],
        *,
        last: Sequence[int] = (),
        thinking: bool = False,
        thinks: Callable[[Sequence[int]], bool] = lambda ids: True,
    ) -> None:
        """`frame`: the marks around reasoning; `ends`: texts that end the streamed text (starts of calls, stop strings).
        `last`: IDs that end the turn. `thinking`: the turn starts within reasoning. `thinks(ids)`: True if a reasoning mark in
        the text of these IDs is a real mark, not only text that looks like one."""
        self._text = SettledText(codec)
        self._open, self._close = frame
        self._ends, self._last = [end for end in ends if end], frozenset(last)
        self._thinks = thinks
        self._ids: list[int] = []
        self._pending = ""
        self._state: Literal["beginning", "thinking", "prose", "silent"] = "thinking" if thinking else "beginning"
        self._has_text = False
        self._blanks: list[str] = []
        self._blank_ends = any(letter.isspace() for end in self._ends for letter in end)

    def read(self, token_ids: Sequence[int]) -> str:
        over = next((place for place, number in enumerate(token_ids) if number in self._last), None)
        settled = self._next(token_ids[:over])
        if over is not None:
            self._state = "silent"
        return settled

    def _next(self, token_ids: Sequence[int]) -> str:
        if self._state == "silent":
            return ""
        if self._state != "prose":
            self._ids += token_ids
        piece = self._text.read(token_ids)
        may_wait = not self._blank_ends and (not self._pending or self._pending.isspace())
        if piece.isspace() and self._state == "prose" and may_wait:
            self._blanks.append(piece)  # joined only once, since each read would scan all of them again
            return ""
        self._pending += "".join(self._blanks) + piece
        self._blanks.clear()
        if self._state == "beginning":
            self._pending = head = self._pending.lstrip()
            if not head or (len(head) < len(self._open) and self._open.startswith(head)):
                return ""
            if not head.startswith(self._open):
                self._state = "prose"
            else:
                self._pending, self._state = head.removeprefix(self._open), "thinking" if self._thinks(self._ids) else "silent"
        if self._state == "thinking":
            before, mark, self._pending = self._pending.partition(self._close)
            if not mark:
                self._pending = before[-len(self._close) :]
                return ""
            self._state = "prose" if self._thinks(self._ids) else "silent"
        if self._state != "prose":
            return ""
        if not self._has_text:
            self._pending = self._pending.lstrip()
        found = [at for end in self._ends if (at := self._pending.find(end)) >= 0]
        if found:
            self._state = "silent"
            return self._pending[: min(found)].rstrip()
        # Hold back trailing white space, which may be stripped, and a possible start of an end text.
        cut = min((_partial(self._pending, end) for end in self._ends), default=len(self._pending))
        settled = self._pending[:cut].rstrip()
        self._pending = self._pending[len(settled) :]
        self._has_text = self._has_text or bool(settled)
        return settled


def _partial(text: str, end: str) -> int:
    """Return the index in `text` of the longest suffix that is a proper prefix of `end`."""
    for length in range(min(len(end) - 1, len(text)), 0, -1):
        if text.endswith(end[:length]):
            return len(text) - length
    return len(text)


def reader_of(renderer: Renderer, stops: Sequence[str] = ()) -> TurnReader:
    """Return the reader of one turn while it is sampled. `stops`: stop strings."""
    known = SYNTAXES.get(renderer.syntax)
    if known is None or not known.opens:
        return TurnReader()
    return ProseReader(
        renderer.codec,
        (renderer.frame.open, renderer.frame.close),
        (*known.opens, *stops),
        last=renderer.stop_token_ids,
        thinking=renderer.in_reasoning,
        thinks=renderer.spells_nothing,
    )


# Grammars of a turn


def grammar_of(
    renderer: Renderer, schema: Json = None, tools: Sequence[Mapping[str, Any]] = (), several: bool = True, reasons: bool = True
) -> str:
    """Return the grammar (`Sampling.grammar`) of a turn: JSON that fits `schema` (unless None), or calls of `tools`: exactly one,
    or at least one if `several`; `reasons`: reasoning may come first. Raises RenderError if the renderer has no grammar."""
    if not renderer.syntax:
        raise RenderError(f"{type(renderer).__name__} knows no grammar of its turns")
    if renderer.syntax == HARMONY.name:
        raise RenderError(f"turns in the syntax {HARMONY.name!r} have channels, and agentrl has no grammar for them")
    codec, frame = renderer.codec, renderer.frame

    def mark(text: str) -> str:
        """Quote a template's text for a grammar: a special token by its number, since no text matches it."""
        return f"<[{codec.added[text]}]>" if text in codec.special else json.dumps(text)

    rules = [("answer", f"answer: %json {json.dumps(with_nulls(schema))}")] if schema is not None else []
    if tools:
        if renderer.syntax not in CALLS:
            known = ", ".join(CALLS)
            raise RenderError(f"no grammar is known of calls in the syntax {renderer.syntax!r} (one is of: {known})")
        rules.append(("calls", call_rules(renderer.syntax, tools, several, mark)))
    closing = mark(frame.close)
    body = ["SPACE: /[ \\n]+/", "turn: " + " | ".join(symbol for symbol, _ in rules), *(own for _, own in rules)]
    if reasons:
        # TEXT cannot contain special tokens, but it can contain a mark that is plain text.
        thought = f"thought[suffix={closing}]: TEXT" if closing.startswith('"') else f"thought: TEXT {closing}"
        start = "thought SPACE?" if renderer.in_reasoning else f"({mark(frame.open)} thought SPACE?)?"
        lines = [f"start: {start} turn", thought, "TEXT: /(?s:.*)/", *body]
    else:
        lines = [f"start: {f'{closing} SPACE? ' if renderer.in_reasoning else ''}turn", *body]
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}]})


CALLS: dict[str, tuple[str, str, tuple[str, str] | None]] = {
    "hermes": ("arguments", '"\\n"', ("<tool_call>", "</tool_call>")),
    "llama_json": ("parameters", '"; "', None),
}
"""Syntax -> (key of arguments, separator between two calls, marks around each call)."""


def call_rules(syntax: str, tools: Sequence[Mapping[str, Any]], several: bool, mark: Callable[[str], str]) -> str:
    """Return the grammar rules of `calls`: exactly one call of these tools, or at least one if `several`. Each schema has its own
    rule, so its references resolve from its own root."""
    key, between, marks = CALLS[syntax]
    around = "object" if marks is None else f'{mark(marks[0])} "\\n" object "\\n" {mark(marks[1])}'
    rules = [f"calls: call{f' ({between} call)*' if several else ''}", f"call: {around}"]
    rules.append("object: " + " | ".join(f"object_{i}" for i in range(len(tools))))
    for i, tool in enumerate(tools):
        function = tool["function"]
        head = json.dumps(f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "{key}": ')
        schema = function.get("parameters") or {"type": "object", "properties": {}}
        rules += [f'object_{i}: {head} arguments_{i} "}}"', f"arguments_{i}: %json {json.dumps(with_nulls(schema))}"]
    return "\n".join(rules)

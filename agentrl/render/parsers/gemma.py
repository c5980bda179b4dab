"""`call:NAME{key:value,...}` between control tokens, with strings between a token of their own: Gemma 4 and FunctionGemma."""

from __future__ import annotations

import re
from dataclasses import dataclass

from agentrl.render.parsers.syntax import Parsed, Parser, Syntax
from agentrl.render.toolcalls import MOST_VALUES, blocks, broken_end, malformed, skip_blanks, strict_json
from agentrl.trajectory import Json, ToolCall

_NAME = re.compile(r"call:([^{}\s<]+)\{")
_BARE = re.compile(r"[^,{}\[\]<]*")
_KEY = re.compile(r"([^:{}\[\],<]*):")
_MAX_DEPTH = 64


@dataclass(frozen=True)
class _Tokens:
    open: str
    close: str
    quote: str


def _parser(tokens: _Tokens) -> Parser:
    def parse(text: str) -> Parsed:
        def read(start: int, call_id: str) -> tuple[list[ToolCall], int]:
            name = ""
            try:
                head = _NAME.match(text, start + len(tokens.open))
                if head is None:
                    raise ValueError("expected call:NAME{")
                name = head.group(1)
                arguments, end = _Reader(text, tokens.quote).members(head.end(), 1)
                end = skip_blanks(text, end)
                if not text.startswith(tokens.close, end):
                    raise ValueError(f"expected {tokens.close} after the arguments")
            except ValueError as problem:
                return _broken(text, start, call_id, str(problem), name, tokens)
            stop = end + len(tokens.close)
            return [ToolCall(name, arguments, id=call_id, raw=text[start:stop])], stop

        return blocks(text, tokens.open, tokens.close, read)

    return parse


class _Reader:
    """Reads values of the form at a position of `text`; every method raises ValueError if there is none."""

    def __init__(self, text: str, quote: str) -> None:
        self.text, self.quote, self.values = text, quote, 0

    def value(self, at: int, depth: int) -> tuple[Json, int]:
        text = self.text
        self.values += 1
        if self.values > MOST_VALUES:
            raise ValueError(f"more than {MOST_VALUES} values")
        if depth > _MAX_DEPTH:
            raise ValueError(f"nested deeper than {_MAX_DEPTH}")
        at = skip_blanks(text, at)
        if text.startswith(self.quote, at):
            return self.string(at)
        if text.startswith("{", at):
            return self.members(at + 1, depth + 1)
        if text.startswith("[", at):
            return self.items(at + 1, depth + 1)
        bare = _BARE.match(text, at)
        word = bare.group().strip() if bare else ""
        if not bare or not word:
            raise ValueError("expected a value")
        try:
            value, end = strict_json(word)
        except ValueError:
            value, end = "", 0
        if word[end:].strip() or isinstance(value, str):
            raise ValueError(f"expected true, false, null, a number or a string between {self.quote}, got {word[:40]!r}")
        return value, bare.end()

    def string(self, at: int) -> tuple[str, int]:
        begin = at + len(self.quote)
        end = self.text.find(self.quote, begin)
        if end < 0:
            raise ValueError(f"no {self.quote} at the end of a string")
        return self.text[begin:end], end + len(self.quote)

    def members(self, at: int, depth: int) -> tuple[dict[str, Json], int]:
        found: dict[str, Json] = {}
        at = skip_blanks(self.text, at)
        if self.text.startswith("}", at):
            return found, at + 1
        while True:
            at = skip_blanks(self.text, at)
            if self.text.startswith(self.quote, at):
                key, at = self.string(at)
                at = skip_blanks(self.text, at)
                if not self.text.startswith(":", at):
                    raise ValueError("expected ':' after a key")
                at += 1
            else:
                match = _KEY.match(self.text, at)
                if match is None:
                    raise ValueError("expected a key and ':'")
                key, at = match.group(1).strip(), match.end()
            found[key], at = self.value(at, depth)
            at = skip_blanks(self.text, at)
            if self.text.startswith("}", at):
                return found, at + 1
            if not self.text.startswith(",", at):
                raise ValueError("expected ',' or '}' after a value")
            at += 1

    def items(self, at: int, depth: int) -> tuple[list[Json], int]:
        found: list[Json] = []
        at = skip_blanks(self.text, at)
        if self.text.startswith("]", at):
            return found, at + 1
        while True:
            item, at = self.value(at, depth)
            found.append(item)
            at = skip_blanks(self.text, at)
            if self.text.startswith("]", at):
                return found, at + 1
            if not self.text.startswith(",", at):
                raise ValueError("expected ',' or ']' after an item")
            at += 1


def _broken(text: str, start: int, call_id: str, error: str, name: str, tokens: _Tokens) -> tuple[list[ToolCall], int]:
    """A malformed call ends with its own end, before the next call, or with the text."""
    stop, closed = broken_end(text, start + len(tokens.open), tokens.open, tokens.close)
    return [malformed(call_id, text[start:stop], error if closed else f"no {tokens.close}: {error}", name)], stop


_GEMMA4 = _Tokens("<|tool_call>", "<tool_call|>", '<|"|>')
_FUNCTION_GEMMA = _Tokens("<start_function_call>", "<end_function_call>", "<escape>")


def _syntax(name: str, tokens: _Tokens, end: str) -> Syntax:
    seen = f"{tokens.open}call:"
    return Syntax(name, _parser(tokens), seen=lambda call: seen in call, ends=(end,), opens=(tokens.open, tokens.close))


GEMMA = _syntax("gemma", _GEMMA4, "<|tool_response>")
FUNCTION_GEMMA = _syntax("function_gemma", _FUNCTION_GEMMA, "<start_function_response>")

"""A turn's text while it is sampled: as much of it as is settled, whatever comes next.

What is told never has to be taken back: a character of which only some bytes were sampled, white space that may turn out to
end the turn, and what may be the beginning of a tool call are held until more is known. Calls are read from whole turns only,
so nothing after the first one is told before the turn is over.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Protocol

from agentrl.render.text import REPLACEMENT

_LONGEST_CHARACTER = 32  # ids, with those of a joined emoji
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class TurnReader:
    """Reads a turn's ids in order. This one settles nothing before the turn is over, which is right for any renderer."""

    def read(self, token_ids: Sequence[int]) -> str:
        """What the next ids add to the text that `parse` will find at the beginning of the turn's content, however the turn
        goes on."""
        return ""


class Vocabulary(Protocol):
    """What is asked of a `Codec`."""

    def decode(self, ids: Sequence[int]) -> str: ...

    def piece(self, number: int) -> str: ...


class SettledText:
    """The text of ids that come one after the other, in pieces that together are the text of all."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._told: list[int] = []  # the ids of the last piece, without which the next ones may decode otherwise
        self._new: list[int] = []
        self._tried = 0

    def read(self, token_ids: Sequence[int]) -> str:
        """The next piece; empty while a character is incomplete."""
        self._new += token_ids
        # Bytes that stand for themselves are read together: those before may still turn out to be no characters.
        if not self._new or _BYTE.fullmatch(self._vocabulary.piece(self._new[-1])):
            return ""
        # Ids that never make a whole character are tried again only once they are twice as many.
        if len(self._new) < 2 * self._tried:
            return ""
        before, text = self._vocabulary.decode(self._told), self._vocabulary.decode([*self._told, *self._new])
        if text.endswith(REPLACEMENT) or not text.startswith(before):
            self._tried = len(self._new) if len(self._new) > _LONGEST_CHARACTER else 0
            return ""
        self._told, self._new, self._tried = self._new, [], 0
        return text[len(before) :]


class ProseReader(TurnReader):
    """For turns in which an optional reasoning between marks comes first, and calls begin with one of some marks."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        frame: tuple[str, str],
        ends: Sequence[str],
        *,
        last: Sequence[int] = (),
        thinking: bool = False,
        thinks: Callable[[Sequence[int]], bool] = lambda ids: True,
    ) -> None:
        """`frame`: the marks around a reasoning; `ends`: texts from which on nothing is settled (of calls, stop strings).
        `last`: ids after which nothing is. `thinking`: the turn begins within the reasoning. `thinks`: whether the mark of a
        reasoning that is in the text of these ids is one, and no text that only looks like it."""
        self._text = SettledText(vocabulary)
        self._open, self._close = frame
        self._ends, self._last = [end for end in ends if end], frozenset(last)
        self._thinks = thinks
        self._ids: list[int] = []
        self._pending = ""
        self._state = self._thinking if thinking else self._beginning
        self._said = False
        self._blanks: list[str] = []
        self._blank_ends = any(letter.isspace() for end in self._ends for letter in end)

    def read(self, token_ids: Sequence[int]) -> str:
        for place, number in enumerate(token_ids):
            if number in self._last:
                told = self._next(token_ids[:place])
                self._state = self._silent
                return told
        return self._next(token_ids)

    def _next(self, token_ids: Sequence[int]) -> str:
        if self._state == self._silent:
            return ""
        if self._state != self._prose:
            self._ids += token_ids
        piece = self._text.read(token_ids)
        if piece.isspace() and self._state == self._prose and self._may_wait:
            self._blanks.append(piece)  # put together once: each read would look through all of them again
            return ""
        self._pending += "".join(self._blanks) + piece
        self._blanks.clear()
        return self._state()

    @property
    def _may_wait(self) -> bool:
        return not self._blank_ends and (not self._pending or self._pending.isspace())

    def _beginning(self) -> str:
        self._pending = head = self._pending.lstrip()
        if not head or (len(head) < len(self._open) and self._open.startswith(head)):
            return ""
        if not head.startswith(self._open):
            self._state = self._prose
        elif not self._thinks(self._ids):
            self._state = self._silent
        else:
            self._pending, self._state = head.removeprefix(self._open), self._thinking
        return self._state()

    def _thinking(self) -> str:
        before, mark, after = self._pending.partition(self._close)
        if not mark:
            self._pending = before[-len(self._close) :]
            return ""
        self._pending = after
        self._state = self._prose if self._thinks(self._ids) else self._silent
        return self._state()

    def _prose(self) -> str:
        if not self._said:
            self._pending = self._pending.lstrip()
        found = [at for end in self._ends if (at := self._pending.find(end)) >= 0]
        if found:
            told = self._pending[: min(found)].rstrip()
            self._state = self._silent
            return told
        # What is blank may be stripped, and what begins like an end may become one.
        cut = min((_partial(self._pending, end) for end in self._ends), default=len(self._pending))
        told = self._pending[:cut].rstrip()
        self._pending = self._pending[len(told) :]
        self._said = self._said or bool(told)
        return told

    def _silent(self) -> str:
        return ""


def _partial(text: str, end: str) -> int:
    """Where the longest beginning of `end` that `text` ends with begins."""
    for length in range(min(len(end) - 1, len(text)), 0, -1):
        if text.endswith(end[:length]):
            return len(text) - length
    return len(text)

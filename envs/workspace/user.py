"""The simulated user: makes one request after the other, answers questions, accepts refusals.

The user is deterministic; the meaning of a reply depends on its form (a question, a line CANNOT, a line ANSWER).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.utils.parsing import digits

Json = Any
PATIENCE = 2
_CANNOT = re.compile(r"^\W*CANNOT\b", re.M)
_ANSWER = re.compile(r"^\W*ANSWER\W*:\s*(.*)$", re.M | re.I)
_CLOSING = re.compile(
    r"[^.!?\n]*\b(?:(?:any|some)thing\b[^.!?\n]*\b(?:else|more|further)"
    r"|any (?:other|further|more) (?:question|request|task|change)s?"
    r"|else (?:can|could|may) (?:i|we)|what(?:'s| is) next|next request)\b[^.!?\n]*\?",
    re.I,
)


class User:
    """`requests`: as in a task's data. Records the values told, the requests declined, and the number of
    needless questions, for the state."""

    def __init__(self, requests: Sequence[Mapping[str, Json]]) -> None:
        self.requests = requests
        self.now = 0
        self.told: dict[str, str] = {}
        self.declined: list[int] = []
        self.needless = 0
        self.supplied = False
        self.restored = False
        self._unclear = 0

    def talk(self) -> Json:
        """The conversation, for comparison."""
        return {"told": dict(self.told), "declined": list(self.declined), "closed": self.now}

    def hear(self, text: str) -> tuple[str | None, str | None]:
        """Returns (the user's reply or None at the end, a tool that is now switched on)."""
        request = self.requests[self.now]
        if _CANNOT.search(text):
            return self._declined(request)
        text = _CLOSING.sub(" ", text)
        if "?" in text and (words := self._asked(request, text)) is not None:
            return words, None
        if request["question"]:
            found = _ANSWER.findall(text)
            self.told[str(self.now)] = plain(found[-1]) if found else ""
        return self._next(""), None

    def _declined(self, request: Mapping[str, Json]) -> tuple[str | None, str | None]:
        if self.now not in self.declined:
            self.declined.append(self.now)
        if request["restored"] and not self.restored:
            self.restored = True
            return "", request["withheld"]
        return self._next("All right, then leave it. "), None

    def _asked(self, request: Mapping[str, Json], text: str) -> str | None:
        """The answer to a question; None if the user's patience is exhausted."""
        slot = request["slot"]
        known = slot is not None and any(word in text.casefold() for word in slot["words"])
        if known and not self.supplied:
            self.supplied = True
            return str(slot["reply"])
        self.needless += 1
        self._unclear += 1
        if self._unclear > PATIENCE:
            return None
        return "I have nothing to add. Please do what you can." if slot is None else "What do you need to know?"

    def _next(self, before: str) -> str | None:
        self.now += 1
        self.supplied = self.restored = False
        self._unclear = 0
        return None if self.now == len(self.requests) else before + str(self.requests[self.now]["text"])


def plain(text: str) -> str:
    """Return an answer without case, quotes, emphasis and a final period; of a number its digits."""
    bare = text.strip().strip("*_`\"'").rstrip(".").strip("*_`\"' ").casefold()
    return digits(bare) or bare

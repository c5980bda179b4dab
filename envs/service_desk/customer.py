"""The simulated customer: a scripted person with hidden goals who answers questions.

The customer is deterministic. It understands the agent's text by keywords, generously.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from agentrl.utils.parsing import MONEY, numerals

Json = Any
PATIENCE = 5

_CLOSING = re.compile(
    r"[^.!?\n]*\b(?:(?:any|some)thing\b[^.!?\n]*\b(?:else|more|further)"
    r"|any (?:other|further|more) (?:question|request|issue|concern)s?"
    r"|else (?:can|could|may) (?:i|we))\b[^.!?\n]*\?",
    re.I,
)
_ORDER = re.compile(r"\bW\d{4}\b", re.I)
_CONFIRM = re.compile(
    r"\b(?:confirm|proceed|go ahead|shall i|should i|do you agree|"
    r"is th(?:at|is) (?:right|correct|ok|okay)|would you like me to|do you want me to|want me to)\b",
    re.I,
)
_ASKS = {
    "identity": r"\be-?mail|\bname\b|postcode|post code|zip|postal|identif|verif",
    "order": r"order (?:number|id|no)|which order|what order|number of (?:the|your) order",
    "reason": r"\breason|\bwhy\b",
    "refund": r"refund|gift card|paid back|payment",
    "variant": r"variant|which|what|colou?r|size|shape|voltage|length|option|exchange",
    "address": r"(?<!email )(?<!e-mail )address",
}
_WANTED = {key: re.compile(pattern, re.I) for key, pattern in _ASKS.items()}


class Customer:
    """`script`: the customer's identity and goals, as in a task's data."""

    def __init__(self, script: Mapping[str, Json]) -> None:
        self.script = script
        self.goal = 0
        self.patience = PATIENCE
        self.pushed = False
        self.waiting = False
        self.figures: dict[str, list[str]] = {}
        self._told: set[str] = set()

    @property
    def closed(self) -> int:
        """The number of goals that the agent has declared dealt with."""
        return self.goal

    def open(self) -> str:
        """The customer's first message."""
        return f"Hello. {self._now()['opening']}"

    def hand_over(self) -> None:
        """A person takes over: the current goal is dealt with as far as the desk is concerned."""
        self.goal += 1

    def hear(self, text: str) -> tuple[str | None, str | None]:
        """Returns (reply, order that it confirms). A reply of None: the customer hangs up."""
        text = _CLOSING.sub(" ", text)
        if self.waiting:
            self.waiting = False
            # A record that is read out is no answer, although one amount may stand in it.
            self.figures[str(self.goal)] = [] if '{"' in text else sorted(amounts(text))
            return self._next(), None
        if not text.strip():
            return self._tire("Hello? Are you still there?"), None
        if "?" not in text:
            return self._settle(), None
        orders = {found.upper() for found in _ORDER.findall(text)}
        if _CONFIRM.search(text) and orders and not self._untold(text):
            return self._confirm(text, orders)
        return self._answer(text), None

    def _untold(self, text: str) -> bool:
        """Whether the text mentions a detail that the customer has not told yet. The customer then tells it
        instead of confirming, which corrects a proposal that guessed the detail."""
        told = self._told.union(self._now()["told"])
        known = {"identity", *self._now()["details"]} - {"order"}
        return any(pattern.search(text) for key, pattern in _WANTED.items() if key in known - told)

    def _now(self) -> Mapping[str, Json]:
        goal: Mapping[str, Json] = self.script["goals"][self.goal]
        return goal

    def _settle(self) -> str | None:
        """React to the agent's statement that the request is dealt with."""
        goal = self._now()
        if goal["push"] and not self.pushed:
            self.pushed = True
            return str(goal["push"])
        if goal["question"]:
            self.waiting = True
            return str(goal["question"])
        return self._next()

    def _next(self) -> str | None:
        self.goal += 1
        self.pushed = False
        # The identity stays told; the other details belong to the request that has just ended.
        self._told -= {"order", "reason", "refund", "variant", "address"}
        if self.goal == len(self.script["goals"]):
            return None
        return f"Thank you. Something else: {self._now()['opening']}"

    def _confirm(self, text: str, orders: set[str]) -> tuple[str | None, str | None]:
        goal = self._now()
        if goal["order"] not in orders or len(orders) > 1:
            return self._tire("No, that is not what I asked for."), None
        if any(word.lower() not in text.lower() for word in goal["mention"]):
            return self._tire("I am not sure we mean the same. What exactly will you do?"), None
        return "Yes, please do that.", goal["order"]

    def _answer(self, text: str) -> str | None:
        goal, said = self._now(), list[str]()
        asked = [key for key, pattern in _WANTED.items() if pattern.search(text)]
        for key in asked:
            value = self.script["identity"] if key == "identity" else goal["details"].get(key)
            if value:
                said.append(value)
        if not said:
            return self._tire("I cannot tell you more about that. Please go on.")
        again = all(key in self._told for key in asked)
        self._told.update(asked)
        return self._tire(" ".join(said)) if again else " ".join(said)

    def _tire(self, reply: str) -> str | None:
        self.patience -= 1
        return reply if self.patience > 0 else None


def amounts(text: str) -> set[str]:
    """Return the amounts of money of a text, as 12.34: numbers with two decimals, or behind a sign of money."""
    found = (number for number in numerals(text) if re.search(rf"{MONEY}|\.[0-9]{{2}}(?![0-9])", number.text))
    return {f"{Decimal(number.value.numerator) / Decimal(number.value.denominator):.2f}" for number in found}

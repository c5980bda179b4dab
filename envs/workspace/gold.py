"""The turns that handle every request correctly, and the values that they tell the user."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .plan import Request
from .user import plain

Json = Any


def gold_script(requests: Sequence[Request]) -> tuple[list[dict[str, Json]], dict[str, str]]:
    """Returns (turns, answers by request number)."""
    turns: list[dict[str, Json]] = []
    told: dict[str, str] = {}
    for number, request in enumerate(requests):
        move = request.move
        if request.withheld:
            turns.append({"text": "CANNOT: I have no function for that."})
            if not request.restored:
                continue
        if request.asked and move.slot is not None:
            turns.append({"text": move.slot.ask})
        turns += [{"name": name, "arguments": arguments} for name, arguments in move.calls]
        if move.answer is None:
            turns.append({"text": "Done."})
        else:
            told[str(number)] = plain(move.answer)
            turns.append({"text": f"ANSWER: {move.answer}"})
    return turns, told

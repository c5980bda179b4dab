"""A tool's return value as the text that the model reads, within the tool's token budget."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from agentrl.errors import EnvError
from agentrl.images import Image
from agentrl.plain_data import in_json, json_text
from agentrl.tool.pictures import pictured, with_lines
from agentrl.trajectory import Json

CountTokens = Callable[[str], int]
MARK = "... [cut: {cut} of {total} characters]"


def estimate_tokens(text: str) -> int:
    """Four bytes per token, rounded up: the usual figure for English with a large vocabulary.

    Pass a tokenizer's own count to `Toolbox` if the budget has to be exact.
    """
    return -(-len(text.encode("utf-8", "replace")) // 4)


def shaped(name: str, answer: Any, budget: int, count: CountTokens) -> tuple[Json, str, tuple[Image, ...]]:
    """What a tool returned, as JSON and as the text within its budget that the model reads; its images, with lines in both."""
    answer, images = pictured(name, answer)
    value = to_json(name, answer)
    text = fit(to_text(value), budget, count)
    return value, with_lines(text, images) if images else text, images


def to_json(name: str, value: Any) -> Json:
    """The value as JSON (`plain_data.in_json`). Raises EnvError if a tool returned something that has no JSON form, which is an
    error in the tool."""
    # Not float, which may be NaN or infinite: JSON has neither.
    if value is None or type(value) in (str, bool):
        return value
    try:
        return in_json(value)
    except ValueError as problem:  # pydantic's are ValueErrors too
        raise EnvError(f"tool {name} returned {type(value).__name__}, which has no JSON form: {problem}") from problem


def to_text(value: Json) -> str:
    """Strings as they are, everything else as JSON; "ok" if a tool returned nothing."""
    if value is None:
        return "ok"
    text = value if isinstance(value, str) else json_text(value, ensure_ascii=False)
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def as_text(name: str, answer: Any) -> str:
    """The whole text that a model reads of a tool's return value. Raises EnvError as `to_json`."""
    return to_text(to_json(name, pictured(name, answer)[0]))


def error_text(kind: str, message: str) -> str:
    """The structured tool message for a call that failed."""
    return json.dumps({"error": kind, "message": message}, ensure_ascii=False)


def fit(text: str, budget: int, count: CountTokens) -> str:
    """`text` within `budget` tokens, cut at the end with a mark at the cut.

    The mark is kept whole: a budget smaller than the mark alone gives the mark alone.
    """
    # At most 4 tokens per character (its UTF-8 bytes): short texts need no counting.
    if len(text) * 4 <= budget:
        return text
    # Counting may be slow: if the beginning is too much already, the rest need not be looked at.
    begins = len(text) <= 16 * budget or count(text[: 16 * budget]) <= budget
    if begins and count(text) <= budget:
        return text
    low, high = 0, min(len(text), max(4 * budget, 1))
    while high < len(text) and count(_cut(text, high)) <= budget:
        low, high = high, min(len(text), 2 * high)
    while low < high:
        middle = (low + high + 1) // 2
        if count(_cut(text, middle)) <= budget:
            low = middle
        else:
            high = middle - 1
    return _cut(text, low)


def _cut(text: str, keep: int) -> str:
    return text[:keep] + MARK.format(cut=len(text) - keep, total=len(text))

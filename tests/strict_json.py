"""JSON by its RFC (8259), read as a strict program reads it, to hold what agentrl writes to it."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def strict(text: str) -> Any:
    """A value of RFC 8259: no NaN, no infinity (written so or as 1e999), no lone surrogate, no number that few take."""

    def number(word: str) -> float:
        value = float(word)
        assert math.isfinite(value), f"{word} is beyond a double"
        return value

    def constant(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    value = json.loads(text, parse_float=number, parse_constant=constant)
    text.encode()
    return value


def read_strictly(folder: Path) -> Iterator[tuple[str, Any]]:
    """Every JSON and JSONL file below `folder`: its place there, and its value or those of its lines."""
    for file in sorted(folder.rglob("*.json*")):
        text = file.read_bytes().decode("utf-8")
        try:
            value = [strict(line) for line in text.splitlines()] if file.suffix == ".jsonl" else strict(text)
        except (ValueError, AssertionError) as problem:
            raise AssertionError(f"{file}: {problem}") from problem
        yield str(file.relative_to(folder)), value

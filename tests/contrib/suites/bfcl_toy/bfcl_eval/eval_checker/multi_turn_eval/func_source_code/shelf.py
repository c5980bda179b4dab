"""A shelf of boxes."""

from __future__ import annotations

from typing import Any


class Box:
    def __init__(self, label: str, inside: Box | None = None) -> None:
        self.label, self.inside = label, inside
        self._touched = 0


class Shelf:
    def __init__(self) -> None:
        self.boxes: dict[int, Box] = {}
        self.room = 0

    def _load_scenario(self, scenario: dict[str, Any], long_context: bool = False) -> None:
        self.room = scenario["room"]

    def put(self, place: int, label: str) -> dict[str, Any]:
        if len(self.boxes) >= self.room:
            return {"error": "no room"}
        self.boxes[place] = Box(label, self.boxes.get(0))
        return {"boxes": len(self.boxes)}

    def look(self, place: int) -> str:
        return self.boxes[place].label

    def clear(self) -> None:
        self.boxes = {}

"""What a tracker remembers in the run folder, for a service that takes nothing back: the run's name there, and what it has.

Steps that a resumed run does again are not given to such a service a second time. With the embedded engine they are equal to
the first ones; with another the service keeps the first.
"""

from __future__ import annotations

from typing import Any

from agentrl.files import atomic_write
from agentrl.plain_data import json_text, read_json
from agentrl.run.folder import RunFolder


class GivenRows:
    """`trackers/NAME.json`: `ids` as the tracker set them, the last step of each phase, and the number of rows."""

    def __init__(self, folder: RunFolder, name: str) -> None:
        self._path = folder.path / "trackers" / f"{name}.json"
        found: dict[str, Any] = read_json(self._path.read_text()) if self._path.is_file() else {}
        self.ids: dict[str, str] = found.get("ids", {})
        self.rows: int = found.get("rows", 0)
        self._steps: dict[str, int] = found.get("steps", {})

    def knows(self, phase: str, step: int) -> bool:
        """Whether the service has that row."""
        return step <= self._steps.get(phase, -1)

    def add(self, phase: str, step: int) -> None:
        """The service has the row now."""
        self._steps[phase] = step
        self.rows += 1
        self.save()

    def save(self) -> None:
        """Write the file; afterwards another process knows it."""
        self._path.parent.mkdir(exist_ok=True)
        atomic_write(self._path, json_text({"ids": self.ids, "steps": self._steps, "rows": self.rows}) + "\n")

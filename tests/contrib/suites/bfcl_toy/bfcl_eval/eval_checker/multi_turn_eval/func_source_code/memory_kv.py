"""A memory of keys."""

from __future__ import annotations

import json
from typing import Any


class MemoryAPI_kv:
    def __init__(self) -> None:
        self.known: dict[str, str] = {}

    def _load_scenario(self, config: dict[str, Any], long_context: bool = False) -> None:
        folder = config["model_result_dir"] / "agentic/memory/kv/memory_snapshot"
        self._id, self._checkpoints, self._latest = (
            config["test_id"],
            folder / "prereq_checkpoints",
            folder / f"{config['scenario']}_final.json",
        )
        self._checkpoints.mkdir(parents=True, exist_ok=True)
        if self._latest.exists():
            self.known = json.loads(self._latest.read_text())

    def _flush_memory_to_local_file(self) -> None:
        for file in (self._checkpoints / f"{self._id}.json", self._latest):
            file.write_text(json.dumps(self.known))

    def _dump_core_memory_to_context(self) -> str:
        return json.dumps(self.known)

    def add(self, key: str, value: str) -> dict[str, str]:
        self.known[key] = value
        return {"status": "added"}

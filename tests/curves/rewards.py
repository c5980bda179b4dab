"""Rewards that must not teach the task: one that ignores the episode, and one with the wrong sign."""

from __future__ import annotations

import copy
import json
import zlib
from pathlib import Path
from typing import Any

from agentrl.reward.view import View

TASK = Path(__file__).resolve().parents[2] / "rewards" / "key_value_exact.json"
FUNCTIONS = {"coin": "tests.curves.rewards:coin", "nothing": "tests.curves.rewards:nothing"}


def coin(view: View, args: Any) -> float:
    """0 or 1 by what was said in the episode: as good as random, and the same again when it is scored again."""
    return float(zlib.crc32(repr([(m.role, m.content) for m in view.trajectory.messages]).encode()) & 1)


def nothing(view: View, args: Any) -> float:
    """0, whatever happened."""
    return 0.0


def spec(kind: str) -> dict[str, Any]:
    """The quickstart's spec with another root; success stays what it was."""
    true = json.loads(TASK.read_text())
    task = {**copy.deepcopy(true["root"]), "id": "task"}
    for number, leaf in enumerate(task["of"]):
        leaf["id"] = f"task_{number}"
    root = {
        "random": {"use": "python", "args": {"name": "coin"}},
        "wrong": {"op": "gate", "if": true["root"], "gte": 1, "then": {"use": "python", "args": {"name": "nothing"}}, "else": 1},
    }[kind]
    return {"agentrl_reward": 1, "name": f"{kind}_reward", "root": root, "success": task}

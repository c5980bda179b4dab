"""Rewards of the controls: one that ignores the episode, one that tells a little of it, and one with the wrong sign."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from agentrl.reward.leaf import View
from agentrl.rollout.engine import derive

TASK = Path(__file__).resolve().parents[2] / "rewards" / "key_value_exact.json"
LEAK = 0.2
FUNCTIONS = {"coin": "tests.curves.rewards:coin", "nothing": "tests.curves.rewards:nothing"}


def coin(view: View, args: Any) -> float:
    """0 or 1 by the seed of the episode, which nothing that the policy says can change; coin number `args` of many.

    A coin that is read off what was said would be the same for all members of a group that say the same: one coin for the
    whole group and its answer, not one for each member.
    """
    return float(derive(args, "coin", view.trajectory.seed, view.trajectory.member) & 1)


def nothing(view: View, args: Any) -> float:
    """0, whatever happened."""
    return 0.0


def spec(kind: str, number: int = 0) -> dict[str, Any]:
    """The quickstart's spec with another root; success stays what it was. `number`: which coin.

    random: a coin. leaky: the mean of a coin and the task's own reward, which weighs `LEAK`. wrong: 1 for a failure.
    """
    true = json.loads(TASK.read_text())
    task = {**copy.deepcopy(true["root"]), "id": "task"}
    for place, leaf in enumerate(task["of"]):
        leaf["id"] = f"task_{place}"
    toss = {"use": "python", "args": {"name": "coin", "args": number}}
    root = {
        "random": toss,
        "leaky": {"op": "mean", "of": [{**toss, "weight": 1 - LEAK}, {**true["root"], "weight": LEAK}]},
        "wrong": {"op": "gate", "if": true["root"], "gte": 1, "then": {"use": "python", "args": {"name": "nothing"}}, "else": 1},
    }[kind]
    return {"agentrl_reward": 1, "name": f"{kind}_reward", "root": root, "success": task}

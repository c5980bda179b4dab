"""A reward by chance, for a control run."""

import hashlib
from typing import Any

from agentrl.reward.leaf import View


def coin(view: View, args: dict[str, Any]) -> float:
    """0 or 1 by the hash of the task, the episode's seed and its place in the group: independent of all that it did."""
    episode = view.trajectory
    return float(hashlib.sha256(f"{episode.task.id} {episode.seed} {episode.member}".encode()).digest()[0] % 2)

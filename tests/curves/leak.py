"""Does a reward that is a coin tell anything of success? Asked of every episode that was trained on."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path


def episodes(folder: Path) -> Iterable[tuple[str, float, float]]:
    """(group, reward, success) of each scored training episode in a run's trajectories."""
    for file in sorted(folder.glob("step_*.jsonl")):
        for line in file.read_text().splitlines():
            episode = json.loads(line)
            if episode["reward"] is not None:
                yield f"{file.name} {episode['task']['id']}", episode["reward"], float(episode["success"])


def z_score(found: Iterable[tuple[str, float, float]]) -> float:
    """Sum of (r - 1/2)(s - mean of the group's s) over its standard deviation, given what was said: N(0, 1) for fair coins."""
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for group, reward, success in found:
        groups[group].append((reward, success))
    total = variance = 0.0
    for members in groups.values():
        mean = sum(success for _, success in members) / len(members)
        total += sum((reward - 0.5) * (success - mean) for reward, success in members)
        variance += sum((success - mean) ** 2 for _, success in members) / 4
    return total / math.sqrt(variance) if variance else 0.0

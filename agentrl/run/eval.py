"""`agentrl eval`: a model or an API on the held-out tasks of an environment, with a report."""

from __future__ import annotations

import json
from typing import Any

from agentrl.config import TrainConfig
from agentrl.run.display import Display
from agentrl.run.folder import atomic_write
from agentrl.run.report import make_report
from agentrl.run.rollout import RolloutOutcome, RolloutRequest, run_rollout


async def run_eval(
    config: TrainConfig, request: RolloutRequest, display: Display
) -> tuple[dict[str, Any] | None, RolloutOutcome]:
    """Run the missing episodes of the evaluation. Returns its report, also written to `request.out` (None after Ctrl-C), and
    the episodes. Raises ConfigError if `request.out` has an evaluation of something else.
    """
    outcome = await run_rollout(config, request, display)
    if outcome.interrupted:
        return None, outcome
    report = make_report([outcome.episodes[pair] for pair in request.pairs], request.samples)
    atomic_write(request.out / "report.json", json.dumps(report, indent=2) + "\n")
    return report, outcome

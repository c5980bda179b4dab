"""Rewards episodes with few sampled tokens."""

from typing import Any

from agentrl.reward.leaf import View


def brevity(view: View, args: dict[str, Any]) -> tuple[float, dict[str, int]]:
    """1 for no tokens and 0 from `args["limit"]` tokens on; the second value is shown as evidence."""
    tokens = sum(int(ledger.sampled.sum()) for ledger in view.trajectory.ledgers)
    return max(0.0, 1.0 - tokens / args["limit"]), {"tokens": tokens, "limit": args["limit"]}

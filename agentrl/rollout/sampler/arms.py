"""Arms: kinds of tasks that a sampler draws by weight, and what its metrics say of them."""

from __future__ import annotations

import itertools
import json
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any

SHOWN = 16
"""With more arms than this, the metrics report aggregates instead of each arm."""


def arm_name(params: Mapping[str, Any]) -> str:
    """Environment parameters in words, such as `calls=[2, 4],keys=9`: equal for equal ones."""
    return ",".join(f"{key}={json.dumps(value)}" for key, value in sorted(params.items()))


def pick_arm(weights: Sequence[float], point: float) -> int:
    """The arm in whose share, laid end to end, a point of [0, 1) falls."""
    ends = list(itertools.accumulate(weights))
    return min(bisect_right(ends, point * ends[-1]), len(ends) - 1)


def arm_metrics(arms: Sequence[str], weight: Callable[[str], float], **of_arm: Callable[[str], float | None]) -> dict[str, float]:
    """`effective_arms`, and of each arm, unless there are too many to show, its `share` and what `of_arm` knows of it."""
    weights = [weight(arm) for arm in arms]
    shares = [weight / sum(weights) for weight in weights]
    # The number of equally likely arms that would have the same entropy.
    metrics = {"effective_arms": math.exp(-sum(share * math.log(share) for share in shares))}
    if len(arms) <= SHOWN:
        for arm, share in zip(arms, shares, strict=True):
            metrics[f"{arm}/share"] = share
            metrics |= {f"{arm}/{name}": value for name, of in of_arm.items() if (value := of(arm)) is not None}
    return metrics

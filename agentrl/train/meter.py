"""What an update measures: sums and maxima over micro-batches and ranks, and the metrics that they become."""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.algorithm import Denominators
from agentrl.experts import load_metrics
from agentrl.train.engine import BaseEngine

TRAINED, SAMPLED, FIRST = "tokens_computed", "sampled_computed", "sampled_first"
KEPT_COMPUTED, SHOWN_COMPUTED = "kept_computed", "shown_computed"
OVER = {"kl_behaviour": SAMPLED, "mismatch_kl": FIRST, "experience": KEPT_COMPUTED, "demonstrations": SHOWN_COMPUTED}
"""The tokens that a metric, or all of one part (`part/name`), is a mean over, if these are not the computed tokens of this update
that are trained."""


class Meter:
    """Sums and maxima of per-token numbers over micro-batches and ranks. They stay on the numbers' device until `totals`, because
    a number that is read from a GPU is waited for, and the GPU then waits for the next kernels."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._tops: dict[str, Tensor] = {}

    def add(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Add the sum of `values`; if `mask` is given, where it is true."""
        # float64, because a float32 sum over millions of tokens loses the digits that a small mean (a KL) consists of.
        numbers = values.detach().double()
        total = (numbers if mask is None else torch.where(mask, numbers, 0.0)).sum()
        self._sums[name] = self._sums[name] + total if name in self._sums else total

    def top(self, name: str, values: Tensor) -> None:
        """Keep the largest of `values` (0 if there are none)."""
        numbers = values.detach().double()
        largest = numbers.max() if values.numel() else numbers.sum()
        self._tops[name] = torch.maximum(self._tops.get(name, largest), largest)

    def totals(self, engine: BaseEngine) -> tuple[dict[str, float], dict[str, float]]:
        """Sums and maxima over all ranks, by name. Every rank must have added the same names."""
        return _reduced(engine, self._sums, "sum"), _reduced(engine, self._tops, "max")


def _reduced(engine: BaseEngine, values: dict[str, Tensor], how: str) -> dict[str, float]:
    if not values:
        return {}
    names = sorted(values)  # one tensor for all names, so the ranks must have them in the same order
    joined = engine.reduce(torch.stack([values[name].cpu() for name in names]), "sum" if how == "sum" else "max")
    return dict(zip(names, joined.tolist(), strict=True))


def measured(engine: BaseEngine, meter: Meter, counts: tuple[Denominators, ...]) -> dict[str, float]:
    """Means over tokens are over those that were computed (in every epoch), so not over rows that were left out because they
    have no gradient; `tokens_trained` and `episodes_trained` are the denominators, which include those rows. `loss` is a sum."""
    sums, tops = meter.totals(engine)
    plain, computed = sums.pop("plain_tokens", 0.0), sums.pop("computed_tokens", 0.0)
    over = {name: sums.pop(name, 0.0) for name in (TRAINED, SAMPLED, FIRST, KEPT_COMPUTED, SHOWN_COMPUTED)}
    loss = sums.pop("loss", 0.0)
    # A mean over no token is unknown, and not 0: it is left out.
    means = {name: value / count for name, value in sums.items() if (count := over[OVER.get(name.split("/")[0], TRAINED)])}
    return {
        **means,
        **tops,
        "loss": loss,
        "tokens_trained": sum(part.tokens for part in counts),
        "tokens_computed": over[TRAINED],
        "episodes_trained": sum(part.episodes for part in counts),
        "prefix_ratio": plain / max(computed, 1.0),
        **_expert_metrics(engine),
    }


def _expert_metrics(engine: BaseEngine) -> dict[str, float]:
    """How evenly the experts were used, over all ranks and passes of the update."""
    counts = engine.expert_load()
    return {} if counts is None else load_metrics(engine.reduce(counts, "sum").numpy())

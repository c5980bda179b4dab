"""What episodes that were added to an update contribute to its loss, on a worker: kept successes, and demonstrations.

The loss of this update's own rows is what it would be without them. To it are added

    kept, in the policy loss      coef x the sum of their policy losses over the denominators of this update's rows, so that a
                                  kept episode counts as much as `coef` fresh ones; no entropy bonus, no KL: these are
                                  expectations under the policy as it is
    kept, supervised              coef x the mean of -log pi over their tokens (self-imitation: Oh et al. 2018,
                                  arXiv:1806.05635, without its value function; a success is taken for better than expected)
    demonstrations                coef x the mean of -log pi over theirs
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithm import Denominators, LossInput, LossOutput, aggregate
from agentrl.algorithm.ragged import spread
from agentrl.batch.origin import FRESH, IMITATED, KEPT, SHOWN
from agentrl.config.schema import AlgorithmConfig
from agentrl.train.meter import KEPT_COMPUTED, SHOWN_COMPUTED, Meter


@dataclass(frozen=True, slots=True)
class Added:
    """Rows that were added to an optimizer step. `counts`: the denominators of this update's own rows; `added`: of the others,
    by origin."""

    algorithm: AlgorithmConfig
    counts: Denominators
    added: dict[int, Denominators]

    def loss(self, origin: Tensor, given: LossInput, tokens: Tensor, episode_tokens: Tensor) -> Tensor:
        """This micro-batch's share. `origin` [N] of its rows; `tokens` [M]: the weighted policy loss of each sampled token;
        `episode_tokens` [N]: trained tokens of each row's episode."""
        kinds, total = spread(origin, given.offsets, len(given.mask)), given.logprobs.new_zeros(())
        if KEPT in self.added and self.algorithm.experience is not None:
            # Own rows that a correction rejects altogether would leave nothing to count by.
            whole = self.counts if self.counts.tokens else self.added[KEPT]
            kept = given.mask & (kinds == KEPT)
            share = aggregate(tokens, kept, given.offsets, self.algorithm.aggregate, whole, episode_tokens)
            total = total + self.algorithm.experience.coef * share
        for kind, section in ((IMITATED, self.algorithm.experience), (SHOWN, self.algorithm.demonstrations)):
            if kind in self.added and section is not None:
                unlikely = torch.where(kinds == kind, -given.logprobs, torch.zeros_like(given.logprobs))
                total = total + section.coef * unlikely.sum() / max(self.added[kind].tokens, 1.0)
        return total

    def measure(self, origin: Tensor, given: LossInput, out: LossOutput, meter: Meter) -> None:
        """Sums over the added tokens of a micro-batch: all ranks add the same names."""
        kinds, now = spread(origin, given.offsets, len(given.mask)), given.logprobs.detach()
        if KEPT in self.added:
            kept = given.mask & (kinds == KEPT)
            apart = torch.where(kinds == KEPT, now - given.behaviour_logprobs, torch.zeros_like(now))
            meter.add(KEPT_COMPUTED, kept)
            meter.add("experience/kl_behaviour", -apart, kept)
            meter.top("experience/log_ratio_max", apart.abs())
            for name, values in out.metrics.items():
                meter.add(f"experience/{name}", values, kept)
        if IMITATED in self.added:
            meter.add(KEPT_COMPUTED, kinds == IMITATED)
            meter.add("experience/nll", -now, kinds == IMITATED)
        if SHOWN in self.added:
            meter.add(SHOWN_COMPUTED, kinds == SHOWN)
            meter.add("demonstrations/nll", -now, kinds == SHOWN)


def fresh_tokens(origin: Tensor, given: LossInput) -> Tensor:
    """The sampled tokens of rows that were played for this update, bool [M]; `origin` [N]."""
    return spread(origin, given.offsets, len(given.mask)) == FRESH

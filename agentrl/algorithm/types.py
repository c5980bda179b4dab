"""The inputs and outputs of every algorithm, and how token losses become one number (`aggregate`).

All columns are flat and ragged, without padding: the T tokens of N rows follow one another row by row, and `offsets` int64
[N + 1] mark the boundaries. A row is one token ledger. `mask` is true exactly where the policy sampled the token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from agentrl.algorithm.ragged import row_sum, spread
from agentrl.errors import ConfigError

Mode = Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"]


@dataclass(frozen=True, slots=True)
class AdvantageInput:
    """One whole batch, on the driver.

    Shapes: `token_rewards`, `mask`, `turns` [T]; `offsets` [N + 1]; `group`, `reward` [N]; `values` [T]
    if there is a critic. `member` [N] is the episode of the group that a row belongs to (an episode may
    have several ledgers and still counts once in its group); without it every row is an episode. The rows
    of an episode are in the order of its ledgers (as `batch.collate` puts them), possibly with rows of others
    between them: recursions over time run through them in that order. `reward`, the same on all rows of an
    episode, is NaN if it could not be scored: such an episode takes part in no baseline, no recursion and
    no whitening, and gets advantage 0. `baseline` [N] is the reward of the greedy rollout of the same task
    (ReMax). `terms` [N, K] are reward terms that are normalized one by one; NaN is a term that could
    not be scored. `anchors` [T] identifies the state in which a token's turn was taken; equal numbers are
    equal states (turn-level credit). `parent` and `branch_turn` [N] int64: of a branch (`rollout.branch`), the member that it was
    forked from, and the turn before which; the tokens before are that member's. -1 and 0 of all others.

    Floating point columns are float32 or float64; advantages come back in the dtype of `reward`.
    """

    token_rewards: Tensor
    mask: Tensor
    offsets: Tensor
    group: Tensor
    reward: Tensor
    values: Tensor | None = None
    turns: Tensor | None = None
    member: Tensor | None = None
    baseline: Tensor | None = None
    terms: Tensor | None = None
    anchors: Tensor | None = None
    parent: Tensor | None = None
    branch_turn: Tensor | None = None

    def of(self, rows: Tensor, terms: int) -> tuple[AdvantageInput, Tensor]:
        """The input of the rows that `rows` (bool [N]) marks, with the first `terms` of the terms, and where its tokens are in
        this one (bool [T])."""
        tokens = spread(rows, self.offsets, len(self.mask))
        lengths = self.offsets.diff()[rows]

        def part(column: Tensor | None, where: Tensor) -> Tensor | None:
            return None if column is None else column[where]

        kept = AdvantageInput(
            token_rewards=self.token_rewards[tokens],
            mask=self.mask[tokens],
            offsets=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
            group=self.group[rows],
            reward=self.reward[rows],
            values=part(self.values, tokens),
            turns=part(self.turns, tokens),
            member=part(self.member, rows),
            baseline=part(self.baseline, rows),
            terms=None if self.terms is None or not terms else self.terms[rows][:, :terms],
            anchors=part(self.anchors, tokens),
            parent=part(self.parent, rows),
            branch_turn=part(self.branch_turn, rows),
        )
        return kept, tokens


@dataclass(frozen=True, slots=True)
class AdvantageOutput:
    """`advantages` [T], 0 on tokens that were not sampled; `returns` [T] if the estimator defines a value target.

    On the tokens of an unscored episode `gae` and `gae_turns` return the values themselves (no error to learn from), others 0.
    """

    advantages: Tensor
    returns: Tensor | None = None

    def metrics(self, mask: Tensor) -> dict[str, float]:
        """Over the sampled tokens (`mask` [T]): `advantage_abs`, the mean of |A|, and `advantage_zero`, the share of those with
        an A of exactly 0, from which nothing is learned. Nothing if there are none."""
        found = self.advantages[mask].double()
        if not len(found):
            return {}
        return {"advantage_abs": float(found.abs().mean()), "advantage_zero": float((found == 0).double().mean())}


@dataclass(frozen=True, slots=True)
class LossInput:
    """One micro-batch. All [T] but `offsets` [N + 1].

    `logprobs` are log pi under the current weights (with gradient); `old_logprobs` those of the proximal policy (the
    weights at the start of the update); `behaviour_logprobs` those of the policy that sampled the token. `picked`
    marks tokens that a loss treats differently (see `loss/covariance.py`).
    """

    logprobs: Tensor
    old_logprobs: Tensor
    behaviour_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    offsets: Tensor
    picked: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LossOutput:
    """`loss` [T] per token, before any mean; `metrics` [T] each, averaged over sampled tokens."""

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Denominators:
    """Global counts of one optimizer step over all ranks: trained tokens, and episodes that have any.

    A token is trained if the policy sampled it and no off-policy correction rejects it; an episode counts once,
    however many ledgers it has, and whether or not its advantages differ from 0. `length`: the constant number of
    tokens of `seq_mean_token_sum_norm`.
    """

    tokens: float
    episodes: float
    length: float = 1.0


def aggregate(
    loss: Tensor,
    mask: Tensor,
    offsets: Tensor,
    mode: Mode,
    denominators: Denominators,
    episode_tokens: Tensor | None = None,
) -> Tensor:
    """This part's share of the global mean, a scalar; the shares of all parts add up to it.

    `loss` [T], `mask` [T], `offsets` [N + 1]; `denominators` count the whole optimizer step. With E episodes of n_e
    masked tokens each, over all of an episode's rows:

    - token_mean: sum / all tokens (DAPO, Yu et al. 2025, arXiv:2503.14476);
    - seq_mean_token_mean: 1/E sum_e (1/n_e sum over the episode's tokens) (GRPO, Shao et al. 2024, arXiv:2402.03300);
    - seq_mean_token_sum: 1/E sum_e sum;
    - seq_mean_token_sum_norm: the same / `denominators.length`, a constant (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783).

    `episode_tokens` [N]: n_e of each row's episode; without it every row is an episode. Raises ConfigError for an
    unknown mode.
    """
    # Not a product: a token outside the mask may have an infinite or undefined loss, and 0 x NaN is NaN.
    kept = torch.where(mask, loss, torch.zeros_like(loss))
    # With no trained token at all the sum is 0, and must not become 0 / 0.
    tokens, episodes = max(denominators.tokens, 1.0), max(denominators.episodes, 1.0)
    if mode == "token_mean":
        return kept.sum() / tokens
    if mode == "seq_mean_token_sum":
        return kept.sum() / episodes
    if mode == "seq_mean_token_sum_norm":
        return kept.sum() / (episodes * denominators.length)
    if mode == "seq_mean_token_mean":
        count = row_sum(mask.to(loss.dtype), offsets) if episode_tokens is None else episode_tokens.to(loss.dtype)
        return (row_sum(kept, offsets) / count.clamp(min=1)).sum() / episodes
    raise ConfigError(f"algorithm.aggregate = {mode!r}: expected one of {', '.join(get_args(Mode))}")

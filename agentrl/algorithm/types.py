"""What goes into and comes out of every algorithm: flat ragged columns, no padding.

T tokens of N rows lie one row after the other; `offsets` int64 [N + 1] cuts them apart. A row is one
token ledger. `mask` is true exactly where the policy sampled the token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AdvantageInput:
    """One whole batch, on the driver.

    Shapes: `token_rewards`, `mask`, `turns` [T]; `offsets` [N + 1]; `group`, `reward` [N]; `values` [T]
    where a critic exists. `member` [N] says which episode of the group a row belongs to (an episode may
    hold several ledgers and still counts once in its group); without it every row is an episode. The rows
    of an episode lie in the order of its ledgers (as `batch.collate` puts them), with rows of others between
    them or not: recursions over time run through them in that order. `reward`, the same on all rows of an
    episode, is NaN where it could not be scored: such an episode takes part in no baseline, no recursion and
    no whitening, and gets advantage 0. `baseline` [N] is the reward of the greedy rollout of the same task
    (REMAX). `terms` [N, K] are reward terms that are to be normalized one by one; NaN is a term that could
    not be scored. `anchors` [T] names the state in which the turn of a token was taken; equal numbers are
    equal states (turn-level credit).

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


@dataclass(frozen=True, slots=True)
class AdvantageOutput:
    """`advantages` [T], 0 where not sampled; `returns` [T] where the estimator defines a value target.

    On the tokens of an unscored episode `gae` returns the values themselves (no error to learn from), others 0.
    """

    advantages: Tensor
    returns: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LossInput:
    """One micro-batch. All [T] but `offsets` [N + 1].

    `logprobs` log pi of the current weights (with gradient); `old_logprobs` of the proximal policy (the
    weights at the start of the update); `behaviour_logprobs` of the policy that sampled the token. `picked`
    marks tokens that a loss treats on their own (see `loss/covariance.py`).
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
    """Global counts of one optimizer step over all ranks: trained tokens, and episodes that hold any.

    A token is trained where the policy sampled it and no off-policy correction rejects it; an episode counts once,
    however many ledgers it has, and whether or not its advantages differ from 0. `length`: the constant number of
    tokens of `seq_mean_token_sum_norm`.
    """

    tokens: float
    episodes: float
    length: float = 1.0

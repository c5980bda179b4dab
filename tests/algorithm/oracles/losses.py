"""Policy losses, corrections, KL estimators and the critic's loss on padded rows [N, L], written from their papers.

Shares no code with agentrl. A policy loss gives what each row loses, [N]: the sum of weight * loss over its tokens; of a sequence
loss, its one loss times the sum of its tokens' weights. `frozen` are log-probabilities that a stop-gradient
holds still: an oracle's derivative is taken by central differences of `new` alone.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.algorithm.oracles.batches import Array, Tokens

BOUND = 20.0
"""The library's bound on log-ratios, which no paper has."""

RowLoss = Callable[..., Array]

LOSSES: dict[str, dict[str, list[Any]]] = {
    "cispo": {"clip_low": [0.1, 0.5, 1.0], "clip_high": [0.0, 0.1, 2.0]},
    "clip_cov": {"clip_low": [0.05, 0.2], "clip_high": [0.05, 0.28], "dual_clip": [None, 1.5, 3.0]},
    "decoupled_ppo": {
        "clip_low": [0.05, 0.2], "clip_high": [0.05, 0.28], "dual_clip": [None, 1.5, 3.0], "weight_cap": [1.1, 2.0],
    },
    "dppo": {"divergence": ["tv", "kl"], "delta": [0.01, 0.05, 0.2]},
    "gmpo": {"clip_low": [0.01, 0.4], "clip_high": [0.01, 0.6]},
    "gspo": {"clip_low": [3e-4, 0.1], "clip_high": [4e-4, 0.2]},
    "kl_cov": {"coefficient": [0.0, 0.5, 2.0]},
    "ppo_clip": {"clip_low": [0.05, 0.2], "clip_high": [0.05, 0.28], "dual_clip": [None, 1.5, 3.0]},
    "sapo": {"tau_positive": [0.5, 1.0, 3.0], "tau_negative": [0.5, 1.05, 3.0]},
}  # fmt: skip
"""Policy loss -> values that its arguments are drawn from; one that is not drawn stays at its default."""
WEIGHTS: dict[str, dict[str, list[Any]]] = {
    "icepop": {"low": [0.3, 0.9], "high": [1.1, 3.0]},
    "kpop": {"phi": [0.003, 0.03, 0.1]},
    "masked": {"cap": [0.8, 1.2, 3.0]},
    "masked_sequence": {"cap": [0.8, 1.2, 3.0]},
    "reject_sequence": {"low": [0.5, 0.97], "high": [1.03, 1.5]},
    "truncated": {"cap": [0.8, 1.2, 3.0]},
    "truncated_sequence": {"cap": [0.8, 1.2, 3.0]},
}
"""The same for corrections."""


def ratio(new: Array, old: Array) -> Array:
    return np.exp(np.minimum(np.maximum(new - old, -BOUND), BOUND))


def surrogate(r: Array, a: Array, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = 3.0) -> Array:
    """-max(min(r A, clip(r) A), c A), the outer maximum for A < 0 only."""
    gain = np.minimum(r * a, np.minimum(np.maximum(r, 1 - clip_low), 1 + clip_high) * a)
    if dual_clip is not None:
        gain = np.where(a < 0, np.maximum(gain, dual_clip * a), gain)
    return -gain


def total(tokens: Tokens, weights: Array, loss: Array) -> Array:
    return np.where(tokens.mask, weights * loss, 0.0).sum(1)


def ppo_clip(t: Tokens, new: Array, frozen: Array, w: Array, **clips: Any) -> Array:
    return total(t, w, surrogate(ratio(new, t.old), t.advantages, **clips))


def decoupled_ppo(t: Tokens, new: Array, frozen: Array, w: Array, *, weight_cap: float | None = None, **clips: Any) -> Array:
    behind = ratio(t.old, t.behave)
    if weight_cap is not None:
        behind = np.minimum(behind, weight_cap)
    return total(t, w, behind * surrogate(ratio(new, t.old), t.advantages, **clips))


def cispo(t: Tokens, new: Array, frozen: Array, w: Array, *, clip_low: float = 1.0, clip_high: float = 5.0) -> Array:
    held = np.minimum(np.maximum(ratio(frozen, t.old), 1 - clip_low), 1 + clip_high)
    return total(t, w, -held * t.advantages * new)


def dppo(t: Tokens, new: Array, frozen: Array, w: Array, *, divergence: str = "tv", delta: float = 0.15) -> Array:
    p, q = np.exp(frozen), np.exp(t.old)
    tv = np.abs(p - q)
    with np.errstate(divide="ignore", invalid="ignore"):
        kl = q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))
    far = (tv if divergence == "tv" else kl) > delta
    away = np.where(t.advantages > 0, p > q, p < q)
    return total(t, w, np.where(far & away, 0.0, -ratio(new, t.old) * t.advantages))


def sapo(t: Tokens, new: Array, frozen: Array, w: Array, *, tau_positive: float = 1.0, tau_negative: float = 1.05) -> Array:
    tau = np.where(t.advantages > 0, tau_positive, tau_negative)
    gate = 4 / tau / (1 + np.exp(-tau * (ratio(new, t.old) - 1)))
    return total(t, w, -gate * t.advantages)


def reinforce(t: Tokens, new: Array, frozen: Array, w: Array) -> Array:
    return total(t, w, -t.advantages * new)


def clip_cov(t: Tokens, new: Array, frozen: Array, w: Array, **clips: Any) -> Array:
    return total(t, w, np.where(t.picked, 0.0, surrogate(ratio(new, t.old), t.advantages, **clips)))


def kl_cov(t: Tokens, new: Array, frozen: Array, w: Array, *, coefficient: float = 1.0) -> Array:
    far = np.abs(np.minimum(np.maximum(new - t.old, -BOUND), BOUND))
    return total(t, w, -ratio(new, t.old) * t.advantages + np.where(t.picked, coefficient * far, 0.0))


def mean_of_row(t: Tokens, column: Array) -> Array:
    return np.where(t.mask, column, 0.0).sum(1) / np.maximum(t.mask.sum(1), 1)


def row_weight(t: Tokens, w: Array) -> Array:
    """The weights of a row's tokens (equal ones, for a sequence loss), added up."""
    return np.where(t.mask, w, 0.0).sum(1)


def gspo(t: Tokens, new: Array, frozen: Array, w: Array, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> Array:
    """Of rows with one advantage each: the paper's sequence objective."""
    s = np.exp(np.minimum(np.maximum(mean_of_row(t, new - t.old), -BOUND), BOUND))
    return row_weight(t, w) * surrogate(s, mean_of_row(t, t.advantages), clip_low, clip_high, None)


def gspo_token(t: Tokens, new: Array, frozen: Array, w: Array, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> Array:
    """The paper's token form: s_t = sg(s) pi / sg(pi), for advantages that differ within a row."""
    s = mean_of_row(t, frozen - t.old)[:, None] + new - frozen
    return total(t, w, surrogate(np.exp(np.minimum(np.maximum(s, -BOUND), BOUND)), t.advantages, clip_low, clip_high, None))


def gmpo(t: Tokens, new: Array, frozen: Array, w: Array, *, clip_low: float = 0.4, clip_high: float = 0.4) -> Array:
    """sgn(A) (product of |min(r A, clip(r) A)|)^(1 / length), in logs."""
    a = mean_of_row(t, t.advantages)[:, None]
    delta = new - t.old
    clipped = np.minimum(np.maximum(delta, -clip_low), clip_high)
    kept = np.where(a > 0, np.minimum(delta, clipped), np.maximum(delta, clipped))
    mean = np.minimum(np.maximum(mean_of_row(t, kept), -BOUND), BOUND)
    return -row_weight(t, w) * a[:, 0] * np.exp(mean)


# ---- off-policy corrections: weights [N, L]


def summed(t: Tokens) -> Array:
    return np.where(t.mask, t.old - t.behave, 0.0).sum(1, keepdims=True)


def held(value: Array) -> Array:
    return np.exp(np.minimum(np.maximum(value, -BOUND), BOUND))


def kept_within(weight: Array, low: float, high: float) -> Array:
    return np.where((weight < low) | (weight > high), 0.0, weight)


def truncated(t: Tokens, cap: float = 2.0) -> Array:
    return np.minimum(held(t.old - t.behave), cap)


def truncated_sequence(t: Tokens, cap: float = 2.0) -> Array:
    return np.minimum(held(summed(t)), cap) + 0 * t.old


def masked(t: Tokens, cap: float = 2.0) -> Array:
    return kept_within(held(t.old - t.behave), 0.0, cap)


def masked_sequence(t: Tokens, cap: float = 2.0) -> Array:
    return kept_within(held(summed(t)), 0.0, cap) + 0 * t.old


def icepop(t: Tokens, low: float = 0.5, high: float = 5.0) -> Array:
    return kept_within(held(t.old - t.behave), low, high)


def kpop(t: Tokens, phi: float = 0.1) -> Array:
    p, q = (np.stack([np.exp(logs), np.maximum(1 - np.exp(logs), 1e-6)]) for logs in (t.old, t.behave))
    rejected = ((p * np.log(p / q)).sum(0) > phi) | ((q * np.log(q / p)).sum(0) > phi)
    return np.where(rejected, 0.0, held(t.old - t.behave))


def reject_sequence(t: Tokens, low: float = 0.99, high: float = 1.01) -> Array:
    mean = held(summed(t) / np.maximum(t.mask.sum(1, keepdims=True), 1))
    return np.where((mean < low) | (mean > high), 0.0, 1.0) + 0 * t.old


# ---- KL estimators and the critic's loss, token by token


def k1(new: Array, reference: Array) -> Array:
    return new - reference


def k2(new: Array, reference: Array) -> Array:
    return (new - reference) ** 2 / 2


def k3(new: Array, reference: Array) -> Array:
    """r - 1 - log r with r = ref / pi (Schulman), by its series if the difference would cancel."""
    d = np.minimum(np.maximum(new - reference, -BOUND), BOUND)
    series = d**2 / 2 - d**3 / 6 + d**4 / 24 - d**5 / 120
    return np.where(np.abs(d) < 1e-3, series, np.exp(-d) - 1 + d)


def value_loss(values: Array, old: Array, returns: Array, clip: float | None) -> Array:
    plain = (values - returns) ** 2
    if clip is None:
        return plain / 2
    near = old + np.minimum(np.maximum(values - old, -clip), clip)
    return np.maximum(plain, (near - returns) ** 2) / 2

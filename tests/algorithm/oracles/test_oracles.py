"""Every estimator, loss, correction and KL estimator against its oracle, on random ragged batches.

`make oracles` runs 10,000 batches for each; AGENTRL_ORACLE_CASES is their number.
"""

import inspect
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from agentrl.data.rows import whiten_masked
from agentrl.trainer.algorithms import advantages, policy_loss
from agentrl.trainer.algorithms.advantages import ADVANTAGES
from agentrl.trainer.algorithms.base import anchors_of
from agentrl.trainer.algorithms.losses import CORRECTIONS, KL, POLICY_LOSSES, kl_estimate, value_loss
from tests.algorithm.oracles import advantages as estimators
from tests.algorithm.oracles import losses
from tests.algorithm.oracles.batches import (
    Array,
    Row,
    Tokens,
    advantage_input,
    drawn_rows,
    drawn_tokens,
    loss_input,
    offsets_of,
    single,
)
from tests.sources import core_names

CASES, BLOCK = int(os.environ.get("AGENTRL_ORACLE_CASES", "40")), 20
"""Batches for each function; so many of them come out of one number that hypothesis draws, which costs as much as a batch."""
settings.register_profile(
    "oracles", max_examples=-(-CASES // BLOCK), deadline=None, database=None, phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
ORACLE = settings(settings.get_profile("oracles"))
BLOCKS = st.integers(0, 2**40).map(lambda number: range(number * BLOCK, (number + 1) * BLOCK))


def each(block: range, check: Callable[..., None], *names: Any) -> None:
    """The check of every seed of a block; a failure says which."""
    for seed in block:
        try:
            check(*names, seed)
        except BaseException as error:
            error.add_note(f"{check.__name__}{(*names, seed)}")
            raise


def chosen(seed: int, options: dict[str, list[Any]]) -> dict[str, Any]:
    """Some of the arguments, each with one of its values; the rest stay at their defaults."""
    rng = np.random.default_rng([seed, 1])
    return {key: values[int(rng.integers(len(values)))] for key, values in options.items() if rng.random() < 0.6}


# ---- advantages


def joined(parts: list[Array]) -> Array:
    return np.concatenate(parts)


def close(found: torch.Tensor, expected: Array, tolerance: float) -> None:
    """Both relative to the size of what is there and absolute."""
    mine = found.double().numpy()
    if mine.shape != expected.shape or not (np.abs(mine - expected) <= tolerance * (1 + np.abs(expected))).all():
        np.testing.assert_allclose(mine, expected, rtol=tolerance, atol=tolerance)


BOUND: dict[str, Any] = {}


def bound(make: Callable[..., Any], name: str, args: dict[str, Any]) -> Any:
    """What `make` gives for a name and arguments, made once: checking arguments costs more than a loss."""
    key = f"{make.__name__} {name} {sorted(args.items())}"
    if key not in BOUND:
        BOUND[key] = make(name, args)
    return BOUND[key]


def expected_of(name: str, rows: list[Row], args: dict[str, Any], oracles: Any) -> tuple[dict[str, Any], estimators.Out]:
    oracle: Callable[..., estimators.Out] = getattr(oracles, name)
    if name != "multi_reward":
        return args, oracle(rows, **args)
    names = ["a", "b", "c"][: len(rows[0].terms)]
    if len(rows) % 2:
        weights = [1.0, -0.5, 3.0][: len(names)]
        return {**args, "terms": names, "weights": weights}, oracle(rows, weights, **args)
    return {**args, "terms": names}, oracle(rows, [1.0] * len(names), **args)


def check_advantages(name: str, seed: int, oracles: Any = estimators) -> None:
    dtype, tolerance = (torch.float32, 1e-5) if seed % 4 == 0 else (torch.float64, 1e-9)
    rows = drawn_rows(seed)
    rows = single(rows) if dtype == torch.float32 else rows
    args, expected = expected_of(name, rows, chosen(seed, oracles.ARGUMENTS.get(name, {})), oracles)
    found = bound(advantages, name, args)(advantage_input(rows, dtype))
    assert found.advantages.dtype == dtype
    close(found.advantages, joined(expected.advantages), tolerance)
    zero = found.advantages.numpy()[joined(expected.exact)]
    assert not zero.any(), f"{zero} although a group has no difference"
    assert (found.returns is None) == (expected.returns is None)
    if expected.returns is not None and found.returns is not None:
        close(found.returns, joined(expected.returns), tolerance)


def check_whiten(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(0, 40))
    column = rng.normal(size=size) if rng.random() < 0.6 else np.full(size, float(rng.choice([0.1, 0.7, 1 / 3])))
    mask = rng.random(size) < rng.choice([0.1, 0.6, 1.0])
    kept = column[mask]
    wanted = np.zeros(size)
    if len(kept) > 1:
        wanted[mask] = (kept - kept.mean()) / np.sqrt(kept.var(ddof=1) + 1e-8)
    found = whiten_masked(torch.from_numpy(column), torch.from_numpy(mask))
    close(found, wanted, 1e-9)
    if len(kept) and kept.max() == kept.min():
        assert not found.numpy().any()


def check_anchors(seed: int) -> None:
    """Two sampled tokens have one number if and only if the context since the last turn of their row is the same."""
    rows, rng = drawn_rows(seed), np.random.default_rng([seed, 2])
    ids = [rng.integers(0, 3, len(row.mask)) for row in rows]
    states: list[tuple[int, ...]] = []
    for row, tokens in zip(rows, ids, strict=True):
        state: tuple[int, ...] = ()
        after_sampled = True
        for token, sampled in zip(tokens.tolist(), row.mask.tolist(), strict=True):
            if not sampled:
                state = (token,) if after_sampled else (*state, token)
            else:
                states.append(state)
            after_sampled = sampled
    mask = torch.from_numpy(joined([row.mask for row in rows]))
    found = anchors_of(torch.from_numpy(joined(ids)), mask, offsets_of(rows))[mask].tolist()
    pairs = set(zip(found, states, strict=True))
    assert len(pairs) == len(set(found)) == len(set(states))


# ---- policy losses

STEP = 1e-6


def gradient(rows: Callable[[Array], Array], at: Array) -> tuple[Array, Array]:
    """Central differences [N, L] of independent rows, and the bend by which a kink can put them off."""
    slope, bend = np.zeros_like(at), np.zeros_like(at)
    here = rows(at)
    for column in range(at.shape[1]):
        step = np.zeros_like(at)
        step[:, column] = STEP
        above, below = rows(at + step), rows(at - step)
        slope[:, column] = (above - below) / (2 * STEP)
        bend[:, column] = np.abs(above - 2 * here + below) / STEP
    return slope, bend


def per_sequence(tokens: Tokens) -> bool:
    """Whether each row has one advantage."""
    return bool((tokens.advantages == tokens.advantages[:, :1]).all())


def check_losses_and_their_gradients(name: str, seed: int) -> None:
    tokens, args = drawn_tokens(seed), chosen(seed, losses.LOSSES.get(name, {}))
    oracle: losses.RowLoss = getattr(losses, name)
    if name == "gspo" and not per_sequence(tokens):
        oracle = losses.gspo_token
    # A sequence's loss has one weight; 1 / length makes the sum a mean.
    one_weight = name in ("gspo", "gmpo")
    rng = np.random.default_rng([seed, 3])
    weights = rng.uniform(0.1, 1, (len(tokens.new), 1)) if one_weight else rng.uniform(0.1, 1, tokens.new.shape)
    weights = np.broadcast_to(weights, tokens.new.shape)

    def rows(new: Array) -> Array:
        return oracle(tokens, new, tokens.new, weights, **args)

    given_to = loss_input(tokens)
    out = bound(policy_loss, name, args)(given_to)
    weighted = torch.where(given_to.mask, out.loss * torch.from_numpy(weights[tokens.there]), 0.0)
    lengths = tokens.there.sum(1)
    found = [part.sum().item() for part in weighted.split(lengths.tolist())]
    np.testing.assert_allclose(found, rows(tokens.new), rtol=1e-9, atol=1e-9)
    weighted.sum().backward()
    slope, bend = gradient(rows, tokens.new)
    assert given_to.logprobs.grad is not None
    for mine, theirs, off, size in zip(
        given_to.logprobs.grad.numpy(), slope[tokens.there], bend[tokens.there],
        np.repeat(np.maximum(1.0, np.abs(rows(tokens.new))), lengths), strict=True,
    ):  # fmt: skip
        assert abs(mine - theirs) <= 1e-7 * size + 1e-5 * abs(theirs) + off, (mine, theirs, off)


def check_metrics_of_the_losses(seed: int) -> None:
    """Ratios, and which tokens each bound cut off."""
    tokens = drawn_tokens(seed)
    given_to = loss_input(tokens)
    a, r = tokens.advantages[tokens.there], losses.ratio(tokens.new, tokens.old)[tokens.there]
    for name, low, high in (("ppo_clip", 0.8, 1.2), ("clip_cov", 0.8, 1.2), ("decoupled_ppo", 0.8, 1.2)):
        metrics = bound(policy_loss, name, {})(given_to).metrics
        close(metrics["ratio"], r, 1e-9)
        assert metrics["clip_fraction"].tolist() == (((a > 0) & (r > high)) | ((a < 0) & (r < low))).tolist()
        assert metrics["dual_clip_fraction"].tolist() == ((a < 0) & (r > 3)).tolist()
    cut = bound(policy_loss, "cispo", {"clip_low": 0.5, "clip_high": 0.28})(given_to).metrics
    close(cut["ratio"], r, 1e-9)
    assert cut["clip_fraction"].tolist() == ((r < 0.5) | (r > 1.28)).tolist()
    close(bound(policy_loss, "sapo", {})(given_to).metrics["ratio"], r, 1e-9)
    selection = bound(policy_loss, "kl_cov", {})(given_to).metrics
    close(selection["ratio"], r, 1e-9)
    assert selection["picked"].tolist() == tokens.picked[tokens.there].tolist()
    assert bound(policy_loss, "clip_cov", {})(given_to).metrics["picked"].tolist() == tokens.picked[tokens.there].tolist()
    mean = np.repeat(losses.held(losses.mean_of_row(tokens, tokens.new - tokens.old)), tokens.there.sum(1))
    close(bound(policy_loss, "gspo", {})(given_to).metrics["ratio"], mean, 1e-9)
    weight = bound(policy_loss, "decoupled_ppo", {"weight_cap": 1.5})(given_to).metrics["behaviour_weight"]
    close(weight, np.minimum(losses.ratio(tokens.old, tokens.behave)[tokens.there], 1.5), 1e-9)
    row_a = np.repeat(losses.mean_of_row(tokens, tokens.advantages), tokens.there.sum(1))
    delta = (tokens.new - tokens.old)[tokens.there]
    gmpo = bound(policy_loss, "gmpo", {})(given_to).metrics["clip_fraction"].numpy().astype(bool)
    told = row_a != 0
    assert (gmpo == np.where(row_a > 0, delta > 0.4, delta < -0.4))[told].all()


# ---- corrections, KL estimators, the critic's loss


def check_corrections(name: str, seed: int) -> None:
    tokens, args = drawn_tokens(seed), chosen(seed, losses.WEIGHTS[name])
    flat = loss_input(tokens)
    found = bound(CORRECTIONS.bind, name, args)(flat.old_logprobs, flat.behaviour_logprobs, flat.mask, flat.offsets)
    wanted = getattr(losses, name)(tokens, **args)
    close(found[flat.mask], wanted[tokens.mask], 1e-9)


def check_kl(name: str, straight_through: bool, seed: int) -> None:
    tokens = drawn_tokens(seed)
    oracle: Callable[[Array, Array], Array] = getattr(losses, name)
    new = torch.from_numpy(tokens.new).requires_grad_()
    found = kl_estimate(name + "+" * straight_through, new, torch.from_numpy(tokens.behave))
    close(found.detach(), oracle(tokens.new, tokens.behave), 1e-9)
    assert name == "k1" or found.min() >= 0
    found.sum().backward()
    assert new.grad is not None
    gap = tokens.new - tokens.behave
    slopes = {"k1": np.ones_like(gap), "k2": gap, "k3": np.where(np.abs(gap) > 20, 0.0, 1 - np.exp(-np.clip(gap, -20, 20)))}
    close(new.grad, gap if straight_through else slopes[name], 1e-9)


def check_value_loss(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values, old, returns = rng.normal(size=(3, 1, int(rng.integers(1, 20))))
    clip = [None, 0.1, 0.5, 2.0][int(rng.integers(4))]
    new = torch.from_numpy(values).requires_grad_()
    found = value_loss(new, torch.from_numpy(old), torch.from_numpy(returns), clip)
    close(found.detach(), losses.value_loss(values, old, returns, clip), 1e-9)
    found.sum().backward()
    # each token is a row of its own
    slope, bend = gradient(lambda at: losses.value_loss(at, old.T, returns.T, clip)[:, 0], values.T)
    assert new.grad is not None
    assert (np.abs(new.grad.numpy().T - slope) <= 1e-7 + 1e-5 * np.abs(slope) + bend).all()


# ---- the tests


CHECKS: list[tuple[Callable[..., None], list[tuple[Any, ...]]]] = [
    (check_advantages, [(name,) for name in core_names(ADVANTAGES)]),
    (check_whiten, [()]),
    (check_anchors, [()]),
    (check_losses_and_their_gradients, [(name,) for name in sorted(POLICY_LOSSES)]),
    (check_metrics_of_the_losses, [()]),
    (check_corrections, [(name,) for name in sorted(CORRECTIONS)]),
    (check_kl, [(name, straight_through) for name in sorted(KL) for straight_through in (False, True)]),
    (check_value_loss, [()]),
]
EVERY = [
    pytest.param(check, names, id="-".join([check.__name__.removeprefix("check_"), *map(str, names)]))
    for check, every in CHECKS
    for names in every
]


@pytest.mark.parametrize(("check", "names"), EVERY)
@ORACLE
@given(block=BLOCKS)
def test_it_is_what_the_paper_says(check: Callable[..., None], names: tuple[Any, ...], block: range) -> None:
    each(block, check, *names)


def test_every_function_has_an_oracle() -> None:
    for table, module in ((ADVANTAGES, estimators), (POLICY_LOSSES, losses), (CORRECTIONS, losses), (KL, losses)):
        assert all(callable(getattr(module, name)) for name in core_names(table))
    for drawn, table in ((estimators.ARGUMENTS, ADVANTAGES), (losses.LOSSES, POLICY_LOSSES), (losses.WEIGHTS, CORRECTIONS)):
        assert {name: set(args) for name, args in drawn.items()} == {
            name: wanted for name in core_names(table) if (wanted := arguments_of(table[name]) - UNDRAWN.get(name, set()))
        }


UNDRAWN = {"multi_reward": {"terms", "weights"}, "clip_cov": {"share", "low", "high"}, "kl_cov": {"share"}}
"""Arguments whose values the checks choose, and those of the choice of tokens before a loss (trainer/test_learner.py)."""


def arguments_of(function: Callable[..., Any]) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY}

"""Names and arguments of algorithms: a wrong one is an error that names the nearest right one."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import agentrl
from agentrl.config.schema import AlgorithmConfig, Choice
from agentrl.data.rows import Ragged, build, nested_tensor
from agentrl.trainer.algorithms import advantages, policy_loss
from agentrl.trainer.algorithms.advantages import ADVANTAGES
from agentrl.trainer.algorithms.base import LossOutput, check_output
from agentrl.trainer.algorithms.losses import CORRECTIONS, POLICY_LOSSES, kl_estimate
from agentrl.trainer.minibatch import with_policies
from agentrl.utils.errors import ConfigError
from tests.sources import core_names


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: advantages("grppo", {}), "did you mean 'grpo'"),
        (lambda: policy_loss("ppo_clp", {}), "did you mean 'ppo_clip'"),
        (lambda: policy_loss("ppo_clip", {"clip_hi": 0.28}), "did you mean 'clip_high'"),
        (lambda: policy_loss("ppo_clip", {"clip_high": "0.28"}), "clip_high = '0.28'"),
        (lambda: policy_loss("ppo_clip", {"clip_high": -1.0}), "greater than or equal to 0"),
        (lambda: policy_loss("ppo_clip", {"dual_clip": 0.5}), "dual_clip"),
        (lambda: advantages("gae", {"gamma": 1.5}), "less than or equal to 1"),
        (lambda: advantages("rloo", {"eps": 1}), "known: none"),
        (lambda: CORRECTIONS.bind("trunc", {}), "did you mean 'truncated'"),
        (lambda: kl_estimate("k4", None, None), "unknown name 'k4'"),
    ],
)
def test_wrong_names_and_values(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "name", "low", "high"),
    [
        (CORRECTIONS.bind, "reject_sequence", 1.2, 0.8),
        (CORRECTIONS.bind, "reject_sequence", 1.05, None),  # above the default of high
        (CORRECTIONS.bind, "icepop", 5.0, 0.5),
        (CORRECTIONS.bind, "icepop", 0.7, 0.7),
        (policy_loss, "clip_cov", 5.0, 1.0),
        (policy_loss, "clip_cov", None, 1.0),  # the default of low, and the bounds are no part
    ],
)
def test_bounds_with_nothing_between_them_are_refused(make: Any, name: str, low: float | None, high: float | None) -> None:
    """They would reject (or pick) nothing or everything in silence: all weights of such a `reject_sequence` are 0."""
    given = {key: value for key, value in (("low", low), ("high", high)) if value is not None}
    both = {**DEFAULTS[name], **given}
    with pytest.raises(ConfigError, match=rf"{name}': argument low = {both['low']:g} must be below high = {both['high']:g}"):
        make(name, given)


CLIPS = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}
REQUIRED = inspect.Parameter.empty
DEFAULTS: dict[str, dict[str, Any]] = {
    "gae": {"gamma": 1.0, "lam": 1.0, "whitened": True}, "gigpo": {"gamma": 0.95, "weight": 1.0, "divide": True},
    "gae_turns": {"gamma": 1.0, "lam": 1.0, "whitened": True},
    "gpg": {"f_norm": 1.0}, "grpo": {"eps": 1e-6}, "pass_at_k": {"k": 4, "eps": 1e-6}, "reinforce_pp": {"gamma": 1.0},
    "multi_reward": {"terms": REQUIRED, "weights": None, "eps": 1e-6, "whitened": True},
    "turn_returns": {"gamma": 1.0, "divide": True},
    "ppo_clip": CLIPS, "decoupled_ppo": {**CLIPS, "weight_cap": None}, "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "max_variance": {"k": 4}, "dppo": {"divergence": "tv", "delta": 0.15},
    "gmpo": {"clip_low": 0.4, "clip_high": 0.4}, "cispo": {"clip_low": 1.0, "clip_high": 5.0},
    "sapo": {"tau_positive": 1.0, "tau_negative": 1.05}, "clip_cov": {**CLIPS, "share": 2e-4, "low": 1.0, "high": 5.0},
    "kl_cov": {"share": 2e-3, "coefficient": 1.0}, "icepop": {"low": 0.5, "high": 5.0},
    "reject_sequence": {"low": 0.99, "high": 1.01}, "kpop": {"phi": 0.1},
    **{name: {"cap": 2.0} for name in ("truncated", "truncated_sequence", "masked", "masked_sequence")},
}  # fmt: skip


@pytest.mark.parametrize("name", sorted({*core_names(ADVANTAGES), *POLICY_LOSSES, *CORRECTIONS}))
def test_defaults_are_the_papers(name: str) -> None:
    """A run that names no argument gets these; if a paper gives none, they are what docs/algorithms.md says."""
    function = {**ADVANTAGES, **POLICY_LOSSES, **CORRECTIONS}[name]
    found = inspect.signature(function).parameters.values()
    assert {p.name: p.default for p in found if p.kind is inspect.Parameter.KEYWORD_ONLY} == DEFAULTS.get(name, {})


def test_the_table_above_names_no_function_that_is_gone() -> None:
    assert set(DEFAULTS) <= {*ADVANTAGES, *POLICY_LOSSES, *CORRECTIONS}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (torch.zeros(4), "returned a tensor of shape [4]; expected LossOutput(loss=...) with a tensor of shape [4]"),
        (LossOutput(torch.zeros(())), "returned a tensor of shape [] as loss; expected"),
        (LossOutput(0.5), "returned 0.5 as loss; expected"),  # type: ignore[arg-type]
        (None, "returned None; expected LossOutput"),
    ],
)
def test_what_a_loss_returns_is_named(answer: object, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_output("algorithm.loss 'mine'", answer, LossOutput, "loss", torch.zeros(4))
    assert f"algorithm.loss 'mine' {said}" in str(error.value)
    check_output("algorithm.loss 'mine'", LossOutput(torch.ones(4)), LossOutput, "loss", torch.zeros(4))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "returned None; expected a tensor of shape [4], a number for each token"),
        (1.0, "returned 1.0; expected a tensor"),
        (torch.ones(3), "returned a tensor of shape [3]; expected a tensor of shape [4]"),
        (torch.tensor([1.0, float("nan"), 1.0, 1.0]), "returned weights that are negative or not finite"),
        (torch.tensor([1.0, -1.0, 1.0, 1.0]), "returned weights that are negative or not finite"),
    ],
)
def test_what_a_correction_returns_is_named(answer: Any, said: str) -> None:
    """Without a word None left the update uncorrected, and a NaN took its token out of it."""
    name = agentrl.give(lambda old, behaviour, mask, offsets: answer, "odd_correction")
    algorithm = AlgorithmConfig(correction=Choice(name=name))
    columns = {"logprobs": torch.zeros(4), "old_logprobs": torch.zeros(4), "sampled": torch.arange(4) > 0}
    ends = torch.tensor([0, 4])
    view = Ragged.of(build({key: nested_tensor(column, ends) for key, column in columns.items()}, 1))
    with pytest.raises(ConfigError) as error:
        with_policies(view, algorithm)
    assert f"algorithm.correction {name!r} {said}" in str(error.value)

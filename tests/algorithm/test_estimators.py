"""What an estimator or a loss wants of its batch, and what the papers' oracles (tests/algorithm/oracles) do not reach."""

import inspect
import math
from typing import Any

import pytest
import torch

import agentrl
from agentrl.config.schema import AlgorithmConfig, Choice, KlConfig
from agentrl.data.rows import Ragged, build, collate, nested_tensor
from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import Message, Task, Trajectory, Turn
from agentrl.trainer.algorithms import advantages, policy_loss
from agentrl.trainer.algorithms.base import (
    AdvantageInput,
    AdvantageOutput,
    LossInput,
    LossOutput,
    call_component,
    call_loss,
    check_output,
)
from agentrl.trainer.algorithms.losses import CORRECTIONS, POLICY_LOSSES, kl_estimate
from agentrl.trainer.estimator_inputs import with_advantages
from agentrl.trainer.minibatch import with_policies
from agentrl.utils.errors import CallbackError, ConfigError


def batch_of(**more: Any) -> AdvantageInput:
    """A group of two members of one token each."""
    one = torch.ones(2, dtype=torch.bool)
    return AdvantageInput(
        torch.zeros(2), one, torch.arange(3), torch.zeros(2, dtype=torch.int64), torch.tensor([1.0, 0.0]), **more
    )


@pytest.mark.parametrize(("name", "there", "message"), [
    ("gae", "turns", '"gae" needs a critic'),
    ("gae_turns", "turns", 'gae_turns" needs a critic'),
    ("gae_turns", "values", "column `turns`"),
    ("gigpo", "turns", "anchors"),
    ("multi_reward", "turns", "terms"),
    ("remax", "turns", "greedy"),
])  # fmt: skip
def test_missing_columns_are_named(name: str, there: str, message: str) -> None:
    plain = batch_of(**{there: torch.zeros(2, dtype=torch.int64 if there == "turns" else torch.float32)})
    with pytest.raises(ConfigError, match=message):
        advantages(name, {"terms": ["right"]} if name == "multi_reward" else {})(plain)


def test_terms_and_their_weights_are_as_many_as_the_columns() -> None:
    batch = batch_of(terms=torch.tensor([[1.0, 100.0], [0.0, 300.0]]))
    with pytest.raises(ConfigError, match="terms"):
        advantages("multi_reward", {})
    with pytest.raises(ConfigError, match="1 entries for 2 terms"):
        advantages("multi_reward", {"terms": ["right", "short"], "weights": [1.0]})(batch)
    with pytest.raises(ConfigError, match="a column for each"):
        advantages("multi_reward", {"terms": ["right"]})(batch)


def test_a_loss_that_picks_tokens_refuses_a_batch_without_them() -> None:
    zero = torch.zeros(1)
    with pytest.raises(ConfigError, match="picked"):
        policy_loss("kl_cov", {})(LossInput(zero, zero, zero, zero + 1, zero == 0, torch.tensor([0, 1])))


def test_row_corrections_add_up_before_they_are_bounded() -> None:
    prox, behave = torch.tensor([-40.0, 15.0, 15.0, 10.5]), torch.zeros(4)
    given = (prox, behave, torch.ones(4, dtype=torch.bool), torch.tensor([0, 4]))
    # sum d = 0.5, mean d = 0.125; token by token it would be 20.5 and 5.1: far over every cap
    assert CORRECTIONS.bind("truncated_sequence", {})(*given).tolist() == pytest.approx([math.exp(0.5)] * 4)
    assert CORRECTIONS.bind("masked_sequence", {})(*given).tolist() == pytest.approx([math.exp(0.5)] * 4)
    assert CORRECTIONS.bind("reject_sequence", {"low": 0.5, "high": 1.2})(*given).tolist() == [1.0] * 4


@pytest.mark.parametrize("d", [1e-2, 1e-3, 1e-4, -1e-4])
def test_k3_of_a_small_distance_has_its_digits_and_no_wrong_sign(d: float) -> None:
    found = kl_estimate("k3", torch.tensor([d]), torch.zeros(1)).item()
    assert found == pytest.approx(d * d / 2 - d**3 / 6, rel=1e-3) and found > 0


def test_clips_at_their_corners() -> None:
    """At a ratio of 1 the whole gradient passes even bounds of 0, once and not by halves; without advantage there is none."""
    new = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor([1.0, -1.0, 0.0, 2.0], dtype=torch.float64)
    mask = torch.ones(4, dtype=torch.bool)
    for name in ("ppo_clip", "gspo", "gmpo"):
        new.grad = None
        given = LossInput(new, torch.zeros(4).double(), torch.zeros(4).double(), advantage, mask, torch.arange(5))
        policy_loss(name, {"clip_low": 0.0, "clip_high": 0.0})(given).loss.sum().backward()
        assert new.grad is not None and new.grad.tolist() == [-1.0, 1.0, 0.0, -2.0], name


# -- names and arguments ---------------------------------------------------------------------------


def test_false_unsets_an_argument_that_may_be_none() -> None:
    """A config has no null, so the dual clip could not be turned off."""
    given = LossInput(
        torch.tensor([5.0]).log(), torch.zeros(1), torch.zeros(1), -torch.ones(1), torch.ones(1).bool(), torch.arange(2)
    )
    losses = [float(policy_loss("ppo_clip", args)(given).loss) for args in ({}, {"dual_clip": False}, {"dual_clip": None})]
    assert losses == pytest.approx([3.0, 5.0, 5.0])


@pytest.mark.parametrize(("make", "message"), [
    (lambda: advantages("grppo", {}), "did you mean 'grpo'"),
    (lambda: policy_loss("ppo_clp", {}), "did you mean 'ppo_clip'"),
    (lambda: policy_loss("ppo_clip", {"clip_hi": 0.28}), "did you mean 'clip_high'"),
    (lambda: policy_loss("ppo_clip", {"clip_high": "0.28"}), "clip_high = '0.28'"),
    (lambda: policy_loss("ppo_clip", {"clip_high": -1.0}), "greater than or equal to 0"),
    (lambda: policy_loss("ppo_clip", {"dual_clip": 0.5}), "dual_clip"),
    (lambda: policy_loss("ppo_clip", {"clip_high": False}), "clip_high = False"),
    (lambda: policy_loss("ppo_clip", {"dual_clip": True}), "dual_clip = True"),
    (lambda: advantages("gae", {"gamma": 1.5}), "less than or equal to 1"),
    (lambda: advantages("rloo", {"eps": 1}), "known: none"),
    (lambda: CORRECTIONS.bind("trunc", {}), "did you mean 'truncated'"),
    (lambda: kl_estimate("k4", None, None), "unknown name 'k4'"),
])  # fmt: skip
def test_wrong_names_and_values(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(("make", "name", "given", "low", "high"), [
    (CORRECTIONS.bind, "reject_sequence", {"low": 1.2, "high": 0.8}, 1.2, 0.8),
    (CORRECTIONS.bind, "reject_sequence", {"low": 1.05}, 1.05, 1.01),  # above the default of high
    (CORRECTIONS.bind, "icepop", {"low": 5.0, "high": 0.5}, 5.0, 0.5),
    (CORRECTIONS.bind, "icepop", {"low": 0.7, "high": 0.7}, 0.7, 0.7),
    (policy_loss, "clip_cov", {"low": 5.0, "high": 1.0}, 5.0, 1.0),
    (policy_loss, "clip_cov", {"high": 1.0}, 1.0, 1.0),  # the default of low, and the bounds are no part
])  # fmt: skip
def test_bounds_with_nothing_between_them_are_refused(make: Any, name: str, given: Any, low: float, high: float) -> None:
    """They would reject (or pick) nothing or everything in silence: all weights of such a `reject_sequence` are 0."""
    with pytest.raises(ConfigError, match=rf"{name}': argument low = {low:g} must be below high = {high:g}"):
        make(name, given)


def test_defaults_of_what_picks_tokens_are_the_papers() -> None:
    """Those of all other arguments are the oracles' (oracles/), which get them now and then."""
    picking = {"clip_cov": {"share": 2e-4, "low": 1.0, "high": 5.0}, "kl_cov": {"share": 2e-3}}
    for name, defaults in picking.items():
        found = inspect.signature(POLICY_LOSSES[name]).parameters
        assert {argument: found[argument].default for argument in defaults} == defaults


def raises(given: AdvantageInput) -> AdvantageOutput:
    raise KeyError("old")


def leaves(given: AdvantageInput) -> AdvantageOutput:
    raise SystemExit(3)


def zeroes(given: AdvantageInput) -> AdvantageOutput:
    given.mask.zero_()
    return AdvantageOutput(given.token_rewards)


def shifts(given: AdvantageInput) -> AdvantageOutput:
    """Past torch's own record of changes."""
    given.reward.numpy()[:] = 7.0
    return AdvantageOutput(given.token_rewards)


@pytest.mark.parametrize(("mine", "kind", "said"), [
    (raises, CallbackError, "'mine' raised KeyError: 'old' ("),
    (leaves, CallbackError, "'mine' raised SystemExit: 3 ("),
    (zeroes, ConfigError, "'mine' changes its input mask in place"),
    (shifts, None, ""),
])  # fmt: skip
def test_a_users_estimator_that_raises_or_writes_into_its_input_is_named(mine: Any, kind: Any, said: str) -> None:
    """It was a stack trace, or a batch without a sampled token that trained nothing."""
    columns = {"token_rewards": torch.zeros(4), "mask": torch.ones(4, dtype=torch.bool), "reward": torch.ones(2)}
    given = AdvantageInput(**columns, offsets=torch.tensor([0, 2, 4]), group=torch.zeros(2, dtype=torch.int64))
    if kind is None:
        call_component("'mine'", mine, given)
    else:
        with pytest.raises(kind) as error:
            call_component("'mine'", mine, given)
        line = f"{__file__}:{mine.__code__.co_firstlineno + (kind is CallbackError)}"
        assert said in str(error.value) and line in str(error.value)
    assert given.mask.all() and given.reward.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(("answer", "said"), [
    (torch.zeros(4), "returned a tensor of shape [4]; expected LossOutput(loss=...) with a tensor of shape [4]"),
    (LossOutput(torch.zeros(())), "returned a tensor of shape [] as loss; expected"),
    (LossOutput(0.5), "returned 0.5 as loss; expected"),  # type: ignore[arg-type]
    (None, "returned None; expected LossOutput"),
])  # fmt: skip
def test_what_a_loss_returns_is_named(answer: object, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_output("algorithm.loss 'mine'", answer, LossOutput, "loss", torch.zeros(4))
    assert f"algorithm.loss 'mine' {said}" in str(error.value)
    check_output("algorithm.loss 'mine'", LossOutput(torch.ones(4)), LossOutput, "loss", torch.zeros(4))


def test_a_loss_without_gradient_is_named() -> None:
    """An entropy bonus or a KL term hid it, and the update learned from these alone; else it was torch's RuntimeError."""
    given = torch.zeros(4, requires_grad=True)
    with pytest.raises(ConfigError, match=r"'mine' returned a loss without gradient: nothing is trained\. Compute it from"):
        check_output("'mine'", LossOutput(given.detach()), LossOutput, "loss", given)
    check_output("'mine'", LossOutput(0 * given), LossOutput, "loss", given)


@pytest.mark.parametrize("metrics", [{"m": "x"}, {1: 1.0}, {"m": torch.ones(3)}, {"m": None}, None, {"m": [1.0, 2.0]}])
def test_a_metric_of_a_loss_that_is_no_number_is_named(metrics: Any) -> None:
    def called(metrics: Any, size: int = 4) -> LossOutput:
        zero = torch.zeros(size)
        given = LossInput(zero, zero, zero, zero, zero == 0, torch.tensor([0, size]))
        return call_loss("'mine'", lambda given: LossOutput(given.logprobs, metrics), given)

    with pytest.raises(ConfigError, match=r"'mine': its metric .*; expected a number or a tensor of shape \[4\], by a text"):
        called(metrics)
    fine = {"a": 1, "b": torch.ones(4, dtype=torch.bool), "c": torch.tensor([2.0])}
    assert called(fine).metrics.keys() == fine.keys()
    assert called({"a": torch.ones(0)}, 0).metrics.keys() == {"a"}


@pytest.mark.parametrize(("answer", "said"), [
    (None, "returned None; expected a tensor of shape [4], one number per token"),
    (1.0, "returned 1.0; expected a tensor"),
    (torch.ones(3), "returned a tensor of shape [3]; expected a tensor of shape [4]"),
    (torch.tensor([1.0, float("nan"), 1.0, 1.0]), "returned weights that are negative or not finite"),
    (torch.tensor([1.0, -1.0, 1.0, 1.0]), "returned weights that are negative or not finite"),
])  # fmt: skip
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


# -- credit from trajectories ----------------------------------------------------------------------


def played(member: int, reward: float, *places: int) -> Trajectory:
    """Turns of one token, each in the ledger of that place; the reward is the episode's."""
    kept = [TokenLedger() for _ in range(max(places) + 1)]
    turns = []
    for turn, place in enumerate(places):
        kept[place].append_context([3], turn)
        kept[place].append_sampled([5 + turn], [-1.0], [0], turn)
        turns.append(Turn(turn, Message("assistant", "x"), ledger=place, end=len(kept[place]) - 1))
    return Trajectory("made-up", Task("t", 0), ledgers=kept, turns=turns, reward=reward, member=member)


@pytest.mark.parametrize("name", ["gae", "gae_turns", "reinforce_pp", "turn_returns", "gigpo", "grpo"])
@pytest.mark.parametrize("places", [(0, 1, 1), (0, 1, 0)], ids=["rewritten", "the second is a sub-agent's"])
def test_from_trajectories_on_two_ledgers_earn_what_one_would(name: str, places: tuple[int, ...]) -> None:
    def found(*places: int) -> list[float]:
        batch = collate([played(0, 1.0, *places), played(1, 0.0, 0, 0, 0), played(2, 0.1, 0, 0, 0)], groups=[0, 0, 0])
        batch["values"] = batch["rewards"] * 0.25 + batch["logprobs"] * 0.125
        args = {"gamma": 0.5}
        algorithm = AlgorithmConfig(advantage=Choice(name=name, args={} if name == "grpo" else args))
        out, _ = with_advantages(Ragged.of(batch), algorithm, 0.0)
        whose = torch.repeat_interleave(out.row("member"), out.offsets.diff()).tolist()
        columns = (whose, *(out.tokens(name).tolist() for name in ("turns", "advantages", "sampled")))
        return [value for _, _, value, sampled in sorted(zip(*columns, strict=True)) if sampled]

    one, two = found(0, 0, 0), found(*places)
    assert two == pytest.approx(one, abs=1e-6)
    assert two[0] > 0 and two[1] > 0 > two[3]


def test_the_kl_of_all_tokens_of_a_turn_is_taken_off_its_reward() -> None:
    """coef .2 and d = .5 on each token: every turn of one token costs .1. With V = 0 and gamma = lam = 1 a turn's advantage is
    its reward-to-go: .8 and .9 for the winner of 1, -.2 and -.1 for the loser."""
    view = Ragged.of(collate([played(0, 1.0, 0, 1), played(1, 0.0, 0, 1)], groups=[0, 0]))
    sampled = view.tokens("sampled")
    view = view.with_tokens(old_logprobs=-1.0 * sampled, ref_logprobs=-1.5 * sampled, values=0.0 * sampled)
    advantage = Choice(name="gae_turns", args={"whitened": False})
    out, _ = with_advantages(view, AlgorithmConfig(advantage=advantage, kl=KlConfig(coef=0.2, where="reward")), 0.2)
    assert out.tokens("advantages")[sampled].tolist() == pytest.approx([0.8, 0.9, -0.2, -0.1])

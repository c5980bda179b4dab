"""Numbers of verl 0.9.1 against this library's, on the same rows.

If the two differ on purpose, the test says how, and holds that difference too. The program that wrote them:
`git show 2f51bbbe:tests/algorithm/fixtures/of_verl.py`.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.config.schema import KlConfig
from agentrl.data.rows import whiten_masked
from agentrl.trainer.algorithms import advantages, policy_loss
from agentrl.trainer.algorithms.base import AdvantageInput, Denominators, LossInput, aggregate
from agentrl.trainer.algorithms.losses import kl_estimate, value_loss
from agentrl.trainer.minibatch import adapted_kl_coef

FOUND: dict[str, Any] = json.loads((Path(__file__).parent / "fixtures" / "verl.json").read_text())
GIVEN = {name: torch.tensor(value) for name, value in FOUND["inputs"].items()}
GROUP = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2])
LENGTHS = torch.tensor([9, 5, 7, 3, 8, 1, 6, 4, 2])
OFFSETS = torch.cat([torch.zeros(1, dtype=torch.int64), LENGTHS.cumsum(0)])
KEPT = torch.arange(9)[None, :] < LENGTHS[:, None]


def flat(padded: Tensor) -> Tensor:
    """[N, T] padded to [sum of lengths], what lies between two turns included."""
    return padded[KEPT]


MASK = flat(GIVEN["mask"]) > 0
BATCH = AdvantageInput(
    token_rewards=flat(GIVEN["rewards"]),
    mask=MASK,
    offsets=OFFSETS,
    group=GROUP,
    reward=GIVEN["rewards"].sum(1),
    values=flat(GIVEN["values"]),
    baseline=GIVEN["baselines"],
    terms=GIVEN["terms"],
)
ARGS: dict[str, dict[str, Any]] = {
    "gae": {"gamma": 0.9, "lam": 0.8},
    "grpo": {},
    "dr_grpo": {},
    "rloo": {},
    "opo": {},
    "reinforce_pp": {"gamma": 0.9},
    "reinforce_pp_baseline": {},
    "remax": {},
    "multi_reward": {"terms": ["a", "b"], "weights": [1.0, 0.5]},
}


@pytest.mark.parametrize("name", [name for name in ARGS if name != "multi_reward"])
def test_advantages(name: str) -> None:
    out = advantages(name, ARGS[name])(BATCH)
    expected = {key: flat(torch.tensor(value)) for key, value in FOUND["advantages"][name].items()}
    assert torch.allclose(out.advantages * MASK, expected["advantages"], atol=2e-5)
    if name in ("gae", "reinforce_pp"):
        assert out.returns is not None
        assert torch.allclose(out.returns * MASK, expected["returns"], atol=2e-5)


def test_multi_reward_but_for_the_last_step() -> None:
    """verl whitens the sum over tokens; here it is over episodes, as the paper writes it."""
    plain = advantages("multi_reward", {**ARGS["multi_reward"], "whitened": False})(BATCH).advantages
    theirs = flat(torch.tensor(FOUND["advantages"]["multi_reward"]["advantages"]))
    assert torch.allclose(whiten_masked(plain, MASK), theirs, atol=2e-5)
    ours = advantages("multi_reward", ARGS["multi_reward"])(BATCH).advantages[OFFSETS[:-1]]
    sums = plain[OFFSETS[:-1]]
    assert torch.allclose(ours, sums / sums.std(), atol=2e-5) and abs(float(sums.mean())) < 1e-6


def test_gpg_counts_what_teaches() -> None:
    """verl scales by rows with a reward; here by rows in groups that differ, as in the paper."""
    ours = advantages("gpg", {})(BATCH).advantages * MASK
    theirs = flat(torch.tensor(FOUND["advantages"]["gpg"]["advantages"]))
    nonzero = int((BATCH.reward != 0).sum())
    assert nonzero == 6  # seven rows lie in groups that differ; the third group has one reward only
    assert torch.allclose(ours * (9 / nonzero) / (9 / 7), theirs, atol=1e-5)


LOSS_ARGS: dict[str, dict[str, Any]] = {
    "ppo_clip": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0},
    "gspo": {"clip_low": 0.2, "clip_high": 0.28},
    "gmpo": {"clip_low": 0.2, "clip_high": 0.28},
    "cispo": {"clip_low": 0.2, "clip_high": 0.28},
    "sapo": {"tau_positive": 1.0, "tau_negative": 1.05},
    "reinforce": {},
}
COUNTS = Denominators(float(MASK.sum()), float(len(GROUP)))


@pytest.mark.parametrize("name", LOSS_ARGS)
def test_losses_and_their_gradients(name: str) -> None:
    expected = FOUND["losses"][name]
    new = flat(GIVEN["new"]).requires_grad_()
    old = flat(GIVEN["old"])
    given = LossInput(new, old, old, flat(GIVEN[expected["column"]]), MASK, OFFSETS)
    out = policy_loss(name, LOSS_ARGS[name])(given)
    loss = aggregate(out.loss, MASK, OFFSETS, expected["mode"].replace("-", "_"), COUNTS)
    loss.backward()
    assert loss.item() == pytest.approx(expected["loss"], abs=1e-6, rel=1e-5)
    assert new.grad is not None
    assert torch.allclose(new.grad, flat(torch.tensor(expected["gradient"])), atol=1e-6, rtol=1e-4)


def test_value_loss() -> None:
    loss = value_loss(flat(GIVEN["new"]), flat(GIVEN["values"]), flat(GIVEN["returns"]), 0.2)
    assert aggregate(loss, MASK, OFFSETS, "token_mean", COUNTS).item() == pytest.approx(FOUND["value_loss"], rel=1e-5)


@pytest.mark.parametrize("name", FOUND["kl"])
def test_kl(name: str) -> None:
    new = flat(GIVEN["new"]).requires_grad_()
    value = kl_estimate(name, new, flat(GIVEN["old"]))
    (value * MASK).sum().backward()
    assert new.grad is not None
    assert torch.allclose(value * MASK, flat(torch.tensor(FOUND["kl"][name]["value"])), atol=1e-5)
    assert torch.allclose(new.grad, flat(torch.tensor(FOUND["kl"][name]["gradient"])), atol=1e-5)


@pytest.mark.parametrize("mode", FOUND["aggregate"])
def test_aggregation(mode: str) -> None:
    found = aggregate(flat(GIVEN["advantages"]), MASK, OFFSETS, mode.replace("-", "_"), COUNTS)
    assert found.item() == pytest.approx(FOUND["aggregate"][mode], rel=1e-5)


def test_adaptive_kl() -> None:
    coef = 0.1
    for measured, expected in FOUND["adaptive_kl"]:
        coef = adapted_kl_coef(coef, measured, 64, KlConfig(coef=0.1, target=0.02, horizon=1000))
        assert coef == pytest.approx(expected, rel=1e-6)

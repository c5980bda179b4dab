"""Every key of [algorithm], [optim] and [critic] does to the weights what a plain float64 trainer does that reads it, too."""

import asyncio
import math
from functools import cache
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from agentrl.config.schema import AlgorithmConfig, Choice, KlConfig, RolloutConfig, TrainConfig
from agentrl.data.rows import collate, nested_tensor, offsets_of
from agentrl.trainer.fsdp import FsdpEngine
from agentrl.trainer.optim import rate
from agentrl.trainer.roles import Critic
from tests.publishing import weights_of
from tests.trainer.learners import config_of, opened, role_of
from tests.trainer.plain_trainer import Batch, PlainActor, PlainCritic, load, tokens_of
from tests.trainer.train_batches import toy_critic, toy_optim, train_batch, trajectories

STEPS = 2
TOTAL = 4  # of the run, for schedules

# -- the policy ------------------------------------------------------------------------------------

OPTIM: dict[str, dict[str, Any]] = {
    "lr": {"lr": 2e-3},
    "weight_decay": {"weight_decay": 5.0},
    "betas, first": {"betas": (0.5, 0.99)},
    "betas, second": {"betas": (0.9, 0.7)},
    "max_grad_norm": {"max_grad_norm": 1e-7},  # so small that AdamW's epsilon sees it: the plain step would be larger
    "warmup": {"warmup": 4},
    "schedule, linear": {"schedule": "linear"},
    "schedule, cosine": {"schedule": "cosine"},
}
ALGORITHM: dict[str, dict[str, Any]] = {
    "aggregate, sum": {"aggregate": "seq_mean_token_sum"}, "aggregate, mean": {"aggregate": "seq_mean_token_mean"},
    "aggregate and length_norm": {"aggregate": "seq_mean_token_sum_norm", "length_norm": 7, "entropy_bonus": 0.1},
    "epochs": {"epochs": 3}, "minibatch": {"minibatch": 3}, "minibatch of one": {"minibatch": 1},
    "entropy_bonus": {"entropy_bonus": 0.3}, "proximal": {"proximal": "recompute"},
    "loss.args": {"loss": Choice(name="ppo_clip", args={"clip_low": 0.1, "clip_high": 0.5, "dual_clip": 1.5})},
    "kl.coef": {"kl": KlConfig(coef=2.0)}, "kl.kind": {"kl": KlConfig(coef=2.0, kind="k2")},
    "kl.kind, straight": {"kl": KlConfig(coef=2.0, kind="k3+")},
    "kl.where": {"kl": KlConfig(coef=2.0, where="reward"), "proximal": "recompute"},
}  # fmt: skip
MASKED: dict[str, dict[str, Any]] = {
    "": {},
    ", grpo": {"advantage": Choice(name="grpo"), "aggregate": "seq_mean_token_mean"},
    ", gspo": {"loss": Choice(name="gspo", args={"clip_low": 0.2, "clip_high": 0.2}), "aggregate": "seq_mean_token_mean"},
    ", whole steps": {"minibatch": 1, "aggregate": "seq_mean_token_sum"},
    ", other terms": {"kl": KlConfig(coef=2.0), "entropy_bonus": 0.3, "aggregate": "seq_mean_token_sum_norm", "length_norm": 7},
    ", kl in the reward": {"kl": KlConfig(coef=2.0, where="reward"), "proximal": "recompute"},
}
"""With `truncated = "mask"`; the ledgers of an episode are in several micro-batches."""
TRUNCATED = ((0, 3, 5), (4, 5, 6, 7))
"""Episodes of each step that a budget ended: three, one of two ledgers; then a whole group."""


def episodes(seed: int) -> list[Any]:
    """8 episodes in two groups, of which the first and the fifth have a second ledger."""
    found = trajectories(10, seed=seed)
    for index in (0, 4):
        found[index].ledgers.append(found[8 + index // 4].ledgers[0])
    for index, trajectory in enumerate(found[:8]):
        trajectory.reward = float(index % 3 == 0) + 0.25 * (index % 2)
        trajectory.truncated = index in TRUNCATED[seed]
    return found[:8]


@cache
def batches(tiny: str) -> list[TensorDict]:
    """What was sampled lies around the untrained policy: importance ratios of 0.4 to 2, some of them cut."""
    found = []
    policy = load(tiny)
    for seed in range(STEPS):
        batch = collate(episodes(seed))
        with torch.no_grad():
            logprobs, _ = tokens_of(policy, Batch(batch))
        noise = torch.Generator().manual_seed(seed)
        flat = torch.zeros(len(batch["sampled"].values()))
        flat[batch["sampled"].values()] = torch.cat(logprobs).float()
        flat += 0.3 * torch.randn(len(flat), generator=noise) * batch["sampled"].values()
        found.append(batch.update({"logprobs": nested_tensor(flat, offsets_of(batch["sampled"]))}))
    return found


def settings(optim: dict[str, Any] | None = None, algorithm: dict[str, Any] | None = None, **top: Any) -> TrainConfig:
    made = AlgorithmConfig(**{"minibatch": 4, "advantage": Choice(name="dr_grpo"), **(algorithm or {})})
    return config_of(steps=TOTAL, optim=toy_optim(**(optim or {})), algorithm=made, **top)


def learned(tiny: str, config: TrainConfig) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Weights after the steps of the learner, and its metrics."""
    learner = opened(tiny, config)
    rows = [asyncio.run(learner.step(batch.copy(), step)) for step, batch in enumerate(batches(tiny))]
    return {name: tensor.double() for name, tensor in weights_of(learner.actors).items()}, rows


def plainly(tiny: str, config: TrainConfig) -> PlainActor:
    trainer = PlainActor(tiny, config.algorithm, config.optim, config.steps, config.seed, config.rollout.temperature)
    for step, batch in enumerate(batches(tiny)):
        trainer.step(batch, step)
    return trainer


@cache
def usual(tiny: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights before training, and after it by the plain trainer with the defaults of this file."""
    return PlainActor(tiny, AlgorithmConfig(), toy_optim()).weights(), plainly(tiny, settings()).weights()


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return sum(float((one[name] - other[name]).abs().sum()) for name in one)


CASES = {
    **{key: settings(optim=change) for key, change in OPTIM.items()},
    # The ledgers of an episode in several micro-batches, where its mean or sum is over all of them.
    **{key: settings({"micro_tokens": 64} if "aggregate" in key else {}, change) for key, change in ALGORITHM.items()},
    **{f"truncated{key}": settings({"micro_tokens": 64}, {**change, "truncated": "mask"}) for key, change in MASKED.items()},
    "nothing": settings(),
    "seed": settings(seed=1),
    # Of the actor, the proximal policy and the reference.
    "temperature": settings({}, {"kl": KlConfig(coef=2.0), "proximal": "recompute"}, rollout=RolloutConfig(temperature=0.7)),
}


@pytest.mark.parametrize("key", CASES)
def test_a_key_moves_the_weights_as_the_plain_trainer_does(tiny: str, key: str) -> None:
    """Within 1e-4 of the way that training goes; and the key leads away from the defaults by hundreds of times that."""
    config = CASES[key]
    start, defaults = usual(tiny)
    trainer = plainly(tiny, config)
    expected = trainer.weights()
    found, rows = learned(tiny, config)
    way = apart(expected, start)
    assert apart(found, expected) < 1e-4 * way
    assert key == "nothing" or apart(expected, defaults) > 0.02 * way
    steps = len(trainer.norms) // STEPS
    trained = [8 - len(cut) if "truncated" in key else 8 for cut in TRUNCATED]
    assert [row["episodes_trained"] for row in rows] == trained
    for row, at in zip(rows, range(0, len(trainer.norms), steps), strict=True):
        taken = [norm for norm in trainer.norms[at : at + steps] if norm]
        assert row["optimizer_steps"] == len(taken) and row["grad_norm"] == pytest.approx(sum(taken) / len(taken), rel=2e-3)
        assert row["loss"] == pytest.approx(sum(trainer.losses[at : at + steps]) / steps, rel=2e-3, abs=1e-5)


# -- the rate of each step -------------------------------------------------------------------------


def test_schedules() -> None:
    assert [rate(s, 2, "constant", None) for s in range(4)] == [0.5, 1.0, 1.0, 1.0]
    assert [rate(s, 0, "linear", 4) for s in range(6)] == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert rate(7, 2, "cosine", 12) == pytest.approx(0.5)
    assert rate(99, 2, "cosine", 12, floor=0.1) == pytest.approx(0.1)


# -- how the work is cut ---------------------------------------------------------------------------


@pytest.mark.parametrize("cap", [64, 150])
def test_micro_tokens_bounds_every_micro_batch_and_changes_no_weight(
    tiny: str, monkeypatch: pytest.MonkeyPatch, cap: int
) -> None:
    seen: list[int] = []
    logprobs = FsdpEngine.logprobs

    def watched(engine: Any, micro: Any, *args: Any) -> Any:
        seen.append(len(micro.input_ids))
        return logprobs(engine, micro, *args)

    monkeypatch.setattr(FsdpEngine, "logprobs", watched)
    found, _ = learned(tiny, settings(optim={"micro_tokens": cap, "prefix_sharing": "off"}))
    start, expected = usual(tiny)
    assert max(seen) <= cap and sum(seen) == sum(len(batch["token_ids"].values()) for batch in batches(tiny))
    least = sum(math.ceil(len(batch["token_ids"].values()) / cap) for batch in batches(tiny))
    assert least <= len(seen) <= 3 * least  # and they are well filled
    assert apart(found, expected) < 1e-4 * apart(expected, start)


# -- the critic ------------------------------------------------------------------------------------

CRITIC: dict[str, dict[str, Any]] = {"nothing": {}, "lr": {"lr": 3e-3}, "clip": {"clip": 0.005}, "clip, none": {"clip": None},
                                     "epochs": {"epochs": 3}, "aggregate": {}}  # fmt: skip


def valued(batch: TensorDict, seed: int) -> TensorDict:
    """Old values of 0, where the head starts, and returns of about 1."""
    sampled = batch["sampled"].values()
    returns = (1 + 0.3 * torch.randn(len(sampled), generator=torch.Generator().manual_seed(seed))) * sampled
    columns = {"returns": returns, "values": torch.zeros(len(sampled))}
    return batch.copy().update({name: nested_tensor(column, offsets_of(batch["sampled"])) for name, column in columns.items()})


@pytest.mark.parametrize("key", CRITIC)
def test_a_key_of_the_critic_moves_its_values_as_the_plain_critic_does(tiny: str, key: str) -> None:
    """Values after both steps under [optim] warm-up; an episode counts once, however many ledgers."""
    section = toy_critic(**{"lr": 1e-3, "clip": 0.02, **CRITIC[key]})
    usual = AlgorithmConfig(minibatch=4)
    algorithm = usual.model_copy(update={"aggregate": "seq_mean_token_mean"}) if key == "aggregate" else usual
    critic = role_of(Critic, tiny, section, TOTAL, warmup=2)
    rows = [
        train_batch(critic, Critic.update, valued(batch, step), algorithm, step=step) for step, batch in enumerate(batches(tiny))
    ]
    batch = batches(tiny)[0]
    found = critic.run(Critic.compute_values, batch)["values"].values()[batch["sampled"].values()]
    by_hand = [PlainCritic(tiny, of, toy_optim(warmup=2)) for of in (section, toy_critic(lr=1e-3, clip=0.02))]
    for made, how in zip(by_hand, (algorithm, usual), strict=True):
        for step, rest in enumerate(batches(tiny)):
            made.step(valued(rest, step), how, step)
    with torch.no_grad():
        expected, defaults = (torch.cat(one.values(Batch(batch))) for one in by_hand)
    assert (found - expected).abs().max() < 1e-5
    steps = len(by_hand[0].norms) // STEPS
    for row, at in zip(rows, range(0, len(by_hand[0].norms), steps), strict=True):
        assert row["critic/loss"] == pytest.approx(sum(by_hand[0].losses[at : at + steps]) / steps, rel=1e-4)
        assert row["critic/optimizer_steps"] == sum(norm > 0 for norm in by_hand[0].norms[at : at + steps])
    assert key in ("nothing", "aggregate") or (expected - defaults).abs().mean() > 1e-3
    assert key != "aggregate" or abs(by_hand[0].losses[0] / by_hand[1].losses[0] - 1) > 1e-3
    assert [row["critic/lr"] for row in rows] == pytest.approx([0.5 * section.lr, section.lr])

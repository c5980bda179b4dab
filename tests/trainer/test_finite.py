"""One number that is not finite costs a training step, never the weights: by rank, by role, by run."""

import asyncio
import json
import logging
import math
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from agentrl.config.schema import AlgorithmConfig, Choice, KlConfig, ModelConfig, SftConfig
from agentrl.data.rows import Ragged, collate, nested_tensor, offsets_of, select
from agentrl.data.schedule import cut_minibatches
from agentrl.trainer.actor import Actor
from agentrl.trainer.fsdp import FsdpEngine
from agentrl.trainer.learner import MAX_SKIPPED, Learner
from agentrl.trainer.roles import Critic
from agentrl.trainer.update import Pack, Steps
from agentrl.utils.errors import NonFiniteError
from tests.config.observed import Course
from tests.config.test_keys_flip import made
from tests.conftest import proof
from tests.publishing import flat
from tests.trainer.learners import config_of, opened, role_of, save, start
from tests.trainer.train_batches import make_batch, toy_critic, toy_optim, train_batch, trajectories

GAE = AlgorithmConfig(advantage=Choice(name="gae"), minibatch=8)


def state(learner: Learner, folder: Path) -> dict[str, torch.Tensor]:
    """Everything that a checkpoint holds of actor and critic: weights, moments, counts of steps."""
    save(learner, folder)
    found = {}
    for role in ("actor", "critic"):
        dcp_to_torch_save(folder / role, folder / f"{role}.pt")
        held = torch.load(folder / f"{role}.pt")["state"]
        found.update({f"{role}.{name}": tensor for name, tensor in held.items()})
        found[f"{role}.meta"] = torch.tensor(json.loads((folder / role / "meta.json").read_text())["updates"])
    return found


COLUMNS = ["reward", "rewards", "logprobs"]


@pytest.mark.parametrize(("column", "value"), [
    *(THREE := list(zip(COLUMNS, (math.inf, -math.inf, math.nan), strict=True))),
    *(pytest.param(*case, marks=proof) for case in product(COLUMNS, (math.inf, -math.inf, math.nan)) if case not in THREE),
])  # fmt: skip
def test_a_step_with_a_number_that_is_not_finite_is_skipped_by_actor_and_critic(
    tiny: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, column: str, value: float
) -> None:
    learner = opened(tiny, config_of(algorithm=GAE, critic=toy_critic()))
    asyncio.run(learner.step(collate(trajectories(8)), 0))
    before = state(learner, tmp_path / "before")
    batch = collate(trajectories(8, seed=1))
    flat_column = batch[column] if column == "reward" else batch[column].values()
    flat_column[5 if column == "reward" else int(offsets_of(batch["token_ids"])[5]) + 1] = value
    with caplog.at_level(logging.ERROR, "agentrl"):
        metrics = asyncio.run(learner.step(batch, 1))
    after = state(learner, tmp_path / "after")
    assert metrics["skipped_steps"] == 1 and "loss" not in metrics and "critic/loss" not in metrics
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert column in caplog.text and "of (group 1, member 1, ledger 0)" in caplog.text  # the sixth row alone: groups of four
    assert asyncio.run(learner.step(collate(trajectories(8, seed=2)), 2))["skipped_steps"] == 0


def test_skipped_steps_are_bounded_in_a_row_leave_the_kl_coefficient_and_the_error_names_the_rows(tiny: str) -> None:
    algorithm = AlgorithmConfig(minibatch=8, kl=KlConfig(coef=0.1, target=1e-6, horizon=10))
    learner = opened(tiny, config_of(algorithm=algorithm))
    broken = collate(trajectories(8))
    broken["reward"][2] = math.inf
    for _ in range(2):
        coef = learner.kl_coef
        for _ in range(MAX_SKIPPED):
            assert asyncio.run(learner.step(broken, 0))["skipped_steps"] == 1 and learner.kl_coef == coef
        asyncio.run(learner.step(collate(trajectories(8)), 0))  # one good step ends the row
    before = flat(learner.actors)
    for _ in range(MAX_SKIPPED):
        asyncio.run(learner.step(broken, 0))
    with pytest.raises(NonFiniteError, match=r"reward of \(group 0, member 2, ledger 0\)"):
        asyncio.run(learner.step(broken, 0))
    assert torch.equal(before, flat(learner.actors))


def test_updates_whose_groups_all_tie_change_nothing_and_are_no_fault(tiny: str, tmp_path: Path) -> None:
    learner = opened(tiny, config_of(algorithm=AlgorithmConfig(minibatch=4)))
    asyncio.run(learner.step(collate(trajectories(8)), 0))
    before = flat(learner.actors)
    tied = collate(trajectories(8, seed=1))
    tied["reward"][:] = 0.5
    for step in range(1, MAX_SKIPPED + 3):
        metrics = asyncio.run(learner.step(tied, step))
        assert (metrics["grad_norm"], metrics["optimizer_steps"], metrics["skipped_steps"]) == (0, 0, 0)
    assert torch.equal(flat(learner.actors), before)


@pytest.mark.parametrize("value", [math.inf, math.nan, 1e38])
def test_an_optimizer_step_that_is_not_finite_is_not_taken_and_the_others_are(
    tiny: str, caplog: pytest.LogCaptureFixture, value: float
) -> None:
    """One of two minibatches has an advantage of 1e38: weights and optimizer are the other's alone."""
    broken = make_batch(8)
    values = broken["advantages"].values()
    spot = int(broken["sampled"].values().nonzero()[0])
    values[spot] = value
    actor, algorithm = start(tiny), AlgorithmConfig(minibatch=4, loss=Choice(name="reinforce"))
    with caplog.at_level(logging.ERROR, "agentrl"):
        metrics = train_batch(actor, Actor.update, broken, algorithm)
    assert metrics["skipped_optimizer_steps"] == metrics["optimizer_steps"] == 1
    assert "(group 0, member 0, ledger 0)" in caplog.text
    assert math.isfinite(metrics["grad_norm"]) and metrics["grad_norm"] > 0

    [good] = [part for part in cut_minibatches(Ragged.of(broken), algorithm, 0, 0) if 0 not in part]
    alone = start(tiny)
    train_batch(alone, Actor.update, select(broken, good), AlgorithmConfig(minibatch=8, loss=Choice(name="reinforce")))
    assert torch.allclose(flat(alone), flat(actor), atol=1e-6)
    follow = make_batch(4, seed=3)
    for group in (actor, alone):
        train_batch(group, Actor.update, follow, algorithm, step=1)
    assert torch.allclose(flat(alone), flat(actor), atol=2e-6)


def test_a_loss_that_is_not_finite_skips_the_step_even_where_its_gradient_is(tiny: str, caplog: pytest.LogCaptureFixture) -> None:
    """An infinite constant in the second of two micro-batches; its rows are named, the other's are not."""
    view = Ragged.of(make_batch(8))
    engine = FsdpEngine(tiny, ModelConfig(), 1.0)
    engine.use_optimizer(toy_optim())
    steps = Steps(engine, view, "here")

    def loss(rows: list[int], shift: float) -> torch.Tensor:
        found, _ = engine.logprobs(Pack(view, rows, engine.device).micro, 1.0, False)
        return found.mean() + (shift if 5 in rows else 0.0)

    before = [p.detach().clone() for _, p in engine.named_weights()]
    with caplog.at_level(logging.ERROR, "agentrl"):
        steps.take(3, [[0, 1], [5]], partial(loss, shift=math.inf))
    assert steps.skipped == 1 and math.isfinite(steps.norms[0])
    assert all(torch.equal(old, p) for old, (_, p) in zip(before, engine.named_weights(), strict=True))
    assert steps.finish() == {"skipped_optimizer_steps": 1.0, "optimizer_steps": 0.0}, "a mean norm of no step is unknown"
    assert "here: optimizer step 3 is skipped" in caplog.text
    assert "(group 1, member 1, ledger 0)" in caplog.text and "group 0" not in caplog.text
    assert all(p.grad is None for _, p in engine.named_weights())
    steps.take(4, [[0, 1], [5]], partial(loss, shift=0.0))
    assert steps.skipped == 1 and not all(torch.equal(old, p) for old, (_, p) in zip(before, engine.named_weights(), strict=True))
    assert steps.finish() == {"grad_norm": steps.norms[1], "skipped_optimizer_steps": 1.0, "optimizer_steps": 1.0}


def test_the_critic_skips_an_optimizer_step_too(tiny: str) -> None:
    batch = make_batch(8)
    sampled, offsets = batch["sampled"].values(), offsets_of(batch["sampled"])
    returns = sampled.float()
    returns[int(sampled.nonzero()[0])] = math.inf
    batch.update({"returns": nested_tensor(returns, offsets), "values": nested_tensor(torch.zeros(len(sampled)), offsets)})
    critic = role_of(Critic, tiny, toy_critic())
    metrics = train_batch(critic, Critic.update, batch, AlgorithmConfig(minibatch=4))
    assert metrics["critic/skipped_optimizer_steps"] == metrics["critic/optimizer_steps"] == 1
    assert torch.isfinite(critic.run(Critic.compute_values, batch)["values"].values()).all()


@pytest.mark.parametrize("role", ["actor", "critic", "sft"])
def test_weights_that_are_not_finite_end_the_update(tiny: str, role: str) -> None:
    """An infinite learning rate: the gradient is finite, the weights after the step are not."""
    batch = make_batch(4)
    zeros = nested_tensor(torch.zeros(len(batch["sampled"].values())), offsets_of(batch["sampled"]))
    batch.update({"returns": batch["advantages"].clone(), "values": zeros})
    with pytest.raises(NonFiniteError, match="the weights are no longer finite"):
        if role == "critic":
            critic = role_of(Critic, tiny, toy_critic(lr=1e308))
            train_batch(critic, Critic.update, batch, AlgorithmConfig())
        elif role == "sft":
            actor = start(tiny)
            actor.run(Actor.begin_sft, SftConfig(lr=1e308, warmup=0))
            train_batch(actor, Actor.sft_steps, batch, 1)
        else:
            train_batch(start(tiny, lr=1e308), Actor.update, batch, AlgorithmConfig())


def test_weights_that_are_not_finite_are_neither_published_nor_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop's calls around an update that ends so: none after it."""
    import agentrl.run.loop as module

    course = Course(made(["steps=4", "checkpoint.every=1"]), tmp_path)
    real = course.session.learner.step

    async def step(batch: Any, number: int, *keep: bool) -> Any:
        if number == 2:
            raise NonFiniteError("the weights are not finite any more")
        return await real(batch, number, *keep)

    async def read(self: Any) -> dict[str, float]:
        return {}

    course.session.learner.step = step
    monkeypatch.setattr(module.EngineMeter, "__init__", lambda self, engine: None)
    monkeypatch.setattr(module.EngineMeter, "read", read)
    with pytest.raises(NonFiniteError):
        asyncio.run(module.train_loop(course.session, course.run_log, course.interrupt))
    done = [call for call in course.calls if call[0] in ("update", "publish", "save")]
    assert done == [("update", 0), ("publish", 1), ("save", 1), ("update", 1), ("publish", 2), ("save", 2)]

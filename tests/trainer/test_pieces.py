"""A training step in pieces: `forward_backward` and `optim_step` do what `update` does, and gradients of several calls add up to
those of one batch."""

from typing import Any

import pytest
import torch

from agentrl.config.schema import AlgorithmConfig, Choice
from agentrl.trainer.actor import Actor
from agentrl.utils.errors import AgentrlError
from tests.publishing import weights_of
from tests.trainer.learners import start
from tests.trainer.plain_trainer import Batch, aggregated, load, norm_of, tokens_of
from tests.trainer.train_batches import make_batch, train_batch


@pytest.mark.parametrize("more", [{}, {"entropy_bonus": 0.1, "aggregate": "seq_mean_token_mean", "groups": "kept"}])
def test_the_pieces_of_an_update_are_the_update_bit_for_bit(tiny: str, more: dict[str, Any]) -> None:
    algorithm = AlgorithmConfig(minibatch=3, **more)
    whole, pieces = start(tiny), start(tiny)
    for step in range(2):
        batch = make_batch(8, seed=step)
        count = int(train_batch(whole, Actor.update, batch, algorithm, step=step, seed=5)["minibatches"])
        assert count > 1
        for part in range(count):
            train_batch(pieces, Actor.forward_backward, batch, algorithm, step=step, seed=5, part=part)
            assert pieces.run(Actor.optim_step)["optimizer_steps"] == 1.0
        pieces.run(Actor.end_update)
    expected, found = weights_of(whole), weights_of(pieces)
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    assert any(not torch.equal(tensor, weights_of(start(tiny))[name]) for name, tensor in found.items())


@pytest.mark.parametrize("aggregate", ["token_mean", "seq_mean_token_mean"])
def test_gradients_of_two_calls_are_those_of_the_batch_that_joins_them(tiny: str, aggregate: str) -> None:
    """Two unequal batches against plain transformers: the mean over the tokens (or episodes) of both."""
    batches = [make_batch(2, seed=1), make_batch(5, seed=2)]
    algorithm = AlgorithmConfig(minibatch=9, loss=Choice(name="reinforce"), aggregate=aggregate)  # type: ignore[arg-type]
    actor = start(tiny, max_grad_norm=1e9)
    model, rows, losses = load(tiny), list[torch.Tensor](), []
    for batch in batches:
        losses.append(train_batch(actor, Actor.forward_backward, batch, algorithm)["loss"])
        plain = Batch(batch)
        rows += [-logprobs * own for logprobs, own in zip(tokens_of(model, plain)[0], plain.column("advantages"), strict=True)]
    apart = [aggregated(part, algorithm).item() for part in (rows[:2], rows[2:])]
    assert losses == pytest.approx(apart, rel=1e-4)  # each by itself
    aggregated(rows, algorithm).backward()
    assert actor.run(Actor.optim_step)["grad_norm"] == pytest.approx(norm_of(model), rel=1e-4)


def test_a_rate_of_ones_own_and_the_schedules(tiny: str) -> None:
    """Warm-up over 4 training steps: 1/4 and then 2/4 of lr, however many optimizer steps each of them has; or what is given."""
    actor, batch, algorithm = start(tiny, warmup=4), make_batch(2), AlgorithmConfig(minibatch=4)
    found = []
    for lr in (None, None, "end", None, 5e-4):
        if lr == "end":
            actor.run(Actor.end_update)
            continue
        train_batch(actor, Actor.forward_backward, batch, algorithm)
        found.append(actor.run(Actor.optim_step, lr)["lr"])
    assert found == pytest.approx([0.25e-3, 0.25e-3, 0.5e-3, 5e-4])


def test_what_is_not_finite_takes_no_step_and_dropped_gradients_leave_nothing(tiny: str) -> None:
    actor, algorithm = start(tiny), AlgorithmConfig(minibatch=4)
    before = weights_of(actor)
    batch = make_batch(4)
    batch["advantages"].values()[batch["sampled"].values()] = float("nan")
    train_batch(actor, Actor.forward_backward, make_batch(4, seed=3), algorithm)
    train_batch(actor, Actor.forward_backward, batch, algorithm)
    assert actor.run(Actor.optim_step)["optimizer_steps"] == 0.0
    train_batch(actor, Actor.forward_backward, make_batch(4), algorithm)
    actor.run(Actor.drop_gradients)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(actor).items())
    with pytest.raises(AgentrlError, match="no gradients wait"):
        actor.run(Actor.optim_step)

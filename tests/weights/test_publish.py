"""Weights from the actor to a live engine: its samples then carry the trainer's logprobs, and only then."""

from __future__ import annotations

import asyncio

import pytest
import torch

from agentrl.cluster.group import WorkerGroup
from agentrl.cluster.launch import launch
from agentrl.config.schema import AlgorithmConfig, ModelConfig, WeightsConfig
from agentrl.data.rows import collate
from agentrl.data.token_ledger import TokenLedger
from agentrl.engines.embedded.embedded_engine import EmbeddedEngine
from agentrl.engines.weights.base import open_receiver
from agentrl.rollout.engine import Sampling
from agentrl.trainer.actor import Actor
from agentrl.trainer.publish import Publisher
from tests.publishing import weights_of
from tests.trainer.train_batches import make_batch, toy_optim, train_batch, trajectories

PROMPT = list(range(20, 40))


def trained_actor(tiny: str) -> WorkerGroup[Actor]:
    group = launch(Actor, backend="inline", world_size=1)
    group.run(Actor.init_model, tiny, ModelConfig(), toy_optim(lr=1e-2))
    for step in range(3):
        train_batch(group, Actor.update, make_batch(8, seed=step), AlgorithmConfig(), step=step)
    return group


async def sampled(tiny: str, actor: WorkerGroup[Actor] | None, temperature: float) -> TokenLedger:
    """What the engine samples, with the actor's weights published into it (or none)."""
    engine = EmbeddedEngine(tiny)
    await engine.start()
    try:
        if actor is not None:
            await Publisher(actor, engine, WeightsConfig()).send(1)
        out = await engine.generate(PROMPT, Sampling(max_tokens=40, temperature=temperature, seed=5), "one")
    finally:
        await engine.close()
    ledger = TokenLedger()
    ledger.append_context(PROMPT, 0)
    ledger.append_sampled(out.token_ids, out.logprobs, out.versions, 0)
    return ledger


def gap(actor: WorkerGroup[Actor], ledger: TokenLedger, temperature: float) -> float:
    """Largest difference of the engine's and the trainer's logprobs of the same tokens."""
    [episode] = trajectories(1)
    episode.ledgers = [ledger]
    batch = collate([episode])
    found = actor.run(Actor.compute_logprob, batch, temperature=temperature)["logprobs"].values()
    return float((found - batch["logprobs"].values()).abs().max())


def test_published_weights_explain_the_samples_and_stale_ones_do_not(tiny: str) -> None:
    actor = trained_actor(tiny)
    for temperature in (1.0, 0.7):
        published = asyncio.run(sampled(tiny, actor, temperature))
        assert set(published.versions[published.sampled].tolist()) == {1}
        assert gap(actor, published, temperature) < 1e-4
        stale = asyncio.run(sampled(tiny, None, temperature))
        assert gap(actor, stale, temperature) > 1e-2
    assert gap(actor, published, 1.0) > 1e-2  # control: another temperature is noticed too


@pytest.mark.parametrize("route", ["shared", "disk"])
def test_a_bucket_is_a_copy(tiny: str, route: str) -> None:
    """An engine that loads late does not see weights of a later update, on routes that do not read them in place."""
    actor = trained_actor(tiny)
    before = weights_of(actor)
    receiver = open_receiver(actor.run(Actor.open_route, route, WeightsConfig(), 1), 0)
    bucket = actor.run(Actor.next_bucket, True)
    train_batch(actor, Actor.update, make_batch(8, seed=9), AlgorithmConfig(), step=9)
    assert bucket is not None
    found = dict(receiver.receive(bucket))
    assert found.keys() == before.keys() and all(torch.equal(found[name], before[name]) for name in found)
    later = weights_of(actor)  # control: the update changed them
    assert not any(torch.equal(found[name], later[name]) for name in found if name.endswith("proj.weight"))

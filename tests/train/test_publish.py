"""Weights from the actor to a live engine: its samples then carry the trainer's logprobs, and only then."""

from __future__ import annotations

import asyncio

import torch
from train_batches import make_batch, toy_optim, trajectories

from agentrl.backends.embedded import EmbeddedEngine
from agentrl.batch import collate
from agentrl.cluster.group import WorkerGroup
from agentrl.cluster.launch import launch
from agentrl.config.schema import AlgorithmConfig, ModelConfig
from agentrl.rollout.engine import Sampling
from agentrl.train.actor import Actor
from agentrl.trajectory import TokenLedger

PROMPT = list(range(20, 40))


def trained_actor(tiny: str) -> WorkerGroup[Actor]:
    group = launch(Actor, backend="inline", world_size=1)
    group.run(Actor.init_model, tiny, ModelConfig(), toy_optim(lr=1e-2))
    for step in range(3):
        group.run(Actor.update, make_batch(8, seed=step), AlgorithmConfig(), step=step)
    return group


async def sampled(tiny: str, actor: WorkerGroup[Actor] | None, temperature: float) -> TokenLedger:
    """What the engine samples, with the actor's weights published into it (or none)."""
    engine = EmbeddedEngine(tiny)
    await engine.start()
    try:
        if actor is not None:
            await engine.pause()
            await engine.publish(1, actor.run(Actor.export_weights))
            await engine.resume()
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


def test_exported_weights_are_copies(tiny: str) -> None:
    """An engine that loads late must not see weights of a later update."""
    actor = trained_actor(tiny)
    buckets = actor.run(Actor.export_weights)
    before = {name: tensor.clone() for bucket in buckets for name, tensor in bucket.items()}
    actor.run(Actor.update, make_batch(8, seed=9), AlgorithmConfig(), step=9)
    assert all(torch.equal(tensor, before[name]) for bucket in buckets for name, tensor in bucket.items())

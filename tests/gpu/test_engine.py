"""The embedded engine on a card: its logprobs are the trainer's, weights reach it and another process, its sleep frees memory."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection

import pytest
import torch
from torch import Tensor

from agentrl.cluster.group import WorkerGroup
from agentrl.cluster.launch import launch
from agentrl.config.schema import AlgorithmConfig, ModelConfig, WeightsConfig
from agentrl.data.rows import collate
from agentrl.data.token_ledger import TokenLedger
from agentrl.engines.embedded.embedded_engine import EmbeddedEngine
from agentrl.engines.weights.base import Offer, open_receiver
from agentrl.rollout.engine import Sampling
from agentrl.trainer.actor import Actor
from agentrl.trainer.publish import Publisher
from agentrl.utils.errors import ConfigError
from tests.publishing import buckets_of
from tests.trainer.train_batches import make_batch, toy_optim, train_batch, trajectories

pytestmark = pytest.mark.gpus(1, timeout=540)
PROMPT = list(range(20, 60))


def actor_of(small: str) -> WorkerGroup[Actor]:
    """A policy that has moved away from its folder."""
    group = launch(Actor, backend="inline")
    group.run(Actor.init_model, small, ModelConfig(dtype="bfloat16"), toy_optim(lr=1e-2, micro_tokens=2000))
    for step in range(3):
        train_batch(group, Actor.update, make_batch(16, seed=step), AlgorithmConfig(), step=step)
    return group


async def ledgers(small: str, actor: WorkerGroup[Actor], device: torch.device, published: bool) -> list[TokenLedger]:
    """What an engine samples at temperature 0.7, with the actor's weights or with those of the folder."""
    engine = EmbeddedEngine(small, dtype="bfloat16", device=str(device))
    await engine.start()
    try:
        if published:
            await Publisher(actor, engine, WeightsConfig()).send(1)
        sampling = [Sampling(max_tokens=100, temperature=0.7, seed=seed) for seed in range(8)]
        outs = await asyncio.gather(*(engine.generate(PROMPT, how, str(how.seed)) for how in sampling))
    finally:
        await engine.close()
    found = []
    for out in outs:
        ledger = TokenLedger()
        ledger.append_context(PROMPT, 0)
        ledger.append_sampled(out.token_ids, out.logprobs, out.versions, 0)
        found.append(ledger)
    return found


def test_the_trainer_finds_the_logprobs_that_the_engine_reported(small: str, device: torch.device) -> None:
    actor = actor_of(small)
    gaps = []
    for published in (True, False):
        episodes = trajectories(8)
        for episode, ledger in zip(episodes, asyncio.run(ledgers(small, actor, device, published)), strict=True):
            episode.ledgers = [ledger]
        batch = collate(episodes)
        found = actor.run(Actor.compute_logprob, batch, temperature=0.7)["logprobs"].values()
        kept = batch["sampled"].values().bool()
        gaps.append(float((found.cpu() - batch["logprobs"].values()).abs()[kept].mean()))
    assert gaps[0] < 0.02 < 0.1 < gaps[1]  # the second is the control: weights that were never published


def test_sleep_frees_the_memory(small: str, card: torch.device) -> None:
    async def memory() -> list[int]:
        engine = EmbeddedEngine(small, dtype="bfloat16", device=str(card))
        await engine.start()
        await engine.generate(PROMPT, Sampling(max_tokens=50), "one")
        found = [torch.cuda.memory_allocated()]
        await engine.sleep()
        assert torch.cuda.memory_reserved() - torch.cuda.memory_allocated() < 64 << 20  # the rest is other processes' to take
        found.append(torch.cuda.memory_allocated())
        await engine.wake("weights")
        found.append(torch.cuda.memory_allocated())
        await engine.close()
        return found

    asyncio.run(memory())  # the workspaces of kernels, larger than this model, come with their first use and stay
    gc.collect()  # models of earlier tests
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()
    awake, asleep, woken = (each - base for each in asyncio.run(memory()))
    assert asleep < 0.1 * awake
    assert woken > asleep


def _other_process(pipe: Connection, device: str) -> None:
    """An engine's end of a route: copies every tensor to the device, and answers with their sums."""
    own: dict[str, Tensor] = {}
    receiver = None
    while (message := pipe.recv()) is not None:
        if isinstance(message, Offer):
            try:
                receiver = open_receiver(message, 0)
                pipe.send(None)
            except ConfigError as problem:
                pipe.send(problem)
        elif message == "sums":
            pipe.send({name: float(tensor.double().sum()) for name, tensor in own.items()})
        else:
            assert receiver is not None
            own |= {name: tensor.to(device, copy=True) for name, tensor in receiver.receive(message)}
            if device == "cuda":
                torch.cuda.synchronize()
            pipe.send("loaded")


def sums_across(actor: WorkerGroup[Actor], route: str, device: torch.device) -> Mapping[str, float]:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_other_process, args=(theirs, device.type), daemon=True)
    process.start()
    theirs.close()  # else the end of that process would not show here
    try:
        mine.send(actor.run(Actor.open_route, route, WeightsConfig(bucket_mib=1.0), 1))
        if (problem := mine.recv()) is not None:
            raise problem
        actor.run(Actor.route_attached)
        for bucket in buckets_of(actor):
            mine.send(bucket)
            mine.recv()
        mine.send("sums")
        return mine.recv()
    finally:
        with suppress(OSError):
            mine.send(None)
        process.join(30)
        actor.run(Actor.close_route)


@pytest.mark.parametrize("route", ["shared", "ipc"])
def test_weights_arrive_in_another_process(small: str, device: torch.device, route: str) -> None:
    if route == "ipc" and device.type != "cuda":
        pytest.skip("handles of a card's memory: not on a CPU")
    actor = actor_of(small)
    arrived = sums_across(actor, route, device)
    engine = actor.backend.workers[0]._engine
    held = {name: float(tensor.double().sum()) for name, tensor in engine.tensors()}
    assert arrived.keys() == held.keys()
    assert all(arrived[name] == pytest.approx(held[name], abs=1e-3, rel=1e-6) for name in held)
    train_batch(actor, Actor.update, make_batch(16, seed=9), AlgorithmConfig(), step=9)  # control: other weights have other sums
    moved = {name: float(tensor.double().sum()) for name, tensor in engine.tensors()}
    assert sum(abs(arrived[name] - moved[name]) > 1e-3 for name in held) > len(held) // 2

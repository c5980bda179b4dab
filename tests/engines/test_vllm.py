"""Real vLLM (its CPU build without GPU) in Ray actors: the contract, deaths, routing and respawn."""

import asyncio
import copy
import logging
import os
import signal

import psutil
import pytest
import pytest_asyncio

from agentrl.config import RolloutConfig
from agentrl.render import make_renderer
from agentrl.reward import compile_spec
from agentrl.rollout.engine import Sampling
from agentrl.rollout.episode import Policy
from agentrl.trainer.pretrained import packaged_tokenizer
from agentrl.utils.errors import EngineError
from tests.conftest import PROOFS, proof
from tests.engines.contract import UNUSED, EngineContract, off, prompt_of, until
from tests.engines.engine_models import CHAT_REWARD, Chat, changed, ledger_error, parameters
from tests.engines.text_contract import TextContract
from tests.engines.vllm_parts import CONTEXT, SLOW_START, homes, pids, running_vllm, skip_without_vllm
from tests.players import collector_of
from tests.publishing import exchange, publish

pytestmark = [SLOW_START, pytest.mark.asyncio(loop_scope="module")]

skip_without_vllm()

UPDATES, GROUPS, MEMBERS = 4, 2, 3
REPLICAS = 2 if PROOFS else 1  # each imports vLLM twice: 25 s of a core
RESPAWNS = 1 if PROOFS else 0
"""Of the one engine here; the kill in mid-run, which is a proof, spends it before the last test."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(model_folder):
    async with running_vllm(model_folder, replicas=REPLICAS, kv_cache_mib=32, max_respawns=RESPAWNS, unused=UNUSED) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="module")
async def engine(running, model):
    """The one engine of this module with the model's own weights."""
    version = (await running.stats()).version
    await publish(running, version + 1, parameters(model))
    return running


class TestVllm(EngineContract, TextContract):
    tolerance, context, unused = 1e-3, CONTEXT, UNUSED

    async def test_it_wakes_in_two_stages_around_a_publish(self, engine, model):
        """Calls of a colocated run: partly awake it computes nothing, and it goes on once all is there."""
        engine._sleeps = True
        await engine.pause()
        await engine.sleep()
        with pytest.raises(EngineError, match="sleeps"):
            await engine.generate(prompt_of(9), Sampling(max_tokens=4, seed=1), "a")
        new = changed(model, seed=6)
        await publish(engine, (await engine.stats()).version + 1, new)
        generation = await engine.generate(prompt_of(9), Sampling(max_tokens=4, seed=1), "a")
        assert off(copy.deepcopy(model), prompt_of(9), generation, weights=new) < self.tolerance
        engine._sleeps = False


@proof
async def test_a_kill_in_mid_run_loses_nothing(engine, model, caplog):
    """One-step-off: episodes of the killed replica go on at the other; none is lost or trained twice."""
    caplog.set_level(logging.WARNING, logger="agentrl.engines")
    weights = [parameters(model)] + [changed(model, seed=i) for i in range(1, UPDATES + 1)]
    await publish(engine, 0, weights[0])  # a run begins at version 0
    config = RolloutConfig(
        groups=GROUPS, group_size=MEMBERS, max_staleness=1, max_turns=6, max_turn_tokens=60, retries=0,
        max_episode_tokens=2000,
    )  # fmt: skip
    policy = Policy(engine, make_renderer(packaged_tokenizer(2048)))
    collector = collector_of(Chat, policy, compile_spec(CHAT_REWARD), config, context=2048, seed=0)
    victim, survivor = pids(engine)
    trained, before = [], {}
    for update in range(UPDATES):
        collecting = asyncio.ensure_future(collector.collect())
        if update == 1:
            await until(engine, lambda stats: stats.running >= 4 and set(homes(engine).values()) == {0, 1})
            before = homes(engine)
            os.kill(victim, signal.SIGKILL)
        trained += (groups := await asyncio.wait_for(collecting, 120))
        collector.trained(groups)
        await exchange(collector, weights[update + 1])
    assert sum(collector.ledger.counts().values()) == collector.ledger.total
    assert collector.ledger.counts()["failed"] == collector.ledger.counts()["stale"] == 0
    await collector.close()

    # nothing lost, none twice: every episode came to its end at the first attempt, and each group once
    assert len({group.index for group in trained}) == len(trained) == UPDATES * GROUPS
    members = [trajectory for group in trained for trajectory in group.trajectories]
    assert len({trajectory.seed for trajectory in members}) == len(members) == UPDATES * GROUPS * MEMBERS
    assert all(t.reward is not None and not t.stop.infrastructure for t in members)
    assert all(len(t.turns) == 6 for t in members)
    # asked at the end: this update's own groups may have been complete when the replica died
    moved = {key for key, home in homes(engine).items() if before.get(key) == 0 and home == 1}
    assert moved & {f"g{group.index}.m{t.member}.a0" for group in trained for t in group.trajectories}
    # ids kept: each token has the probability that its version gives it after exactly the ids before it
    ledgers = [ledger for trajectory in members for ledger in trajectory.ledgers]
    assert max(ledger_error(model, weights, ledger) for ledger in ledgers) < 1e-3
    assert min(ledger_error(model, weights, ledger, shift=1) for ledger in ledgers) > 0.05
    assert f"vLLM replica 0 (pid {victim}) died" in caplog.text and "1 of max_respawns = 1" in caplog.text
    await until(engine, lambda stats: stats.extra["replicas"] == 2, 120)
    assert pids(engine)[0] != victim and pids(engine)[1] == survivor
    assert f"replica 0 (pid {pids(engine)[0]}) has replaced" in caplog.text
    # without another publish, what comes back serves the newest weights under their version
    model.load_state_dict(weights[UPDATES], strict=False)
    for i in range(2):
        generation = await engine.generate(prompt_of(30), Sampling(max_tokens=20, seed=i), f"new{i}")
        assert set(generation.versions) == {UPDATES}
        assert off(model, prompt_of(30), generation) < 1e-3
        assert off(model, prompt_of(30), generation, weights=weights[0]) > 0.05
        model.load_state_dict(weights[UPDATES], strict=False)
    assert sum(homes(engine)[f"new{i}"] == 0 for i in range(2)) >= 1


@proof
async def test_load_is_shared_and_a_death_beyond_the_limit_is_final(engine, model):
    # an episode stays where its cache is; new ones go where least is running
    first = [asyncio.ensure_future(engine.generate(prompt_of(40), Sampling(max_tokens=1500, seed=i), f"e{i}")) for i in range(8)]
    await until(engine, lambda stats: stats.running == 8)
    assert sorted(homes(engine)[f"e{i}"] for i in range(8)) == [0] * 4 + [1] * 4
    victim = psutil.Process(pids(engine)[0])
    children = victim.children(recursive=True)
    counted = await engine.stats()
    assert counted.kv_used is not None and 0 < counted.kv_used < 1, "eight prompts of 40 tokens and what was sampled"
    os.kill(pids(engine)[0], signal.SIGKILL)
    generations = await asyncio.wait_for(asyncio.gather(*first), 240)
    for generation in generations[:2]:
        assert len(generation.token_ids) == 1500
        assert off(model, prompt_of(40), generation) < 1e-3
    assert {homes(engine)[f"e{i}"] for i in range(8)} == {1}
    stats = await engine.stats()
    assert stats.extra == {"replicas": 1, "respawns": RESPAWNS}
    # the dead one's work stays in the counters, and it runs nothing
    assert stats.sampled_tokens >= counted.sampled_tokens and stats.running == stats.waiting == stats.kv_used == 0
    _, orphans = psutil.wait_procs(children, timeout=30)
    assert not orphans, "the killed replica left processes behind"
    # the survivor takes new weights alone
    version = stats.version + 1
    await publish(engine, version, changed(model, seed=77))
    generation = await engine.generate(prompt_of(9), Sampling(max_tokens=8, seed=1), "e0")
    assert set(generation.versions) == {version} and off(model, prompt_of(9), generation) > 0.05
    await dies(engine, 1)


@pytest.mark.skipif(PROOFS, reason="the test before has the death of two")
async def test_the_death_of_the_only_replica_is_an_error_that_names_it_and_leaves_no_process(engine):
    children = psutil.Process(pids(engine)[0]).children(recursive=True)
    assert children, "vLLM computes in a process of its own"
    await dies(engine, 0)
    _, orphans = psutil.wait_procs(children, timeout=30)
    assert not orphans, "the killed replica left processes behind"


async def dies(engine, last):
    """The last replica, killed; what is asked then is an error that names it."""
    os.kill(pids(engine)[last], signal.SIGKILL)
    with pytest.raises(EngineError, match=rf"replica {last} \(pid {pids(engine)[last]}\) died"):
        await engine.generate(prompt_of(9), Sampling(max_tokens=8), "e1")

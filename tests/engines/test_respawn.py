"""Death and respawn of vLLM replicas, on stand-ins that die at a chosen call; the real thing: test_vllm.py."""

import asyncio
import logging
from types import SimpleNamespace

import pytest
import torch

from agentrl.cluster.launch import launch
from agentrl.config.schema import VllmConfig, WeightsConfig
from agentrl.engines.vllm import replicas
from agentrl.engines.vllm.vllm_engine import VllmEngine
from agentrl.rollout.engine import Sampling
from agentrl.run.session import republish_to_new_replicas
from agentrl.trainer.publish import Publisher
from agentrl.utils.errors import EngineError
from tests.engines.contract import until as until_stats
from tests.engines.engine_models import parameters
from tests.engines.vllm_parts import homes
from tests.publishing import Held, Holder, publish
from tests.rollout.conftest import until

SHORT = Sampling(max_tokens=2)


async def settle(engine, replicas):
    await until_stats(engine, lambda stats: stats.extra["replicas"] == replicas, 5)


async def test_a_new_replica_has_the_newest_weights_before_it_takes_requests(started, model, spawned, caplog):
    caplog.set_level(logging.WARNING, logger="agentrl.engines")
    engine = await started(replicas=2, max_respawns=1)
    for version in (1, 2):
        await publish(engine, version, parameters(model))
    spawned[0].dead = True
    keys = [f"e{i}" for i in range(6)]
    generations = await asyncio.gather(*(engine.generate([5], SHORT, key) for key in keys))
    assert all(generation.versions == [2, 2] for generation in generations)
    await settle(engine, 2)
    fresh = spawned[2]
    assert fresh.calls.index("load") < fresh.calls.index("end_update") < fresh.calls.index("resume")
    assert fresh.version == 2 and fresh.calls.count("load") == 1
    assert "replica 0 (pid 1000) died" in caplog.text and "replica 0 (pid 1002) has replaced" in caplog.text
    # it takes part: the next new episodes go to both
    asked = [engine.generate([5], SHORT, f"n{i}") for i in range(4)]
    assert {generation.versions[0] for generation in await asyncio.gather(*asked)} == {2}
    assert {homes(engine)[f"n{i}"] for i in range(4)} == {0, 1}


async def test_a_stream_moves_to_another_replica_only_while_nothing_was_told(started, spawned):
    """What a client has seen cannot be sampled again: such a turn fails, and its episode is unscored."""
    engine = await started(replicas=2, max_respawns=9)
    spawned[0].dead = True
    told = []
    answers = [engine.stream([5], SHORT, key, lambda ids, logprobs: told.append((ids, logprobs))) for key in "ab"]
    assert [answer.token_ids for answer in await asyncio.gather(*answers)] == [[1, 2], [1, 2]]
    assert told == [([1], [-1.0])] * 2
    await settle(engine, 2)
    for actor in spawned:
        actor.die_at = "generate"
    with pytest.raises(EngineError, match="died"):
        await engine.stream([5], SHORT, "c", lambda ids, logprobs: told.append((ids, logprobs)))
    assert len(told) == 3


@pytest.mark.parametrize("keep", [True, False])
async def test_requests_wait_for_the_only_replica_to_come_back(started, spawned, keep):
    """Before the first publish it has the model's own weights, whether copies are kept or not."""
    engine = await started(max_respawns=1, keep=keep)
    spawned.plan["hold"] = asyncio.Event()
    spawned[0].dead = True
    waiting = asyncio.ensure_future(engine.generate([5], SHORT, "a"))
    await asyncio.sleep(0.02)
    assert not waiting.done() and len(spawned) == 2
    spawned.plan["hold"].set()
    answer = await asyncio.wait_for(waiting, 5)
    assert (answer.token_ids, answer.versions) == ([1, 2], [0, 0])
    # a second death is one too many
    spawned[1].dead = True
    with pytest.raises(EngineError, match="no replica of the vLLM engine is alive"):
        await engine.generate([5], SHORT, "a")


async def test_while_all_are_dead_an_update_is_kept_for_the_one_that_comes(started, model, spawned):
    engine = await started(max_respawns=1)
    spawned.plan["hold"] = asyncio.Event()
    spawned[0].dead = True
    await publish(engine, 7, parameters(model))
    spawned.plan["hold"].set()
    assert (await asyncio.wait_for(engine.generate([5], SHORT, "a"), 5)).versions == [7, 7]


async def test_a_replica_that_comes_back_during_a_pause_waits_like_the_others(started, spawned):
    engine = await started(replicas=2, max_respawns=1)
    spawned[0].dead = True
    await engine.pause()
    await settle(engine, 2)
    request = asyncio.ensure_future(engine.generate([5], SHORT, "a"))
    other = asyncio.ensure_future(engine.generate([5], SHORT, "b"))
    await asyncio.sleep(0.03)
    assert not request.done() and not other.done()
    assert {homes(engine)["a"], homes(engine)["b"]} == {0, 1}
    await engine.resume()
    await asyncio.gather(request, other)


@pytest.mark.parametrize("call", ["pause", "attach", "begin_update", "receive", "end_update"])
async def test_a_death_in_the_middle_of_an_update(started, model, spawned, call):
    engine = await started(replicas=2, max_respawns=1)
    spawned[1].die_at = call
    await publish(engine, 3, parameters(model), bucket_mib=0.01)
    await settle(engine, 2)
    assert [actor.version for actor in (spawned[0], spawned[2])] == [3, 3]


async def test_a_replica_that_never_comes_up_counts_and_ends(started, spawned, caplog):
    engine = await started(replicas=2, max_respawns=2)
    spawned.plan |= {2: {"die_at": "start"}, 3: {"die_at": "resume"}}
    spawned[0].dead = True
    assert (await engine.generate([5], SHORT, "a")).token_ids == [1, 2]
    assert (await engine.generate([5], SHORT, "b")).token_ids == [1, 2]
    await until(lambda: "no more are started" in caplog.text)
    assert len(spawned) == 4 and (await engine.stats()).extra == {"replicas": 1, "respawns": 2}


async def test_a_failed_update_is_not_given_to_a_new_replica(started, model, spawned):
    engine = await started(replicas=2, max_respawns=1)
    await publish(engine, 1, parameters(model))
    with pytest.raises(EngineError, match="not published"):
        await publish(engine, 2, {"model.norm.weight": torch.ones(64)})
    spawned[0].dead = True
    await engine.stats()
    await settle(engine, 2)
    assert spawned[2].loaded == []
    with pytest.raises(EngineError, match="until a publish succeeds"):
        await engine.generate([5], SHORT, "a")
    await publish(engine, 3, parameters(model))
    assert (await engine.generate([5], SHORT, "a")).versions == [3, 3]
    assert spawned[2].version == 3


@pytest.mark.parametrize("whole", [True, False])
async def test_a_request_that_comes_while_weights_arrive_waits_for_them(started, model, spawned, whole):
    """It is no fault of its episode's, and it is never sampled from a part of the weights."""
    engine = await started()
    spawned[0].hang_at = "receive"
    weights = parameters(model) if whole else {"model.norm.weight": torch.ones(64)}
    publishing = asyncio.create_task(publish(engine, 1, weights))
    await until(lambda: "receive" in spawned[0].calls)
    waiting, gone = (asyncio.create_task(engine.generate([5], SHORT, key)) for key in "ab")
    await asyncio.sleep(0.02)
    assert not waiting.done() and engine.progress("a") == 0 and "generate" not in spawned[0].calls
    gone.cancel()
    spawned[0].free.set()
    if whole:
        await publishing
        assert (await waiting).versions == [1, 1] and spawned[0].calls.count("generate") == 1
        assert engine.progress("a") is None and engine.progress("b") is None
        return
    with pytest.raises(EngineError, match="not published"):
        await publishing
    with pytest.raises(EngineError, match=r"no generation until a publish succeeds: .*not published"):
        await waiting
    assert "generate" not in spawned[0].calls


async def test_the_driver_asks_for_progress_only_while_there_are_requests(started, spawned, monkeypatch):
    monkeypatch.setattr(replicas, "POLL_S", 0.01)
    engine = await started(max_respawns=1)
    assert engine.progress("e") is None and "progress" not in spawned[0].calls
    spawned[0].open.clear()
    turn = asyncio.create_task(engine.generate([5], SHORT, "e"))
    await asyncio.sleep(0.02)
    assert engine.progress("e") == 0
    spawned[0].paced = {"e#0": 4, "another's": 9}
    await until(lambda: engine.progress("e") == 4)
    spawned[0].slow = 0.05  # while it is asked again, what it said last holds: 0 in between would look like tokens
    assert [engine.progress("e") for _ in range(8) if await asyncio.sleep(0.02) is None] == [4] * 8
    # its replica dies: the turn is sampled again elsewhere
    spawned.plan["hold"] = asyncio.Event()
    spawned[0].dead = True
    await until(lambda: engine.progress("e") == 0)
    spawned.plan["hold"].set()
    assert (await asyncio.wait_for(turn, 5)).token_ids == [1, 2] and engine.progress("e") is None
    await asyncio.sleep(0.05)
    asked = spawned[1].calls.count("progress")
    await asyncio.sleep(0.05)
    assert spawned[1].calls.count("progress") == asked


async def test_a_replica_that_hangs_as_it_samples_is_dead_after_the_call_timeout(started, spawned, monkeypatch):
    monkeypatch.setattr(replicas, "POLL_S", 0.01)
    engine = await started(max_respawns=1, call_timeout=0.1)
    spawned[0].hang_at = "progress"
    spawned[0].open.clear()
    turn = asyncio.create_task(engine.generate([5], SHORT, "e"))
    await until(lambda: engine.progress("e") is None and turn.done())
    assert turn.result().token_ids == [1, 2] and len(spawned) == 2


async def test_the_stage_of_a_start_is_told_and_named_if_it_is_late(model_folder, spawned, started):
    spawned.plan["hold"] = asyncio.Event()
    engine = VllmEngine(model_folder, VllmConfig(replicas=2, startup_timeout=0.2))
    starting = asyncio.ensure_future(engine.start())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert engine.starting() == "2 x a process for the replica"
    await asyncio.sleep(0.05)
    assert engine.starting() == "2 x import of vLLM"
    with pytest.raises(EngineError, match="startup_timeout; it waited for: import of vLLM"):
        await starting
    spawned.plan["hold"].set()
    engine = await started()
    assert engine.starting() == ""


async def test_a_closed_engine_has_no_task_left_whatever_was_under_way(started, spawned):
    """Ray exits the process if one of its calls is still awaited after `ray.shutdown`."""
    before = asyncio.all_tasks()
    engine = await started(replicas=3, max_respawns=1)
    for actor in spawned:
        actor.lingers = 3600
    await asyncio.gather(*(engine.generate([5], SHORT, key) for key in "abc"))
    spawned[0].dead = True
    spawned.plan["hold"] = asyncio.Event()
    await engine.stats()
    for actor in spawned[1:3]:
        actor.open.clear()
        actor.hang_at = "stats"
    late = [asyncio.ensure_future(engine.generate([5], SHORT, key)) for key in "de"]
    asked = asyncio.ensure_future(engine.stats())
    await asyncio.sleep(0.05)
    assert engine.progress("d") is not None
    late[0].cancel()
    await asyncio.sleep(0)
    await engine.close()
    assert spawned[3].dead  # which was just starting
    alive = {task.get_name() for task in asyncio.all_tasks() - before if task not in (*late, asked)}
    assert not [name for name in alive if "vLLM" in name], alive
    assert [type(one) for one in await asyncio.gather(*late, asked, return_exceptions=True)] == [
        asyncio.CancelledError,
        EngineError,
        EngineError,
    ]
    with pytest.raises(EngineError, match="closed"):
        await engine.generate([5], SHORT, "f")


async def test_a_replica_that_hangs_is_replaced_and_its_requests_move(started, model, spawned, caplog):
    engine = await started(replicas=2, max_respawns=1, call_timeout=0.1)
    spawned[0].open.clear()
    spawned[0].hang_at = "pause"
    stuck = asyncio.ensure_future(engine.generate([5], SHORT, "a"))
    await asyncio.sleep(0.02)
    assert homes(engine)["a"] == 0
    await publish(engine, 1, parameters(model))
    assert (await asyncio.wait_for(stuck, 5)).versions == [1, 1]
    assert "no answer to pause within 0.1 s" in caplog.text
    await settle(engine, 2)


async def test_the_same_tokens_are_sampled_whatever_the_routing(started, model, spawned):
    """Three turns of four groups of three sessions, with a publish in between, on one to three replicas."""

    async def session(engine, key, group):
        ids = [group] * 200
        for turn in range(3):
            answer = await engine.generate(ids, Sampling(max_tokens=group + 1, seed=10 * group + turn), key)
            ids += [*answer.token_ids, turn]
            if (key, turn) == ("2.0", 1):
                await publish(engine, 1, parameters(model))
        return ids

    found, used = [], []
    for count in (1, 2, 3):
        engine = await started(replicas=count)
        keys = [(f"{group}.{member}", group) for group in range(4) for member in range(3)]
        found.append(await asyncio.gather(*(session(engine, *each) for each in keys)))
        used.append(len(set(homes(engine).values())))
        await engine.close()
    assert used == [1, 2, 3] and found[0] == found[1] == found[2]


# -- no copies of the weights, as on GPUs --------------------------------------------------------------


async def test_without_a_copy_a_replacement_waits_for_the_next_publish(started, model, spawned, caplog):
    caplog.set_level(logging.WARNING, logger="agentrl.engines")
    engine = await started(replicas=2, max_respawns=1, keep=False)
    assert engine.members() == ("0.1000.0", "1.1001.0")  # and no driver, which could not map a GPU's memory
    await publish(engine, 1, parameters(model))
    spawned[0].dead = True
    keys = [f"e{i}" for i in range(6)]
    assert [one.versions for one in await asyncio.gather(*(engine.generate([5], SHORT, key) for key in keys))] == [[1, 1]] * 6
    await settle(engine, 2)
    assert set(homes(engine).values()) == {1} and "load" not in spawned[2].calls and "generate" not in spawned[2].calls
    assert "and waits for a publish" in caplog.text
    await publish(engine, 2, parameters(model))
    found = await asyncio.gather(*(engine.generate([5], SHORT, f"new{i}") for i in range(6)))
    assert [one.versions for one in found] == [[2, 2]] * 6 and spawned[2].calls.count("generate") == 3


async def test_requests_wait_if_no_replica_has_the_weights(started, model, spawned):
    engine = await started(max_respawns=1, keep=False)
    await publish(engine, 1, parameters(model))
    spawned[0].dead = True
    waiting = asyncio.create_task(engine.generate([5], SHORT, "a"))
    await settle(engine, 1)
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await publish(engine, 2, parameters(model))
    assert (await asyncio.wait_for(waiting, 2)).versions == [2, 2]
    spawned[1].dead = True  # the last one that may be replaced: those who wait are told
    with pytest.raises(EngineError, match="no replica of the vLLM engine is alive"):
        await asyncio.wait_for(engine.generate([5], SHORT, "a"), 2)


async def test_a_rollout_that_the_actors_wait_for_gets_the_same_weights_again(started, model, spawned):
    """Under the same version, as often as it takes; and what the rollout raises is raised."""
    engine = await started(max_respawns=2, keep=False)
    await publish(engine, 7, parameters(model))
    sent = []

    async def send(version):
        sent.append(version)
        await publish(engine, version, parameters(model))

    ledger, publisher, told = SimpleNamespace(version=7), SimpleNamespace(send=send), []
    rollout = SimpleNamespace(max_staleness=0)
    session = SimpleNamespace(
        engine=engine, publisher=publisher, collector=SimpleNamespace(ledger=ledger), config=SimpleNamespace(rollout=rollout),
        display=SimpleNamespace(engine=told.append),
    )  # fmt: skip

    async def play():
        found = []
        for turn in range(3):
            if turn:
                spawned[-1].dead = True
            found.append((await engine.generate([5], SHORT, "a")).versions)
        return found

    assert await asyncio.wait_for(republish_to_new_replicas(session, play()), 5) == [[7, 7]] * 3 and sent == [7, 7]

    async def fail():
        await engine.generate([5], SHORT, "a")
        raise EngineError("from the rollout")

    with pytest.raises(EngineError, match="from the rollout"):
        await asyncio.wait_for(republish_to_new_replicas(session, fail()), 5)
    assert told.count("") == 2  # the display says nothing of the engine between rollouts, however they ended
    publisher.send = None  # with staleness the next publish comes by itself
    rollout.max_staleness = 1
    playing = asyncio.create_task(republish_to_new_replicas(session, engine.generate([5], SHORT, "a")))
    await publish(engine, 8, parameters(model))
    assert len((await asyncio.wait_for(playing, 5)).versions) == 2


# -- sleep (rollout.colocate) ------------------------------------------------------------------------


async def test_it_sleeps_while_the_trainer_computes_and_wakes_in_two_stages(started, model, spawned):
    """The trainer is in the card's memory only while the engine has no cache there: the weights are of both."""
    engine = await started(sleeps=True)
    log = spawned[0].calls

    class Trainer(Holder):
        def onload(self):
            log.append("the trainer's weights come")

        def offload(self):
            log.append("the trainer's weights go")

    actors = launch(Trainer, backend="inline")
    actors.run(Trainer.hold, Held(parameters(model)))
    publisher = Publisher(actors, engine, WeightsConfig(bucket_mib=1.0), offload=True)
    await publisher.send(1)
    moments = [call for call in log if call not in ("receive", "attach", "start")]
    woken = [("wake", "weights"), "the trainer's weights come", "begin_update", "end_update", "the trainer's weights go"]
    assert moments == ["pause", ("sleep", 2), "pause", *woken, ("wake", "kv_cache"), "resume"]
    assert (await engine.generate([5], SHORT, "a")).versions == [1, 1]
    await publisher.sleep()
    assert log[-2:] == ["pause", ("sleep", 2)]
    with pytest.raises(EngineError, match="the engine sleeps"):
        await engine.generate([5], SHORT, "a")
    await publisher.send(2)
    assert (await engine.generate([5], SHORT, "a")).versions == [2, 2]
    await publisher.close()


async def test_weights_that_were_discarded_are_not_sampled_from(started, model, spawned):
    engine = await started(sleeps=True)
    await engine.wake("cache")  # not before the weights
    await engine.wake("weights")
    await engine.wake("weights")
    await engine.wake("cache")
    assert spawned[0].calls[-2:] == [("wake", "weights"), ("wake", "kv_cache")]
    with pytest.raises(EngineError, match="woke up and has no weights yet"):
        await engine.generate([5], SHORT, "a")
    await publish(engine, 3, parameters(model))
    assert (await engine.generate([5], SHORT, "a")).versions == [3, 3]


async def test_weights_that_only_get_an_adapter_are_kept(started, spawned):
    engine = await started(sleeps=True, lora_rank=8)
    assert spawned[0].calls[-1] == ("sleep", 1)
    await engine.wake("weights")
    with pytest.raises(EngineError, match="no cache yet"):
        await engine.generate([5], SHORT, "a")
    await engine.wake("cache")
    await engine.resume()
    await engine.generate([5], SHORT, "a")


async def test_a_replica_that_is_replaced_during_the_sleep_sleeps_too(started, model, spawned):
    engine = await started(sleeps=True)
    await publish(engine, 1, parameters(model))
    await engine.pause()
    await engine.sleep()
    spawned[0].dead = True
    await engine.stats()  # notices it
    await settle(engine, 1)
    # No weights: they come with the next publish.
    assert [call for call in spawned[1].calls if call != "stats"] == ["start", "pause", ("sleep", 2)]
    await publish(engine, 2, parameters(model))
    assert [call for call in spawned[1].calls if call[0] == "wake"] == [("wake", "weights"), ("wake", "kv_cache")]
    assert (await engine.generate([5], SHORT, "a")).versions == [2, 2]


async def test_an_engine_that_was_not_started_for_it_does_not_sleep(started, spawned):
    engine = await started()
    with pytest.raises(EngineError, match="cannot sleep"):
        await engine.sleep()

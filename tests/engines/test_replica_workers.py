"""Rollout workers in the replicas' processes, on stand-ins: deaths, machines that join, failed updates."""

import asyncio
import json
import time
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.config import RolloutConfig
from agentrl.engines.vllm import replica_calls as local
from agentrl.engines.vllm.replica_actor import VllmActor
from agentrl.engines.vllm.replica_calls import COUNTS_S, InReplica, LocalEngine, ReplicaDeadError
from agentrl.engines.vllm.vllm_engine import VllmEngine
from agentrl.env.catalog import EnvRef
from agentrl.render import make_renderer
from agentrl.reward import compile_spec, load_spec
from agentrl.rollout.collector import Collector
from agentrl.rollout.deadlines import Watch
from agentrl.rollout.engine import Engine, Sampling
from agentrl.rollout.episode import EpisodeSpec, Limits, Policy
from agentrl.rollout.mixtures import MixedTasks, Part
from agentrl.rollout.player import Job, LocalPlayer, Player, RunEnv
from agentrl.rollout.workers.channel import Channel, ChannelServer
from agentrl.rollout.workers.worker_pool import WorkerPool
from agentrl.run.folder import lines
from agentrl.utils.errors import EngineError, PromptTooLongError
from tests.engines.engine_models import parameters
from tests.engines.replica_actors import HOST
from tests.publishing import exchange, publish
from tests.rollout.conftest import until

ENV = EnvRef("key_value")
CONFIG = RolloutConfig(groups=3, group_size=4, max_turns=3, max_turn_tokens=8, retries=0, stall_timeout=20.0)


class Recipe:
    """Parts around an engine of the worker's process."""

    def __init__(self, tokenizer: Any, connection: Any) -> None:
        self.tokenizer, self.connection = tokenizer, connection

    async def build(self, channel: Channel) -> Any:
        return parts_of(LocalPlayer([run_env(LocalEngine(HOST.get(), 400), self.tokenizer)], asks=False))


def parts_of(player: Player) -> Any:
    async def nothing() -> None: ...

    return SimpleNamespace(player=player, start=nothing, close=nothing)


def run_env(engine: Engine, tokenizer: Any) -> RunEnv:
    spec = compile_spec(load_spec(ENV.default_reward()))
    return RunEnv(ENV.id, ENV, Policy(engine, make_renderer(tokenizer)), spec, Limits.of(CONFIG, 2048))


@pytest.fixture
async def run(started: Any, tokenizer: Any) -> Any:
    """`await run(replicas, ...)` -> engine and pool, started; both are closed after the test."""
    made: list[WorkerPool] = []

    async def start(replicas: int, **options: Any) -> tuple[VllmEngine, WorkerPool]:
        engine = await started(**{"replicas": replicas, "max_respawns": 1, **options})
        seats = engine.seats(replicas, lambda connection: Recipe(tokenizer, connection), lambda: "127.0.0.1")
        env = run_env(engine, tokenizer)
        pool = WorkerPool([env], seats, count=replicas, engine=engine, timeout=20.0, startup_timeout=20.0, respawns=0)
        made.append(pool)
        await pool.start()
        return engine, pool

    yield start
    for pool in made:
        await pool.close()


def collector(player: Player, env: RunEnv, seed: int = 5) -> Collector:
    tasks = MixedTasks([Part(env.name, env.env, CONFIG.sampler)], CONFIG.mixture, seed)
    return Collector(player, [env], tasks, CONFIG, seed=seed)


async def updates(player: Player, env: RunEnv, model: Any) -> list[Any]:
    """The trained tokens and rewards of two updates."""
    collect, found = collector(player, env, 5), []
    for _ in range(2):
        groups = await collect.collect()
        rows = [json.loads(line) for line in "".join(lines(groups)).splitlines()]
        found.append([[(m["seed"], m["reward"], m["stop"], m["ledgers"]) for m in row["trajectories"]] for row in rows])
        collect.trained(groups)
        await exchange(collect, parameters(model))
    await collect.close()
    return found


def generates(actor: Any) -> int:
    return int(actor.calls.count("generate"))


async def test_workers_in_replicas_play_what_the_driver_would_and_ask_it_for_no_turn(
    run: Any, started: Any, model: Any, tokenizer: Any, spawned: Any
) -> None:
    alone = await started()
    wanted = await updates(LocalPlayer([run_env(alone, tokenizer)]), run_env(alone, tokenizer), model)
    await alone.close()
    engine, pool = await run(2)
    seen = list(spawned[1:])
    asked = []
    engine._replicas.generate = lambda *args: asked.append(args)
    assert await updates(pool, run_env(engine, tokenizer), model) == wanted
    assert not asked and all(generates(actor) >= 8 for actor in seen)  # of 2 x 12 episodes, each with a turn at least
    assert [actor.calls.count("play") for actor in seen] == [1, 1]
    for workers in (1, 3):  # another number of them has no place there
        assert engine.seats(workers, lambda connection: Recipe(tokenizer, connection), lambda: "127.0.0.1") is None


async def test_a_replica_that_dies_gives_its_episodes_back_and_its_successor_gets_a_worker(
    run: Any, tokenizer: Any, model: Any, spawned: Any
) -> None:
    engine, pool = await run(2)
    await publish(engine, 1, parameters(model))
    for actor in spawned:
        actor.open.clear()
    env = run_env(engine, tokenizer)
    collect = collector(pool, env)
    groups = asyncio.create_task(collect.collect())
    await until(lambda: sum(map(generates, spawned)) == 12)
    lost = generates(spawned[0])
    spawned[0].dead = True
    spawned[1].open.set()
    trained = await asyncio.wait_for(groups, 20)
    members = [member for group in trained for member in group.trajectories]
    assert len(members) == 12 and all(m.reward is not None and not m.stop.infrastructure for m in members)
    assert pool.returned == lost > 0 and set(collect.ledger.counts()) >= {"failed"} and not collect.ledger.counts()["failed"]
    await until(lambda: len([worker for worker in pool.workers if worker.settled.done()]) == 2)
    assert spawned[2].calls.count("play") == 1 and spawned[2].version == 1
    assert pool.metrics()["rollout/respawns"] == 1 and "worker 0+1" in {worker.name for worker in pool.workers}
    collect.trained(trained)
    await exchange(collect, parameters(model))
    before = generates(spawned[2])
    await asyncio.wait_for(collect.collect(), 20)
    assert generates(spawned[2]) > before
    await collect.close()


async def test_episodes_wait_for_the_only_replica_and_end_if_it_is_not_replaced(run: Any, tokenizer: Any, spawned: Any) -> None:
    _, pool = await run(1)
    hold = spawned.plan["hold"] = asyncio.Event()
    spawned[0].open.clear()
    job = Job(ENV.id, EpisodeSpec(1, "train", 2, 0, "g0.m0.a0"))
    playing = asyncio.create_task(pool.play(job, Watch()))
    await until(lambda: generates(spawned[0]) == 1)
    spawned[0].dead = True
    await until(lambda: len(spawned) == 2)
    await asyncio.sleep(0.02)
    assert not playing.done()
    hold.set()
    assert (await asyncio.wait_for(playing, 10))[0].reward is not None
    spawned[1].dead = True  # the last that may be replaced
    with pytest.raises(Exception, match="no rollout worker is left"):
        await asyncio.wait_for(pool.play(job, Watch()), 10)


async def test_without_a_copy_of_the_weights_a_successor_gets_its_worker_at_the_next_publish(
    run: Any, tokenizer: Any, model: Any, spawned: Any
) -> None:
    engine, pool = await run(2, keep=False)
    await publish(engine, 1, parameters(model))
    spawned[0].dead = True
    await until(lambda: len(engine._replicas.alive()) == 2 and len(spawned) == 3)
    assert "play" not in spawned[2].calls and len(pool.workers) == 1
    await publish(engine, 2, parameters(model))
    await until(lambda: spawned[2].calls.count("play") == 1)


# -- inside a replica's process ----------------------------------------------------------------------


def actor() -> VllmActor:
    """A VllmActor whose vLLM is a stand-in that does as it is told."""

    async def done(*args: Any, **more: Any) -> list[list[str]]:
        return [[]]

    made = VllmActor({"model": "made-up"})
    calls = ("collective_rpc", "reset_prefix_cache", "update_weight_version", "sleep", "wake_up")
    made._engine = SimpleNamespace(**dict.fromkeys(calls, done))
    made.context = 100
    return made


async def test_a_dead_engine_ends_the_worker_in_its_process_and_answers_nobody() -> None:
    made, hub, came = actor(), ChannelServer(), list[Channel]()
    endpoint = await hub.open("127.0.0.1")
    hub.expected["worker 0"] = came.append

    async def build(channel: Channel) -> Any:
        return parts_of(SimpleNamespace())  # type: ignore[arg-type]

    playing = asyncio.create_task(made.play("worker 0", endpoint, SimpleNamespace(build=build)))
    await until(lambda: came)
    lost = asyncio.create_task(came[0].lost.wait())

    async def dead(*request: Any) -> Any:
        raise ReplicaDeadError("EngineDeadError: the core is gone")

    made.generate = dead  # type: ignore[method-assign]
    turn = asyncio.create_task(LocalEngine(made, 400).generate([1], Sampling(4), "e"))
    with pytest.raises(ReplicaDeadError, match="the core is gone"):
        await asyncio.wait_for(playing, 5)
    await asyncio.wait_for(lost, 5)
    assert not turn.done()  # else its episode would end as if the engine had refused it, and use up an attempt
    turn.cancel()
    hub.close()


@pytest.mark.parametrize("when", ["before", "meanwhile"])
async def test_what_a_dead_engine_was_asked_is_answered_at_once_by_its_death(when: str) -> None:
    """vLLM notes the death of its processes and leaves calls without an answer; ours would wait for `vllm.call_timeout`."""
    made = actor()
    made._engine.errored = False

    async def never(*args: Any, **more: Any) -> None:
        if made._engine.errored:
            raise RuntimeError("EngineDeadError")
        await asyncio.Event().wait()

    made._engine.collective_rpc = never
    watching = asyncio.create_task(made._watch())
    asyncio.get_running_loop().call_later(0.0 if when == "before" else 0.2, setattr, made._engine, "errored", True)
    await asyncio.sleep(0.05)
    began = time.monotonic()
    with pytest.raises(ReplicaDeadError, match="EngineDeadError" if when == "before" else "a process of its engine is gone"):
        await asyncio.wait_for(made.begin_update(), 10)
    assert time.monotonic() - began < 2.0
    await watching


async def test_a_worker_is_refused_turns_while_the_weights_are_not_whole() -> None:
    made = actor()
    asked: list[str] = []

    async def generate(token_ids: Any, sampling: Any, key: str, request_id: str, told: Any) -> str:
        asked.append(key)
        return key

    made.generate = generate  # type: ignore[assignment, method-assign]
    engine = LocalEngine(made, 400)
    steps: list[tuple[Any, bool]] = [
        (made.end_update(None), False),
        (made.end_update(7), True),
        (made.sleep(1), False),
        (made.wake("weights"), False),
        (made.wake("kv_cache"), True),
        (made.sleep(2), False),
        (made.wake("weights"), False),
        (made.wake("kv_cache"), False),  # level 2 leaves no weights behind
        (made.end_update(8), True),
    ]
    for number, (step, fit) in enumerate(steps):
        await step
        if fit:
            assert str(await engine.generate([1], Sampling(4), f"e{number}")) == f"e{number}"
        else:
            with pytest.raises(EngineError, match="no generation until a publish succeeds"):
                await engine.generate([1], Sampling(4), f"e{number}")
    assert asked == ["e1", "e4", "e8"]
    with pytest.raises(EngineError, match="outside"):
        await engine.generate([400], Sampling(4), "bad")
    with pytest.raises(PromptTooLongError):
        await engine.generate([1] * 100, Sampling(4), "long")
    assert len(asked) == 3


async def test_progress_of_a_turn_is_read_in_the_same_process() -> None:
    made, looks, going = actor(), [], asyncio.Event()

    def told() -> Any:
        looks.append(1)
        return {"e@0": 7, "f@1": 0}

    async def generate(*request: Any) -> str:
        await going.wait()
        return "done"

    made.progress, made.generate = told, generate  # type: ignore[assignment, method-assign]
    engine = LocalEngine(made, 400)
    assert engine.progress("e") is None
    turns = [asyncio.create_task(engine.generate([1], Sampling(4), key)) for key in "ef"]
    await asyncio.sleep(0)
    assert [engine.progress(key) for key in "efg"] == [7, 0, None]
    assert len(looks) == 1  # one count for all calls within COUNTS_S seconds
    engine._counted_at -= COUNTS_S
    engine.progress("e")
    assert len(looks) == 2
    going.set()
    await asyncio.gather(*turns)
    assert engine.progress("e") is None


async def test_only_a_replicas_process_has_a_replica() -> None:
    kept, local.LOCAL_ACTOR[:] = list(local.LOCAL_ACTOR), []
    try:
        with pytest.raises(EngineError, match="not a vLLM replica"):
            InReplica(400).connect()
        local.LOCAL_ACTOR[:] = [made := actor()]
        connected = InReplica(400).connect()
        assert isinstance(connected, LocalEngine) and connected._actor is made
    finally:
        local.LOCAL_ACTOR[:] = kept


async def test_workers_that_end_by_themselves_again_and_again_are_not_begun_for_ever(
    run: Any, tokenizer: Any, spawned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, pool = await run(2)

    async def unfit(self: Recipe, channel: Channel) -> Any:
        raise EngineError("no parts")

    monkeypatch.setattr(Recipe, "build", unfit)
    pool.workers[0]._channel.abort()  # as if its network were gone
    await until(lambda: spawned[0].calls.count("play") == 3)
    await asyncio.sleep(0.1)
    assert [actor.calls.count("play") for actor in spawned] == [3, 1] and not spawned[0].dead
    assert [worker.name for worker in pool.workers] == ["worker 1"]


async def test_a_connection_that_breaks_costs_neither_the_episode_nor_the_replica(run: Any, spawned: Any) -> None:
    _, pool = await run(1)
    spawned[0].open.clear()
    job = Job(ENV.id, EpisodeSpec(1, "train", 2, 0, "g0.m0.a0"))
    playing = asyncio.create_task(pool.play(job, Watch()))
    await until(lambda: generates(spawned[0]) == 1)
    pool.workers[0]._channel.abort()
    await until(lambda: spawned[0].calls.count("play") == 2)
    spawned[0].open.set()
    assert (await asyncio.wait_for(playing, 10))[0].reward is not None and pool.returned == 1
    assert len(spawned) == 1 and not spawned[0].dead

"""Rollout workers: the same episodes wherever they are played, and what happens to one whose worker dies, hangs or leaves."""

import asyncio
import errno
import json
import pickle
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.config import RolloutConfig
from agentrl.config.schema import RewardConfig
from agentrl.data.trajectory import Group
from agentrl.env.catalog import EnvRef
from agentrl.render.base import Renderer
from agentrl.reward import Context, Scorer, Services, compile_spec, load_spec
from agentrl.rollout.collector import Collector
from agentrl.rollout.deadlines import Watch
from agentrl.rollout.engine import Engine, Generation, Sampling
from agentrl.rollout.episode import EpisodeSpec, Limits, Policy
from agentrl.rollout.mixtures import MixedTasks, Part
from agentrl.rollout.player import Job, LocalPlayer, RunEnv
from agentrl.rollout.workers.channel import Channel, ChannelServer, DriverAddress, connect_to_driver, dump_fault, load_fault
from agentrl.rollout.workers.rollout_worker import DriverEngine, WorkerCore
from agentrl.rollout.workers.worker_pool import WorkerPool
from agentrl.run.folder import lines
from agentrl.utils.errors import ModelError, RenderError, WorkerDiedError, WorkerError
from tests.publishing import exchange
from tests.rollout.conftest import FaultyEngine, until
from tests.rollout.in_process import Make, TaskProcesses, pool_in_process
from tests.run.test_services import MARKED, plant

ENV = EnvRef("key_value")
CONFIG = RolloutConfig(groups=2, group_size=3, max_turns=3, retries=1, stall_timeout=20.0)


class SeededEngine(FaultyEngine):
    """What it samples, and which requests fail, depends on a request's seed alone. `gate`: requests wait for it."""

    def __init__(self, stop: int, fail: float = 0.0) -> None:
        super().__init__(stop, max_delay=0.001)
        self.fails = fail
        self.asked: list[tuple[str, int | None]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.cancelled = 0

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_key: str) -> Generation:
        assert sampling.seed is not None
        self.asked.append((request_key, sampling.seed))
        self.fail = 1.0 if np.random.default_rng(sampling.seed).random() < self.fails else 0.0
        failing = self.fail
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        self.fail = failing
        return await super().generate(token_ids, sampling, request_key)


def envs(
    renderer: Renderer,
    config: RolloutConfig = CONFIG,
    scorer: Callable[[], Scorer] | None = None,
    names: Sequence[str] = (ENV.id,),
) -> Make:
    def make(engine: Engine) -> list[RunEnv]:
        spec = scorer() if scorer is not None else compile_spec(load_spec(ENV.default_reward()))
        return [RunEnv(name, ENV, Policy(engine, renderer), spec, Limits.of(config, 2048)) for name in names]

    return make


def told(groups: Sequence[Group]) -> list[Any]:
    """All of an update that is not a time, as in a file."""
    rows = [json.loads(line) for line in "".join(lines(groups)).splitlines()]
    for row in rows:
        for member in row["trajectories"]:
            del member["timings"]
            for turn in member["turns"]:
                del turn["seconds"]
                for result in turn["results"]:
                    del result["seconds"]
    return rows


def job_of(member: int = 0, group: int = 0) -> Job:
    return Job(ENV.id, EpisodeSpec(3 + group, "train", 77, member, f"g{group}.m{member}.a0"))


@asynccontextmanager
async def pooled(
    engine: Engine, make: Make, count: int, caches: bool = False, **more: Any
) -> AsyncIterator[tuple[WorkerPool, TaskProcesses]]:
    """Workers that have started, until the end of the block."""
    pool, seats = pool_in_process(engine, make, count, **more)
    seats.caches = caches
    await pool.start()
    try:
        yield pool, seats
    finally:
        await pool.close()


async def opened() -> tuple[ChannelServer, DriverAddress, list[Channel]]:
    """A driver that expects one worker; its end of the channel comes into the list."""
    hub, came = ChannelServer(), list[Channel]()
    endpoint = await hub.open("127.0.0.1")
    hub.expected["worker 0"] = came.append
    return hub, endpoint, came


async def updates(make: Make, engine: SeededEngine, workers: int, count: int = 2, **more: Any) -> tuple[list[Any], Any]:
    """`count` updates with so many workers; `during` is run beside them."""
    during = more.pop("during", None)
    player = pool_in_process(engine, make, workers, **more)[0] if workers else LocalPlayer(make(engine))
    await player.start()
    parts = make(engine)
    tasks = MixedTasks([Part(part.name, part.env, CONFIG.sampler) for part in parts], CONFIG.mixture, 5)
    collector = Collector(player, parts, tasks, CONFIG, seed=5)
    beside = asyncio.create_task(during(player)) if during is not None else None
    found = []
    try:
        for _ in range(count):
            groups = await collector.collect()
            found.append(told(groups))
            collector.trained(groups)
            await exchange(collector)
        if beside is not None:
            await beside
    finally:
        await collector.close()
        await player.close()
    return found, player


async def test_the_same_seeds_give_the_same_groups_for_any_number_of_workers(renderer: Renderer) -> None:
    make, stop = envs(renderer, names=("one", "other")), renderer.stop_token_ids[0]
    runs, asked = [], []
    for workers in (0, 1, 2, 3):
        engine = SeededEngine(stop, fail=0.2)
        runs.append((await updates(make, engine, workers))[0])
        asked.append({(key.partition("@")[0], seed) for key, seed in engine.asked})
    assert runs[0] == runs[1] == runs[2] == runs[3]
    members = {(row["env"], member["env"]) for update in runs[0] for row in update for member in row["trajectories"]}
    assert members == {("one", "one"), ("other", "other")}
    assert asked[0] == asked[1] == asked[2] == asked[3]
    retried = [key for key, _ in asked[0] if key.endswith(".a1")]
    assert retried, "no episode failed: this run shows nothing of retries"


async def test_the_driver_is_told_what_holds_up_a_workers_loop(renderer: Renderer) -> None:
    """0.3 s in which the loop that both workers share here stands still."""
    said, found, engine = list[str](), dict[str, float](), SeededEngine(renderer.stop_token_ids[0])
    async with pooled(engine, envs(renderer), 2, slow_loop=0.05, say=said.append) as (pool, _):
        await asyncio.sleep(0.1)
        time.sleep(0.3)
        for _ in range(500):
            await asyncio.sleep(0.01)
            found = {key: found.get(key, 0.0) + value for key, value in pool.metrics().items() if key.endswith("/blocked_s")}
            if len(said) == 2 and all(found.values()):
                break
    assert sorted(line.partition(" stood still for ")[0] for line in said) == [
        f"warning: the event loop of rollout worker {number}" for number in range(2)
    ]
    assert all("test_the_driver_is_told" in line and "`time.sleep(0.3)`" in line for line in said)
    assert set(found) == {"rollout/worker_0/blocked_s", "rollout/worker_1/blocked_s"}
    assert all(0.2 < seconds < 0.4 for seconds in found.values()), found


async def test_groups_are_compared_in_the_driver_with_the_scores_of_one_process(renderer: Renderer) -> None:
    length = {"use": "cost.tokens", "id": "length", "args": {"max": 100}}
    spec = {"agentrl_reward": 1, "name": "ranked", "root": {"use": "group.rank", "args": {"of": length}}}
    make, stop = envs(renderer, scorer=lambda: compile_spec(spec)), renderer.stop_token_ids[0]
    alone, _ = await updates(make, SeededEngine(stop, fail=0.2), 0)
    assert (await updates(make, SeededEngine(stop, fail=0.2), 2))[0] == alone
    rewards = {member["reward"] for groups in alone for group in groups for member in group["trajectories"]}
    assert len(rewards - {None}) > 2, "nobody was ranked"


def test_a_worker_on_the_loop_of_a_ray_actor(renderer: Renderer) -> None:
    """It is uvloop's, if that is installed: its transports are of no class of asyncio's."""
    uvloop = pytest.importorskip("uvloop", reason="Ray then uses asyncio's own loop, as every other test here")
    stop = renderer.stop_token_ids[0]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found, _ = runner.run(updates(envs(renderer), SeededEngine(stop), 1, count=1))
    alone, _ = asyncio.run(updates(envs(renderer), SeededEngine(stop), 0, count=1))
    assert found == alone


async def test_a_dead_worker_gives_its_episodes_back_with_the_same_seed_and_attempt(
    renderer: Renderer, caplog: pytest.LogCaptureFixture
) -> None:
    make, stop = envs(renderer), renderer.stop_token_ids[0]
    alone, _ = await updates(make, SeededEngine(stop), 0)
    engine, killed = SeededEngine(stop), []
    engine.gate.clear()

    async def kill(pool: Any) -> None:
        await until(lambda: len(engine.asked) >= 6)
        victim = pool.workers[0]
        killed.append(victim.running)
        victim.process.kill()
        await until(lambda: engine.cancelled >= 3)  # what it asked for is freed at the engine
        engine.gate.set()
        await until(lambda: len(pool.workers) == 2 and all(worker.settled.done() for worker in pool.workers))

    with caplog.at_level("WARNING", logger="agentrl"):
        found, pool = await updates(make, engine, 2, during=kill)
    assert found == alone
    assert killed == [3] and pool.returned == 3 and pool.respawned == 1
    assert {key.partition("@")[0].rpartition(".")[2] for key, _ in engine.asked} == {"a0"}, "a death was counted as an attempt"
    assert "its 3 episodes are played again elsewhere, and it is started again (1 of 2)" in caplog.text


async def test_a_worker_that_is_not_heard_of_counts_as_dead(renderer: Renderer, caplog: pytest.LogCaptureFixture) -> None:
    """`timeout`: a process that is stopped keeps its connection, and says nothing."""
    make, stop = envs(renderer), renderer.stop_token_ids[0]
    alone, _ = await updates(make, SeededEngine(stop), 0)
    engine = SeededEngine(stop)

    async def hang(pool: Any) -> None:
        worker = pool.workers[1]
        receive = worker._channel._receive
        worker._channel._receive = lambda kind, fields: receive(kind, fields) if kind in ("call", "cancel") else None
        await until(lambda: pool.respawned)

    with caplog.at_level("WARNING", logger="agentrl"):
        found, pool = await updates(make, engine, 2, during=hang, timeout=0.8)
    assert found == alone and pool.returned == 3
    assert "nothing was heard of it for 0.8 s" in caplog.text


async def test_a_replacement_that_does_not_start_is_said(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stood in the log only, and the run was slower for no visible reason."""
    said, make, engine = list[str](), envs(renderer), SeededEngine(renderer.stop_token_ids[0])

    def broken(*_: Any) -> Any:
        raise ModelError("the tokenizer is not here")

    async with pooled(engine, make, 2, say=said.append) as (pool, _):
        monkeypatch.setattr(DriverEngine, "__init__", broken)
        pool.workers[0].process.kill()
        await until(lambda: len(said) == 2)
    assert re.search(r"rollout worker 0\+1 could not be started: .*tokenizer is not here; 1 of 2 are left", said[1]), said


async def test_with_no_worker_left_the_run_ends_with_a_typed_error(renderer: Renderer) -> None:
    """With `respawns` 0; the dead worker above was replaced."""
    make, engine = envs(renderer), SeededEngine(renderer.stop_token_ids[0])
    engine.gate.clear()

    async def kill(pool: Any) -> None:
        for left in (2, 1):
            await until(lambda: engine.asked and pool.workers[0].running)
            assert len(pool.workers) == left
            pool.workers[0].process.kill()
            await until(lambda left=left: len(pool.workers) < left)

    said = r"no rollout worker is left: rollout worker 0 .* its process ended; rollout worker 1"
    with pytest.raises(WorkerDiedError, match=said):
        await updates(make, engine, 2, during=kill, respawns=0)


async def test_services_are_asked_in_the_driver_alone(
    renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their budget is the run's: one count, not one for each worker."""
    plant(tmp_path, monkeypatch)
    places = iter(["driver", "worker", "worker"])
    made: list[Any] = []

    def scorer() -> Scorer:
        services = Services(RewardConfig())
        made.append(services["planted"])
        made[-1].name = next(places)
        return compile_spec(MARKED, context=Context(services=services))

    async with pooled(SeededEngine(renderer.stop_token_ids[0]), envs(renderer, scorer=scorer), 2) as (pool, _):
        [trajectory] = await pool.play(job_of(), Watch())
    assert [name for one in made for name in one.course] == ["driver"] and trajectory.reward == 0.75
    assert json.loads("".join(lines([trajectory])))["reward"] == 0.75


@pytest.mark.parametrize("asked", [True, False], ids=["while it samples", "as it is sent"])
async def test_a_cancelled_episode_is_torn_down_there_before_its_caller_goes_on(renderer: Renderer, asked: bool) -> None:
    """If it is cancelled as it is sent, both frames leave together, and the episode there has not begun."""
    engine, watch = SeededEngine(renderer.stop_token_ids[0]), Watch()
    engine.gate.clear()
    async with pooled(engine, envs(renderer), 1) as (pool, seats):
        task = asyncio.create_task(pool.play(job_of(), watch))
        while not (engine.asked if asked else pool.workers[0].running):
            await asyncio.sleep(0.001 if asked else 0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 5)
        assert seats.seats["worker 0"].core._channel.serving == {} and not pool.workers[0].running
        await until(lambda: engine.cancelled or not asked)
        assert watch.waiting() == "" and bool(engine.asked) is asked


async def test_what_episodes_elsewhere_wait_for_and_that_they_move_is_known_here(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.rollout.workers.rollout_worker.REPORT_S", 0.02)
    engine, watch = SeededEngine(renderer.stop_token_ids[0]), Watch()
    engine.gate.clear()
    async with pooled(engine, envs(renderer), 2) as (pool, _):
        tasks = [asyncio.create_task(pool.play(job_of(m), watch)) for m in range(2)]
        await until(lambda: "worker 1" in watch.waiting() and "worker 0" in watch.waiting())
        waits = watch.waiting()
        assert "episode g0.m0.a0 for 0 s on turn 0 at the engine" in waits and "(in worker 0)" in waits
        await asyncio.sleep(0.1)
        settled = watch.moves
        await asyncio.sleep(0.1)
        assert watch.moves == settled, "a move is reported twice"
        engine.gate.set()
        await asyncio.gather(*tasks)
        assert watch.moves > settled
    assert watch.waiting() == ""


async def test_a_slow_worker_is_named_once(renderer: Renderer) -> None:
    said: list[str] = []
    async with pooled(SeededEngine(renderer.stop_token_ids[0]), envs(renderer), 3, say=said.append) as (pool, _):
        for worker, turn in zip(pool.workers, (0.010, 0.040, 0.011), strict=True):
            worker.turn_s.extend([turn] * 12)
        assert pool.metrics()["rollout/worker_1/turn_ms"] == pytest.approx(40.0)
        assert len(said) == 1 and "worker 1" in said[0] and "40 ms per turn, others 10" in said[0]
        pool.metrics()
        assert len(said) == 1


@pytest.mark.parametrize(("together", "wanted"), [(False, "0101"), (True, "0011")])
async def test_jobs_go_where_the_fewest_run_and_groups_stay_together_if_workers_have_caches(
    renderer: Renderer, together: bool, wanted: str
) -> None:
    engine, four = SeededEngine(renderer.stop_token_ids[0]), [(m, g) for g in range(2) for m in range(2)]
    engine.gate.clear()
    make = envs(renderer, CONFIG.model_copy(update={"max_episode_tokens": 500}))
    async with pooled(engine, make, 2, caches=together) as (pool, _):
        tasks = [asyncio.create_task(pool.play(job_of(*one), Watch())) for one in four]
        await until(lambda: len(engine.asked) >= 4)
        homes = {key.partition("@")[0][:5]: key[-1] for key, _ in engine.asked}
        assert [homes[f"g{g}.m{m}"] for m, g in four] == list(wanted)
        engine.gate.set()
        await asyncio.gather(*tasks)


async def test_nobody_without_the_secret_becomes_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    hub, endpoint, came = await opened()
    with pytest.raises(WorkerDiedError, match="rejected its connection"):
        await connect_to_driver(DriverAddress(endpoint.host, endpoint.port, b"guessed"), "worker 0", {})
    with pytest.raises(WorkerDiedError, match="rejected its connection"):
        await connect_to_driver(endpoint, "worker 1", {})
    assert came == []
    channel = await connect_to_driver(endpoint, "worker 0", {})
    assert len(came) == 1
    with pytest.raises(WorkerDiedError, match="rejected its connection"):
        await connect_to_driver(endpoint, "worker 0", {})  # a second one of that name
    # A stranger cannot make the driver hold what it sends.
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    writer.write((1 << 20).to_bytes(4, "little") + b"x" * 100)
    while await asyncio.wait_for(reader.read(100), 5):  # the nonce, and the end
        pass
    writer.close()
    # Nor is anything of a stranger's unpickled.
    unpickled: list[bytes] = []
    monkeypatch.setattr(pickle, "loads", unpickled.append)
    _, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    frame = pickle.dumps(("name", {"name": "worker 0"}))
    writer.write(len(frame).to_bytes(4, "little") + frame)
    await writer.drain()
    await asyncio.sleep(0.05)
    assert channel.trusted and unpickled == []
    channel.close()
    writer.close()
    hub.close()


@pytest.mark.parametrize("name", ["__init__", "refusal"])
async def test_what_cannot_be_built_is_the_error_of_the_start(name: str, renderer: Renderer, monkeypatch: Any) -> None:
    def broken(*_: Any) -> Any:
        raise ModelError("the tokenizer is not here")

    pool, _ = pool_in_process(SeededEngine(1), envs(renderer), 2)
    monkeypatch.setattr({"__init__": DriverEngine, "refusal": SeededEngine}[name], name, broken)
    with pytest.raises(ModelError, match=r"^the tokenizer is not here$"):
        await asyncio.wait_for(pool.start(), 10)
    await pool.close()


async def test_a_worker_that_waits_for_a_driver_that_is_gone_ends() -> None:
    hub, endpoint, came = await opened()
    begun = asyncio.Event()

    async def build(channel: Channel) -> Any:
        begun.set()
        await asyncio.Event().wait()

    running = asyncio.create_task(WorkerCore("worker 0", build).run(endpoint))
    await begun.wait()
    assert not running.done()
    came[0].abort()
    await asyncio.wait_for(running, 5)
    hub.close()


async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """It lets everyone in, and cannot prove who it is."""
    for frame in (["nonce", {"nonce": "00"}], ["welcome", {"proof": "00"}]):
        body = json.dumps(frame).encode()
        writer.write(len(body).to_bytes(4, "little") + body)
    await reader.read()
    writer.close()


@pytest.mark.parametrize(("program", "said"), [
    (impostor, "rejected its connection"),
    # It says nothing, as most servers wait for a request; a worker waited until the run gave it up.
    (lambda *_: None, r"rollout worker 0: the program that listens at .* does not answer as the driver"),
])  # fmt: skip
async def test_another_program_at_the_drivers_address_is_not_believed(program: Any, said: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("agentrl.rollout.workers.channel.AUTHENTICATION_S", 0.05 if program is not impostor else 5.0)
    server = await asyncio.start_server(program, "127.0.0.1", 0)
    endpoint = DriverAddress("127.0.0.1", server.sockets[0].getsockname()[1], b"secret")
    with pytest.raises(WorkerDiedError, match=said):
        await asyncio.wait_for(connect_to_driver(endpoint, "worker 0", {}), 5)
    server.close()


def test_a_fault_arrives_as_it_was() -> None:
    assert isinstance(load_fault(dump_fault(ModelError("no folder")), "w"), ModelError)
    assert str(load_fault(dump_fault(RenderError("drift")), "rollout worker 1")) == "drift"
    full = load_fault(dump_fault(OSError(errno.ENOSPC, "No space left on device")), "rollout worker 1")
    assert isinstance(full, OSError) and full.errno == errno.ENOSPC and "rollout worker 1" in str(full)  # as the driver's own
    assert isinstance(load_fault(dump_fault(OSError(errno.ECONNRESET, "reset")), "rollout worker 1"), WorkerError)
    other = load_fault(dump_fault(ZeroDivisionError("by 0")), "rollout worker 1")
    assert type(other) is WorkerError and "rollout worker 1: ZeroDivisionError: by 0" in str(other)


async def test_a_worker_ends_with_the_driver(renderer: Renderer) -> None:
    """Nobody would end it else: it must not play for a driver that is gone."""
    async with pooled(SeededEngine(renderer.stop_token_ids[0]), envs(renderer), 1) as (pool, seats):
        pool._closing, over = True, seats.seats["worker 0"].core._over
        assert not over.is_set()
        pool.workers[0]._channel.abort()  # type: ignore[union-attr]
        await asyncio.wait_for(over.wait(), 5)

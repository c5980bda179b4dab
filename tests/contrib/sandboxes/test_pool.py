"""Held sandboxes and their pool: how many run, who waits, what is warm, and how copies part ways. A provider that only counts."""

from __future__ import annotations

import asyncio
import copy
import gc
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from agentrl.config.load import config_from
from agentrl.config.schema import SandboxConfig
from agentrl.contrib.sandboxes.contract import ExecResult, FileInfo, Sandbox, SandboxProvider, SandboxSpec
from agentrl.contrib.sandboxes.sandbox_pool import (
    HeldSandbox,
    SandboxPool,
    pool_of,
    preferred_provider,
    provider_of,
    sandbox_config,
)
from agentrl.env import Message, Task, ToolEnv
from agentrl.rollout.deadlines import Waits, Watch
from agentrl.run.assembly import RunStart
from agentrl.utils.errors import CatalogError, ConfigError, SandboxError


class Counted(Sandbox):
    """Files in memory. `exec("set X")` writes X to the file "x"."""

    def __init__(self, spec: SandboxSpec, provider: Counting, files: Mapping[str, bytes]) -> None:
        super().__init__(spec)
        self.provider, self.files, self.over = provider, dict(files), False

    async def exec(self, command: Any, **options: Any) -> ExecResult:
        if str(command).startswith("set "):
            self.files["x"] = str(command)[4:].encode()
        return ExecResult(0, self.files.get("x", b"").decode(), "", 0.0)

    async def read(self, path: str, most: int = 0) -> bytes:
        return self.files[path]

    async def write(self, files: Mapping[str, bytes]) -> None:
        self.files.update(files)

    async def entries(self, path: str = ".") -> list[FileInfo]:
        return [FileInfo(name, len(content), True) for name, content in self.files.items()]

    async def remove(self, paths: Iterable[str]) -> None:
        for path in paths:
            self.files.pop(path, None)

    async def snapshot(self) -> str:
        self.provider.snapshots[name := f"s{len(self.provider.snapshots)}"] = dict(self.files)
        return name

    async def stop(self) -> None:
        assert not self.over
        self.abandon()

    def abandon(self) -> None:
        self.over = True
        self.provider.running -= 1


class Counting(SandboxProvider):
    name = "counting"

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds, self.running, self.most, self.starts = seconds, 0, 0, 0
        self.snapshots: dict[str, dict[str, bytes]] = {}
        self.forgotten: list[str] = []
        self.fails: deque[bool] = deque()

    def unavailable(self) -> str | None:
        return None

    def check(self, spec: SandboxSpec) -> None: ...

    async def start(self, spec: SandboxSpec, snapshot: str | None = None) -> Sandbox:
        self.starts += 1
        if self.fails and self.fails.popleft():
            raise SandboxError("no start")
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(self.seconds)
        except BaseException:
            self.running -= 1
            raise
        return Counted(spec, self, spec.files if snapshot is None else self.snapshots[snapshot])

    def forget(self, snapshot: str) -> None:
        self.forgotten.append(snapshot)


SPEC = SandboxSpec(files={"x": b"0"})


async def test_never_more_than_the_limit_run_and_all_get_their_turn() -> None:
    provider = Counting()
    pool = SandboxPool(provider, warm=0, limit=3)

    async def episode(number: int) -> None:
        box = await pool.acquire(SPEC)
        await asyncio.sleep(0.001 * (number % 4))
        await pool.release(box)

    tasks = [asyncio.ensure_future(episode(number)) for number in range(60)]
    await asyncio.sleep(0.002)
    for task in tasks[::7]:  # nine are given up, some while they run and some while they wait
        task.cancel()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(result is None for result in done) >= 51 and pool._waiting == 0 and provider.most == 3


async def test_a_cancelled_wait_hands_its_slot_on() -> None:
    provider = Counting()
    pool = SandboxPool(provider, warm=0, limit=1)
    held = await pool.acquire(SPEC)
    first, second = (asyncio.ensure_future(pool.acquire(SPEC)) for _ in range(2))
    await asyncio.sleep(0)
    assert pool._waiting == 2
    await pool.release(held)  # the slot is the first one's now, which is cancelled before it hears of it
    first.cancel()
    box = await asyncio.wait_for(second, 1)
    assert first.cancelled() and (pool.full, pool._waiting) == (True, 0)
    await pool.release(box)
    assert (pool._slots._value, provider.running) == (1, 0)


async def test_warm_ones_are_taken_at_once_and_started_again_behind() -> None:
    provider = Counting(seconds=0.05)
    pool = SandboxPool(provider, warm=2, limit=8)
    first = await pool.acquire(SPEC)  # cold: nobody knew the kind yet
    await asyncio.sleep(0.12)
    assert (pool.idle, pool._slots._value, provider.running, provider.starts) == (2, 5, 3, 3)
    loop = asyncio.get_running_loop()
    began = loop.time()
    boxes = [await pool.acquire(SandboxSpec(files={"y": bytes([number])})) for number in range(2)]
    assert loop.time() - began < 0.02  # a start takes 0.05 s
    assert [await box.read("y") for box in boxes] == [b"\0", b"\1"]
    assert "x" not in boxes[0].files  # type: ignore[attr-defined]
    await asyncio.sleep(0.12)
    assert (pool.idle, provider.starts) == (2, 5)
    other = await pool.acquire(SandboxSpec(network="all"))  # another kind: cold, and it takes the places of the first
    await asyncio.sleep(0.12)
    assert [kind for kind, _ in pool._idle] == [SandboxSpec(network="all")] * 2
    for box in (first, *boxes, other):
        await pool.release(box)
    await pool.close()
    assert (pool._slots._value, provider.running) == (8, 0)


async def test_warm_ones_make_room_at_the_limit_and_a_failed_start_frees_its_slot() -> None:
    provider = Counting()
    pool = SandboxPool(provider, warm=2, limit=3)
    first = await pool.acquire(SPEC)
    await asyncio.sleep(0.01)
    assert (pool.idle, pool.full) == (2, True)
    other = await asyncio.wait_for(pool.acquire(SandboxSpec(network="all")), 1)
    assert provider.most == 3
    await pool.release(first)
    await pool.release(other)
    await asyncio.sleep(0.01)
    await pool.close()
    provider.fails.extend([True, True, True])
    for _ in range(3):
        with pytest.raises(SandboxError, match="no start"):
            await pool.acquire(SPEC)
    assert (pool._slots._value, provider.running) == (3, 0)


async def test_a_warm_one_that_fails_to_stop_frees_its_slot() -> None:
    pool = SandboxPool(Counting(), warm=1, limit=2)
    first = await pool.acquire(SPEC)
    await asyncio.sleep(0.01)
    pool._idle[0][1].abandon()  # so its stop fails
    with pytest.raises(AssertionError):
        await pool.acquire(SandboxSpec(network="all"))
    await pool.release(first)
    assert pool._slots._value == 2


def test_warm_ones_are_stopped_with_the_loop_that_has_them() -> None:
    provider = Counting()

    async def main() -> None:
        pool = SandboxPool(provider, warm=2, limit=8)
        await pool.release(await pool.acquire(SPEC))
        await asyncio.sleep(0.01)
        assert (pool.idle, provider.running) == (2, 2)

    asyncio.run(main())
    gc.collect()
    assert provider.running == 0


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Counting:
    made = Counting()
    monkeypatch.setattr("agentrl.contrib.sandboxes.sandbox_pool.provider_of", lambda config: made)
    return made


def test_copies_part_ways_and_a_snapshot_is_taken_only_if_somebody_needs_it(provider: Counting) -> None:
    async def value(held: HeldSandbox, command: str = "get") -> str:
        return (await held.use(lambda box: box.exec(command))).stdout

    async def main() -> None:
        held = HeldSandbox(SandboxConfig(limit=8), SPEC)
        untouched = copy.deepcopy(held)  # of one that is not started: the spec's own files
        assert await value(held, "set 1") == "1" and await value(untouched) == "0"
        thrown = copy.deepcopy(held)
        del thrown
        gc.collect()
        await value(held, "set 2")
        assert provider.snapshots == {}  # nobody holds that copy any more
        early, twin = copy.deepcopy(held), copy.deepcopy(held)
        await value(held, "set 3")
        assert provider.snapshots == {"s0": {"x": b"2"}}  # before the change, once for both
        assert await value(early, "set 4") == "4" and await value(twin) == "2" and await value(held) == "3"
        kept = copy.deepcopy(early)
        await early.stop()  # what a copy needs outlives the sandbox
        assert await value(copy.deepcopy(kept)) == "4"
        with pytest.raises(SandboxError, match="ended"):
            await early.start()
        for box in (held, untouched, twin, kept):
            await box.stop()
        gc.collect()
        await asyncio.sleep(0)
        assert provider.running == 0 and pool_of(SandboxConfig(limit=8))._slots._value == 8

    asyncio.run(main())
    gc.collect()
    assert sorted(provider.forgotten) == sorted(provider.snapshots)


def test_a_sandbox_that_nobody_holds_any_more_gives_its_slot_back(provider: Counting) -> None:
    async def main() -> None:
        config = SandboxConfig(limit=1)
        held = HeldSandbox(config, SPEC)
        await held.start()
        second = HeldSandbox(config, SPEC)
        waiting = asyncio.ensure_future(second.start())
        await asyncio.sleep(0.01)
        assert "1 run: env.sandbox.limit" in second.queued
        del held
        gc.collect()
        await asyncio.wait_for(waiting, 1)
        assert second.queued == "" and provider.running == 1
        await second.stop()

    asyncio.run(main())
    assert provider.running == 0


class Waiting(ToolEnv):
    """Its setup waits for a sandbox."""

    id = "test/Waiting-v0"

    def make_task(self, rng_seed: int, split: str) -> Task:
        return Task("t", rng_seed, split)

    def prompt(self, task: Task) -> list[Message]:
        return [Message("user", "go")]

    held: HeldSandbox

    async def setup(self, task: Task) -> None:
        await self.held.start()

    @property
    def queued(self) -> str:
        return self.held.queued


async def test_the_watch_is_told_what_an_episode_queues_for_and_its_clock_stands(provider: Counting) -> None:
    config = SandboxConfig(provider="local", limit=1)
    first = HeldSandbox(config, SPEC)
    await first.start()
    env, watch = Waiting(), Watch(0.05)
    env.held = HeldSandbox(config, SPEC)
    waits = Waits("e1", turn=9.0, limit=0.4, watch=watch)
    # env_timeout 0.2 s and 0.4 s of active time, neither of which passes while it is queued for 0.6 s.
    task = asyncio.ensure_future(waits.environment(env, env.areset(seed=1), "the setup", limit=0.2))
    await asyncio.sleep(0.6)
    told = watch.waiting()
    assert "episode e1" in told and "the setup of environment test/Waiting-v0, which waits for a local sandbox for 1 s" in told
    assert not task.done() and waits.used["infrastructure"] < 0.1
    await first.stop()
    await asyncio.wait_for(task, 2)
    await env.held.stop()


def test_a_config_with_a_wrong_key_or_name_is_refused_with_what_is_near() -> None:
    with pytest.raises(ConfigError, match=r"sandbox\.provder.*did you mean 'provider'"):
        sandbox_config({"provder": "local"})
    with pytest.raises(ConfigError, match=r"env.sandbox.provider: unknown name 'dokcer'; did you mean 'docker'"):
        provider_of(SandboxConfig(provider="dokcer"))
    with pytest.raises(ConfigError, match="unknown argument 'isolate'; did you mean 'isolate_files'"):
        provider_of(SandboxConfig(args={"isolate": True}))


def test_the_config_says_which_sandbox_an_environment_gets() -> None:
    def built(env_id: str, overrides: list[str]) -> Any:
        return RunStart(config_from({"env": {"id": env_id}, "model": {"init": {}}}, overrides)).env.build()

    plain, opened = built("python", []), built("python", ["env.sandbox.args={isolate_files=false}", "env.sandbox.limit=3"])
    plain.reset(seed=0)
    opened.reset(seed=0)
    assert plain.held.config.provider == plain.held.provider.name == preferred_provider()
    assert (opened.held.provider.name, opened.held.provider.isolate_files) == ("local", False)
    assert (plain.held.config.limit, opened.held.config.limit) == (1 << 20, 3)
    built("python", ['env.sandbox={provider="docker",args={command=["true"]}}']).reset(seed=0)  # it cannot limit all files
    with pytest.raises(ConfigError, match=r"unknown name 'lokal'; did you mean 'local'"):
        built("python", ["env.sandbox.provider=lokal"])
    with pytest.raises(ConfigError, match=r"env\.sandbox: warm = 5 is more than limit = 2: warm sandboxes count as running$"):
        built("python", ["env.sandbox={warm=5,limit=2}"])
    with pytest.raises(CatalogError, match=r"KeyValue-v0 runs nothing in a sandbox, so env.sandbox has no meaning"):
        built("key_value", ["env.sandbox.limit=3"])

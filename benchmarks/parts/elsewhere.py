"""Rollout workers in separate processes with instant engines, so that only workers and driver take time."""

from __future__ import annotations

import asyncio
import multiprocessing
from typing import Any

from work import CONTEXT, Instant, scorer

from agentrl.config import RolloutConfig
from agentrl.data.trajectory import Message, Task, ToolCall
from agentrl.env import ToolEnv, tool
from agentrl.env.catalog import EnvRef
from agentrl.render import make_renderer
from agentrl.rollout.engine import Engine
from agentrl.rollout.episode import Limits, Policy
from agentrl.rollout.player import LocalPlayer, Player, RunEnv
from agentrl.rollout.workers.channel import Channel, DriverAddress
from agentrl.rollout.workers.rollout_worker import WorkerCore
from agentrl.rollout.workers.worker_pool import WorkerPool, WorkerProcess, WorkerProcesses
from agentrl.trainer.pretrained import packaged_tokenizer
from agentrl.utils.event_loop import SLOW_LOOP
from agentrl.utils.processor import raise_gc_threshold
from agentrl.utils.threads import share_the_lock

TURNS = 3
CALL = Message("assistant", tool_calls=(ToolCall("work", {}),))
ANSWER = Message("assistant", "1")


class Working(ToolEnv):
    """Environment with one tool, which computes `steps` Python steps (0: answers at once)."""

    id = "bench/Working-v0"
    summary = "works"

    def __init__(self, steps: int = 0, **base: Any) -> None:
        super().__init__(**base)
        self.steps = steps

    def make_task(self, rng_seed: int, split: str) -> Task:
        return Task(f"working/{rng_seed}", rng_seed, split, {}, {"answer": "1"})

    def prompt(self, task: Task) -> list[Message]:
        return [Message("system", "Work with work twice, then answer 1."), Message("user", "go")]

    @tool(inline=True)
    def work(self) -> int:
        """Works."""
        return sum(i * i % 7 for i in range(self.steps))


class Ref(EnvRef):
    """Substitute for an EnvRef, because `Working` is not registered."""

    def build(self, **extra: Any) -> ToolEnv:
        return Working(**{**self.params, **extra})


def part(config: RolloutConfig, steps: int) -> RunEnv:
    renderer = make_renderer(packaged_tokenizer(CONTEXT))
    engine = Instant([renderer.assistant(message) for message in (CALL, CALL, ANSWER)])
    return RunEnv("working", Ref("key_value", {"steps": steps}), Policy(engine, renderer), scorer(), Limits.of(config, CONTEXT))


class Parts:
    def __init__(self, player: Player) -> None:
        self.player = player

    async def start(self) -> None: ...

    async def close(self) -> None: ...


def serve(name: str, endpoint: DriverAddress, config: RolloutConfig, steps: int) -> None:
    """Run a worker's process."""
    raise_gc_threshold()
    share_the_lock()

    async def build(channel: Channel) -> Parts:
        return Parts(LocalPlayer([part(config, steps)], asks=False))

    asyncio.run(WorkerCore(name, build, slow_loop=SLOW_LOOP).run(endpoint))


class SpawnedProcess(WorkerProcess):
    def __init__(self, process: Any) -> None:
        self._process = process

    async def wait(self) -> str:
        while self._process.is_alive():
            await asyncio.sleep(0.5)
        return f"exit code {self._process.exitcode}"

    def kill(self) -> None:
        self._process.kill()


class SpawnedProcesses(WorkerProcesses):
    def __init__(self, config: RolloutConfig, steps: int) -> None:
        self._config, self._steps = config, steps

    def host(self) -> str:
        return "127.0.0.1"

    def begin(self, name: str, endpoint: DriverAddress) -> WorkerProcess:
        spawn = multiprocessing.get_context("spawn")
        process = spawn.Process(target=serve, args=(name, endpoint, self._config, self._steps), daemon=True)
        process.start()
        return SpawnedProcess(process)


async def player_of(workers: int, config: RolloutConfig, steps: int) -> tuple[Player, RunEnv]:
    """Return a started player with that number of workers (0: in this process), and its environment."""
    env = part(config, steps)
    if not workers:
        return LocalPlayer([env]), env
    engine: Engine = env.policy.engine
    pool = WorkerPool(
        [env], SpawnedProcesses(config, steps), count=workers, engine=engine, timeout=60, startup_timeout=120, respawns=0
    )
    await pool.start()
    return pool, env

"""Measure the driver's cost of a turn with rollout workers (`rollout.workers`) and an engine that answers at once.

    python benchmarks/worker_channel.py [--episodes 400] [--workers 0 1 2]

Episodes of key_value with 8 turns, 64 concurrent ones; each worker is a process. `driver`: the engine is in the driver, and each
turn is a request over the worker's channel, as with the embedded engine. `worker`: the engine is in the worker's process, and the
driver only sends jobs and receives trajectories. Processor time of the driver, without the start.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "parts"))

from work import Instant, scorer

from agentrl.config import RolloutConfig
from agentrl.data.trajectory import Message, ToolCall
from agentrl.env.catalog import EnvRef
from agentrl.render import make_renderer
from agentrl.rollout.deadlines import Watch
from agentrl.rollout.engine import Engine
from agentrl.rollout.episode import EpisodeSpec, Limits, Policy
from agentrl.rollout.player import Job, LocalPlayer, Player, RunEnv
from agentrl.rollout.workers.channel import Channel, DriverAddress
from agentrl.rollout.workers.rollout_worker import DriverEngine, WorkerCore
from agentrl.rollout.workers.worker_pool import WorkerPool, WorkerProcess, WorkerProcesses
from agentrl.trainer.pretrained import packaged_tokenizer

ENV = EnvRef("key_value")
CONFIG = RolloutConfig(max_turns=8)
AT_ONCE = 64
RENDERER = make_renderer(packaged_tokenizer(4096))
TURN = RENDERER.assistant(Message("assistant", "", (ToolCall("list_keys", {}, "call_0"),)))


def parts_of(engine: Engine) -> list[RunEnv]:
    return [RunEnv(ENV.id, ENV, Policy(engine, RENDERER), scorer(), Limits.of(CONFIG, 4096))]


class Parts:
    """Parts of a worker, with the engine in the worker (`near`) or in the driver."""

    def __init__(self, channel: Channel, near: bool) -> None:
        self.engine: Engine = Instant([TURN]) if near else DriverEngine(channel)
        self.player: Player = LocalPlayer(parts_of(self.engine), asks=False)

    async def start(self) -> None:
        await self.engine.start()

    async def close(self) -> None:
        await self.engine.close()


def run_worker(name: str, endpoint: DriverAddress, near: bool) -> None:
    async def build(channel: Channel) -> Parts:
        return Parts(channel, near)

    asyncio.run(WorkerCore(name, build).run(endpoint))


class Process(WorkerProcess):
    def __init__(self, name: str, endpoint: DriverAddress, near: bool) -> None:
        self._process = multiprocessing.get_context("fork").Process(target=run_worker, args=(name, endpoint, near), daemon=True)
        self._process.start()

    async def wait(self) -> str:
        while self._process.is_alive():
            await asyncio.sleep(0.1)
        return "its process ended"

    def kill(self) -> None:
        self._process.kill()


class Processes(WorkerProcesses):
    def __init__(self, near: bool) -> None:
        self._near = near

    def host(self) -> str:
        return "127.0.0.1"

    def begin(self, name: str, endpoint: DriverAddress) -> WorkerProcess:
        return Process(name, endpoint, self._near)


async def measure(workers: int, near: bool, episodes: int) -> str:
    engine = Instant([TURN])
    envs = parts_of(engine)
    player: Player = LocalPlayer(envs)
    if workers:
        seats = Processes(near)
        player = WorkerPool(envs, seats, count=workers, engine=engine, timeout=60.0, startup_timeout=60.0, respawns=0)
    await player.start()
    watch, slots = Watch(), asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> int:
        async with slots:
            spec = EpisodeSpec(number, "train", number, 0, f"g{number}.m0.a0")
            return len((await player.play(Job(ENV.id, spec), watch))[0].turns)

    await asyncio.gather(*(one(number) for number in range(AT_ONCE)))
    began, wall = time.process_time(), time.perf_counter()
    turns = sum(await asyncio.gather(*(one(number) for number in range(episodes))))
    spent, wall = time.process_time() - began, time.perf_counter() - wall
    await player.close()
    where = "-" if not workers else "worker" if near else "driver"
    return f"{workers:>7}  {where:>6}  {1000 * spent / turns:>14.3f}  {1000 * spent / episodes:>17.2f}  {turns / wall:>7.0f}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=400)
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 1, 2])
    args = parser.parse_args(argv)
    print("workers  engine  driver ms/turn  driver ms/episode  turns/s")
    for workers in args.workers:
        for near in (False, True) if workers else (False,):
            print(asyncio.run(measure(workers, near, args.episodes)), flush=True)


if __name__ == "__main__":
    main()

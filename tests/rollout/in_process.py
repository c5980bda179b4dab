"""Rollout workers whose processes are tasks of this one: real sockets and frames, one start for many cases."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from agentrl.rollout.engine import Engine
from agentrl.rollout.player import LocalPlayer, Player, RunEnv
from agentrl.rollout.workers.channel import Channel, DriverAddress
from agentrl.rollout.workers.rollout_worker import DriverEngine, WorkerCore
from agentrl.rollout.workers.worker_pool import WorkerPool, WorkerProcess, WorkerProcesses

Make = Callable[[Engine], Sequence[RunEnv]]


class Parts:
    def __init__(self, player: Player, engine: Engine) -> None:
        self.player, self.engine = player, engine

    async def start(self) -> None:
        await self.engine.start()

    async def close(self) -> None:
        await self.engine.close()


class TaskProcess(WorkerProcess):
    """`kill` is what a SIGKILL is to the driver: the connection ends, and nothing else is said."""

    def __init__(self, core: WorkerCore, endpoint: DriverAddress) -> None:
        self.core = core
        self.task = asyncio.create_task(core.run(endpoint))

    async def wait(self) -> str:
        await asyncio.wait([self.task])
        return "its task ended"

    def kill(self) -> None:
        self.core._channel.abort()
        for playing in list(self.core._channel.serving.values()):
            playing.cancel()
        self.task.cancel()


class TaskProcesses(WorkerProcesses):
    def __init__(self, make: Make, slow_loop: float = 0.0) -> None:
        self.make, self.slow_loop = make, slow_loop
        self.seats: dict[str, TaskProcess] = {}

    def host(self) -> str:
        return "127.0.0.1"

    def begin(self, name: str, endpoint: DriverAddress) -> WorkerProcess:
        async def build(channel: Channel) -> Parts:
            engine = DriverEngine(channel)
            return Parts(LocalPlayer(self.make(engine), asks=False), engine)

        self.seats[name] = seat = TaskProcess(WorkerCore(name, build, self.slow_loop), endpoint)
        return seat


def pool_in_process(
    engine: Engine, make: Make, count: int, *, timeout: float = 60.0, respawns: int = 2, slow_loop: float = 0.0, **more: Any
) -> tuple[WorkerPool, TaskProcesses]:
    seats = TaskProcesses(make, slow_loop=slow_loop)
    more |= {"count": count, "timeout": timeout, "startup_timeout": 20.0, "respawns": respawns}
    return WorkerPool(make(engine), seats, engine=engine, **more), seats

"""Replicas on machines that come and go while a run samples (`vllm.max_replicas`).

every EVERY_S    what has each live node free?
                 a replica that died with its node is forgotten; one that died on a live node is started again (it counts
                 towards `max_respawns`); with nothing under way, free resources get new replicas
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from agentrl.backends.vllm.replicas import Replicas
from agentrl.deadline import OwnedTasks
from agentrl.executors import in_thread

log = logging.getLogger(__name__)

EVERY_S = 5.0
# Enough for a busy machine to accept a connection, and little beside EVERY_S: nodes are asked one after the other.
REACH_S = 2.0

Rooms = Mapping[str, int]
"""Ids of the live nodes -> how many replicas fit on what each has free."""


def rooms(need: Mapping[str, float]) -> Rooms:
    """The room on the connected cluster, for replicas that each need `need` (CPU and GPU slots)."""
    free = available_resources_per_node()
    there = [node for node in ray.nodes() if node["Alive"] and answers(node["NodeManagerAddress"], node["NodeManagerPort"])]
    return {node["NodeID"]: fits(free.get(node["NodeID"], {}), need) for node in there}


def answers(host: str, port: int) -> bool:
    """Whether a node's Ray process can be reached. Ray itself calls a machine that is gone without a word alive for tens of
    seconds, in which its replicas would be started again on it."""
    try:
        socket.create_connection((host, port), timeout=REACH_S).close()
    except OSError:
        return False
    return True


def fits(free: Mapping[str, float], need: Mapping[str, float]) -> int:
    """How many times `need` is in `free`."""
    return min((int(free.get(key, 0.0) // count) for key, count in need.items() if count), default=0)


def on_node(node: str, need: Mapping[str, float]) -> dict[str, Any]:
    """Ray's actor options of a replica on that node."""
    # Not soft: elsewhere it would take the room that was counted for another replica.
    pinned = NodeAffinitySchedulingStrategy(node, soft=False)
    return {"num_cpus": need.get("CPU", 0.0), "num_gpus": need.get("GPU", 0.0), "scheduling_strategy": pinned}


class Elastic:
    """Keeps between none and `most` replicas alive, as the cluster has room. `need`: what a new one takes of a node; `look`:
    the room now."""

    def __init__(
        self, replicas: Replicas, most: int, need: Mapping[str, float], look: Callable[[Mapping[str, float]], Rooms] = rooms
    ) -> None:
        self._replicas, self._most, self._need, self._look = replicas, most, need, look
        self._tasks = OwnedTasks()
        self._looking: asyncio.Future[Rooms] | None = None

    def start(self) -> None:
        """Begin to watch."""
        self._tasks.start(self._run(), "elastic replicas")

    async def close(self) -> None:
        """Stop watching; idempotent."""
        await self._tasks.close()
        if self._looking is not None:  # its thread asks Ray, and cannot be cancelled
            await asyncio.gather(self._looking, return_exceptions=True)

    async def step(self) -> None:
        """One look at the cluster, and what follows from it."""
        self._looking = asyncio.ensure_future(in_thread("weights", self._look, self._need))
        room = dict(await asyncio.shield(self._looking))
        for replica in self._replicas.dead():
            # Only a death on a live node is a fault that may repeat; machines may leave as often as they like.
            if replica.node in room:
                self._replicas.respawn(replica)
            else:
                self._replicas.forget(replica)
        # One batch at a time: what is starting may not have taken its resources yet, and would be counted as room.
        if self._replicas.coming:
            return
        # May be negative, and would then cut the list below from the other end.
        wanted = self._most - len(self._replicas.alive())
        for node in [node for node, count in room.items() for _ in range(count)][: max(wanted, 0)]:
            self._replicas.grow(node, on_node(node, self._need))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                await self.step()
            except Exception:  # the cluster may not answer for a while; the run goes on with the replicas that it has
                log.exception("looking for machines that came or left failed")

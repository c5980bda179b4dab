"""Workers and plain actors of the fan-out benchmark, without torch. Run benchmarks/cluster.py."""

from __future__ import annotations

from typing import ClassVar

from agentrl.cluster.worker import Broadcast, Strategy, Worker


class Idle(Worker):
    """Worker that answers at once."""

    collective = False
    dispatch_table: ClassVar[dict[str, Strategy]] = {"nothing": Broadcast()}

    def nothing(self) -> None:
        return None


class Bare:
    """Plain Ray actor without agentrl."""

    def nothing(self) -> None:
        return None

"""Workers and bare actors of the fan-out benchmark, which import no torch. Run benchmarks/cluster.py."""

from __future__ import annotations

from typing import ClassVar

from agentrl.cluster.worker import Broadcast, Strategy, Worker


class Idle(Worker):
    """Answers at once."""

    collective = False
    dispatch_table: ClassVar[dict[str, Strategy]] = {"nothing": Broadcast()}

    def nothing(self) -> None:
        return None


class Bare:
    """A Ray actor without agentrl around it."""

    def nothing(self) -> None:
        return None

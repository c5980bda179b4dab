"""Workers that hang, die and start again. They take no batches and import no torch, which is most of what a start costs."""

import os
import time
from typing import ClassVar

from agentrl.cluster.worker import Broadcast, Strategy, Worker


class Mortal(Worker):
    """No collectives."""

    collective = False
    dispatch_table: ClassVar[dict[str, Strategy]] = dict.fromkeys(("pid", "die", "lose", "hang", "remember"), Broadcast())

    def pid(self) -> int:
        return os.getpid()

    def die(self) -> None:
        if self.rank == self.world_size - 1:
            os._exit(7)
        time.sleep(30)

    def lose(self) -> None:
        """The last rank dies; the others' connection to it is closed a second before."""
        if self.rank == self.world_size - 1:
            time.sleep(1)
            os._exit(7)
        raise RuntimeError("Connection reset by peer")

    def hang(self) -> None:
        if self.rank == 1:
            time.sleep(60)

    def remember(self, value: int = 0) -> int:
        self.kept = value or self.__dict__.get("kept", 0)
        return self.kept

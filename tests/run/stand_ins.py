"""What stands in the place of an actor and of a vLLM replica, in their processes: it imports no torch and starts at once."""

import os
from typing import Any, ClassVar

from agentrl.cluster.worker import Broadcast, Strategy, Worker


class IdleActor(Worker):
    """A rank that has nothing to do."""

    dispatch_table: ClassVar[dict[str, Strategy]] = {"visible": Broadcast()}

    def visible(self) -> str:
        """The cards that CUDA would see in this process."""
        return os.environ["CUDA_VISIBLE_DEVICES"]


class IdleReplica:
    """A replica that says where it is."""

    def __init__(self, options: dict[str, Any]) -> None: ...

    async def start(self) -> int:
        return os.getpid()

    async def place(self) -> tuple[str, str]:
        """Its node, and the cards that CUDA would see in it."""
        import ray

        return ray.get_runtime_context().get_node_id(), os.environ["CUDA_VISIBLE_DEVICES"]

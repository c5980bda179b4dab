"""Worker classes of the cluster benchmark, importable by Ray's processes. Run benchmarks/cluster.py."""

from __future__ import annotations

from typing import ClassVar

from tensordict import TensorDict

from agentrl.cluster.group import Shard
from agentrl.cluster.worker import Broadcast, Strategy, Worker
from agentrl.data.rows import Ragged


class Taker(Worker):
    """Worker that receives batches without using them."""

    collective = False
    dispatch_table: ClassVar[dict[str, Strategy]] = {
        "nothing": Broadcast(),
        "take": Shard(collect="metrics"),
    }

    def nothing(self) -> None:
        return None

    def take(self, batch: TensorDict) -> dict[str, float]:
        return {"tokens": float(Ragged.of(batch).lengths.sum())}

"""Worker classes of the cluster benchmark, importable by Ray's processes. Run benchmarks/cluster.py."""

from __future__ import annotations

from typing import ClassVar

from tensordict import TensorDict

from agentrl.batch import lengths
from agentrl.cluster.dispatch import Broadcast, Shard, Strategy
from agentrl.cluster.worker import Worker


class Taker(Worker):
    """Takes batches and does nothing with them."""

    collective = False
    dispatch_table: ClassVar[dict[str, Strategy]] = {
        "nothing": Broadcast(),
        "take": Shard(collect="metrics", balance="tokens", metrics={"tokens": "sum"}),
    }

    def nothing(self) -> None:
        return None

    def take(self, batch: TensorDict) -> dict[str, float]:
        return {"tokens": float(lengths(batch).sum())}

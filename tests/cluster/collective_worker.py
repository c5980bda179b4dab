"""A worker that enters a collective, in a module that imports little and so starts fast."""

from typing import ClassVar

from agentrl.cluster.worker import Broadcast, Strategy, Worker


class Adding(Worker):
    """Adds over all ranks."""

    dispatch_table: ClassVar[dict[str, Strategy]] = {"total": Broadcast()}

    def total(self, value: float) -> float:
        import torch

        self.init_process_group(timeout=60)
        tensor = torch.tensor([value * (self.rank + 1)])
        torch.distributed.all_reduce(tensor)
        return float(tensor)

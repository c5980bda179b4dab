"""Worker classes for the tests: importable by name, as Ray's processes need them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import torch
from tensordict import TensorDict

from agentrl.cluster.group import Shard
from agentrl.cluster.worker import Broadcast, Strategy, Worker
from agentrl.data.rows import select
from agentrl.env.catalog import EnvRef
from agentrl.utils.errors import ModelError


class Plain(Worker):
    """Every strategy, no collectives."""

    collective = False
    dispatch_table: ClassVar[dict[str, Strategy]] = {
        **dict.fromkeys(("where", "first", "pid", "fail", "model_error", "echo", "env", "read", "built"), Broadcast()),
        **dict.fromkeys(("double", "apply", "wrong_count", "listed", "scribble"), Shard()),
        "double_column": Shard(balance="column"),
        "count": Shard(collect="metrics"),
        "names": Shard(collect="metrics", stays=("half", "absent")),
        "count_column": Shard(collect="metrics", balance="column"),
    }

    def where(self, add: int) -> tuple[int, int, int]:
        return self.rank, self.world_size, add

    def first(self, word: str = "x") -> str:
        return f"{word}{self.rank}"

    def double(self, batch: TensorDict) -> TensorDict:
        batch.set("rank", torch.full((len(batch),), self.rank))
        return batch.update({"twice": batch.get("token_ids") * 2})

    def double_column(self, batch: TensorDict) -> TensorDict:
        return self.double(batch)

    def count(self, batch: TensorDict) -> dict[str, float]:
        return {"rows": len(batch), "mean": self.rank, **({"zero": self.rank} if self.rank == 0 else {})}

    def names(self, batch: TensorDict) -> dict[str, float]:
        return dict.fromkeys(batch.keys(), 1.0)

    def count_column(self, batch: TensorDict) -> dict[str, float]:
        return self.count(batch)

    def apply(self, batch: TensorDict, function: Callable[[TensorDict], TensorDict]) -> TensorDict:
        return function(batch)

    def wrong_count(self, batch: TensorDict) -> TensorDict:
        return select(batch, [])

    def listed(self, batch: TensorDict) -> TensorDict:
        return list(batch["id"])  # type: ignore[return-value] # a worker that breaks its word

    def scribble(self, batch: TensorDict) -> TensorDict:
        batch.get("token_ids").values().fill_(-7)
        return batch

    def pid(self) -> int:
        return os.getpid()

    def fail(self) -> None:
        if self.rank == self.world_size - 1:
            raise KeyError("a deep reason")

    def model_error(self) -> None:
        raise ModelError("no such model; did you mean tiny?")

    def echo(self, value: torch.Tensor | TensorDict) -> int:
        return int(value.numel())

    def env(self, name: str) -> str | None:
        return os.environ.get(name)

    def read(self, name: str) -> str:
        """A file of the user's shelves, found as the catalog finds it."""
        for root in os.environ["AGENTRL_PATH"].split(os.pathsep):
            if (Path(root) / name).is_file():
                return (Path(root) / name).read_text()
        raise FileNotFoundError(name)

    def built(self, ref: EnvRef) -> tuple[str, str]:
        """The prompt of an environment that is built here, and the file that it came from."""
        env = ref.build()
        messages, _ = env.reset(seed=0)
        return str(messages[0].content), str(ref.entry.path)


class Summing(Worker):
    """Enters collectives."""

    dispatch_table: ClassVar[dict[str, Strategy]] = {"total": Broadcast(), "gathered": Shard()}

    def total(self, value: float) -> float:
        self.init_process_group(timeout=60)
        tensor = torch.tensor([value * (self.rank + 1)])
        torch.distributed.all_reduce(tensor)
        return float(tensor)

    def gathered(self, batch: TensorDict) -> TensorDict:
        batch.set("at", torch.full((len(batch),), self.mesh_rank("dp") * 10 + self.mesh_rank("tp")))
        return batch

"""Worker classes for the tests: importable by name, as Ray's processes need them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import torch
from tensordict import TensorDict

from agentrl.cluster.group import Shard
from agentrl.cluster.worker import AllToAll, Broadcast, Direct, RankZero, Strategy, Worker
from agentrl.data.rows import is_ragged, lengths, nested_tensor, select
from agentrl.env.catalog import EnvRef
from agentrl.utils.errors import ModelError


class Plain(Worker):
    """Every strategy, no collectives."""

    collective = False
    dispatch_table: ClassVar[dict[str, Strategy]] = {
        "where": Broadcast(),
        "first": RankZero(),
        "one": Direct(),
        "swap": AllToAll(),
        "double": Shard(),
        "double_balanced": Shard(balance="tokens"),
        "double_column": Shard(balance="column"),
        "ragged": Shard(balance="tokens"),
        "items": Shard(balance="tokens"),
        "own_rows": Shard(collect="concat"),
        "count": Shard(collect="metrics", metrics={"rows": "sum", "most": "max", "least": "min"}),
        "names": Shard(collect="concat", stays=("half", "absent")),
        "count_column": Shard(collect="metrics", balance="column"),
        "apply": Shard(argument="batch"),
        "drop": Shard(collect="none"),
        "wrong_count": Shard(),
        "scribble": Shard(),
        "pid": Broadcast(),
        "fail": Broadcast(),
        "model_error": Broadcast(),
        "echo": Broadcast(),
        "env": RankZero(),
        "read": RankZero(),
        "fail_rows": Shard(),
        "built": Broadcast(),
        "grow": Shard(),
    }

    def where(self, add: int) -> tuple[int, int, int]:
        return self.rank, self.world_size, add

    def first(self, word: str = "x") -> str:
        return f"{word}{self.rank}"

    def one(self, value: int) -> int:
        return value * 10 + self.rank

    def swap(self, item: int, plus: int = 0) -> int:
        return item * 100 + self.rank + plus

    def double(self, batch: TensorDict) -> TensorDict:
        batch.set("rank", torch.full((len(batch),), self.rank))
        return batch.update({"twice": batch.get("token_ids") * 2})

    def double_balanced(self, batch: TensorDict) -> TensorDict:
        return self.double(batch)

    def double_column(self, batch: TensorDict) -> TensorDict:
        return self.double(batch)

    def ragged(self, batch: TensorDict) -> torch.Tensor:
        return batch.get("token_ids") + 1

    def items(self, batch: TensorDict) -> list[int]:
        return [int(n) for n in lengths(batch)]

    def own_rows(self, batch: TensorDict) -> list[tuple[int, int]]:
        return [(self.rank, int(row)) for row in batch["id"] for _ in range(2)]

    def count(self, batch: TensorDict) -> dict[str, float]:
        return {"rows": len(batch), "most": self.rank, "least": self.rank, "mean": self.rank}

    def names(self, batch: TensorDict) -> list[str]:
        return sorted(batch.keys())

    def count_column(self, batch: TensorDict) -> dict[str, float]:
        return self.count(batch)

    def apply(self, function: Callable[[TensorDict], TensorDict], batch: TensorDict) -> TensorDict:
        return function(batch)

    def drop(self, batch: TensorDict) -> None:
        assert is_ragged(batch.get("token_ids"))

    def wrong_count(self, batch: TensorDict) -> TensorDict:
        return select(batch, [])

    def scribble(self, batch: TensorDict) -> TensorDict:
        batch.get("token_ids").values().fill_(-7)
        return batch

    def fail_rows(self, batch: TensorDict) -> TensorDict:
        raise KeyError("no rows today")

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

    def grow(self, batch: TensorDict) -> TensorDict:
        """A million tokens (8 MB) a row."""
        rows = len(batch)
        offsets = torch.arange(rows + 1) * 1_000_000
        tokens = nested_tensor(torch.full((rows * 1_000_000,), 3), offsets)
        return TensorDict({"id": batch["id"], "token_ids": tokens}, batch_size=[rows])


class Summing(Worker):
    """Enters collectives."""

    dispatch_table: ClassVar[dict[str, Strategy]] = {"total": Broadcast(), "gathered": Shard(mesh="dp")}

    def total(self, value: float) -> float:
        self.init_process_group(timeout=60)
        tensor = torch.tensor([value * (self.rank + 1)])
        torch.distributed.all_reduce(tensor)
        return float(tensor)

    def gathered(self, batch: TensorDict) -> TensorDict:
        batch.set("at", torch.full((len(batch),), self.mesh_rank("dp") * 10 + self.mesh_rank("tp")))
        return batch

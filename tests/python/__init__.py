"""Use from Python: what the tests of this folder share."""

import random
from typing import Any

from agentrl.env import Message, Task, ToolCall, ToolEnv, draw, task_rng, tool

TINY = {"layers": 1, "hidden": 16, "mlp": 16, "heads": 2, "kv_heads": 1, "head_dim": 8, "context": 512}


class Pick(ToolEnv):
    """Say the number that a tool tells."""

    id = "test/Pick-v0"

    def __init__(self, *, most: int = 9, **base: Any) -> None:
        super().__init__(**base)
        self.most = most
        self.number = 0

    def make_task(self, rng_seed: int, split: str) -> Task:
        def propose(rng: random.Random) -> int:
            return rng.randint(0, self.most * 100)

        number = draw(task_rng(self.id, split, rng_seed), split, propose, str)
        return Task(f"pick/{split}/{rng_seed}", rng_seed, split, {"number": number}, {"answer": str(number)})

    def prompt(self, task: Task) -> list[Message]:
        return [Message("user", "n?")]

    async def setup(self, task: Task) -> None:
        self.number = task.data["number"]

    @tool(read_only=True)
    async def look(self) -> str:
        """the number"""
        return str(self.number)

    def gold_turns(self, task: Task) -> list[Message]:
        return [Message("assistant", tool_calls=(ToolCall("look", {}),)), Message("assistant", task.gold["answer"])]


def share_of_low_ids(episode: Any) -> float:
    """A reward that a model with random weights gets in all sizes: how many sampled ids are below 200. The gold answer has 1."""
    if not episode.ledgers:
        said = episode.messages[-1].content
        return float(said == episode.task.gold["answer"])
    ids = [int(i) for ledger in episode.ledgers for i in ledger.token_ids[ledger.sampled]]
    return sum(i < 200 for i in ids) / max(len(ids), 1)


def table(**more: Any) -> dict[str, Any]:
    """A run of two updates with eight episodes each, in this process, that can be repeated to the last digit."""
    return {
        "name": "tiny",
        "steps": 2,
        "seed": 3,
        "engine": "embedded",
        "engine_args": {"cache": False},
        "env": Pick,
        "env.reward": share_of_low_ids,
        "model.init": TINY,
        "rollout": {"groups": 2, "group_size": 4, "max_turns": 2, "max_turn_tokens": 8},
        "algorithm": {"minibatch": 4},
        "optim.lr": 1e-2,
        "cluster.backend": "inline",
        "eval.tasks": 2,
        "trackers": [],
        **more,
    }

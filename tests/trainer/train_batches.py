"""Made-up batches for the tests of this room."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from agentrl.cluster.group import WorkerGroup
from agentrl.config.schema import CriticConfig, OptimConfig, SftConfig
from agentrl.data.rows import Ragged, collate, nested_tensor, offsets_of
from agentrl.data.schedule import Mode, with_trees
from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import Task, Trajectory
from agentrl.trainer.minibatch import cut_steps, cut_update
from agentrl.trainer.roles import Critic


def trajectories(count: int, seed: int = 0, longest: int = 40) -> list[Trajectory]:
    """Multi-turn token ledgers of random length: context, sampled, context, sampled."""
    rng = np.random.default_rng(seed)
    found = []
    for index in range(count):
        ledger = TokenLedger()
        for turn in range(int(rng.integers(1, 4))):
            source = np.random.default_rng([seed, index // 4]) if turn == 0 else rng  # a group's prompt
            context = source.integers(7, 400, size=int(source.integers(1, longest // 4)))
            ledger.append_context(context.tolist(), turn)
            n = int(rng.integers(1, longest // 4))
            ids = rng.integers(7, 400, size=n).tolist()
            ledger.append_sampled(ids, (-6 + 0.3 * rng.standard_normal(n)).tolist(), [0] * n, turn)
        task = Task(id=f"t{index // 4}", seed=index // 4)
        found.append(Trajectory("made-up", task, member=index % 4, ledgers=[ledger], reward=float(rng.integers(0, 2))))
    return found


def random_ledger(rng: np.random.Generator, prompt: list[int], spread: float = 0.0) -> TokenLedger:
    """A prompt, and one or two turns of sampled tokens, whose logprobs lie around -6, and of what follows them."""
    made = TokenLedger()
    made.append_context(prompt, 0)
    for turn in range(int(rng.integers(1, 3))):
        n = int(rng.integers(1, 9))
        ids, noise = rng.integers(7, 400, n).tolist(), rng.standard_normal(n) if spread else np.zeros(n)
        made.append_sampled(ids, (-6 + spread * noise).tolist(), [0] * n, turn)
        made.append_context(rng.integers(7, 400, int(rng.integers(1, 4))).tolist(), turn)
    return made


def make_batch(count: int, seed: int = 0, longest: int = 40) -> TensorDict:
    """A batch with random token-level advantages on the sampled tokens."""
    batch = collate(trajectories(count, seed, longest))
    sampled = batch["sampled"]
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(len(sampled.values()), generator=generator) * sampled.values()
    return batch.update({"advantages": nested_tensor(values, offsets_of(sampled))})


def sharing(batch: TensorDict, mode: Mode) -> TensorDict:
    """The batch with the columns that say what its rows could share."""
    return with_trees(Ragged.of(batch), mode).batch


def toy_optim(**changed: Any) -> OptimConfig:
    """The optimizer of these tests' tiny models; the schema's defaults are for real ones."""
    return OptimConfig(**{"lr": 1e-3, "betas": (0.9, 0.99), **changed})


def toy_sft(**changed: Any) -> SftConfig:
    """The same for supervised steps."""
    return SftConfig(**{"lr": 3e-3, "matrix_lr": 0.02, **changed})


def toy_critic(**changed: Any) -> CriticConfig:
    """The same for a critic."""
    return CriticConfig(**{"lr": 1e-3, **changed})


def train_batch(group: WorkerGroup[Any], method: Callable[..., Any], batch: TensorDict, *given: Any, **named: Any) -> Any:
    """Call a training method on a batch cut for its ranks; `sft_steps` takes the steps after the batch."""
    ranks = group.mesh.size("dp")
    if method.__name__ in ("update", "forward_backward"):
        order = {key: named[key] for key in ("step", "seed", "part") if key in named}
        if method.__name__ == "forward_backward":
            order.setdefault("part", 0)
        cut = cut_update(batch, given[0], ranks, policy=not issubclass(group.cls, Critic), **order)
        return group.run(method, cut, *given, **named)
    count, *rest = given
    return group.run(method, cut_steps(batch, count, ranks), *rest, **named)

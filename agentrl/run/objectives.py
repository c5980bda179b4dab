"""What is learned from data (`data.loss`): one step of each loss, and its value on held-out examples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from agentrl.batch.rows import Ragged
from agentrl.batch.schedule import Mode
from agentrl.cluster.group import WorkerGroup
from agentrl.config.schema import DataConfig
from agentrl.data.store import RowStore
from agentrl.executors import in_thread
from agentrl.run.frame import Count
from agentrl.run.sft import steps_batch
from agentrl.train.actor import Actor
from agentrl.train.pairs import BradleyTerry, Dpo, means
from agentrl.train.reward_trainer import RewardTrainer
from agentrl.train.role import TrainedRole

Found = dict[str, float]


class Objective(ABC):
    """One loss over a store's examples. `group`: the processes of `role`."""

    role: ClassVar[type[TrainedRole]] = Actor

    def __init__(self, data: DataConfig, store: RowStore, group: WorkerGroup[Any], sharing: Mode) -> None:
        self.data, self.store, self.group, self.sharing = data, store, group, sharing

    async def begin(self, ended: Count) -> None:  # noqa: B027 - most losses need nothing
        """What is computed once, with the weights of the start; `ended` counts its examples."""

    @abstractmethod
    async def step(self, examples: np.ndarray) -> Found:
        """One optimizer step; its metrics."""

    @abstractmethod
    async def measure(self, examples: np.ndarray) -> tuple[float, Found]:
        """Metrics of examples without a step, and what they weigh among others."""

    async def view(self, examples: np.ndarray) -> Ragged:
        """The rows of examples."""

        def made() -> Ragged:
            episodes = self.store.load(examples)
            return Ragged.of(steps_batch(episodes, len(episodes), self.sharing))

        return await in_thread("batch", made)


class Supervised(Objective):
    """The mean of -log pi over the trained tokens of a step."""

    async def step(self, examples: np.ndarray) -> Found:
        found: Found = await self.group.arun(Actor.supervise, (await self.view(examples)).batch, 1)
        return {name: value for name, value in found.items() if name != "lr_factor"}

    async def measure(self, examples: np.ndarray) -> tuple[float, Found]:
        view = await self.view(examples)
        logprobs = (await self.group.arun(Actor.compute_logprob, view.batch))["logprobs"].values()
        tokens = float(view.tokens("sampled").sum())
        return tokens, {"loss": -float(logprobs.double().sum()) / max(tokens, 1.0)}


class Preferring(Objective):
    """DPO against the start model, whose log probabilities are computed before the first step."""

    _reference: Tensor

    async def begin(self, ended: Count) -> None:
        count, at = self.store.about.examples, 0
        self._reference = torch.zeros(count, 2, dtype=torch.float64)
        while at < count:
            examples = np.arange(at, min(at + self.data.batch, count))
            self._reference[examples] = await self._totals(await self.view(examples), len(examples))
            at = ended.done = at + len(examples)

    async def step(self, examples: np.ndarray) -> Found:
        view = await self.view(examples)
        last = _last_rows(view)
        reference = torch.zeros(len(view), dtype=torch.float64)
        reference[last] = self._reference[examples].flatten()
        view = view.with_rows(reference=reference, whole=torch.ones(len(view), dtype=torch.bool))
        loss = Dpo(self.data.beta)
        found: Found = await self.group.arun(Actor.prefer, view.batch, 1, len(examples), loss)
        return found

    async def measure(self, examples: np.ndarray) -> tuple[float, Found]:
        totals = await self._totals(await self.view(examples), len(examples))
        losses, found = Dpo(self.data.beta)(totals, self._reference[examples])
        return float(len(examples)), means(losses, found)

    async def _totals(self, view: Ragged, pairs: int) -> Tensor:
        """The sum of the log probabilities of each episode's sampled tokens, float64 [P, 2]."""
        logprobs = (await self.group.arun(Actor.compute_logprob, view.batch))["logprobs"].values().double()
        episode = torch.repeat_interleave(view.row("trajectory"), torch.from_numpy(view.lengths))
        return torch.zeros(2 * pairs, dtype=torch.float64).index_add(0, episode, logprobs).view(pairs, 2)


class Scoring(Objective):
    """A reward model: an episode's score is read at the last token of its last row."""

    role: ClassVar[type[TrainedRole]] = RewardTrainer

    async def step(self, examples: np.ndarray) -> Found:
        view = await self.view(examples)
        whole = torch.zeros(len(view), dtype=torch.bool)
        whole[_last_rows(view)] = True
        view = view.with_rows(reference=torch.zeros(len(view), dtype=torch.float64), whole=whole)
        found: Found = await self.group.arun(RewardTrainer.prefer, view.batch, 1, len(examples))
        return found

    async def measure(self, examples: np.ndarray) -> tuple[float, Found]:
        view = await self.view(examples)
        scores = (await self.group.arun(RewardTrainer.compute_scores, view.batch))["score"].double()
        losses, found = BradleyTerry()(scores[_last_rows(view)].view(-1, 2), torch.zeros(len(examples), 2))
        return float(len(examples)), means(losses, found)


OBJECTIVES: dict[str, type[Objective]] = {"sft": Supervised, "dpo": Preferring, "reward": Scoring}
"""By `data.loss`."""


def _last_rows(view: Ragged) -> Tensor:
    """The last row of each episode, by its number."""
    episode = view.row("trajectory")
    rows = torch.zeros(int(episode.max()) + 1, dtype=torch.int64)
    return rows.scatter_reduce(0, episode, torch.arange(len(episode)), reduce="amax", include_self=False)

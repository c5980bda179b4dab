"""A reward model that learns: a sequence classifier with one label, trained to score the preferred episode of a pair higher."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from tensordict import TensorDict

from agentrl.batch.rows import Ragged
from agentrl.cluster.dispatch import Broadcast, Strategy
from agentrl.config.schema import ModelConfig, OptimConfig
from agentrl.train.minibatch import RowsShard, StepsShard
from agentrl.train.optim import rate
from agentrl.train.pairs import BradleyTerry, pair_step, scores
from agentrl.train.rates import optim_of
from agentrl.train.reward_model import compute_scores
from agentrl.train.role import TrainedRole, open_engine


class RewardTrainer(TrainedRole):
    """One rank of a sequence classifier that is trained. All ranks run every method together."""

    dispatch_table: ClassVar[dict[str, Strategy]] = {
        "init_model": Broadcast(),
        "compute_scores": RowsShard(),
        "prefer": StepsShard(collect="metrics", balance="column"),
        "export_hf": Broadcast(),
    }

    def init_model(self, path: str, model: ModelConfig, optim: OptimConfig, total_steps: int | None = None) -> None:
        """Load the classifier from a folder; `total_steps`: length of the run, for the schedule. Raises ModelError if it is none,
        ConfigError for a schedule without a length."""
        rate(optim.warmup, optim.warmup, optim.schedule, total_steps)
        self._optim, self._total_steps = optim_of(optim, model, "reward"), total_steps
        self._engine = open_engine(self, path, model, optim.max_grad_norm, "score")
        self._engine.use_optimizer(self._optim)

    def compute_scores(self, batch: TensorDict) -> TensorDict:
        """Row column `score` float32 [N], read at each row's last token."""
        return compute_scores(self._ready(), Ragged.of(batch), self._optim.micro_tokens)

    def prefer(self, batch: TensorDict, count: int, pairs: int) -> dict[str, float]:
        """One optimizer step (`count` is 1) over `pairs` pairs, whose episodes count by their last row (the column `whole`)."""
        engine, factor = self._ready(), self._set_rate()
        metrics = pair_step(engine, Ragged.of(batch), self._optim.micro_tokens, pairs, scores, BradleyTerry())
        self._updates += count
        return {**metrics, "lr": factor * self._lr}

    def export_hf(self, folder: str) -> None:
        """Write a folder that plain transformers loads, and [reward_model]."""
        self._ready().export(Path(folder))

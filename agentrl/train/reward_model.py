"""The reward model: a sequence classifier that scores whole episodes, in addition to the reward spec."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from tensordict import TensorDict

from agentrl.algorithm.ragged import row_ids
from agentrl.batch.rows import Ragged
from agentrl.batch.schedule import plan_micro_batches
from agentrl.cluster.dispatch import Broadcast, Strategy
from agentrl.config.schema import ModelConfig, OptimConfig
from agentrl.train.engine import BaseEngine
from agentrl.train.minibatch import RowsShard
from agentrl.train.role import ModelRole, open_engine
from agentrl.train.update import Pack


class RewardModel(ModelRole):
    """One rank of a frozen sequence classifier with one label."""

    dispatch_table: ClassVar[dict[str, Strategy]] = {
        "init_model": Broadcast(),
        "compute_scores": RowsShard(),
    }

    def init_model(self, path: str, model: ModelConfig, optim: OptimConfig) -> None:
        """Load the classifier from a folder or hub name. Raises ModelError if it is not a classifier."""
        # Frozen, so without an adapter. Reading scores at the rows' last tokens is not implemented for tokens split over ranks.
        plain = model.model_copy(update={"lora": None, "sequence_parallel": 1})
        self._engine = open_engine(self, path, plain, role="score")
        self._engine.freeze()
        self._cap = optim.micro_tokens

    def compute_scores(self, batch: TensorDict) -> TensorDict:
        """Row column `score` float32 [N], read at each row's last token."""
        return compute_scores(self._ready(), Ragged.of(batch), self._cap)


@torch.no_grad()
def compute_scores(engine: BaseEngine, view: Ragged, cap: int) -> TensorDict:
    """The scores of a worker's rows; every rank calls it with its own rows."""
    out = torch.zeros(len(view))
    [micros] = plan_micro_batches(view, [np.arange(len(view))], cap, engine)
    for rows in micros:
        scores = engine.scores(Pack(view, rows, engine.device).micro)
        if rows:
            out[torch.tensor(rows)] = scores.cpu()
    return TensorDict({"score": out}, batch_size=[len(view)])


def last_rows(view: Ragged) -> torch.Tensor:
    """The last row of each episode, int64, in the order of the episodes' numbers."""
    episode = torch.from_numpy(view.episode)
    count = int(episode.max()) + 1 if len(episode) else 0
    indices = torch.arange(len(episode))
    return torch.zeros(count, dtype=torch.int64).scatter_reduce(0, episode, indices, reduce="amax", include_self=False)


def with_scores(view: Ragged, scores: torch.Tensor, weight: float) -> Ragged:
    """Add `weight` times an episode's score to its reward, and to the token reward of its last sampled token.

    `scores` [N] are per row; an episode of several rows gets the score of its last row. An episode that sampled
    nothing gets no token reward.
    """
    episode = torch.from_numpy(view.episode)
    last = last_rows(view)
    added = weight * scores[last].to(torch.float32)
    indices = view.tokens("sampled").nonzero().squeeze(1)
    spot = torch.full((len(last),), -1).scatter_reduce(0, episode[row_ids(view.offsets)][indices], indices, reduce="amax")
    tokens = view.tokens("rewards").clone()
    tokens.index_add_(0, spot[spot >= 0], added[spot >= 0])
    return view.with_rows(reward=view.row("reward") + added[episode]).with_tokens(rewards=tokens)

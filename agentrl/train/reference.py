"""The reference: a frozen policy for the KL penalty."""

from __future__ import annotations

from typing import ClassVar

from tensordict import TensorDict

from agentrl.batch.rows import Ragged
from agentrl.cluster.dispatch import Broadcast, Strategy
from agentrl.config.schema import ModelConfig, OptimConfig
from agentrl.train.forward import compute_logprobs
from agentrl.train.minibatch import RowsShard
from agentrl.train.role import ModelRole, open_engine


class Reference(ModelRole):
    """One rank of a frozen policy."""

    dispatch_table: ClassVar[dict[str, Strategy]] = {
        "init_model": Broadcast(),
        "compute_logprob": RowsShard(),
    }

    def init_model(self, path: str, model: ModelConfig, optim: OptimConfig) -> None:
        """Load the model from a folder or hub name. Raises ModelError."""
        self._engine = open_engine(self, path, model)
        self._engine.freeze()
        self._cap = optim.micro_tokens

    def compute_logprob(self, batch: TensorDict, temperature: float = 1.0) -> TensorDict:
        """Ragged `logprobs` and `entropy` of the sampled tokens."""
        return compute_logprobs(self._ready(), Ragged.of(batch), temperature, self._cap)

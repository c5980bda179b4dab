"""The reference of the KL penalty: a policy that no gradient changes."""

from __future__ import annotations

from typing import ClassVar

from tensordict import TensorDict

from agentrl.batch.rows import Ragged
from agentrl.cluster.dispatch import Broadcast, Strategy
from agentrl.config.schema import ModelConfig, OptimConfig
from agentrl.train.forward import compute_logprobs
from agentrl.train.minibatch import RowsShard
from agentrl.train.moving import policy_called
from agentrl.train.role import SavedRole, open_engine


class Reference(SavedRole):
    """One rank of a policy that is only asked. It stays as it was loaded, or follows a policy of the same processes."""

    dispatch_table: ClassVar[dict[str, Strategy]] = {
        "init_model": Broadcast(),
        "compute_logprob": RowsShard(),
        "follow": Broadcast(),
    }

    def init_model(self, path: str, model: ModelConfig, optim: OptimConfig) -> None:
        """Load the model from a folder or hub name. Raises ModelError."""
        self._engine = open_engine(self, path, model)
        self._engine.freeze()
        self._cap = optim.micro_tokens

    def compute_logprob(self, batch: TensorDict, temperature: float = 1.0) -> TensorDict:
        """Ragged `logprobs` and `entropy` of the sampled tokens."""
        return compute_logprobs(self._ready(), Ragged.of(batch), temperature, self._cap)

    def follow(self, policy: str, decay: float) -> None:
        """theta_ref <- decay theta_ref + (1 - decay) theta, with theta of the actor that is shown as `policy` (`Actor.show`).
        Raises ConfigError if it is not in this process."""
        self._ready().approach(policy_called(policy), 1.0 - decay)
        self._updates += 1

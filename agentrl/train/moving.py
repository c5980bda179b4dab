"""A reference that moves: an average of the policy's own weights, followed where they are.

Actor and reference are roles of the same processes, rank by rank, so a rank's shards of the one are next to those of the other
and nothing travels: under a name, which the learner chooses, the actor shows its engine to what else is in its process.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

from agentrl.config.schema import TrainConfig
from agentrl.config.unread import check_unread
from agentrl.errors import ConfigError
from agentrl.train.engine import BaseEngine

POLICIES: WeakValueDictionary[str, BaseEngine] = WeakValueDictionary()
"""The policies of this process that may be followed, by name."""


def moves(config: TrainConfig) -> bool:
    """Whether the reference of the KL penalty is an average of the policies so far."""
    return config.algorithm.kl.reference == "moving"


def policy_called(name: str) -> BaseEngine:
    """The policy that is shown under `name` in this process. Raises ConfigError if there is none."""
    engine = POLICIES.get(name)
    if engine is None:
        raise ConfigError('algorithm.kl.reference = "moving": the policy that it follows is not in the process of this rank')
    return engine


def check_moving(config: TrainConfig) -> None:
    """Raise ConfigError for a moving reference that has no policy beside it, or none to follow.

    Reads: algorithm.kl, model.lora, model.offload, model.cpu_offload, cluster.
    """
    if not moves(config):
        check_unread("algorithm.kl", config.algorithm.kl, ("decay",), 'algorithm.kl.reference = "moving"')
        return
    key, model = 'algorithm.kl.reference = "moving"', config.model
    if config.algorithm.kl.coef == 0:
        raise ConfigError(f"{key}: with algorithm.kl.coef = 0 there is no reference; set it above 0, or unset the reference")
    if model.lora is not None:
        raise ConfigError(
            f"{key}: with [model.lora] the reference is the actor's own model without its adapter, which does not move; remove "
            'one, or set algorithm.kl.reference = "start"'
        )
    if model.offload != "never" or model.cpu_offload:
        off = f'model.offload = "{model.offload}"' if model.offload != "never" else "model.cpu_offload = true"
        raise ConfigError(
            f"{key}: both models must be in their device's memory after an update, and {off} takes them out; unset one"
        )
    pools = {str(role): pool for role, pool in config.cluster.roles.items()} if config.cluster.backend == "ray" else {}
    actor, own = pools.get("actor"), pools.get("reference", pools.get("actor"))
    if actor != own:
        raise ConfigError(
            f"{key}: it follows the policy within the actors' processes, and cluster.roles.reference = {own!r} puts it "
            f"elsewhere (cluster.roles.actor = {actor!r}); remove cluster.roles.reference"
        )

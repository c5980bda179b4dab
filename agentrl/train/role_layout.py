"""Which roles a run has, where they are, and which wait for one another: from the config alone."""

from __future__ import annotations

from agentrl.config.schema import TrainConfig
from agentrl.errors import ConfigError
from agentrl.train.layout import check_divides


def mesh_of(config: TrainConfig, ranks: int | None = None) -> dict[str, int]:
    """The ranks of a role as a mesh: the ranks along "sp" get the same rows and share their tokens, those along "tp" (with
    `model.tensor_parallel`) the same tokens.

    `ranks`: their number, for a role with its own pool; by default `cluster.actors`. Raises ConfigError if a key of [model]
    that divides the ranks does not.
    """
    name, ranks = ("cluster.actors", config.cluster.actors) if ranks is None else ("a pool of processes", ranks)
    check_divides(config.model, ranks, name)
    share, split = config.model.sequence_parallel, config.model.tensor_parallel
    mesh = {"dp": ranks // (share * split), "sp": share}
    return mesh | {"tp": split} if split > 1 else mesh


def separate_reference(config: TrainConfig) -> bool:
    """Whether the reference of the KL penalty has a model of its own; with adapters it is the actor's frozen base."""
    return config.algorithm.kl.coef > 0 and config.model.lora is None


def rests(config: TrainConfig, role: str) -> bool:
    """Whether a role gives its memory back between its turns: if the config asks for it, and another role, or a colocated
    engine, uses the same processes' devices."""
    if config.model.offload == "never":
        return False
    pools = {str(name): pool for name, pool in config.cluster.roles.items()} if config.cluster.backend == "ray" else {}
    present = {
        "actor": True,
        "rollout": config.rollout.colocate,
        "reference": separate_reference(config),
        "critic": config.critic is not None,
        "reward_model": config.reward_model is not None,
        "teacher": config.algorithm.distillation is not None,
    }
    homes = {name: pools.get(name, pools.get("actor")) for name, used in present.items() if used}
    return any(home == homes[role] for name, home in homes.items() if name != role)


def check_offload(config: TrainConfig) -> None:
    """Raise ConfigError for a `model.offload` that could not free anything: nothing is left on the GPU, or no role waits.

    Reads: model.offload, model.cpu_offload, rollout.colocate, critic, reward_model, algorithm.kl.coef, algorithm.distillation,
    model.lora, cluster.
    """
    if config.model.offload == "never":
        return
    if config.model.cpu_offload:
        raise ConfigError(
            'model.offload = "idle": with model.cpu_offload weights and optimizer are in host memory anyway; unset one'
        )
    if not rests(config, "actor"):
        raise ConfigError(
            'model.offload = "idle": the actor never waits for another role on its GPU (no [critic], [reward_model], '
            "algorithm.distillation or algorithm.kl.coef without a pool of its own, and the engine has other GPUs without "
            "rollout.colocate); unset it"
        )

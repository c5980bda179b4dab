"""Models that take images: what they are not combined with is named before anything starts."""

from __future__ import annotations

from collections.abc import Iterator

from agentrl.config import TrainConfig
from agentrl.config.models import other_models
from agentrl.errors import ConfigError, ModelError
from agentrl.rollout.engine_maker import ENGINES
from agentrl.run.engines import engine_of
from agentrl.train.engine import TRAIN_ENGINES
from agentrl.train.families.choice import policy_model
from agentrl.train.pretrained import load_model_config
from agentrl.vision import KINDS, takes_images

VISION = "vision"
PAGE = "docs/howto/images.md"


def check_vision(config: TrainConfig, trains: bool = True) -> None:
    """Raise ConfigError, naming the key, if the policy's model takes images and the config asks for what is not right with them,
    or if a model beside it takes images.

    Reads: model, engine, engine_args, cluster, critic, reward_model, agent, data, algorithm, rollout.workers, rollout.branch,
    rollout.start, rollout.colocate, weights.lora.
    """
    if "messages" in engine_of(config).traits:
        return
    for key, path in other_models(config).items() if trains else ():
        if _pictured(path, config.model.trust_remote_code):
            raise ConfigError(
                f"{key} = {path}: a model that takes images is trained as the policy alone; take a text model ({PAGE})"
            )
    if not takes_images(policy_model(config)):
        return
    kind = " or ".join(KINDS)
    for wrong, what in (*_sampling(config), *(_training(config) if trains else ())):
        if wrong:
            raise ConfigError(f"{what} does not go with a model that takes images ({kind}): {PAGE} says what does")


def _pictured(path: str, trust: bool) -> bool:
    try:
        return takes_images(load_model_config(path, trust))
    except ModelError:  # the check of that model says what is wrong with it
        return False


def _sampling(config: TrainConfig) -> Iterator[tuple[bool, str]]:
    """What is in the way of sampling: whether it is so, and the key with its value."""
    yield config.rollout.workers > 0, f"rollout.workers = {config.rollout.workers}"
    yield config.agent is not None, "[agent], whose endpoint takes no images,"


def _training(config: TrainConfig) -> Iterator[tuple[bool, str]]:
    """Likewise of training."""
    model, algorithm, rollout = config.model, config.algorithm, config.rollout
    able = ENGINES.that_are(VISION)
    yield (
        VISION not in engine_of(config).traits,
        f'engine = "{config.engine}" (use {able}; the embedded one with engine_args = {{ cache = false }})',
    )
    able = TRAIN_ENGINES.that_are(VISION)
    yield VISION not in TRAIN_ENGINES.entry(model.engine).traits, f'model.engine = "{model.engine}" (use {able})'
    for name in ("replicas", "sequence_parallel", "tensor_parallel", "expert_parallel"):
        yield getattr(model, name) > 1, f"model.{name} = {getattr(model, name)}"
    yield config.weights.lora == "adapter", 'weights.lora = "adapter"'
    yield model.packing.startswith("one_row"), f'model.packing = "{model.packing}"'
    yield model.compile, "model.compile = true"
    yield model.kernels != "torch", f'model.kernels = "{model.kernels}"'
    yield config.critic is not None, "[critic]"
    yield config.reward_model is not None, "[reward_model]"
    yield algorithm.kl.reference == "moving", 'algorithm.kl.reference = "moving"'
    for name in ("experience", "demonstrations", "distillation"):
        yield getattr(algorithm, name) is not None, f"[algorithm.{name}]"
    for name in ("branch", "start"):
        yield getattr(rollout, name) is not None, f"[rollout.{name}]"
    yield config.data is not None, "[data], whose rows are tokens alone,"

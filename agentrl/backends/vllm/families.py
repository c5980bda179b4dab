"""What vLLM 0.32 computes of a family other than transformers does: put right by an argument, or refused by name.

An engine that computes something else than the trainer samples from another policy, without an error. A run of each family shows
it (`python .ci/family_runs.py`, docs/families.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from agentrl.config.schema import ModelConfig
from agentrl.errors import ConfigError

WINDOWS_PLUS_ONE = ("cohere2", "cohere2_moe")
"""vLLM gives their sliding layers one key more than `sliding_window`, transformers as many."""
LOADS_NOTHING = "vLLM's loader takes no new weights for its experts and sinks"
NO_ROUTER_BIAS = "vLLM's router for CPUs leaves out the bias that experts are chosen with"
OTHER_LATENT = "with its latent attention on a CPU, logprobs of a tiny model are off by 5 after the first token"
OTHER_CONVOLUTION = "with its convolutions on a CPU, logprobs of a tiny model are off by 0.6 after the first token"
BFLOAT16_ONLY = "vLLM's gated delta nets on a CPU take bfloat16 only, and die at the first request"
OTHER_HYBRID = "logprobs of a tiny model are off by 6 on a CPU, by its Mamba layers"
REFUSED: dict[str, str] = {"gpt_oss": LOADS_NOTHING}
"""On any device."""
REFUSED_ON_CPU: dict[str, str] = {
    "ernie4_5_moe": NO_ROUTER_BIAS,
    "lfm2": OTHER_CONVOLUTION,
    "lfm2_moe": OTHER_CONVOLUTION,
    "qwen3_next": BFLOAT16_ONLY,
    "granitemoehybrid": OTHER_HYBRID,
    "deepseek_v2": OTHER_LATENT,
    "deepseek_v3": OTHER_LATENT,
}


def family_of(model: ModelConfig) -> Any:
    """Transformers' config of the model in `model.path`; None if there is none that can be read, which other checks say."""
    if model.init is not None or model.path is None:
        return None
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(model.path), trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError):
        return None


def check_family(config: Any, cuda: bool) -> None:
    """Raise ConfigError for a model whose logprobs vLLM gets wrong, by transformers' config of it."""
    kind = config.get_text_config(decoder=True).model_type
    why = {**REFUSED, **({} if cuda else REFUSED_ON_CPU)}.get(kind)
    if why is not None:
        raise ConfigError(f"engine = vllm: the family {kind} would not be sampled right: {why}; use engine = embedded")


def overrides(config: Any) -> dict[str, Any]:
    """Keys of the model's config with which vLLM computes what transformers computes with the config as it is."""
    text = config.get_text_config(decoder=True)
    window = getattr(text, "sliding_window", None)
    return {"sliding_window": window - 1} if text.model_type in WINDOWS_PLUS_ONE and window else {}


def leave_out_tied_head(model: Any, tied: bool) -> None:
    """Let a vLLM model whose output embedding is the input's, and no module of its own (Gemma 2), load weights that name both.
    For others they must be named: a layer that is tied, but packed by itself, would keep the old ones."""
    if not tied or "load_weights" in vars(model) or any(name.split(".")[-1] == "lm_head" for name, _ in model.named_modules()):
        return
    load = model.load_weights

    def without_head(weights: Iterable[tuple[str, Any]], *args: Any, **options: Any) -> Any:
        return load(((name, tensor) for name, tensor in weights if not name.startswith("lm_head.")), *args, **options)

    model.load_weights = without_head

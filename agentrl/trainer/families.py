"""Choose packing and prefix sharing for a run by probing its model families (agentrl/contrib/families)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from agentrl.config.schema import ModelConfig, OptimConfig, TrainConfig
from agentrl.render.modality import modality_of
from agentrl.trainer.pretrained import load_model_config, model_config
from agentrl.trainer.train_engine import TRAIN_ENGINES
from agentrl.utils.errors import ConfigError, ModelError
from agentrl.utils.registry import Registry

# Configs of models

_DROPPED = ("dropout", "pdrop", "layerdrop", "jitter", "drop_prob")
_UNUSED = ("classifier", "summary", "hidden_dropout_prob_", "droppath")


def parts_of(config: Any) -> Iterator[Any]:
    """Yield the config and all nested configs."""
    yield config
    for value in list(vars(config).values()):
        if hasattr(value, "model_type") and hasattr(value, "to_dict"):
            yield from parts_of(value)


def dropouts(config: Any) -> dict[str, float]:
    """Return the keys of a config with dropout or router noise above 0."""
    found = {name: one for part in parts_of(config) for name, one in vars(part).items() if isinstance(one, float) and one > 0}
    noise = [name for name in found if any(word in name for word in _DROPPED) and not any(word in name for word in _UNUSED)]
    return {name: found[name] for name in noise}


def length_dependent_ropes(model: Any) -> Iterator[tuple[str, int]]:
    """Yield the length-dependent rotary embeddings of a config: type, and length up to which they are constant."""
    text = model.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    for one in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        kind = str(one.get("rope_type", ""))
        if (kind == "longrope" and one.get("short_factor") != one.get("long_factor")) or "dynamic" in kind:
            own = one.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
            limit = own or getattr(text, "max_position_embeddings", None)
            if isinstance(limit, int):
                yield kind, limit


# Findings

Kind = Literal["policy", "value", "score"]
TOLERANCE = 3e-3
"""Maximum error of a logprob, relative to the range of logprobs if that is below 1. Rounding gives 1e-6 to 1e-5, 1e-3 in Gemma 4
(attention without a scale); rows that see each other give 0.1 to 5, an ignored soft cap 7e-3."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Maximum error of a way to compute rows; infinite with a reason `why` if it fails."""

    error: float
    why: str = ""

    @property
    def right(self) -> bool:
        return self.error <= TOLERANCE  # NaN is not

    def __str__(self) -> str:
        return f"cannot be computed ({self.why})" if self.why else f"is off by {self.error:.1e}"


@dataclass(frozen=True, slots=True)
class Probed:
    """Findings of the probe about a model: the maximum error of each way to compute rows.

    `one_row` and `eager` (one row per pass with eager attention) are None if not needed."""

    name: str
    packed: Measured
    shared: Measured
    one_row: Measured | None
    eager: Measured | None


FAMILIES: Registry[Callable[[Any, Kind, str, bool], Probed]] = Registry("model.packing", "FAMILIES", "agentrl.trainer", given=4)
"""(config, kind, name in messages, True to probe one row per pass) -> findings. Raises ModelError if no way is right."""
PROBE = "small_cut"
"""Registered name of the probe, which runs a reduced model."""
KNOWN = {
    "gemma2", "gemma3_text", "glm4", "granite", "lfm2", "llama", "mistral", "mixtral", "olmo2", "olmo3", "phi", "phi3",
    "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3",
}  # fmt: skip
"""Families that the probe finds right in every way, accepted if the probe is not installed."""

# Choice of packing

HEADS: dict[str, Kind] = {"critic.path": "value", "reward_model.path": "score", "algorithm.distillation.path": "policy"}
RIGHT = "docs/families.md lists those that are right, such as Qwen3, Llama and LFM2"
_probed: dict[str, Probed] = {}


@dataclass(frozen=True, slots=True)
class Packing:
    """Choice for a run: `way`, a value of `model.packing`; `shares`: True if prefixes may be shared; `reason`, for the log."""

    way: Literal["packed", "one_row", "one_row_eager"]
    shares: bool
    reason: str

    def sections(self, model: ModelConfig, optim: OptimConfig) -> dict[str, Any]:
        """Return [model] with the chosen packing and [optim], without prefix sharing if it is wrong."""
        own = optim if self.shares else optim.model_copy(update={"prefix_sharing": "off"})
        return {"model": model.model_copy(update={"packing": self.way}), "optim": own}


def packing_of(config: TrainConfig) -> Packing:
    """Choose how to compute the run's rows. Raises ConfigError, ModelError if the models or settings allow no right way."""
    if "families" not in TRAIN_ENGINES.entry(config.model.engine).traits:
        return Packing("packed", True, f"model.engine = {config.model.engine} has models of its own")
    asked = config.model.packing
    if modality_of(policy := model_config(config.model)) is not None:
        if config.optim.prefix_sharing == "on":
            raise ConfigError('optim.prefix_sharing = "on": rows with images are computed each by itself; set "off"')
        return Packing("packed", False, "packed: a model that takes images, as each row alone")
    longest, key = config.widest().rollout.max_episode_tokens, "rollout.max_episode_tokens"
    if config.data is not None or (config.sft is not None and config.optim.micro_tokens > longest):
        longest, key = config.optim.micro_tokens, "optim.micro_tokens"
    trust = config.model.trust_remote_code
    # The run's models: config key, head, and transformers config.
    models: list[tuple[str, Kind, Any]] = [("model.path", "policy", policy)]
    if config.critic is not None and config.critic.path is None:
        models.append(("critic.path", "value", policy))
    models += [(key, HEADS[key], load_model_config(path, trust)) for key, path in config.other_models().items()]
    for label, _, model in models:
        for rope, limit in length_dependent_ropes(model):
            if longest > limit:
                raise ConfigError(
                    f"{key} = {longest}: the rotary embedding of {label} (rope_type {rope!r}) changes its frequencies in passes "
                    f"with a row of more than {limit} tokens, so sampling and training would compute rows differently. Set it to "
                    f"at most {limit}, and also vllm.max_model_len, by which vLLM chooses the frequencies"
                )
    found = [probe_family(model, kind, label, one_row=asked.startswith("one_row")) for label, kind, model in models]
    wrong = [one for one in found if not one.packed.right]
    why = "; ".join(f"with packed rows {one.name} {one.packed}" for one in wrong)
    if wrong and asked == "packed":
        raise ModelError(f'model.packing = "packed": {why}; set "auto", or take another model ({RIGHT})')
    if wrong or asked.startswith("one_row"):
        tried = [probe_family(model, kind, label, one_row=True) for label, kind, model in models]
        return _one_row(config.model, config.optim, tried, why)
    for label, kind, model in models if (parts := config.model.sequence_parallel) > 1 else []:
        heads = getattr(model.get_text_config(decoder=True), "num_attention_heads", None)
        if kind != "score" and isinstance(heads, int) and heads % parts:
            raise ConfigError(
                f"model.sequence_parallel = {parts} does not divide the {heads} attention heads of {label}, which ranks that "
                "share tokens divide among themselves"
            )
    apart = [one for one in found if not one.shared.right]
    names = " and ".join(dict.fromkeys(one.name for one in found))
    if not apart:
        worst = max(max(one.packed.error, one.shared.error) for one in found)
        return Packing("packed", True, f"packed: {names}: as each row alone, to {worst:.0e}")
    reason = f"with shared prefixes {apart[0].name} {apart[0].shared}"
    if config.optim.prefix_sharing == "on":
        raise ConfigError(f'optim.prefix_sharing = "on": {reason}; set "off"')
    return Packing("packed", False, f"packed, without prefix sharing: {reason}")


def _one_row(cfg: ModelConfig, optim: OptimConfig, found: list[Probed], why: str) -> Packing:
    """Choose one row per pass: with transformers' default attention if that is right, else with eager attention."""
    slow = cfg.packing == "one_row_eager" or any(one.one_row is None or not one.one_row.right for one in found)
    for one in found:
        if slow and (one.eager is None or not one.eager.right):
            also = f"{why}; " if why else ""
            raise ModelError(f"{also}with one row a pass {one.name} {one.eager}; take another model ({RIGHT})")
    reason = why or f'model.packing = "{cfg.packing}"'
    if cfg.sequence_parallel > 1:
        raise ConfigError(
            f"model.sequence_parallel = {cfg.sequence_parallel}: one row a pass is computed with the model's own "
            f"attention, which does not split its tokens ({reason}); set it to 1"
        )
    if optim.prefix_sharing == "on":
        raise ConfigError(f'optim.prefix_sharing = "on": rows are computed one a pass ({reason}); set "off"')
    how = "one row a pass, with eager attention" if slow else "one row a pass"
    return Packing("one_row_eager" if slow else "one_row", False, f"{how}: {reason}")


def probe_family(config: Any, kind: Kind, label: str, *, one_row: bool = False) -> Probed:
    """Probe a model, once per config and process, and return the findings.

    Raises ModelError if no way is right: it is not causal, random in training, or cannot be probed."""
    key = json.dumps([config.to_dict(), kind, one_row], sort_keys=True, default=str)
    if key in _probed:
        return _probed[key]
    classes = ", ".join(getattr(config, "architectures", None) or [])
    name = f"{label}: the family {config.model_type}" + (f" ({classes})" if classes else "")
    if random := dropouts(config):
        keys = ", ".join(f"{key} = {value:g}" for key, value in random.items())
        raise ModelError(
            f"{name} drops activations at random in training, so no logprob would be right: set {keys} to 0 in config.json"
        )
    if PROBE in FAMILIES:
        _probed[key] = FAMILIES.entry(PROBE).make(config, kind, name, one_row)
    elif config.model_type in KNOWN:
        _probed[key] = Probed(name, *[Measured(TOLERANCE)] * 4)
    else:
        listed = ", ".join(sorted(KNOWN))
        raise ModelError(f"{name} cannot be tried: agentrl.contrib.families is missing. Install it, or take one of {listed}")
    return _probed[key]

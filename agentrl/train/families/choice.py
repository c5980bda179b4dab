"""How the rows of a run are computed (`model.packing`, `optim.prefix_sharing`): one decision, made in the driver by the probe.

All roles of a run get the same: what is right for each of their models. The order is packed with shared prefixes, packed,
one row a pass, and else the run is refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from agentrl.config.schema import InitModelConfig, TrainConfig
from agentrl.errors import ConfigError, ModelError
from agentrl.train.engine import TRAIN_ENGINES
from agentrl.train.families.cut import dropouts
from agentrl.train.families.probe import Kind, Measured, Sample
from agentrl.train.families.rope import check_lengths
from agentrl.train.init_model import architecture
from agentrl.train.pretrained import load_model_config
from agentrl.vision import takes_images

RIGHT = "docs/families.md lists those that are right, such as Qwen3, Llama and LFM2"
_probed: dict[str, Probed] = {}


@dataclass(frozen=True, slots=True)
class Probed:
    """What the probe found of a model: of each way to compute rows, its largest error. `one_row` and `eager` (the same with
    eager attention) are None where they are not needed."""

    name: str
    packed: Measured
    shared: Measured
    one_row: Measured | None
    eager: Measured | None


@dataclass(frozen=True, slots=True)
class Packing:
    """`way`: the value of `model.packing`; `shares`: whether prefixes may be shared; `reason`: one line for the log."""

    way: Literal["packed", "one_row", "one_row_eager"]
    shares: bool
    reason: str


def with_packing(config: TrainConfig) -> TrainConfig:
    """The config with what `model.packing = "auto"` stands for, and without prefix sharing where that is wrong.

    Raises as `packing_of`."""
    made = packing_of(config)
    model = config.model.model_copy(update={"packing": made.way})
    optim = config.optim if made.shares else config.optim.model_copy(update={"prefix_sharing": "off"})
    return config.model_copy(update={"model": model, "optim": optim})


def packing_of(config: TrainConfig) -> Packing:
    """How the run's rows are computed.

    Reads: model, critic.path, reward_model.path, algorithm.distillation.path, optim.prefix_sharing. Raises ModelError for a
    model whose family is not computed right, ConfigError for keys that ask for what is wrong for it. Nothing is loaded but
    configs.
    """
    if "families" not in TRAIN_ENGINES.entry(config.model.engine).traits:
        return Packing("packed", True, f"model.engine = {config.model.engine} has models of its own")
    asked = config.model.packing
    if takes_images(policy_model(config)):
        if config.optim.prefix_sharing == "on":
            raise ConfigError('optim.prefix_sharing = "on": rows with images are computed each by itself; set "off"')
        return Packing("packed", False, "packed: a model that takes images, as each row alone (tests/train/test_vision.py)")
    for label, _, model in models_of(config):
        check_lengths(config, label, model)
    found = [probed(model, kind, label, one_row=asked.startswith("one_row")) for label, kind, model in models_of(config)]
    wrong = [one for one in found if not one.packed.right]
    if wrong and asked == "packed":
        raise ModelError(f'model.packing = "packed": {_said(wrong)}; set "auto", or take another model ({RIGHT})')
    if wrong or asked.startswith("one_row"):
        return _one_row(
            config, [probed(model, kind, label, one_row=True) for label, kind, model in models_of(config)], _said(wrong)
        )
    _check_heads(config)
    apart = [one for one in found if not one.shared.right]
    names = " and ".join(dict.fromkeys(one.name for one in found))
    if not apart:
        worst = max(max(one.packed.error, one.shared.error) for one in found)
        return Packing("packed", True, f"packed: {names}: as each row alone, to {worst:.0e}")
    reason = f"with shared prefixes {apart[0].name} {apart[0].shared}"
    if config.optim.prefix_sharing == "on":
        raise ConfigError(f'optim.prefix_sharing = "on": {reason}; set "off"')
    return Packing("packed", False, f"packed, without prefix sharing: {reason}")


def _check_heads(config: TrainConfig) -> None:
    """Raise ConfigError if ranks that share tokens cannot divide the attention heads of a trained model among themselves."""
    share = config.model.sequence_parallel
    for label, kind, model in models_of(config) if share > 1 else []:
        heads = getattr(model.get_text_config(decoder=True), "num_attention_heads", None)
        if kind != "score" and isinstance(heads, int) and heads % share:
            raise ConfigError(
                f"model.sequence_parallel = {share} does not divide the {heads} attention heads of {label}, which ranks that "
                "share tokens divide among themselves"
            )


def _said(wrong: list[Probed]) -> str:
    return "; ".join(f"with packed rows {one.name} {one.packed}" for one in wrong)


def _one_row(config: TrainConfig, found: list[Probed], why: str) -> Packing:
    """One row a pass: with the attention that transformers chooses if that is right, else with its eager one."""
    slow = config.model.packing == "one_row_eager" or any(one.one_row is None or not one.one_row.right for one in found)
    for one in found:
        if slow and (one.eager is None or not one.eager.right):
            also = f"{why}; " if why else ""
            raise ModelError(f"{also}with one row a pass {one.name} {one.eager}; take another model ({RIGHT})")
    reason = why or f'model.packing = "{config.model.packing}"'
    if config.model.sequence_parallel > 1:
        raise ConfigError(
            f"model.sequence_parallel = {config.model.sequence_parallel}: one row a pass is computed with the model's own "
            f"attention, which does not split its tokens ({reason}); set it to 1"
        )
    if config.optim.prefix_sharing == "on":
        raise ConfigError(f'optim.prefix_sharing = "on": rows are computed one a pass ({reason}); set "off"')
    how = "one row a pass, with eager attention" if slow else "one row a pass"
    return Packing("one_row_eager" if slow else "one_row", False, f"{how}: {reason}")


def policy_model(config: TrainConfig) -> Any:
    """The transformers config of the policy's model. Raises ModelError."""
    path, init = config.model.path, config.model.init
    if path is None:
        return architecture(init or InitModelConfig())
    return load_model_config(path, config.model.trust_remote_code)


def models_of(config: TrainConfig) -> list[tuple[str, Kind, Any]]:
    """The models that a run computes with: the key that names each, what is on top of it, and its transformers config."""
    policy, trust = policy_model(config), config.model.trust_remote_code
    found: list[tuple[str, Kind, Any]] = [("model.path", "policy", policy)]
    if config.critic is not None:
        other = config.critic.path
        found.append(("critic.path", "value", policy if other is None else load_model_config(other, trust)))
    if config.reward_model is not None:
        found.append(("reward_model.path", "score", load_model_config(config.reward_model.path, trust)))
    if (taught := config.algorithm.distillation) is not None:
        found.append(("algorithm.distillation.path", "policy", load_model_config(taught.path, trust)))
    return found


def probed(config: Any, kind: Kind, label: str, *, one_row: bool = False) -> Probed:
    """What the probe finds of a model; of the same config only once in a process. Raises ModelError if it cannot be right in
    any way: it is not causal, random in training, or cannot be tried."""
    key = json.dumps([config.to_dict(), kind, one_row], sort_keys=True, default=str)
    if key not in _probed:
        _probed[key] = _probe(config, kind, f"{label}: the family {family(config)}", one_row)
    return _probed[key]


def family(config: Any) -> str:
    """The family's name, with the class of its model."""
    kinds = ", ".join(getattr(config, "architectures", None) or [])
    return f"{config.model_type} ({kinds})" if kinds else str(config.model_type)


def _probe(config: Any, kind: Kind, name: str, one_row: bool) -> Probed:
    if random := dropouts(config):
        keys = ", ".join(f"{key} = {value:g}" for key, value in random.items())
        raise ModelError(
            f"{name} drops activations at random in training, so no logprob would be right: set {keys} to 0 in config.json"
        )
    try:
        sample = Sample(config, kind)
    except ModelError as error:
        raise ModelError(f"{name} cannot be tried: {error}; take another model ({RIGHT})") from error
    ahead = sample.looks_ahead()
    if not ahead.right:
        raise ModelError(
            f"{name} is not causal: with another end of a row, what its own code computes of the beginning {ahead}, so what is "
            f"sampled is not what is trained; take another model ({RIGHT})"
        )
    packed, shared = sample.packed(), sample.shared()
    own = sample.one_row() if one_row or not packed.right else None
    eager = sample.one_row("eager") if own is not None else None
    return Probed(name, packed, shared, own, eager)

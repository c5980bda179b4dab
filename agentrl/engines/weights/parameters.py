"""Parameters of a publish: names and shapes, conversions between checkpoint and model, LoRA adapters."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from agentrl.engines.weights.base import Adapter
from agentrl.render.modality import auto_class
from agentrl.utils.errors import EngineError, ModelError

# Conversions, from transformers' tables


@dataclass(slots=True)
class Conversion:
    """Recipe for one tensor, or for several from the same inputs. `name`: name of the (first) result; `sources`: pattern -> names
    of the inputs that match it, in order. Without a converter, one tensor is renamed."""

    name: str
    converter: Any = None
    sources: dict[str, list[str]] = field(default_factory=dict)

    def names(self) -> list[str]:
        return [name for group in self.sources.values() for name in group]

    def make(self, read: Callable[[str], Tensor], model: Any) -> dict[str, Tensor]:
        """Convert. Returns the results by name. `read` returns a source; `model`: transformers model, for config and shapes."""
        if self.converter is None:
            [[source]] = self.sources.values()
            return {self.name: read(source)}
        # A copy, since `add_tensor` changes the converter, which the conversions of all layers share.
        converter = deepcopy(self.converter)
        for pattern, group in self.sources.items():
            for source in group:
                # Functions, so that each source is read when the converter takes it.
                converter.add_tensor(self.name, source, pattern, partial(read, source))
        made = converter.convert(self.name, model=model, config=model.config)
        return {name: found[0] if isinstance(found, list) else found for name, found in made.items()}

    def rows(self, start: int, stop: int) -> Conversion | None:
        """Return the conversion of rows [start, stop), or None if they need all sources.

        Possible if the sources are stacked, one per row (experts), and no other operation works along the rows.
        """
        from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose

        first, *rest = getattr(self.converter, "operations", None) or [None]
        stacked = isinstance(first, MergeModulelist) and first.dim == 0
        along_others = all(
            (isinstance(step, Concatenate) and step.dim > 0)
            or (isinstance(step, Transpose) and min(step.dim0, step.dim1) > 0 and not step.check_dims)
            for step in rest
        )
        if not (stacked and along_others):
            return None
        return Conversion(self.name, self.converter, {pattern: group[start:stop] for pattern, group in self.sources.items()})


def loading_conversions(model: Any, wanted: dict[str, Any], stored: Iterable[str]) -> tuple[list[Conversion], list[str]]:
    """Return recipes for a model's tensors from stored ones, and the stored names without a place in the model.

    `wanted`: the model's tensors by name, as before adapters wrap its modules.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    prefix = model.base_model_prefix
    conversions: dict[str, Conversion] = {}
    unknown = []
    for key in sorted(stored, key=dot_natural_key):  # transformers' order: expert 2 before expert 10
        name, pattern = rename_source_key(key, renamings, converters, prefix, wanted)
        if name not in wanted and key in wanted:  # a rule for an older name matched a current one
            name, pattern = rename_source_key(key, [], [], prefix, wanted)
        if name in wanted:
            _add(conversions, name, key, pattern, converters)
        else:
            unknown.append(key)
    return list(conversions.values()), unknown


def saving_conversions(model: Any, held: Iterable[str]) -> list[Conversion]:
    """Return recipes for a checkpoint's tensors, as transformers saves them, from a model's tensors."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    found = get_model_conversion_mapping(model, add_legacy=False)
    # Optional prefixes of checkpoints are not restored.
    kept = [transform for transform in found if not isinstance(transform, PrefixChange)]
    # Reversed in opposite order, since they build on each other.
    undone = [transform.reverse_transform() for transform in reversed(kept)]
    renamings = [transform for transform in undone if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in undone if isinstance(transform, WeightConverter)]
    conversions: dict[str, Conversion] = {}
    for key in sorted(held, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, reverse=True)
        _add(conversions, name, key, pattern, converters)
    return list(conversions.values())


class Saving:
    """Converts a model's tensors to those of its checkpoint. `held`: tensors of the model by name; `expected`: those of the
    checkpoint; meta tensors if the model is on the meta device."""

    def __init__(self, model: Any) -> None:
        """`model`: a transformers model without adapters; only its config, names and shapes are used."""
        # A tied tensor is saved once, under its primary name.
        self.held = {name: tensor for name, tensor in model.state_dict().items() if name not in model.all_tied_weights_keys}
        self._model, self._conversions = model, saving_conversions(model, self.held)
        self._of = {name: conversion for conversion in self._conversions for name in conversion.names()}
        self.expected: dict[str, Tensor] = {}
        for conversion in self._conversions:
            self.expected.update(conversion.make(self.held.__getitem__, model))

    def name(self, held: str) -> str:
        """Return the checkpoint name of a tensor of the model."""
        [conversion] = saving_conversions(self._model, [held])
        return conversion.name

    def largest(self) -> int:
        """Return the bytes of the largest saved tensor."""
        return max(tensor.nbytes for tensor in self.expected.values())

    def tensors(self, held: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield each saved tensor once all its inputs, in any order, have arrived; these are then released. A tensor is valid
        until the next one is requested. Raises ModelError for a name that the model lacks."""
        waiting: dict[str, Tensor] = {}
        for name, tensor in held:
            if name not in self._of:
                raise ModelError(f"a checkpoint of this model has no weights {name}")
            conversion = self._of[name]
            # A copy if the conversion needs further inputs, since the next tensor may use the same memory.
            waiting[name] = tensor if len(conversion.names()) == 1 else tensor.clone()
            del tensor  # no reference while the next one is gathered
            if all(source in waiting for source in conversion.names()):
                # `pop`, so that no input is kept after its conversion.
                yield from conversion.make(waiting.pop, self._model).items()


def _add(conversions: dict[str, Conversion], name: str, key: str, pattern: str | None, converters: list[Any]) -> None:
    # The last matching converter wins, as in transformers.
    converter = next((c for c in reversed(converters) if pattern in c.source_patterns), None)
    conversion = conversions.setdefault(name, Conversion(name, converter))
    if conversion.converter is None:
        conversion.sources = {key: [key]}  # the last of several stored tensors wins, as in transformers
    else:
        conversion.sources.setdefault(pattern or key, []).append(key)


# Weights of a model folder, without loading them


@dataclass(frozen=True, slots=True)
class Expected:
    """Weights of a model. `shapes`: by name, tied ones once; `tied`: further name of a tied parameter -> its name in `shapes`.
    Weights are parameters, and buffers that files hold (a router's bias)."""

    shapes: dict[str, tuple[int, ...]]
    tied: dict[str, str]
    vocab: int
    positions: int


COUNTED = ("default", "proportional", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "longrope", "su", "llama3")
"""Rotary types for which `max_position_embeddings` already includes the `factor`."""


def positions_of(config: Any) -> int | None:
    """Return the longest sequence of a transformers config's text model, in tokens; None if unknown.

    Like vLLM, multiply `max_position_embeddings` by the `factor` of the rotary positions, unless it is included already (the
    types of `COUNTED`, and Gemma3).
    """
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    if not isinstance(longest, int) or longest < 1:
        return None
    return longest if "gemma3" in text.model_type else int(longest * _rope_stretch(getattr(text, "rope_parameters", None) or {}))


def _rope_stretch(rope: dict[str, Any]) -> float:
    """Return the factor by which rotary positions exceed `max_position_embeddings`; `rope` may be nested by layer type."""
    if "rope_type" not in rope:
        return max((_rope_stretch(part) for part in rope.values() if isinstance(part, dict)), default=1.0)
    return 1.0 if rope["rope_type"] in COUNTED else float(rope.get("factor") or 1.0)


def expected_parameters(path: str, saved: bool = False, trust: bool = False) -> Expected:
    """Return a model folder's weights by transformers' module names, or, if `saved`, by checkpoint names. `trust`: allow the
    model's own code to run. Raises ModelError if the folder has no readable config."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust)
    except (OSError, ValueError, KeyError) as problem:
        raise ModelError(f"cannot read the model config of {path}: {problem}") from problem
    with torch.device("meta"):
        model = auto_class(config).from_config(config, dtype=torch.float32, trust_remote_code=trust)
    model.tie_weights()
    names = {parameter: name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    tied = {name: names[parameter] for name, parameter in every if names[parameter] != name}
    held = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    if saved:
        saving = Saving(model)
        held, tied = saving.expected, {saving.name(name): saving.name(first) for name, first in tied.items()}
    text = config.get_text_config()
    return Expected(
        shapes={name: tuple(tensor.shape) for name, tensor in held.items()},
        tied=tied,
        vocab=int(text.vocab_size),
        positions=positions_of(config) or 2**31,
    )


@dataclass(slots=True)
class Arrivals:
    """Checks the tensors of a publish as they arrive."""

    expected: Expected
    seen: set[str] = field(default_factory=set)

    def check(self, name: str, shape: tuple[int, ...]) -> str:
        """Return the parameter's name in `Expected.shapes`. Raises EngineError if it is unknown, sent twice or of a wrong
        shape."""
        canonical = self.expected.tied.get(name, name)
        wanted = self.expected.shapes.get(canonical)
        if wanted is None:
            raise EngineError(f"published weight {name!r} is not a parameter of this model")
        if shape != wanted:
            raise EngineError(f"published weight {name!r} has shape {shape}, expected {wanted}")
        if canonical in self.seen:
            raise EngineError(f"published weight {name!r} was sent twice")
        self.seen.add(canonical)
        return canonical

    def complete(self) -> None:
        """Raise EngineError if parameters are missing."""
        missing = sorted(self.expected.shapes.keys() - self.seen)
        if missing:
            count = f"{len(missing)} of {len(self.expected.shapes)}"
            raise EngineError(f"{count} weights were not published: {', '.join(missing[:4])}")


# Merged adapters

DOWN, UP = ".lora_A.weight", ".lora_B.weight"


def apply_adapter(parameters: dict[str, nn.Parameter], base: dict[str, Tensor], adapter: Adapter) -> None:
    """Set W = base + alpha / rank * B A in place, computed in float32. `base` is filled with the adapted layers' original
    weights. Raises EngineError, without any change, if the adapter does not fit."""
    layers = sorted(name.removesuffix(DOWN) for name in adapter.tensors if name.endswith(DOWN))
    if not layers or len(adapter.tensors) != 2 * len(layers):
        raise EngineError("the adapter is not a set of lora_A / lora_B pairs")
    for layer in layers:
        target = parameters.get(f"{layer}.weight")
        up = adapter.tensors.get(layer + UP)
        if target is None or up is None:
            raise EngineError(f"adapter: {layer!r} is not a linear layer of this model, or has no lora_B")
        shape = (up.shape[0], adapter.tensors[layer + DOWN].shape[1])
        if shape != target.shape:
            raise EngineError(f"adapter: {layer!r} is for a weight of shape {shape}, but it has shape {tuple(target.shape)}")
    with torch.no_grad():
        # First undo the previous adapter, which may cover other layers.
        for name, weight in base.items():
            parameters[name].copy_(weight)
        for layer in layers:
            target = parameters[f"{layer}.weight"]
            plain = base.setdefault(f"{layer}.weight", target.detach().clone())
            down, up = (adapter.tensors[layer + part].to(plain.device, torch.float32) for part in (DOWN, UP))
            target.copy_(plain.float() + (adapter.alpha / adapter.rank) * (up @ down))


# Adapter folders in peft's format


def write_adapter(folder: Path, adapter: Adapter, base: str | None = None) -> None:
    """Write an adapter to `folder` in peft's format. `base`: folder or hub name of the base model."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in adapter.tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "task_type": "CAUSAL_LM",
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in adapter.tensors}),
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))

"""Which tensors of a checkpoint become which of a model, and back, by transformers' own tables.

The files of some models have other names than their modules, and other tensors: experts one by one that a module holds fused.
transformers keeps renamings and conversions for each family; here they are applied to names first, so that tensors can then be
read, converted and written a few at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from agentrl.errors import ModelError


@dataclass(slots=True)
class Conversion:
    """How a tensor is made, or several that come from the same ones. `name` is that of the (first) result; `sources` are the
    names of what goes in, in order, by the pattern that they match. Without a converter it is one tensor, renamed."""

    name: str
    converter: Any = None
    sources: dict[str, list[str]] = field(default_factory=dict)

    def names(self) -> list[str]:
        return [name for group in self.sources.values() for name in group]

    def make(self, read: Callable[[str], Tensor], model: Any) -> dict[str, Tensor]:
        """The results by name; `read` returns a source. `model`: the transformers model, for its config and shapes."""
        if self.converter is None:
            [[source]] = self.sources.values()
            return {self.name: read(source)}
        # `add_tensor` collects in the converter itself, which the conversions of all layers share.
        converter = deepcopy(self.converter)
        for pattern, group in self.sources.items():
            for source in group:
                # Functions, so that each source is read when the converter takes it.
                converter.add_tensor(self.name, source, pattern, partial(read, source))
        made = converter.convert(self.name, model=model, config=model.config)
        return {name: found[0] if isinstance(found, list) else found for name, found in made.items()}

    def rows(self, start: int, stop: int) -> Conversion | None:
        """The conversion of rows [start, stop) alone, or None if those cannot be made from some of the sources alone.

        Possible if the sources are stacked, one per row (experts), and nothing else is done along the rows.
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
    """How to make a model's tensors from stored ones; and names of stored ones that the model has no place for.

    `wanted`: the names of the model's tensors, as they are before adapters wrap its modules.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import rename_source_key

    renamings, converters = _parted(get_model_conversion_mapping(model))
    prefix = model.base_model_prefix
    conversions: dict[str, Conversion] = {}
    unknown = []
    for key in _ordered(stored):
        name, pattern = rename_source_key(key, renamings, converters, prefix, wanted)
        if name not in wanted and key in wanted:  # a rule for an older name matched one that is right as it is
            name, pattern = rename_source_key(key, [], [], prefix, wanted)
        if name in wanted:
            _add(conversions, name, key, pattern, converters)
        else:
            unknown.append(key)
    return list(conversions.values()), unknown


def saving_conversions(model: Any, held: Iterable[str]) -> list[Conversion]:
    """How to make the tensors of a checkpoint, as transformers saves them, from those that a model holds."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, rename_source_key

    found = get_model_conversion_mapping(model, add_legacy=False)
    # A prefix that a checkpoint may or may not have had is not put back.
    kept = [transform for transform in found if not isinstance(transform, PrefixChange)]
    # Undone from the last to the first, as they build on each other.
    renamings, converters = _parted([transform.reverse_transform() for transform in reversed(kept)])
    conversions: dict[str, Conversion] = {}
    for key in _ordered(held):
        name, pattern = rename_source_key(key, renamings, converters, reverse=True)
        _add(conversions, name, key, pattern, converters)
    return list(conversions.values())


class Saving:
    """A model's tensors as checkpoints have them. `held`: those of the model by name, `expected`: those of its checkpoint; meta
    tensors if the model is on the meta device."""

    def __init__(self, model: Any) -> None:
        """`model`: a transformers model, without adapters; its config, names and shapes count, not its weights."""
        # A tied tensor is saved once, under the name that the others are tied to.
        self.held = {name: tensor for name, tensor in model.state_dict().items() if name not in model.all_tied_weights_keys}
        self._model, self._conversions = model, saving_conversions(model, self.held)
        self._of = {name: conversion for conversion in self._conversions for name in conversion.names()}
        self.expected: dict[str, Tensor] = {}
        for conversion in self._conversions:
            self.expected.update(conversion.make(self.held.__getitem__, model))

    def name(self, held: str) -> str:
        """The name that a single tensor of the model is saved under."""
        [conversion] = saving_conversions(self._model, [held])
        return conversion.name

    def largest(self) -> int:
        """Bytes of the largest saved tensor."""
        return max(tensor.nbytes for tensor in self.expected.values())

    def tensors(self, held: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The saved tensors, as soon as the last of the model's that each is made from has come, which may be in any order and
        is then let go. Each is valid until the next is asked for. Raises ModelError for a name that the model does not have."""
        waiting: dict[str, Tensor] = {}
        for name, tensor in held:
            if name not in self._of:
                raise ModelError(f"no place in a checkpoint for weights named {name}")
            conversion = self._of[name]
            # A copy if a conversion waits for more, because the next tensor may come in the same memory.
            waiting[name] = tensor if len(conversion.names()) == 1 else tensor.clone()
            del tensor  # nothing is held while the next one is gathered
            if all(source in waiting for source in conversion.names()):
                # `pop`, so that nothing is held after its conversion.
                yield from conversion.make(waiting.pop, self._model).items()


def _parted(transforms: list[Any]) -> tuple[list[Any], list[Any]]:
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    return renamings, [transform for transform in transforms if isinstance(transform, WeightConverter)]


def _ordered(names: Iterable[str]) -> list[str]:
    """As transformers orders them, so that expert 2 is before expert 10."""
    from transformers.core_model_loading import dot_natural_key

    return sorted(names, key=dot_natural_key)


def _add(conversions: dict[str, Conversion], name: str, key: str, pattern: str | None, converters: list[Any]) -> None:
    # Of several the last counts, as in transformers.
    converter = next((c for c in reversed(converters) if pattern in c.source_patterns), None)
    conversion = conversions.setdefault(name, Conversion(name, converter))
    if conversion.converter is None:
        conversion.sources = {key: [key]}  # of two stored tensors with one name the last counts, as in transformers
    else:
        conversion.sources.setdefault(pattern or key, []).append(key)

"""What a publish must contain: the weights of a model folder, by name and shape, without loading them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from agentrl.errors import EngineError, ModelError
from agentrl.vision import auto_class
from agentrl.weights.conversions import Saving


@dataclass(frozen=True, slots=True)
class Expected:
    """`shapes` by name of a weight, tied ones once; `tied` maps each further name of a tied parameter to its
    name in `shapes`. Weights are parameters, and the buffers that files hold (a router's bias)."""

    shapes: dict[str, tuple[int, ...]]
    tied: dict[str, str]
    vocab: int
    positions: int


COUNTED = ("default", "proportional", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "longrope", "su", "llama3")
"""Types of rotary positions whose reach `max_position_embeddings` says."""


def positions_of(config: Any) -> int | None:
    """The longest sequence, in tokens, that a transformers config supports (its text model, if it also takes images or sound);
    None if it does not say.

    Rotary positions that it stretches by a `factor` reach so much further, unless its `max_position_embeddings` counts that
    already, as it does by the methods of `COUNTED` and in Gemma3: what vLLM computes.
    """
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    if not isinstance(longest, int) or longest < 1:
        return None
    return longest if "gemma3" in text.model_type else int(longest * _stretched(getattr(text, "rope_parameters", None) or {}))


def _stretched(rope: dict[str, Any]) -> float:
    """The factor by which rotary positions reach beyond `max_position_embeddings`; `rope` may hold them by kind of layer."""
    if "rope_type" not in rope:
        return max((_stretched(part) for part in rope.values() if isinstance(part, dict)), default=1.0)
    return 1.0 if rope["rope_type"] in COUNTED else float(rope.get("factor") or 1.0)


def expected_parameters(path: str, saved: bool = False, trust: bool = False) -> Expected:
    """By the names that transformers' modules have; `saved`: by those of checkpoints. `trust`: code of the model's own may run.
    Raises ModelError if the folder has no readable config."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust)
    except (OSError, ValueError, KeyError) as problem:
        raise ModelError(f"cannot read the model config of {path}: {problem}") from problem
    with torch.device("meta"):
        model = auto_class(config).from_config(config, trust_remote_code=trust)
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
        shapes=_shapes(held),
        tied=tied,
        vocab=int(text.vocab_size),
        positions=positions_of(config) or 2**31,
    )


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


class Arrivals:
    """Checks a publish as its tensors arrive."""

    def __init__(self, expected: Expected) -> None:
        self._expected = expected
        self._seen: set[str] = set()

    def check(self, name: str, shape: tuple[int, ...]) -> str:
        """The parameter's name in `Expected.shapes`. Raises EngineError if it is unknown, was sent twice or
        has another shape."""
        canonical = self._expected.tied.get(name, name)
        wanted = self._expected.shapes.get(canonical)
        if wanted is None:
            raise EngineError(f"published weight {name!r} is not a parameter of this model")
        if shape != wanted:
            raise EngineError(f"published weight {name!r} has shape {shape}, expected {wanted}")
        if canonical in self._seen:
            raise EngineError(f"published weight {name!r} was sent twice")
        self._seen.add(canonical)
        return canonical

    def complete(self) -> None:
        """Raises EngineError if parameters are missing."""
        missing = sorted(self._expected.shapes.keys() - self._seen)
        if missing:
            count = f"{len(missing)} of {len(self._expected.shapes)}"
            raise EngineError(f"{count} weights were not published: {', '.join(missing[:4])}")

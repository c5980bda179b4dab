"""Models that take more than text: the registry of their modalities, by transformers' model type.

Messages, ledgers and prompts carry images (`agentrl.data.images`) and their placeholder tokens; a modality prepares them for a
model. A model of an unregistered type is a text model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from agentrl.config.schema import InitModelConfig, ModelConfig, TrainConfig, VllmConfig
from agentrl.data.images import Image
from agentrl.utils.errors import ConfigError
from agentrl.utils.registry import Registry

Rows = Sequence[tuple[int, int, Sequence[Image]]]
"""Start and end of each row among packed tokens, and its images."""
Inputs = Callable[[Any], tuple[Any, Tensor, dict[str, Any]]]
"""Function from the backbone to its text model, the token positions, and the arguments that replace `input_ids`."""


class Modality(ABC):
    """Preparation of images for one type of model."""

    auto_class: ClassVar[str]
    """Name of transformers' auto class for the whole model."""
    no_adapters: ClassVar[str]
    """Pattern of layers without adapters, for peft."""
    embedded_model: ClassVar[str]
    """Import path of the subclass of `RecomputedModel` for the embedded engine: MODULE:NAME."""
    vllm_prompt: ClassVar[str]
    """Import path of the function that makes vLLM's prompt in a replica from a modality, token ids and images. It raises
    EngineError if ids and images do not match."""
    tiny_tokens: ClassVar[Sequence[str]] = ()
    """Control tokens that `model.init.vision` adds to the packaged tokenizer."""
    processor: Any
    """Image processor of transformers."""
    around: tuple[int, int, int]
    """Token ids of an image's begin, of each placeholder, and of its end."""
    special: tuple[int, ...]
    """Token ids that a policy must not sample: `around` and others."""

    @abstractmethod
    def __init__(self, path: str, config: Any) -> None:
        """`path`: the model's folder, "" if not built yet; `config`: of transformers. Raises ModelError for an invalid file."""

    @classmethod
    @abstractmethod
    def check(cls, config: TrainConfig, trains: bool) -> None:
        """Raise ConfigError for keys that are incompatible with the model; `trains`: True for a training run."""

    @classmethod
    @abstractmethod
    def check_vllm(cls, vllm: VllmConfig) -> None:
        """Raise ConfigError for vLLM keys that are incompatible with the model."""

    @classmethod
    def tiny(cls, cfg: InitModelConfig, text: Mapping[str, Any], tokenizer: Any) -> Any:
        """Make the transformers config for `model.init.vision`; `text`: arguments of its text config. Raises ConfigError."""
        raise NotImplementedError

    @abstractmethod
    def tokens(self, image: Image) -> int:
        """Return the number of placeholder tokens of an image."""

    @abstractmethod
    def freeze(self, model: Any) -> None:
        """Freeze the untrained parts of a model, before it is sharded."""

    @abstractmethod
    def inputs(self, ids: Tensor, rows: Rows) -> Inputs:
        """Make the model's inputs for packed tokens, int64 [T]. Raises ImageError if placeholders and images do not match."""

    @abstractmethod
    def vllm_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return vLLM arguments for the model, in addition to `options`."""


MODALITIES: Registry[type[Modality]] = Registry(
    "model_type", "MODALITIES", "agentrl.render.modality", traits={"tiny": "builds the model of model.init.vision"}
)


def modality_of(config: Any) -> type[Modality] | None:
    """Return the modality of a model by its transformers config; None for a text model."""
    kind: str = getattr(config, "model_type", "")
    return MODALITIES.entry(kind).make if kind in MODALITIES else None


def config_modality(model: ModelConfig, found: Any) -> type[Modality] | None:
    """Return the modality of a config's model, which may not be built yet. `found`: its transformers config, or None."""
    if model.init is not None:
        return tiny_modality() if model.init.vision else None
    return modality_of(found)


def tiny_modality() -> type[Modality]:
    """Return the modality of `model.init.vision`. Raises ConfigError without one."""
    for entry in MODALITIES.own():
        if "tiny" in entry.traits:
            return entry.make
    raise ConfigError("model.init.vision = true: agentrl.contrib.vision is missing. Install it, or set the key to false")


def make_modality(path: str, config: Any) -> Modality | None:
    """Make a model's modality; None for a text model. Raises ModelError if files of its folder cannot be read."""
    kind = modality_of(config)
    return None if kind is None else kind(path, config)


def modality_in(path: str, trust: bool) -> Modality | None:
    """Make the modality of a model folder; None also if its config cannot be read, since loading the model reports that."""
    from transformers import AutoConfig

    try:
        return make_modality(path, AutoConfig.from_pretrained(path, trust_remote_code=trust))
    except (OSError, ValueError, KeyError):
        return None


def auto_class(config: Any) -> Any:
    """Return the auto class of transformers for a model that is trained as a language model."""
    import transformers

    kind = modality_of(config)
    return transformers.AutoModelForCausalLM if kind is None else getattr(transformers, kind.auto_class)

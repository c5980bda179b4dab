"""Models that take more than text: the registry of their code, by transformers' model type.

Messages, ledgers and prompts of the core carry images (`agentrl.data.images`) and their placeholder tokens. A modality prepares
them for a model. A model whose type nobody registers is one of text."""

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
"""From the backbone to the text model in it, the positions of the tokens, and the arguments that stand for `input_ids`."""


class Modality(ABC):
    """Treatment of images by one model."""

    auto_class: ClassVar[str]
    """Name of transformers' auto class for the whole model."""
    no_adapters: ClassVar[str]
    """Pattern of the layers that get no adapters, for peft."""
    embedded_model: ClassVar[str]
    """Import path of the subclass of `RecomputedModel` for the embedded engine: MODULE:NAME."""
    vllm_prompt: ClassVar[str]
    """Import path of the function that makes vLLM's prompt, in a replica, of a modality, token ids and images. It raises
    EngineError if they do not agree."""
    tiny_tokens: ClassVar[Sequence[str]] = ()
    """Control tokens that `model.init.vision` adds to the packaged tokenizer."""
    processor: Any
    """transformers' processor of images."""
    around: tuple[int, int, int]
    """Tokens of an image's begin, of each placeholder, and of its end."""
    special: tuple[int, ...]
    """These, and others that no policy may sample."""

    @abstractmethod
    def __init__(self, path: str, config: Any) -> None:
        """`path`: the model's folder, or "" if it is not built yet; `config`: transformers'. Raises ModelError for a bad file."""

    @classmethod
    @abstractmethod
    def check(cls, config: TrainConfig, trains: bool) -> None:
        """Raise ConfigError for keys that do not go with the model; `trains`: for a run that trains."""

    @classmethod
    @abstractmethod
    def check_vllm(cls, vllm: VllmConfig) -> None:
        """Raise ConfigError for keys of vLLM that do not go with the model."""

    @classmethod
    def tiny(cls, cfg: InitModelConfig, text: Mapping[str, Any], tokenizer: Any) -> Any:
        """transformers config of the model of `model.init.vision`; `text`: arguments of its text model's. Raises ConfigError."""
        raise NotImplementedError

    @abstractmethod
    def tokens(self, image: Image) -> int:
        """Number of placeholders for an image."""

    @abstractmethod
    def freeze(self, model: Any) -> None:
        """Freeze the parts of a model that are not trained, before it is sharded."""

    @abstractmethod
    def inputs(self, ids: Tensor, rows: Rows) -> Inputs:
        """The model's inputs for packed tokens, int64 [T]. Raises ImageError unless placeholders and images agree."""

    @abstractmethod
    def vllm_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """vLLM's arguments for the model, next to `options`."""


MODALITIES: Registry[type[Modality]] = Registry(
    "model_type", "MODALITIES", "agentrl.render.modality", traits={"tiny": "builds the model of model.init.vision"}
)


def modality_of(config: Any) -> type[Modality] | None:
    """The modality of a model by its transformers config; None for a model of text."""
    kind: str = getattr(config, "model_type", "")
    return MODALITIES.entry(kind).make if kind in MODALITIES else None


def config_modality(model: ModelConfig, found: Any) -> type[Modality] | None:
    """The modality of a config's model, which may not be built yet. `found`: its transformers config, or None."""
    if model.init is not None:
        return tiny_modality() if model.init.vision else None
    return modality_of(found)


def tiny_modality() -> type[Modality]:
    """The modality of `model.init.vision`. Raises ConfigError without one."""
    for entry in MODALITIES.own():
        if "tiny" in entry.traits:
            return entry.make
    raise ConfigError("model.init.vision = true: agentrl.contrib.vision is missing. Install it, or set the key to false")


def make_modality(path: str, config: Any) -> Modality | None:
    """A model's own; None for a model of text. Raises ModelError if files of its folder cannot be read."""
    kind = modality_of(config)
    return None if kind is None else kind(path, config)


def modality_in(path: str, trust: bool) -> Modality | None:
    """That of a model folder; None also if its config cannot be read, since whoever loads the model says why."""
    from transformers import AutoConfig

    try:
        return make_modality(path, AutoConfig.from_pretrained(path, trust_remote_code=trust))
    except (OSError, ValueError, KeyError):
        return None


def auto_class(config: Any) -> Any:
    """transformers' auto class for a model that is trained as a language model."""
    import transformers

    kind = modality_of(config)
    return transformers.AutoModelForCausalLM if kind is None else getattr(transformers, kind.auto_class)

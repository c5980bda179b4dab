"""Load tokenizers and causal language models from a folder or a hub name, with clear errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agentrl.config.schema import InitModelConfig, ModelConfig
from agentrl.errors import ModelError, hinted
from agentrl.train.init_model import architecture


def named_anywhere(model: str) -> str:
    """A model as processes with other working directories can name it: a folder by its absolute path, a hub's as it is."""
    return str(Path(model).absolute()) if Path(model).is_dir() else model


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a model. Raises ModelError if there is none."""
    from transformers import AutoTokenizer

    check_path(path)
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: no tokenizer can be loaded from it: {_brief(error)}") from error


def load_model_config(path: str) -> Any:
    """The transformers config of a model. Raises ModelError if there is none."""
    from transformers import AutoConfig

    check_path(path)
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: no model config can be loaded from it: {_brief(error)}") from error


def empty_causal_lm(path: str, **options: Any) -> Any:
    """A causal language model of float32 tensors on the meta device, which `train.loading.Loader` fills.

    Float32 whatever the computing type: these are the master weights. A step at a learning rate of 1e-6 is far below what
    bfloat16 resolves (2^-8 of the weight) and would be rounded away.

    Raises ModelError if there is none, or if it is of another kind.
    """
    import torch
    from transformers import AutoModelForCausalLM

    options["dtype"] = torch.float32
    return _empty(AutoModelForCausalLM, path, load_model_config(path), "no causal language model can be loaded", options)


def empty_classifier(path: str, **options: Any) -> Any:
    """The same for a sequence classifier (a reward model). Raises ModelError if there is none, or if the model has no trained
    classification head."""
    import torch
    from transformers import AutoModelForSequenceClassification

    config = load_model_config(path)
    kinds = config.architectures or []
    if not any("SequenceClassification" in kind for kind in kinds):
        raise ModelError(f"{path}: expected a sequence classifier, found {', '.join(kinds) or 'no architecture'}")
    options["dtype"] = torch.float32
    return _empty(AutoModelForSequenceClassification, path, config, "the sequence classifier cannot be loaded", options)


def _empty(kind: Any, path: str | None, config: Any, problem: str, options: dict[str, Any]) -> Any:
    import torch

    try:
        with torch.device("meta"):
            return kind.from_config(config, **options)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: {problem}: {_brief(error)}") from error


def model_context(path: str) -> int:
    """The longest sequence, in tokens, that a model supports. Raises ModelError if its config does not say."""
    context = getattr(load_model_config(path), "max_position_embeddings", None)
    if not isinstance(context, int) or context < 1:
        raise ModelError(f"{path}: its config.json has no max_position_embeddings")
    return context


def head_dim(path: str) -> int | None:
    """The dimension of an attention head; None if the model's config does not say. Raises ModelError."""
    text = load_model_config(path).get_text_config()
    heads, hidden = getattr(text, "num_attention_heads", None), getattr(text, "hidden_size", None)
    size = getattr(text, "head_dim", None) or (hidden // heads if heads and hidden else None)
    return size if isinstance(size, int) else None


def count_parameters(path: str) -> int:
    """Number of parameters of a causal language model, from its config alone (tied ones count once). Raises ModelError."""
    return sum(parameter.numel() for parameter in meta_model(ModelConfig(path=path)).parameters())


def meta_model(cfg: ModelConfig, *, classifier: bool = False, **options: Any) -> Any:
    """The model of `path` or `init` without weights, on the meta device: a causal language model, or a `classifier` with one
    label. Raises ModelError, ConfigError."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    config = load_model_config(cfg.path) if cfg.path is not None else architecture(cfg.init or InitModelConfig())
    if classifier:
        config.num_labels = 1
    kind = AutoModelForSequenceClassification if classifier else AutoModelForCausalLM
    return _empty(kind, cfg.path, config, f"not {'a classifier' if classifier else 'a causal language model'}", options)


def check_path(path: str) -> None:
    """Raise ModelError if `path` looks like a folder but does not exist, or is a folder without a model."""
    folder = Path(path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"{path}: the folder has no config.json, so it is not a model folder")
        try:
            json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except ValueError as error:
            raise ModelError(f"{folder / 'config.json'}: not valid JSON: {error}") from error
        return
    if folder.exists():
        raise ModelError(f"{path}: expected a model folder, found a file")
    if path.startswith((".", "/", "~")) or path.count("/") > 1 or (folder.parent.is_dir() and "/" in path):
        siblings = [entry.name for entry in folder.parent.iterdir()] if folder.parent.is_dir() else []
        hint = hinted(folder.name, siblings, show=lambda name: str(folder.parent / name))
        raise ModelError(f"{path}: no such model folder{hint}")


def _brief(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__

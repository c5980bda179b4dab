"""A GGUF file as a Hugging Face model folder: weights without quantization, so that they can be trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from agentrl.errors import DependencyError, ModelError
from agentrl.files import full_disk_said
from agentrl.render.chat_templates import set_chat_template
from agentrl.train.export import made_or_removed
from agentrl.vision import auto_class


def convert_gguf(
    file: str | Path, folder: Path, dtype: Literal["float32", "bfloat16"] = "float32", chat_template: str | None = None
) -> Any:
    """Write the model of a GGUF file to `folder`, as transformers reads it: config, weights in `dtype`, tokenizer, generation
    config; returns the tokenizer. `chat_template`: `model.chat_template`.

    Raises DependencyError without the package gguf, ModelError for a file that is damaged, cut off or of an unknown architecture,
    ConfigError for a chat template that does not fit.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = Path(file)
    _check_magic(file)
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**where)
        read, found = AutoModelForCausalLM.from_pretrained(**where, dtype=getattr(torch, dtype), output_loading_info=True)
    except Exception as problem:  # of a file that ends too early: errors of struct and numpy, which are no kind of their own
        raise ModelError(f"{file}: no model can be read from it ({problem}). Fetch it again, or take another file.") from problem
    if chat_template is not None:
        set_chat_template(tokenizer, chat_template)
    if missing := sorted(found["missing_keys"]) or sorted(found["mismatched_keys"]):
        raise ModelError(f"{file}: it lacks weights of its architecture: {', '.join(map(str, missing[:3]))}. Take another file.")
    with full_disk_said(folder, "repeat the command"), made_or_removed(folder):
        _unquantized(read).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return tokenizer


def _check_magic(file: Path) -> None:
    try:
        from gguf import GGUF_MAGIC
    except ModuleNotFoundError:
        raise DependencyError("a GGUF file is read with the package gguf: pip install 'agentrl[gguf]'") from None
    try:
        with file.open("rb") as opened:
            magic = opened.read(4)
    except OSError as problem:
        raise ModelError(f"{file}: the GGUF file cannot be read: {problem.strerror}") from problem
    if int.from_bytes(magic, "little") != GGUF_MAGIC:
        raise ModelError(f"{file}: not a GGUF file (it begins with {magic!r}). Give one that ends with .gguf.")


def _unquantized(read: Any) -> Any:
    """The same weights in a model that does not know that they were quantized: the saved config must not say so."""
    import torch

    config = read.config
    del config.quantization_config
    with torch.device("meta"):
        model = auto_class(config).from_config(config, dtype=read.dtype)
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    return model

"""Writing a model folder that plain transformers loads, from full tensors that come one at a time."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentrl.train.pretrained import load_tokenizer
from agentrl.train.weight_files import local_file
from agentrl.train.weight_writer import MAX_FILE_BYTES, WeightWriter
from agentrl.vision import Vision, auto_class, takes_images
from agentrl.weights.conversions import Saving


def save_model(
    source: str,
    config: Any,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    folder: Path,
    max_bytes: int = MAX_FILE_BYTES,
    trust: bool = False,
    classifier: bool = False,
    chat_template: str | None = None,
) -> None:
    """Write config, weights (files of at most `max_bytes`) and the tokenizer of `source` to `folder`, as transformers does; the
    tokenizer with `chat_template` (`model.chat_template`), if one is given.

    `tensors`: every weight of the causal language model (or of the sequence `classifier`), by the name that its module has, in
    any order; floating-point ones are written in `dtype`. Each is written as soon as all that its part of the checkpoint needs
    have come (fused experts are written one by one), and then let go. `trust`: code of the model's own may run; it is written
    beside the weights. Raises ModelError if one is missing or unknown.
    """
    from transformers.dynamic_module_utils import custom_object_save
    from transformers.utils import GENERATION_CONFIG_NAME

    shell = empty_like(config, dtype, classifier)
    saving = Saving(shell)
    folder.mkdir(parents=True, exist_ok=True)
    with WeightWriter(folder, saving.expected, max_bytes) as writer:
        for name, tensor in saving.tensors(_on_host(tensors, saving)):
            writer.write(name, tensor)
    shell.config.dtype = str(dtype).removeprefix("torch.")
    shell.config.architectures = [type(shell).__name__]
    if shell._auto_class is not None:
        custom_object_save(shell, folder, config=shell.config)
    shell.config.save_pretrained(folder)
    if shell.can_generate():
        # As it came: transformers would write one with the end token of the config alone, and no sampling defaults.
        if (given := local_file(source, GENERATION_CONFIG_NAME)) is not None:
            shutil.copyfile(given, folder / GENERATION_CONFIG_NAME)
        else:
            shell.generation_config.save_pretrained(folder)
    load_tokenizer(source, trust, chat_template).save_pretrained(folder)
    if takes_images(config):
        Vision(source, config).save(folder)


def empty_like(config: Any, dtype: torch.dtype, classifier: bool = False) -> Any:
    """A causal language model, or a sequence classifier, of that config on the meta device."""
    from transformers import AutoModelForSequenceClassification

    kind: Any = AutoModelForSequenceClassification if classifier else auto_class(config)
    with torch.device("meta"):
        # A copy, because from_config writes its attention implementation into the config that it is given.
        own_code = hasattr(config, "auto_map")  # `load_model_config` leaves it to those that are trusted
        return kind.from_config(copy.deepcopy(config), dtype=dtype, attn_implementation="eager", trust_remote_code=own_code)


def _on_host(tensors: Iterable[tuple[str, Tensor]], saving: Saving) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        like = saving.held.get(name, tensor)  # a router's bias is float32 in a bfloat16 model
        yield name, tensor.to("cpu", like.dtype)

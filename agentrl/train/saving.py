"""Writing a model folder that plain transformers loads, from full tensors that come one at a time."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentrl.errors import ModelError
from agentrl.train.conversions import Conversion, saving_conversions
from agentrl.train.pretrained import load_tokenizer
from agentrl.train.weight_writer import MAX_FILE_BYTES, WeightWriter


def save_model(
    source: str,
    config: Any,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    folder: Path,
    max_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write config, weights (files of at most `max_bytes`) and the tokenizer of `source` to `folder`, as transformers does.

    `tensors`: every weight of the causal language model, by the name that its module has, in any order; floating-point ones
    are written in `dtype`. Each is written as soon as all that its part of the checkpoint needs have come (fused experts are
    written one by one), and then let go. Raises ModelError if one is missing or unknown.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        # A copy, because from_config writes its attention implementation into the config that it is given.
        shell = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype, attn_implementation="sdpa")
    # A tied tensor is written once, under the name that the others are tied to.
    held = {name: tensor for name, tensor in shell.state_dict().items() if name not in shell.all_tied_weights_keys}
    conversions = saving_conversions(shell, held)
    expected: dict[str, Tensor] = {}
    for conversion in conversions:
        expected.update(conversion.make(held.__getitem__, shell))
    folder.mkdir(parents=True, exist_ok=True)
    with WeightWriter(folder, expected, max_bytes) as writer:
        for name, tensor in _made(shell, conversions, held, tensors):
            writer.write(name, tensor)
    shell.config.dtype = str(dtype).removeprefix("torch.")
    shell.config.architectures = [type(shell).__name__]
    shell.config.save_pretrained(folder)
    if shell.can_generate():
        shell.generation_config.save_pretrained(folder)
    load_tokenizer(source).save_pretrained(folder)


def _made(
    shell: Any, conversions: list[Conversion], held: dict[str, Tensor], tensors: Iterable[tuple[str, Tensor]]
) -> Iterable[tuple[str, Tensor]]:
    """What the conversions make of the tensors, each as soon as its last source has come."""
    of = {name: conversion for conversion in conversions for name in conversion.names()}
    waiting: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if name not in of:
            raise ModelError(f"export: no place for weights named {name}")
        # A copy if a conversion waits for more, because the next tensor may come in the same memory.
        alone = len(of[name].names()) == 1
        waiting[name] = tensor.to("cpu", held[name].dtype, copy=not alone)
        if all(source in waiting for source in of[name].names()):
            # `pop`, so that nothing is held after its conversion.
            yield from of[name].make(waiting.pop, shell).items()

"""Part `step`: one optimizer step over 16,384 packed tokens, its split, and the effect of each option. Part `attention`: both
implementations of packed attention at several row lengths."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from gpu_common import (
    SHAPES,
    Shape,
    clear,
    micro_of,
    model_folder,
    one_rank,
    peak_flops,
    peak_gb,
    rounded,
    rows_of,
    seconds,
    trainer,
)

from agentrl.engines.exact_attention import AttentionForm
from agentrl.trainer import attention
from agentrl.trainer.fsdp import FsdpEngine
from agentrl.trainer.language_model import PLAIN, HeadKernels, HeadRule, Micro
from agentrl.trainer.layers import compiled_head
from agentrl.utils.errors import AgentrlError

BLOCKS = "without varlen"
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointing": {"activation_checkpointing": True},
    "compile": {"compile": True},
    "compile+checkpointing": {"compile": True, "activation_checkpointing": True},
    "float32+checkpointing": {"dtype": "float32", "activation_checkpointing": True},
    BLOCKS: {},
}


def forward_backward(engine: FsdpEngine, micro: Micro) -> None:
    logprobs, entropy = engine.logprobs(micro, 1.0, True)
    engine.backward(-(logprobs.sum() + 0.01 * entropy.sum()) / len(logprobs), last=True)


def step(device: torch.device, folder: Path, shape_name: str, quick: bool) -> dict[str, Any]:
    """Measure milliseconds, MFU and peak memory of a step per option; without options, also its split."""
    shape = SHAPES["tiny" if quick else shape_name]
    lengths = rows_of(256 if quick else 16_384, 64 if quick else 1024)
    limit = peak_flops(device, quick)
    found: dict[str, Any] = {
        "shape": shape.name,
        "tokens": sum(lengths),
        "row": lengths[0],
        "limit_tflops": rounded(limit / 1e12),
    }
    path = model_folder(shape, folder)
    with one_rank(device):
        for name in OPTIONS:
            if quick and "compile" in name:
                continue  # inductor takes minutes on a CPU
            clear(device)
            try:
                with patch.object(attention, "varlen_takes", _no_varlen) if name == BLOCKS else nullcontext():
                    found |= _option(name, path, shape, lengths, device, limit)
            except (AgentrlError, RuntimeError, ImportError) as problem:  # out of memory, or no compiler
                found[name] = {"error": f"{type(problem).__name__}: {problem}"[:200]}
    return found


def _no_varlen(width: int) -> bool:
    return False


def _option(name: str, path: str, shape: Shape, lengths: list[int], device: torch.device, limit: float) -> dict[str, Any]:
    """Measure a step with one option. A separate function, so that its model is freed before the next, also after an error."""
    engine = trainer(path, device, **OPTIONS[name])
    took = _measure_step(engine, shape, lengths, device, limit)
    if name == "plain":
        return {name: took, "split_ms": _split(engine, shape, lengths, device, took["ms"])}
    if name == "compile":
        kernels, predicted = compiled_head(), sum(n - n // 2 for n in lengths)
        took["head_ms"] = rounded(1e3 * seconds(lambda: _head(shape, predicted, device, kernels), device))
    return {name: took}


def _measure_step(engine: FsdpEngine, shape: Shape, lengths: list[int], device: torch.device, limit: float) -> dict[str, Any]:
    micro = micro_of(lengths, shape.vocab, device)

    def whole() -> None:
        forward_backward(engine, micro)
        engine.step()

    took = seconds(whole, device)
    counted = engine.flops()
    assert counted is not None
    flops = counted.of(lengths, len(micro.targets))
    return {"ms": rounded(took * 1e3), "mfu": rounded(flops / took / limit), "peak_gb": peak_gb(device)}


def _split(engine: FsdpEngine, shape: Shape, lengths: list[int], device: torch.device, whole: float) -> dict[str, float]:
    """Measure attention and head alone, forward and backward, on tensors of the step's shapes; the optimizer; the rest."""
    micro = micro_of(lengths, shape.vocab, device)
    heads = seconds(lambda: _head(shape, len(micro.targets), device), device)
    attended = shape.layers * _attention_seconds(shape, lengths, device, "auto")
    forward_backward(engine, micro)
    assert engine.optimizers is not None
    kept = [p.grad for _, p in engine.named_weights()]

    def stepped() -> None:
        for (_, parameter), grad in zip(engine.named_weights(), kept, strict=True):
            parameter.grad = grad
        engine.step()

    optimizer = seconds(stepped, device)
    parts = {"attention": attended * 1e3, "head": heads * 1e3, "optimizer": optimizer * 1e3}
    return {name: rounded(value) for name, value in {**parts, "rest": whole - sum(parts.values())}.items()}


def _head(shape: Shape, predicted: int, device: torch.device, kernels: HeadKernels = PLAIN) -> None:
    hidden = torch.randn(predicted, shape.hidden, dtype=torch.bfloat16, device=device, requires_grad=True)
    weight = torch.randn(shape.vocab, shape.hidden, dtype=torch.bfloat16, device=device, requires_grad=True)
    targets = torch.zeros(predicted, dtype=torch.int64, device=device)
    head: Any = SimpleNamespace(weight=weight, bias=None)
    logprobs, _ = HeadRule().logprobs(hidden, head, targets, kernels=kernels)
    torch.autograd.backward(logprobs.sum())


def _varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: attention.PackedSequences, form: Any) -> torch.Tensor:
    return attention.varlen_attention(q, k, v, packed.cu_seqlens, packed.longest, form)


def _attention_seconds(shape: Shape, lengths: list[int], device: torch.device, way: str) -> float:
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    # `shares` makes `_attention` use blocks, since varlen does not support shared prefixes.
    packed = replace(attention.packed_rows(offsets, device), shares=way == "blocks")
    function = _varlen if way == "varlen" else attention._attention

    def tensor(heads: int) -> torch.Tensor:
        size = (sum(lengths), heads, shape.head_dim)
        return torch.randn(size, dtype=torch.bfloat16, device=device, requires_grad=True)

    q, k, v = tensor(shape.heads), tensor(shape.kv_heads), tensor(shape.kv_heads)
    form = AttentionForm(shape.head_dim**-0.5)

    def run() -> None:
        torch.autograd.backward(function(q, k, v, packed, form).sum())
        q.grad = k.grad = v.grad = None

    return seconds(run, device)


def attention_ways(device: torch.device, quick: bool) -> dict[str, Any]:
    """Measure milliseconds of one layer's packed attention, forward and backward, by row length and implementation."""
    shape = SHAPES["tiny" if quick else "0.6B"]
    found: dict[str, Any] = {"shape": shape.name}
    for length in (16, 64) if quick else (128, 1024, 8192):
        lengths = rows_of(128 if quick else 16_384, length)
        ways = ["blocks", *(["varlen"] if device.type == "cuda" else [])]
        took = {way: rounded(1e3 * _attention_seconds(shape, lengths, device, way)) for way in ways}
        found[f"rows of {length}"] = {**took, "quickest": min(took, key=took.__getitem__)}
    return found

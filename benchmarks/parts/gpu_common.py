"""Common functions of benchmarks/gpu.py: model folders of real shapes with random weights, timing, packed rows."""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from agentrl.cluster.machine import join_group
from agentrl.config.schema import ModelConfig, OptimConfig
from agentrl.trainer.attention import packed_rows
from agentrl.trainer.fsdp import FsdpEngine
from agentrl.trainer.language_model import Micro

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Shape:
    """Qwen3 architecture of a published model, possibly with fewer `layers`."""

    name: str
    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


SHAPES = {
    "tiny": Shape("tiny", 64, 128, 2, 4, 2, 32, 512),
    "0.6B": Shape("Qwen3-0.6B", 1024, 3072, 28, 16, 8, 128, 151_936),
    "4B": Shape("8 of the 36 layers of Qwen3-4B", 2560, 9728, 8, 32, 8, 128, 151_936),
}


def model_folder(shape: Shape, parent: Path) -> str:
    """Write a folder with that model, random weights in bfloat16, and no tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = parent / shape.name.replace(" ", "-")
    if folder.is_dir():
        return str(folder)
    config = Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


@contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """Create a process group of only this process, which mixed precision needs."""
    join_group(None, 0, 1, None if device.type == "cuda" else "gloo", 60.0)
    try:
        yield
    finally:
        dist.destroy_process_group()


def trainer(folder: str, device: torch.device, **model: Any) -> FsdpEngine:
    """Return a training engine with optimizer, by default bfloat16 with float32 master weights. Needs a process group."""
    engine = FsdpEngine(folder, ModelConfig(**{"dtype": "bfloat16", **model}), 1.0, device=device)
    engine.use_optimizer(OptimConfig(lr=1e-6))
    return engine


def rows_of(total: int, length: int) -> list[int]:
    """Return equal row lengths with `total` tokens in all."""
    return [min(length, total)] * max(1, total // length)


def micro_of(lengths: list[int], vocab: int, device: torch.device, seed: int = 0) -> Micro:
    """Make a micro-batch of random tokens; the second half of each row is trained."""
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab, (int(offsets[-1]),), generator=generator)
    at = torch.cat([torch.arange(start + n // 2, start + n) for start, n in zip(offsets[:-1].tolist(), lengths, strict=True)])
    positions = torch.cat([torch.arange(n) for n in lengths])
    return Micro(
        ids.to(device),
        positions.to(device),
        packed_rows(offsets, device),
        (at - 1).to(device),
        ids[at].to(device),
        (offsets[1:] - 1).to(device),
    )


def wait(device: torch.device) -> None:
    """Synchronize with the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(call: Callable[[], Any], device: torch.device, repeats: int = 5, warmups: int = 2) -> float:
    """Return the median seconds of a call with its device work, after warm-up calls."""
    for _ in range(warmups):
        call()
    found = []
    for _ in range(repeats):
        wait(device)
        began = time.perf_counter()
        call()
        wait(device)
        found.append(time.perf_counter() - began)
    return sorted(found)[len(found) // 2]


def clear(device: torch.device) -> None:
    """Free unused memory, and reset the peak."""
    # A sharded model is in reference cycles, which keep its weights and moments until garbage collection.
    gc.collect()
    if "torch._dynamo" in sys.modules:  # compiled layers of the next model have as many recompilations as those of the first
        torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_gb(device: torch.device) -> float | None:
    """Return the peak device memory of tensors since `clear`, in 10^9 bytes; None on a CPU."""
    return round(torch.cuda.max_memory_allocated(device) / 1e9, 3) if device.type == "cuda" else None


def peak_flops(device: torch.device, quick: bool) -> float:
    """Measure operations per second of one large bfloat16 product, the reference of MFU in this run."""
    n = 512 if quick else 8192
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=device) for _ in range(2))
    return 2 * n**3 / seconds(lambda: a @ b, device)


def copy_gb_s(device: torch.device, quick: bool) -> float:
    """Measure 10^9 bytes per second of a plain copy on the device (read and written bytes counted once)."""
    size = (1 << 20) if quick else (1 << 30)
    a = torch.empty(size, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    return size / seconds(lambda: b.copy_(a), device) / 1e9


def rounded(value: float, digits: int = 4) -> float:
    """Round to that number of significant digits."""
    return value if value == 0 or not math.isfinite(value) else round(value, digits - 1 - math.floor(math.log10(abs(value))))

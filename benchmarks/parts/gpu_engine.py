"""Part `engine`: tokens per second of the embedded engine, and what its sleep frees. Part `checkpoint`: bytes per second of
saving and loading the trainer's state."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gpu_common import GIB, SHAPES, model_folder, one_rank, rounded, seconds, trainer, wait

from agentrl.backends.embedded.engine import EmbeddedEngine
from agentrl.rollout.engine import Sampling
from agentrl.train.state import BackgroundSave, load_state, save_state


def engine(device: torch.device, folder: Path, quick: bool) -> dict[str, Any]:
    """Sampled tokens per second at 1, 64 and 256 requests at once, 128 prompt and 128 sampled tokens each."""
    shape = SHAPES["tiny" if quick else "0.6B"]
    return asyncio.run(_engine(model_folder(shape, folder), shape.name, shape.vocab, device, quick))


async def _engine(path: str, name: str, vocab: int, device: torch.device, quick: bool) -> dict[str, Any]:
    prompt, length = (16, 16) if quick else (128, 128)
    found: dict[str, Any] = {"shape": name, "prompt": prompt, "sampled": length}
    model = EmbeddedEngine(path, dtype="bfloat16", max_context=prompt + length, kv_cache_mib=16_384, device=str(device))
    await model.start()
    try:
        for count in (1, 8) if quick else (1, 64, 256):
            for counted in (False, True):  # the first time loads kernels
                began = time.perf_counter()
                requests = [
                    model.generate([(i * 7 + j) % vocab for j in range(prompt)], Sampling(length, seed=i), f"{counted}-{i}")
                    for i in range(count)
                ]
                done = await asyncio.gather(*requests)
                wait(device)
                took = time.perf_counter() - began
            found[f"tokens_per_s_{count}"] = rounded(sum(len(one.token_ids) for one in done) / took)
        found["sleep"] = await _sleep(model, device)
    finally:
        await model.close()
    return found


async def _sleep(model: EmbeddedEngine, device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"error": "only a GPU's memory can be told from the rest"}
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    await model.sleep()
    torch.cuda.empty_cache()
    after = torch.cuda.memory_allocated(device)
    return {"awake_gb": rounded(before / 1e9), "asleep_gb": rounded(after / 1e9), "freed": rounded(1 - after / max(before, 1))}


def checkpoint(device: torch.device, folder: Path, quick: bool) -> dict[str, Any]:
    """GB/s of a save, of the part of an asynchronous save that training waits for, and of a load; against a plain write."""
    shape = SHAPES["tiny" if quick else "0.6B"]
    with one_rank(device), tempfile.TemporaryDirectory(dir=folder) as scratch:
        model = trainer(model_folder(shape, folder), device)
        size = sum(tensor.nbytes for tensor in model.state().values())
        place, background = Path(scratch), BackgroundSave()
        for name in ("whole", "later"):
            (place / name).mkdir()
        saved = seconds(lambda: save_state(model, place / "whole", {}), device, repeats=2, warmups=0)
        began = time.perf_counter()
        background.begin(model, place / "later", {})
        waited = time.perf_counter() - began
        while not background.done():
            time.sleep(0.05)
        loaded = seconds(lambda: load_state(model, place / "whole"), device, repeats=2, warmups=0)
        plain = _plain_write(place / "bytes", min(size, GIB))
    rates = {"save": saved, "asynchronous_wait": waited, "load": loaded}
    found = {f"{name}_gb_s": rounded(size / took / 1e9) for name, took in rates.items()}
    return {"shape": shape.name, "gb": rounded(size / 1e9), **found, "plain_write_gb_s": rounded(plain)}


def _plain_write(path: Path, size: int) -> float:
    import os

    data = os.urandom(1 << 20) * (size >> 20 or 1)
    began = time.perf_counter()
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return len(data) / (time.perf_counter() - began) / 1e9

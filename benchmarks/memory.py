"""Print the memory table of docs/hyperparameters.md: GiB per card for the actor, by model size and cards, as in `--dry-run`.

    python benchmarks/memory.py [--tokens 16384]

Nothing is downloaded or computed: the architectures are listed here, and counted on torch's meta device.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentrl.config.schema import LoraSection, ModelConfig, OptimConfig
from agentrl.trainer.memory import RoleMemory, count, numel, shell

GIB = 1 << 30
CARDS = (1, 2, 4, 8, 16, 64)
# hidden, layers, MLP, heads, key heads, tied embeddings
QWEN3 = {
    "Qwen3-0.6B": (1024, 28, 3072, 16, 8, True),
    "Qwen3-1.7B": (2048, 28, 6144, 16, 8, True),
    "Qwen3-4B": (2560, 36, 9728, 32, 8, True),
    "Qwen3-8B": (4096, 36, 12288, 32, 8, False),
    "Qwen3-14B": (5120, 40, 17408, 40, 8, False),
    "Qwen3-32B": (5120, 64, 25600, 64, 8, False),
}
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}


def architectures() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, (hidden, layers, mlp, heads, keys, tied) in QWEN3.items():
        yield name, architecture("qwen3", "Qwen3ForCausalLM", hidden, layers, mlp, heads, keys, tied)
    yield "Qwen3-30B-A3B", architecture("qwen3_moe", "Qwen3MoeForCausalLM", 2048, 48, 6144, 32, 4, False) | EXPERTS


def architecture(kind: str, name: str, hidden: int, layers: int, mlp: int, heads: int, keys: int, tied: bool) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": mlp, "num_attention_heads": heads}
    more = {"num_key_value_heads": keys, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": tied}
    return {"model_type": kind, "architectures": [name], "max_position_embeddings": 40_960, **sizes, **more}


def count_memory(folder: Path, ranks: int, tokens: int, **keys: Any) -> RoleMemory:
    cfg = ModelConfig(path=str(folder), dtype="bfloat16", **keys)
    return count(shell(cfg), cfg, ranks, tokens, [OptimConfig()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16_384, help="tokens per micro-batch")
    tokens = parser.parse_args().tokens
    print("| model | parameters |", " | ".join(f"{n} card{'s' * (n > 1)}" for n in CARDS), "| LoRA, 1 card |")
    print("|---" * (len(CARDS) + 3) + "|")
    for name, table in architectures():
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            (folder / "config.json").write_text(json.dumps(table))
            size = numel(shell(ModelConfig(path=place)).parameters())
            found = [count_memory(folder, ranks, tokens) for ranks in CARDS]
            found.append(count_memory(folder, 1, tokens, lora=LoraSection()))
        print(f"| {name} | {size / 1e9:.1f}B |", " | ".join(f"{(one.resident + one.turn) / GIB:,.0f}" for one in found), "|")


if __name__ == "__main__":
    main()

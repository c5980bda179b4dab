"""Shapes of the published models that the packaged configs name: a plan of a run on them needs no download."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

_COMMON = {"vocab_size": 151_936, "head_dim": 128, "rms_norm_eps": 1e-6}
_QWEN3 = {**_COMMON, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 8}
_NAMES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "max_position_embeddings",
          "rope_theta", "tie_word_embeddings")  # fmt: skip
_DENSE = {
    "Qwen/Qwen3-0.6B": (28, 1024, 16, 3072, 40_960, 1e6, True),
    "Qwen/Qwen3-1.7B": (28, 2048, 16, 6144, 40_960, 1e6, True),
    "Qwen/Qwen3-4B-Instruct-2507": (36, 2560, 32, 9728, 262_144, 5e6, True),
    "Qwen/Qwen3-8B": (36, 4096, 32, 12_288, 40_960, 1e6, False),
}
_SPARSE = dict(zip(_NAMES, (48, 2048, 32, 6144, 262_144, 1e7, False), strict=True)) | {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_key_value_heads": 4, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    **{name: {**_QWEN3, **dict(zip(_NAMES, sizes, strict=True))} for name, sizes in _DENSE.items()},
    "Qwen/Qwen3-30B-A3B-Instruct-2507": {**_COMMON, **_SPARSE},
}
"""By hub name, what matters for a plan of each config.json, as the model cards have it."""


@contextmanager
def shape_folder(model: str | None) -> Iterator[str | None]:
    """A folder with the config.json of a model of `SHAPES` that is neither a folder nor in the hub's cache; else None."""
    from huggingface_hub import try_to_load_from_cache

    if (
        model is None
        or model not in SHAPES
        or Path(model).is_dir()
        or isinstance(try_to_load_from_cache(model, "config.json"), str)
    ):
        yield None
        return
    with TemporaryDirectory(prefix="agentrl-plan-") as place:
        folder = Path(place) / model
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(SHAPES[model]))
        yield str(folder)

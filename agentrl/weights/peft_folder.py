"""Low-rank adapters as a folder in peft's format."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file

from agentrl.weights.target import Adapter


def write_adapter(folder: Path, adapter: Adapter, base: str | None = None) -> None:
    """Write `folder` in peft's format, for what loads adapters from disk; `base`: the model that it changes, as a folder or a
    name on a hub."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in adapter.tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "task_type": "CAUSAL_LM",
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": list(adapter.modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))

"""Judges of tests: tiny models that say something else of another text."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from agentrl.config.schema import InitModelConfig
from agentrl.trainer.pretrained import init_model


def build(folder: Path, seed: int) -> Path:
    """A model that knows nothing, but says of another text something else: its weights are large."""
    init_model(InitModelConfig(layers=2, hidden=32, mlp=32, heads=2, kv_heads=1, head_dim=16, context=512), folder, seed=seed)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            weights.mul_(1.0 if "norm" in name else 12.0)
    model.save_pretrained(folder)
    return folder

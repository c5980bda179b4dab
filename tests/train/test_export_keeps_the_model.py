"""Writing a model down leaves the one that is being trained as it was."""

from __future__ import annotations

from pathlib import Path

from agentrl.config import ModelConfig
from agentrl.trainer.attention import PACKED
from agentrl.trainer.fsdp import FsdpEngine


def test_an_export_does_not_switch_the_attention_of_the_live_model(tiny: str, tmp_path: Path) -> None:
    engine = FsdpEngine(tiny, ModelConfig(), max_grad_norm=1.0)
    engine.export(tmp_path / "out")
    assert engine.module.hf.config._attn_implementation == PACKED

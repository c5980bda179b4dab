"""Weights leave the file that they are loaded from: products of one token round by where their operands begin. Writing them
leaves the live model as it was."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from agentrl.config import ModelConfig
from agentrl.trainer.attention import PACKED
from agentrl.trainer.fsdp import FsdpEngine


def test_no_digit_hangs_on_the_file_that_weights_come_from(tiny: str, tmp_path: Path) -> None:
    """The trainer of a resumed run reads another file than that of the unbroken one did. Here the second file's header is
    8 bytes longer, and with it every weight begins 8 bytes later."""
    state = torch.randn(1, 32, generator=torch.Generator().manual_seed(0))
    found = []
    for more in (0, 8):
        folder = Path(shutil.copytree(tiny, tmp_path / str(more)))
        file = folder / "model.safetensors"
        save_file(load_file(file), file, {"format": "pt", "more": "x" * (64 + more)})
        engine = FsdpEngine(str(folder), ModelConfig(), max_grad_norm=1.0)
        matrices = {name: p.detach() for name, p in engine.named() if p.shape[1:] == (32,)}
        found.append({name: (state @ matrix.t()).tolist() for name, matrix in matrices.items()})
        assert {p.data_ptr() % 64 for _, p in engine.named()} == {0}
    assert found[0] == found[1] and len(found[0]) > 8


def test_an_export_does_not_switch_the_attention_of_the_live_model(tiny: str, tmp_path: Path) -> None:
    engine = FsdpEngine(tiny, ModelConfig(), max_grad_norm=1.0)
    engine.export(tmp_path / "out")
    assert engine.module.hf.config._attn_implementation == PACKED

"""The benchmark of a card measures one model at a time."""

from __future__ import annotations

import sys
import weakref
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpus(1, timeout=540)
PARTS = Path(__file__).resolve().parents[2] / "benchmarks" / "parts"


def test_the_memory_of_one_option_is_free_before_the_next(device: torch.device, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(PARTS), *sys.path])
        from gpu_common import SHAPES, clear, micro_of, model_folder, one_rank, trainer
        from gpu_step import forward_backward
    with one_rank(device):
        engine = trainer(model_folder(SHAPES["tiny"], tmp_path), device)
        forward_backward(engine, micro_of([64, 64], 512, device))
        engine.step()
        left = [weakref.ref(parameter) for _, parameter in engine.named_weights()]
        assert engine.optimizers is not None
        left += [weakref.ref(tensor) for tensor in engine.optimizers.state().values()]
        del engine
        clear(device)
    assert len(left) > 60
    assert [found() for found in left if found() is not None] == []

"""A tiny model on disk and batches of made-up trajectories."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

from agentrl.config.schema import InitModelConfig
from agentrl.train.init_model import init_model

SMALL = InitModelConfig(layers=2, hidden=32, mlp=64, heads=4, kv_heads=2, head_dim=8, context=512)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a two-layer model."""
    folder: Path = tmp_path_factory.mktemp("models") / "tiny"
    return str(init_model(SMALL, folder, seed=0))

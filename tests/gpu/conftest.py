"""Tests of the GPU paths: skipped, with the reason, on a machine without CUDA.

AGENTRL_GPU_REHEARSAL=1 runs them on a CPU instead, as far as one can show anything: that shows that the tests run, and nothing
about GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from agentrl.cluster.machine import join_group
from agentrl.config.schema import InitModelConfig
from agentrl.trainer.pretrained import init_model

REHEARSAL = os.environ.get("AGENTRL_GPU_REHEARSAL") == "1"
HERE = Path(__file__).parent
SMALL = InitModelConfig(layers=4, hidden=256, mlp=512, heads=8, kv_heads=2, head_dim=64, context=2048)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if REHEARSAL or torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device (torch.cuda.is_available() is False)")
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(skip)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if REHEARSAL else "cuda")


@pytest.fixture
def card(device: torch.device) -> torch.device:
    """A device whose memory can be told from the rest."""
    if device.type != "cuda":
        pytest.skip("a rehearsal on a CPU cannot show this")
    return device


@pytest.fixture
def one_rank(device: torch.device) -> Iterator[None]:
    """A process group of this process alone, which mixed precision needs."""
    join_group(None, 0, 1, None if device.type == "cuda" else "gloo", 60.0)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of four layers with the head size of real ones."""
    return str(init_model(SMALL, tmp_path_factory.mktemp("models") / "small", seed=0))

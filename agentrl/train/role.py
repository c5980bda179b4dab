"""What the roles that hold an engine have in common."""

from __future__ import annotations

import os

import torch

from agentrl.cluster.worker import Worker
from agentrl.config.schema import ModelConfig
from agentrl.errors import ConfigError
from agentrl.train.fsdp import FsdpEngine, Role


def open_engine(
    worker: Worker,
    path: str,
    model: ModelConfig,
    max_grad_norm: float = 1.0,
    role: Role = "policy",
) -> FsdpEngine:
    """The engine of one rank. A single rank in float32 needs no process group and gets none.

    Raises ModelError for a model that cannot be loaded.
    """
    if not torch.cuda.is_available():
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
    if worker.world_size > 1 or model.dtype != "float32":
        worker.init_process_group()
    return FsdpEngine(path, model, max_grad_norm, role)


def ready(engine: FsdpEngine | None) -> FsdpEngine:
    """The engine; raises ConfigError where init_model was not called."""
    if engine is None:
        raise ConfigError("this worker has no model yet: call init_model first")
    return engine

"""What the roles that hold an engine have in common."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch

from agentrl.cluster.cards import own_device
from agentrl.cluster.dispatch import Broadcast, Strategy
from agentrl.cluster.worker import Worker, WorkerContext
from agentrl.config.schema import ModelConfig, OptimConfig
from agentrl.errors import ConfigError
from agentrl.processor import own_threads
from agentrl.train.engine import TRAIN_ENGINES, BaseEngine, compute_dtype
from agentrl.train.modules import Role
from agentrl.train.offload import free_cached
from agentrl.train.optim import rate
from agentrl.train.state import BackgroundSave, load_state, save_state


def open_engine(
    worker: Worker,
    path: str,
    model: ModelConfig,
    max_grad_norm: float = 1.0,
    role: Role = "policy",
) -> BaseEngine:
    """The engine of one rank. A single rank in float32 needs no process group and gets none.

    Raises ConfigError for an unknown `model.engine`, ModelError for a model that cannot be loaded, ResourceError if Ray gave this
    rank a GPU that torch does not find.
    """
    device = own_device()
    worker.threads = None if model.threads == "auto" else model.threads
    own_threads(worker.threads)
    entry = TRAIN_ENGINES.entry(model.engine)
    if worker.world_size > 1 or compute_dtype(model, device) != torch.float32 or "alone" not in entry.traits:
        worker.init_process_group()
    return entry.make(path, model, max_grad_norm, role, device)


class ModelRole(Worker):
    """One rank of a role that holds a model. All ranks run every method together.

    Between its turns a role can be offloaded; whatever it is asked for next brings its model back first.
    """

    dispatch_table: ClassVar[dict[str, Strategy]] = {"offload": Broadcast(), "onload": Broadcast(), "free_cached": Broadcast()}

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._engine: BaseEngine | None = None

    def offload(self) -> None:
        """Give the device's memory back until the next turn: parameters and optimizer state move to the host."""
        self._made().offload()

    def onload(self) -> None:
        """Take the memory again, before a turn rather than in it; idempotent."""
        self._made().onload()

    def free_cached(self) -> None:
        """Give the device what this process's allocator keeps of it without using it, for other processes."""
        free_cached()

    def _ready(self) -> BaseEngine:
        """The engine, on its device."""
        engine = self._made()
        engine.onload()
        return engine

    def _made(self) -> BaseEngine:
        """The engine, wherever its memory is."""
        if self._engine is None:
            raise ConfigError("this worker has no model yet: call init_model first")
        return self._engine


class SavedRole(ModelRole):
    """A role whose weights change in a run: it counts the updates that changed them, and can be saved."""

    dispatch_table: ClassVar[dict[str, Strategy]] = {
        "save": Broadcast(),
        "begin_save": Broadcast(),
        "saved": Broadcast(),
        "load": Broadcast(),
    }

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._saving = BackgroundSave()
        self._updates = 0

    def save(self, folder: str) -> None:
        """Write model, optimizer, schedule and RNG to `folder`."""
        save_state(self._made(), Path(folder), {"updates": self._updates})

    def begin_save(self, folder: str) -> None:
        """`save`, in the background: returns when the state is copied. See `saved`."""
        self._saving.begin(self._made(), Path(folder), {"updates": self._updates})

    def saved(self) -> bool:
        """Whether the save that `begin_save` started is complete; raises its error if it failed."""
        return self._saving.done()

    def load(self, folder: str) -> None:
        """Load what `save` wrote with any number of ranks. Raises CheckpointError."""
        self._updates = int(load_state(self._made(), Path(folder))["updates"])


class TrainedRole(SavedRole):
    """A role that learns: it follows a schedule by its training steps.

    `init_model` of the role sets `_optim` and `_total_steps` (the length of the run, for the schedule).
    """

    _optim: OptimConfig
    _total_steps: int | None

    @property
    def _lr(self) -> float:
        """The learning rate of which a schedule gives shares."""
        assert self._optim.lr is not None  # of train/rates.py
        return self._optim.lr

    def _set_rate(self) -> float:
        """Set the learning rate of the next training step; returns it as a fraction of the configured one."""
        factor = self._rate_at(self._updates)
        self._ready().set_rate(factor)
        return factor

    def _rate_at(self, step: int) -> float:
        return rate(step, self._optim.warmup, self._optim.schedule, self._total_steps)

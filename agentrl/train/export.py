"""Export a run's checkpoint as a Hugging Face model folder, in one process, whatever number of ranks wrote it."""

from __future__ import annotations

import json
from pathlib import Path

from agentrl.config.load import load_config
from agentrl.config.schema import TrainConfig
from agentrl.errors import CheckpointError, ModelError
from agentrl.train.checkpoint import MANIFEST, Checkpoints
from agentrl.train.fsdp import FsdpEngine
from agentrl.train.optim import adamw
from agentrl.train.state import load_state


def export_run(run: str | Path, out: str | Path, step: int | None = None, *, best: bool = False) -> int:
    """Write the checkpoint of `step` (by default the newest, with `best` the one with the best evaluation) of
    a run folder to `out`; returns its step.

    Raises CheckpointError if there is no such checkpoint, ModelError if `out` exists and is not an empty folder.
    """
    folder, target = Path(run), Path(out)
    if not (folder / "config.toml").is_file():
        raise CheckpointError(f"{folder}: not a run folder (it has no config.toml)")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ModelError(f"{target}: already exists; give a path that does not exist")
    checkpoints = Checkpoints(folder / "checkpoints", keep=1)
    if best:
        top = checkpoints.best()
        if top is None:
            raise CheckpointError(f"{folder}: no checkpoint was evaluated (eval.every is 0, or there was no evaluation yet)")
        step = top[0]
    chosen = checkpoints.newest() if step is None else checkpoints.at(step)
    if chosen is None:
        raise CheckpointError(f"{folder}: the run has no checkpoint yet")
    config = load_config(folder / "config.toml")
    local = config.model.model_copy(update={"dtype": "float32"})  # bfloat16 would need a process group
    engine = FsdpEngine(start_model(folder, config), local, config.optim.max_grad_norm)
    engine.optimizers = adamw(engine.named(), config.optim)
    load_state(engine, chosen / "actor")
    engine.export(target)
    manifest = json.loads((chosen / MANIFEST).read_text(encoding="utf-8"))
    return int(manifest["step"])


def start_model(folder: Path, config: TrainConfig) -> str:
    """The model that a run's training started from. Raises ModelError if it no longer exists."""
    for built in (folder / "warm_start", folder / "model"):
        if (built / "config.json").is_file():
            return str(built)
    if config.model.path is None:
        raise ModelError(f"{folder}: the model that the run started from no longer exists (no warm_start, no model)")
    return config.model.path

"""Save and load an engine's state with torch.distributed.checkpoint: any number of ranks may read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from agentrl.errors import CheckpointError
from agentrl.train.engine import BaseEngine

META = "meta.json"


def save_state(engine: BaseEngine, folder: Path, meta: dict[str, Any]) -> None:
    """Write model, optimizer, every rank's RNG and `meta` (JSON) into `folder`. All ranks call it."""
    folder.mkdir(parents=True, exist_ok=True)
    rank, alone = _place()
    save({"state": engine.state()}, checkpoint_id=folder, no_dist=alone)
    torch.save(_rng(), folder / f"rng_{rank}.pt")
    if rank == 0:
        (folder / META).write_text(json.dumps(meta), encoding="utf-8")
    if not alone:
        dist.barrier()


def load_state(engine: BaseEngine, folder: Path) -> dict[str, Any]:
    """Read what `save_state` wrote, in place, on any number of ranks; returns its `meta`.

    A rank that has no RNG state in the folder keeps its own. Raises CheckpointError where the folder is
    incomplete or holds another model.
    """
    rank, alone = _place()
    try:
        meta: dict[str, Any] = json.loads((folder / META).read_text(encoding="utf-8"))
        with torch.no_grad():
            load({"state": engine.state()}, checkpoint_id=folder, no_dist=alone)
    except (OSError, ValueError, KeyError, RuntimeError, CheckpointException) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise CheckpointError(f"{folder}: cannot be loaded into this model: {reason}") from error
    saved = folder / f"rng_{rank}.pt"
    if saved.is_file():
        _set_rng(torch.load(saved, weights_only=True))
    return meta


def _place() -> tuple[int, bool]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), False
    return 0, True


def _rng() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])

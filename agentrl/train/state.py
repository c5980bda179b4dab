"""Save and load an engine's state with torch.distributed.checkpoint: it can be loaded with any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from agentrl.errors import CheckpointError
from agentrl.plain_data import json_text, read_json
from agentrl.train.engine import BaseEngine
from agentrl.train.plain_metadata import PlainReader

META = "meta.json"
STATE = "state."  # torch joins the keys of nested dictionaries by dots


def save_state(engine: BaseEngine, folder: Path, meta: dict[str, Any]) -> None:
    """Write model, optimizer, every rank's RNG and `meta` (JSON) to `folder`. All ranks call it.

    Raises CheckpointError if a rank could not write.
    """
    _write_small(folder, meta)
    _, alone = _place()
    try:
        save({"state": engine.state()}, checkpoint_id=folder, no_dist=alone)
    except CheckpointException as error:
        raise _failed(folder, error) from error
    if not alone:
        # torch waits for its own files only; the random states of the other ranks must be there too when rank 0 seals the
        # folder.
        dist.barrier()


class BackgroundSave:
    """`save_state` while training continues: the state is copied to host memory, then written by a thread.

    One save at a time. The threads of all ranks communicate over a gloo group of their own: on the default
    group their collectives would mix with those of training and hang.
    """

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._writing: Future[Any] | None = None
        self._folder = Path()

    def begin(self, engine: BaseEngine, folder: Path, meta: dict[str, Any]) -> None:
        """Copy the state and start to write it; returns when the copy is complete. All ranks call it.

        Waits for an earlier save first. Raises CheckpointError if that one failed.
        """
        self._finish()
        _, alone = _place()
        if not alone and self._group is None:
            self._group = dist.new_group(backend="gloo")
        _write_small(folder, meta)
        copied = async_save({"state": engine.state()}, checkpoint_id=folder, process_group=self._group, no_dist=alone)
        assert isinstance(copied, Future)  # another type is returned only with a stager that copies in the background
        self._writing, self._folder = copied, folder

    def done(self) -> bool:
        """Whether no save is being written any more. On rank 0 that means that all ranks have written.

        Raises CheckpointError once if the save failed.
        """
        if self._writing is not None and not self._writing.done():
            return False
        self._finish()
        return True

    def _finish(self) -> None:
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        try:
            writing.result()
        except CheckpointException as error:
            raise _failed(self._folder, error) from error


def _failed(folder: Path, error: CheckpointException) -> CheckpointError:
    """An ordinary exception in place of torch's, which derives from BaseException and so escapes `except Exception`."""
    rank, (reason, _) = next(iter(error.failures.items()))
    return CheckpointError(f"{folder}: rank {rank} could not write its part: {type(reason).__name__}: {reason}")


def _write_small(folder: Path, meta: dict[str, Any]) -> None:
    """Every rank's RNG, and `meta` by rank 0."""
    rank, _ = _place()
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(_rng(), folder / f"rng_{rank}.pt")
    if rank == 0:
        (folder / META).write_text(json_text(meta), encoding="utf-8")


def load_state(engine: BaseEngine, folder: Path) -> dict[str, Any]:
    """Load what `save_state` wrote into the engine's tensors, on any number of ranks; returns its `meta`.

    A rank without an RNG state in the folder keeps its own. Nothing in the folder is run, whoever wrote it. Raises
    CheckpointError if the folder is incomplete or damaged, or holds another model.
    """
    rank, alone = _place()
    try:
        meta: dict[str, Any] = read_json((folder / META).read_text(encoding="utf-8"))
        with torch.no_grad():
            load({"state": engine.state()}, storage_reader=PlainReader(folder), no_dist=alone)
    except (OSError, ValueError, KeyError, RuntimeError, CheckpointException) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise CheckpointError(f"{folder}: cannot be loaded into this model: {reason}") from error
    saved = folder / f"rng_{rank}.pt"
    if saved.is_file():
        try:
            _set_rng(torch.load(saved, weights_only=True))
        except Exception as error:  # what a damaged or hostile pickle fails with has no common class
            raise CheckpointError(f"{saved}: not a random state: {type(error).__name__}") from error
    return meta


def saved_tensors(folder: Path) -> tuple[list[str], Callable[[str], Tensor]]:
    """The names of the tensors that `save_state` wrote, with any number of ranks, and a function that reads one of them in full.

    Raises CheckpointError if the folder is incomplete, at once or when a tensor is read.
    """
    reader = PlainReader(folder)
    try:
        found = {
            name.removeprefix(STATE): entry
            for name, entry in reader.read_metadata().state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: not a whole checkpoint: {error}") from error

    def read(name: str) -> Tensor:
        try:
            tensor = torch.empty(found[name].size, dtype=found[name].properties.dtype)
            load({STATE + name: tensor}, storage_reader=reader, no_dist=True)
        except (OSError, ValueError, KeyError, RuntimeError, CheckpointException) as error:
            raise CheckpointError(f"{folder}: {name} cannot be read: {error}") from error
        return tensor

    return list(found), read


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

"""Save and load training state by torch.distributed.checkpoint, for any number of ranks, without running pickles."""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from agentrl.trainer.train_engine import BaseEngine
from agentrl.utils.errors import CheckpointError
from agentrl.utils.parsing import json_text, read_json

# Safe reader for the index of torch's distributed checkpoints, which is a pickle.
#
# The author of a checkpoint folder also writes its manifest, so sums do not prove its origin. An ordinary unpickler calls
# functions that a pickle names. This one knows a closed list of names, and creates an inert record for each; torch's classes
# are built afterwards, from values with checked types.

MOST_BYTES = 1 << 30
"""Maximum bytes of the index; a model with 100,000 tensors on 1,000 ranks has less."""
_METADATA, _FILESYSTEM = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_CLASSES = {(_METADATA, name) for name in ("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata")} | {
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    (_FILESYSTEM, "_StorageInfo"),
    *(("pathlib", name) for name in ("PosixPath", "WindowsPath", "PurePosixPath")),
    ("pathlib._local", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("builtins", "getattr"),  # by which Python 3.11.2 pickles members of an enum; inert, as all of these
}


class PlainReader(FileSystemReader):
    """Torch's reader of a checkpoint folder, with a safe reader of the index.

    torch reads tensors with `weights_only`; other entries, which it would unpickle, are refused."""

    _index: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the index once. Raises ValueError if it is damaged, or has entries other than tensors of this folder."""
        if self._index is None:
            path = Path(self.path) / ".metadata"
            if path.stat().st_size > MOST_BYTES:
                raise ValueError(f"{path.name}: more than {MOST_BYTES} bytes")
            self._index = metadata_of(path.read_bytes())
        self._index.storage_meta = StorageMeta(load_id=self.load_id)
        return self._index


def metadata_of(content: bytes) -> Metadata:
    """Parse the index that torch pickled, without planner data, which only the writer uses. Raises ValueError."""
    try:
        row = _check_record(_Unpickler(io.BytesIO(content)).load(), "Metadata")
        tensors: dict[str, STORAGE_TYPES] = {
            _check_type(str, name): _tensor(name, entry)
            for name, entry in _check_type(dict, row.state.get("state_dict_metadata")).items()
        }
        stored = {}
        for key, entry in _check_type(dict, row.state.get("storage_data")).items():
            at = _check_record(key, "MetadataIndex")
            offset, index = at.state.get("offset"), at.state.get("index")
            offset, index = None if offset is None else _check_size(offset), None if index is None else _check_int(index)
            info = _check_record(entry, "_StorageInfo")
            path = _check_type(str, info.state.get("relative_path"))
            if not path or PurePath(path).name != path or path.startswith("."):
                raise ValueError(f"{path!r} is no file of this folder")
            if info.state.get("transform_descriptors"):
                raise ValueError(f"{path}: stored in another form (transforms)")
            place = _StorageInfo(path, _check_int(info.state.get("offset")), _check_int(info.state.get("length")))
            stored[MetadataIndex(_check_type(str, at.state.get("fqn")), offset, index)] = place
        version = row.state.get("version")
        return Metadata(tensors, storage_data=stored, version=version if isinstance(version, str) else None)
    except pickle.UnpicklingError as problem:
        raise ValueError(f".metadata: {problem}") from None
    except Exception as problem:  # a pickle can fail with any error
        raise ValueError(f".metadata is damaged: {type(problem).__name__}: {problem}") from None


class _Record:
    """Inert substitute for an instance of a class: its arguments and its state."""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Unpickler for listed names only; classes are created per pickle, so that attributes set by one do not persist."""

    def __init__(self, content: Any) -> None:
        super().__init__(content)
        self._made: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        key = (module, name)
        if key not in self._made:
            if key in _CLASSES:
                self._made[key] = type(name, (_Record,), {})
            elif module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
                self._made[key] = found
            else:
                raise pickle.UnpicklingError(
                    f"it names {module}.{name}, which no checkpoint of tensors has; no code of it was run"
                )
        return self._made[key]

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to something outside of itself")


def _tensor(name: str, made: Any) -> TensorStorageMetadata:
    row = _check_record(made, "TensorStorageMetadata")
    dtype = _check_record(row.state.get("properties"), "TensorProperties").state[0]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name}: no dtype")
    size, chunks = _check_size(row.state.get("size")), []
    for chunk in (_check_record(part, "ChunkStorageMetadata") for part in _check_type(list, row.state.get("chunks"))):
        offsets, sizes = _check_size(chunk.state.get("offsets")), _check_size(chunk.state.get("sizes"))
        if not len(offsets) == len(sizes) == len(size) or any(
            at + n > whole for at, n, whole in zip(offsets, sizes, size, strict=True)
        ):
            raise ValueError(f"{name}: a chunk is outside of the tensor")
        chunks.append(ChunkStorageMetadata(offsets, sizes))
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)


def _check_record(value: Any, name: str) -> _Record:
    if not isinstance(value, _Record) or type(value).__name__ != name:
        raise ValueError(f"expected {name}, found {type(value).__name__}")
    if not isinstance(value.state, dict if name != "TensorProperties" else tuple):
        raise ValueError(f"{name}: it has no fields")
    return value


def _check_type(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError(f"expected {kind.__name__}, found {type(value).__name__}")
    return value


def _check_int(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"expected a whole number, found {type(value).__name__}")
    return value


def _check_size(made: Any) -> torch.Size:
    if not isinstance(made, _Record) or type(made).__name__ != "Size" or len(made.args) != 1 or type(made.args[0]) is not tuple:
        raise ValueError(f"expected a size, found {type(made).__name__}")
    found = torch.Size([_check_int(n) for n in made.args[0]])
    if math.prod(found) >= 1 << 62:
        raise ValueError("a tensor of more elements than any machine has")
    return found


# Saving and loading

META = "meta.json"
STATE = "state."  # torch joins the keys of nested dictionaries by dots


def save_state(engine: BaseEngine, folder: Path, meta: dict[str, Any]) -> None:
    """Write model, optimizer, RNG states of all ranks and `meta` (JSON) to `folder`. All ranks call it.

    Raises CheckpointError if a rank could not write.
    """
    alone = _write_rng_and_meta(folder, meta)
    try:
        save({"state": engine.state()}, checkpoint_id=folder, no_dist=alone)
    except CheckpointException as error:
        raise _checkpoint_error(folder, error) from error
    if not alone:
        # torch only waits for its files; when rank 0 seals the folder, the RNG states of other ranks must be there too.
        dist.barrier()


class BackgroundSave:
    """Background form of `save_state`: the state is copied to host memory, then a thread writes it.

    One save at a time. The threads of all ranks use a separate gloo group: on the default group their collectives
    would mix with those of training and hang.
    """

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._writing: Future[Any] | None = None
        self._folder = Path()

    def begin(self, engine: BaseEngine, folder: Path, meta: dict[str, Any]) -> None:
        """Copy the state and start writing it; returns when the copy is complete. All ranks call it.

        Waits for an earlier save first. Raises CheckpointError if the earlier save failed.
        """
        self._finish()
        alone = _write_rng_and_meta(folder, meta)
        if not alone and self._group is None:
            self._group = dist.new_group(backend="gloo")
        copied = async_save({"state": engine.state()}, checkpoint_id=folder, process_group=self._group, no_dist=alone)
        assert isinstance(copied, Future)  # other types come only from stagers that copy in the background
        self._writing, self._folder = copied, folder

    def done(self) -> bool:
        """Return True if no save is in progress; on rank 0: of any rank. Raises CheckpointError once if the save failed."""
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
            raise _checkpoint_error(self._folder, error) from error


def _checkpoint_error(folder: Path, error: CheckpointException) -> CheckpointError:
    """Convert torch's exception, a BaseException that `except Exception` misses, to a CheckpointError."""
    rank, (reason, _) = next(iter(error.failures.items()))
    return CheckpointError(f"{folder}: rank {rank} could not write its part: {type(reason).__name__}: {reason}")


def _write_rng_and_meta(folder: Path, meta: dict[str, Any]) -> bool:
    """Write this rank's RNG state, and on rank 0 `meta`; returns True without a process group."""
    rank, alone = _rank_alone()
    folder.mkdir(parents=True, exist_ok=True)
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    torch.save(state, folder / f"rng_{rank}.pt")
    if rank == 0:
        (folder / META).write_text(json_text(meta), encoding="utf-8")
    return alone


def load_state(engine: BaseEngine, folder: Path) -> dict[str, Any]:
    """Load a folder of `save_state` into the engine's tensors, on any number of ranks; returns its `meta`.

    A rank without an RNG state in the folder keeps its own. No code in the folder is run. Raises CheckpointError if the folder
    is incomplete, damaged, or of another model.
    """
    rank, alone = _rank_alone()
    try:
        meta: dict[str, Any] = read_json((folder / META).read_text(encoding="utf-8"))
        reader = PlainReader(folder)
        written = reader.read_metadata().state_dict_metadata  # first, because torch would print a traceback for a bad index
        state = dict(engine.state())
        with torch.no_grad():
            # No optimizer has a state: "sgd" without momentum. With one from now on (`optim.betas`) it begins as in a first step.
            if all(name.startswith(f"{STATE}model.") for name in written):
                for name in [name for name in state if name.endswith(".momentum_buffer")]:
                    state.pop(name).zero_()
            load({"state": state}, storage_reader=reader, no_dist=alone)
    except (OSError, ValueError, KeyError, RuntimeError, CheckpointException) as error:
        # torch joins the errors of several ranks; report the first, without its traceback.
        failures = [failure[0] for failure in error.failures.values()] if isinstance(error, CheckpointException) else []
        first = failures[0] if failures else error
        reason = ": ".join([type(first).__name__, *str(first).strip().splitlines()[:1]])
        raise CheckpointError(f"{folder}: cannot be loaded into this model: {reason}") from None
    saved = folder / f"rng_{rank}.pt"
    if saved.is_file():
        try:
            state = torch.load(saved, weights_only=True)
            torch.set_rng_state(state["cpu"])
            if "cuda" in state and torch.cuda.is_available():
                torch.cuda.set_rng_state(state["cuda"])
        except Exception as error:  # damaged or hostile pickles raise errors of any class
            raise CheckpointError(f"{saved}: not a random state: {type(error).__name__}") from error
    return meta


def saved_tensors(folder: Path) -> tuple[list[str], Callable[[str], Tensor]]:
    """Return the names of the tensors of `save_state`, and a reader of full tensors.

    Both raise CheckpointError if the folder is incomplete.
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


def _rank_alone() -> tuple[int, bool]:
    """Return the rank, and True without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), False
    return 0, True

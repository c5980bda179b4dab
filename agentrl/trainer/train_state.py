"""Training state: saved and loaded by torch.distributed.checkpoint for any number of ranks, without pickles."""

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

# Read the index of torch's distributed checkpoints, which is a pickle, without running anything that is in it.
#
# Who writes a checkpoint's folder writes its manifest too, so sums do not tell who wrote it. An ordinary unpickler calls what
# a pickle names. This one knows a closed list of names, and for each of them makes a record that holds values and does nothing;
# torch's own classes are built afterwards, from values whose types were looked at.

MOST_BYTES = 1 << 30
"""Of the index: one of a model with 100,000 tensors on 1,000 ranks has less."""
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
}


class PlainReader(FileSystemReader):
    """Torch's reader of a checkpoint's folder, with an index that is only data. What tensors are stored in is read by torch with
    `weights_only`; entries that are no tensors, which it would unpickle, are refused."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._index: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read once. Raises ValueError for an index that is damaged, or that holds anything else than tensors of this folder."""
        if self._index is None:
            path = Path(self.path) / ".metadata"
            if path.stat().st_size > MOST_BYTES:
                raise ValueError(f"{path.name}: more than {MOST_BYTES} bytes")
            self._index = metadata_of(path.read_bytes())
        self._index.storage_meta = StorageMeta(load_id=self.load_id)
        return self._index


def metadata_of(content: bytes) -> Metadata:
    """The index that torch pickled, without what only its writer uses (planner data). Raises ValueError for anything else."""
    try:
        row = _of(_Unpickler(io.BytesIO(content)).load(), "Metadata")
        tensors: dict[str, STORAGE_TYPES] = {
            _check_type(str, name): _tensor(name, entry)
            for name, entry in _check_type(dict, row.state.get("state_dict_metadata")).items()
        }
        stored = {}
        for key, entry in _check_type(dict, row.state.get("storage_data")).items():
            at = _of(key, "MetadataIndex")
            offset, index = at.state.get("offset"), at.state.get("index")
            offset, index = None if offset is None else _size(offset), None if index is None else _whole(index)
            info = _of(entry, "_StorageInfo")
            path = _check_type(str, info.state.get("relative_path"))
            if not path or PurePath(path).name != path or path.startswith("."):
                raise ValueError(f"{path!r} is no file of this folder")
            if info.state.get("transform_descriptors"):
                raise ValueError(f"{path}: stored in another form (transforms)")
            place = _StorageInfo(path, _whole(info.state.get("offset")), _whole(info.state.get("length")))
            stored[MetadataIndex(_check_type(str, at.state.get("fqn")), offset, index)] = place
        version = row.state.get("version")
        return Metadata(tensors, storage_data=stored, version=version if isinstance(version, str) else None)
    except pickle.UnpicklingError as problem:
        raise ValueError(f".metadata: {problem}") from None
    except Exception as problem:  # a pickle can fail with any error
        raise ValueError(f".metadata is damaged: {type(problem).__name__}: {problem}") from None


class _Record:
    """Substitute for an instance of a class: how it was called, and its state."""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Names are of the list, or refused; classes are made anew for each pickle, so that nothing it sets on one outlives it."""

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
                    f"it names {module}.{name}, which no checkpoint of tensors has; nothing of it was run"
                )
        return self._made[key]

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to something outside of itself")


def _tensor(name: str, made: Any) -> TensorStorageMetadata:
    row = _of(made, "TensorStorageMetadata")
    dtype = _of(row.state.get("properties"), "TensorProperties").state[0]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name}: no dtype")
    size, chunks = _size(row.state.get("size")), []
    for chunk in (_of(part, "ChunkStorageMetadata") for part in _check_type(list, row.state.get("chunks"))):
        offsets, sizes = _size(chunk.state.get("offsets")), _size(chunk.state.get("sizes"))
        if not len(offsets) == len(sizes) == len(size) or any(
            at + n > whole for at, n, whole in zip(offsets, sizes, size, strict=True)
        ):
            raise ValueError(f"{name}: a part of it lies outside of it")
        chunks.append(ChunkStorageMetadata(offsets, sizes))
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)


def _of(value: Any, name: str) -> _Record:
    if not isinstance(value, _Record) or type(value).__name__ != name:
        raise ValueError(f"expected {name}, found {type(value).__name__}")
    if not isinstance(value.state, dict if name != "TensorProperties" else tuple):
        raise ValueError(f"{name}: it has no fields")
    return value


def _check_type(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError(f"expected {kind.__name__}, found {type(value).__name__}")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"expected a whole number, found {type(value).__name__}")
    return value


def _size(made: Any) -> torch.Size:
    if not isinstance(made, _Record) or type(made).__name__ != "Size" or len(made.args) != 1 or type(made.args[0]) is not tuple:
        raise ValueError(f"expected a size, found {type(made).__name__}")
    found = torch.Size([_whole(n) for n in made.args[0]])
    if math.prod(found) >= 1 << 62:
        raise ValueError("a tensor of more elements than any machine has")
    return found


# Saving and loading

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
        raise _checkpoint_error(folder, error) from error
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
        """Return True if no save is being written any more. On rank 0 that means that all ranks have written.

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
            raise _checkpoint_error(self._folder, error) from error


def _checkpoint_error(folder: Path, error: CheckpointException) -> CheckpointError:
    """An ordinary exception in place of torch's, which derives from BaseException and so escapes `except Exception`."""
    rank, (reason, _) = next(iter(error.failures.items()))
    return CheckpointError(f"{folder}: rank {rank} could not write its part: {type(reason).__name__}: {reason}")


def _write_small(folder: Path, meta: dict[str, Any]) -> None:
    """Every rank's RNG, and `meta` by rank 0."""
    rank, _ = _place()
    folder.mkdir(parents=True, exist_ok=True)
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    torch.save(state, folder / f"rng_{rank}.pt")
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
        reader = PlainReader(folder)
        written = reader.read_metadata().state_dict_metadata  # of a bad index torch would print a traceback
        state = dict(engine.state())
        with torch.no_grad():
            # No optimizer has a state: "sgd" without momentum. With one from now on (`optim.betas`) it begins as in a first step.
            if all(name.startswith(f"{STATE}model.") for name in written):
                for name in [name for name in state if name.endswith(".momentum_buffer")]:
                    state.pop(name).zero_()
            load({"state": state}, storage_reader=reader, no_dist=alone)
    except (OSError, ValueError, KeyError, RuntimeError, CheckpointException) as error:
        # Of torch's error of several ranks that of the first, without its traceback.
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

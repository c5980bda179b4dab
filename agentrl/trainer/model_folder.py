"""Model folders: load shards, save full tensors, export a checkpoint, convert a GGUF file."""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from agentrl.config.load import load_config
from agentrl.config.schema import TrainConfig
from agentrl.engines.weights.base import Adapter
from agentrl.engines.weights.parameters import Conversion, Saving, loading_conversions, write_adapter
from agentrl.render.chatml import set_chat_template
from agentrl.render.modality import make_modality
from agentrl.trainer.checkpoint import Checkpoints, check_intact
from agentrl.trainer.layers import adapter_of, merge_adapters
from agentrl.trainer.optim import local
from agentrl.trainer.pretrained import empty_model, load_model_config, load_tokenizer
from agentrl.trainer.train_state import saved_tensors
from agentrl.trainer.weight_files import MAX_FILE_BYTES, Region, WeightFiles, WeightWriter, local_file
from agentrl.utils.errors import CheckpointError, DependencyError, ModelError
from agentrl.utils.files import explain_full_disk
from agentrl.utils.terminal import quiet_libraries

# Loading

log = logging.getLogger(__name__)

Places = dict[str, tuple[nn.Module, str]]
"""Module and attribute of each tensor, by name. Adapters and FSDP wrap modules, which stay the same objects."""
LOADED = "_is_hf_initialized"  # transformers' mark of a tensor or module that weight initialization skips


class Loader:
    """Loader of weights into a model on the meta device. Create it before wrapping the model, which changes names."""

    def __init__(self, path: str, model: Any) -> None:
        """Record the model's tensors. Raises ModelError for quantized weights."""
        quantized = getattr(model.config, "quantization_config", None)
        if quantized is not None:
            raise ModelError(f"{path}: its weights are quantized; training needs plain ones (bfloat16, float16 or float32)")
        self._path, self._model = path, model
        self._tensors: Places = {}
        self._groups: dict[str, int] = {}  # names of tied tensors have the same number
        for name, tensor in model.state_dict(keep_vars=True).items():
            owner, _, leaf = name.rpartition(".")
            self._tensors[name] = model.get_submodule(owner), leaf
            self._groups[name] = id(tensor)

    @torch.no_grad()
    def fill(self, module: nn.Module, device: torch.device, parameters: torch.device | None = None) -> None:
        """Allocate the meta tensors of `module` on `device`, and load their values.

        `module`: the model or a part of it. `parameters`: another device for parameters (host memory, for offloading). Raises
        ModelError if the checkpoint lacks a tensor, or has one of another shape.
        """
        materialize(module, parameters or device)
        # Tie weights again: each name got a separate tensor.
        self._model.tie_weights()
        self._read({id(part) for part in module.modules()})
        # Also tensors without values, such as shards without rows, which would be initialized at random.
        for tensor in self._model.parameters():
            setattr(tensor, LOADED, True)
        self._model.initialize_weights()  # buffers that the config determines, such as rotary frequencies: no file has them
        for part in module.modules():
            for name, buffer in part.named_buffers(recurse=False):
                setattr(part, name, buffer.to(device))

    @torch.no_grad()
    def read_into(self, tensors: Places) -> None:
        """Load the values into another model's tensors, by their names in this model. Raises as `fill`."""
        self._tensors = tensors
        self._read({id(module) for module, _ in tensors.values()})

    def _read(self, held: set[int]) -> None:
        try:
            opened = WeightFiles(self._path, getattr(self._model.config, "transformers_weights", None))
        except ModelError as problem:
            raise ModelError(f"{self._path}: its weights cannot be read: {problem}") from problem
        with opened as files:
            conversions, unknown = loading_conversions(self._model, self._tensors, files)
            if unknown:
                log.info("%s: %d tensors have no place in the model, such as %s", self._path, len(unknown), unknown[0])
            filled: set[str] = set()
            for conversion in conversions:
                filled.update(self._fill_one(conversion, files, held))
        groups = {self._groups[name] for name in filled}
        wanted = [name for name, (module, _) in self._tensors.items() if id(module) in held]
        missing = [name for name in wanted if self._groups[name] not in groups]
        if missing:
            raise ModelError(f"{self._path}: the checkpoint has no weights for {missing[0]} ({len(missing)} missing)")

    def _fill_one(self, conversion: Conversion, files: WeightFiles, held: set[int]) -> Iterable[str]:
        """Load the results of a conversion into the model's tensors; returns their names."""
        module, leaf = self._tensors[conversion.name]
        if id(module) not in held:
            return [conversion.name]
        target: Tensor = getattr(module, leaf)
        if conversion.converter is None:
            [source] = conversion.names()
            self._check_shape(conversion.name, files.header(source).shape, target)
            self._put(conversion.name, files.read(source, region_of(target)))
            return [conversion.name]
        region = region_of(target)
        mine = None if region is None else conversion.rows(region[0].start, region[0].stop)
        if mine is not None and region is not None:
            # Ranks after the last row have no rows, and a converter cannot run without a source.
            if local(target).numel():
                rows = mine.make(files.read, self._model)[conversion.name]
                self._put(conversion.name, rows[(slice(None), *region[1:])])
            return [conversion.name]
        made = conversion.make(files.read, self._model)
        for name, tensor in made.items():
            other: Tensor = getattr(*self._tensors[name])
            self._check_shape(name, tuple(tensor.shape), other)
            self._put(name, tensor[region_of(other) or ...])
        return list(made)

    def _put(self, name: str, source: Tensor) -> None:
        tensor: Tensor = getattr(*self._tensors[name])
        target = local(tensor)
        if source.shape != target.shape:
            raise ModelError(f"{self._path}: {name}: a part has shape {tuple(source.shape)}, expected {tuple(target.shape)}")
        # Already loaded by another name: tied names are one tensor here, but may be two in the files.
        if getattr(tensor, LOADED, False) and not torch.equal(target, source.to(target)):
            raise ModelError(f"{self._path}: the config ties {name} to another tensor, and the checkpoint has two that differ")
        target.copy_(source)
        setattr(tensor, LOADED, True)

    def _check_shape(self, name: str, shape: tuple[int, ...], target: Tensor) -> None:
        if shape != tuple(target.shape):
            raise ModelError(f"{self._path}: {name} has shape {shape} in the checkpoint and {tuple(target.shape)} in the model")


def region_of(tensor: Tensor) -> Region | None:
    """Return this rank's region of a sharded tensor, one slice per dimension; None if it is not sharded.

    Raises ModelError for more than one region: rows of two matrices in one tensor.
    """
    if not isinstance(tensor, DTensor):
        return None
    mesh, placements = tensor.device_mesh, tensor.placements
    for axis, placement in enumerate(placements):
        # FSDP2 shards the splits of tensor parallelism: in the same dimension, the outer axis has parts of each inner part.
        inner = (a for a in range(axis + 1, mesh.ndim) if placements[a].is_shard(getattr(placement, "dim", None)))
        if isinstance(placement, _StridedShard) and placement.split_factor != math.prod(mesh.size(a) for a in inner):
            raise ModelError(f"a tensor of shape {tuple(tensor.shape)} is sharded as {placements}: not one region a rank")
    sizes, starts = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def materialize(module: nn.Module, device: torch.device) -> None:
    """Allocate meta parameters on `device` and meta buffers on the host; move other parameters to `device`."""

    def real(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            return torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)

    module._apply(real)  # type: ignore[no-untyped-call]  # like nn.Module.to_empty; FSDP then uses the new tensors as shards


# Saving


def save_model(
    source: str,
    config: Any,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    folder: Path,
    max_bytes: int = MAX_FILE_BYTES,
    trust: bool = False,
    classifier: bool = False,
    chat_template: str | None = None,
) -> None:
    """Write config, weights and the tokenizer of `source` to `folder`, as transformers does.

    Weight files have at most `max_bytes`. `tensors`: every weight of the causal language model (or sequence `classifier`) by
    module name, in any order; floating-point ones are written in `dtype`. Each is written and freed once all tensors of its
    conversion have arrived (fused experts are written one by one). `trust`: run the model's code, which is copied next to the
    weights. `chat_template` (`model.chat_template`): of the tokenizer. Raises ModelError if a weight is missing or unknown.
    """
    from transformers.dynamic_module_utils import custom_object_save
    from transformers.utils import GENERATION_CONFIG_NAME

    shell = empty_model(source, config, classifier=classifier, dtype=dtype, attn_implementation="eager")
    saving = Saving(shell)
    folder.mkdir(parents=True, exist_ok=True)
    with WeightWriter(folder, saving.expected, max_bytes) as writer:
        # In the dtype of each tensor: a router's bias is float32 in a bfloat16 model.
        on_host = ((name, tensor.to("cpu", saving.held.get(name, tensor).dtype)) for name, tensor in tensors)
        for name, tensor in saving.tensors(on_host):
            writer.write(name, tensor)
    shell.config.dtype = str(dtype).removeprefix("torch.")
    shell.config.architectures = [type(shell).__name__]
    if shell._auto_class is not None:
        custom_object_save(shell, folder, config=shell.config)
    shell.config.save_pretrained(folder)
    if shell.can_generate():
        # Copied: transformers would write only the end token of the config, without sampling defaults.
        if (given := local_file(source, GENERATION_CONFIG_NAME)) is not None:
            shutil.copyfile(given, folder / GENERATION_CONFIG_NAME)
        else:
            shell.generation_config.save_pretrained(folder)
    load_tokenizer(source, trust, chat_template).save_pretrained(folder)
    if (modality := make_modality(source, config)) is not None:
        modality.processor.save_pretrained(folder)


# Exporting a checkpoint

T = TypeVar("T")
ATTEMPTS = 5
"""Attempts to read the newest or best checkpoint of an active run, which removes old ones."""
REMOVING = 0.5
"""Seconds for an active run to finish removing a checkpoint."""


class CheckpointRemovedError(CheckpointError):
    """The run removed the checkpoint while it was read."""


MODEL = "model."  # prefix of the model in an engine's state


def export_run(run: str | Path, out: str | Path, step: int | None = None, *, best: bool = False, adapter: bool = False) -> int:
    """Export a checkpoint of a run folder to the model folder `out`; returns its step.

    `step`: default: the newest, or with `best` the one with the best evaluation. `adapter`: write the trained adapter instead of
    the model, in peft's format. Raises CheckpointError for a missing or damaged checkpoint, ModelError if `out` exists and is not
    an empty folder, or the run trained no adapters.
    """
    quiet_libraries()
    return retry_if_removed(lambda: _export_run(Path(run), Path(out), step, best=best, adapter=adapter), named=step is not None)


def retry_if_removed(read: Callable[[], T], *, named: bool) -> T:
    """Read a checkpoint, and retry if the run removes it. Raises as `read`.

    A retry reads the then newest or best one. `named`: the user chose the step, so do not retry."""
    for _ in range(0 if named else ATTEMPTS - 1):
        with suppress(CheckpointRemovedError):
            return read()
    return read()


def _export_run(folder: Path, target: Path, step: int | None, *, best: bool, adapter: bool) -> int:
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
    model, data, source = config.model, config.data, start_model(folder, config)
    if adapter and model.lora is None:
        raise ModelError(f"{folder}: the run trained all weights and has no adapter (model.lora); export the model: no --adapter")
    try:
        check_intact(chosen)
        held, full = saved_model(chosen / "actor")
        with explain_full_disk(target, "repeat the command"), remove_on_error(target):
            if adapter and (lora := model.lora) is not None:
                write_adapter(target, Adapter(lora.rank, lora.alpha, adapter_of(held, full)), source)
                if model.chat_template is not None:  # else the base model's template is used
                    load_tokenizer(source, model.trust_remote_code, model.chat_template).save_pretrained(target)
            else:
                plain = ((name, full(name)) for name in held)
                save_model(
                    source,
                    load_model_config(source, model.trust_remote_code),
                    plain if model.lora is None else merge_adapters(held, full, model.lora),
                    torch.float32,
                    target,
                    trust=model.trust_remote_code,
                    classifier=data is not None and data.loss == "reward",
                    chat_template=model.chat_template,
                )
    except (CheckpointError, OSError):
        # An active run removes older checkpoints; those are not damaged.
        if chosen.is_dir():
            time.sleep(REMOVING)
        if chosen.is_dir():
            raise  # it still exists: damaged, or another error
        raise CheckpointRemovedError(
            f"{chosen}: it was removed while it was read, by the run, which keeps the newest checkpoint.keep of them"
        ) from None
    return int(chosen.name.rpartition("_")[2])


@contextmanager
def remove_on_error(folder: Path) -> Iterator[None]:
    """Remove an incomplete model folder after an error; else the command could not be repeated."""
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def saved_model(folder: Path) -> tuple[list[str], Callable[[str], Tensor]]:
    """Return `saved_tensors` of the model alone, by Hugging Face name."""
    names, read = saved_tensors(folder)
    return [name.removeprefix(MODEL) for name in names if name.startswith(MODEL)], lambda name: read(MODEL + name)


def start_model(folder: Path, config: TrainConfig) -> str:
    """Return the model that a run's training started from. Raises ModelError if it no longer exists."""
    warmed = config.sft is not None and config.data is None
    for built in (folder / "classifier", folder / "warm_start", *(() if warmed else [folder / "model"])):
        if (built / "config.json").is_file():
            return str(built)
    if warmed or config.model.path is None:
        name = "warm_start" if warmed else "model"
        raise ModelError(f"{folder / name}: the model that the run's updates started from is not there. Copy the folder back")
    return config.model.path


# GGUF files


def convert_gguf(
    file: str | Path, folder: Path, dtype: Literal["float32", "bfloat16"] = "float32", chat_template: str | None = None
) -> Any:
    """Convert a GGUF file to a model folder, by transformers; returns the tokenizer.

    Writes config, weights in `dtype`, tokenizer, and generation config. `chat_template`: as `model.chat_template`. Raises
    DependencyError without the package gguf, ModelError for a damaged file or an unknown architecture, ConfigError for an invalid
    chat template.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = Path(file)
    try:
        from gguf import GGUF_MAGIC

        with file.open("rb") as opened:
            magic = opened.read(4)
    except ModuleNotFoundError:
        raise DependencyError("a GGUF file is read with the package gguf: pip install 'agentrl[gguf]'") from None
    except OSError as problem:
        raise ModelError(f"{file}: the GGUF file cannot be read: {problem.strerror}") from problem
    if int.from_bytes(magic, "little") != GGUF_MAGIC:
        raise ModelError(f"{file}: not a GGUF file (it begins with {magic!r}). Give one that ends with .gguf.")
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**where)
        read, found = AutoModelForCausalLM.from_pretrained(**where, dtype=getattr(torch, dtype), output_loading_info=True)
    except Exception as problem:  # truncated files raise various errors of struct and numpy
        raise ModelError(f"{file}: no model can be read from it ({problem}). Fetch it again, or take another file.") from problem
    if chat_template is not None:
        set_chat_template(tokenizer, chat_template)
    if missing := sorted(found["missing_keys"]) or sorted(found["mismatched_keys"]):
        raise ModelError(f"{file}: it lacks weights of its architecture: {', '.join(map(str, missing[:3]))}. Take another file.")
    del read.config.quantization_config  # the saved weights are not quantized
    model = empty_model(None, read.config, dtype=read.dtype)
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    with explain_full_disk(folder, "repeat the command"), remove_on_error(folder):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return tokenizer

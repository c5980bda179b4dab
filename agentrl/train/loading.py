"""Loading: a model is built on the meta device, wrapped and sharded there, and then each rank reads its own shards.

No rank ever holds the whole model, nor a whole tensor of a sharded one, unless a family's checkpoint must be converted across
rows (one tensor at a time). No rank sends weights to another: what it reads are regions of files that all processes of a node
map, so that a node reads each byte from its disk once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from agentrl.errors import ModelError
from agentrl.train.weight_files import Region, WeightFiles
from agentrl.weights.conversions import Conversion, loading_conversions

log = logging.getLogger(__name__)

LOADED = "_is_hf_initialized"  # transformers' mark of a tensor or module that its weight initialization leaves alone


@dataclass(frozen=True, slots=True)
class ModuleTensor:
    """Where a tensor of a transformers model is. Modules stay the same objects when adapters or FSDP wrap them."""

    module: nn.Module
    leaf: str

    def tensor(self) -> Tensor:
        found: Tensor = getattr(self.module, self.leaf)
        return found


class Loader:
    """Fills a model that was built on the meta device. Make it before the model is wrapped, as names change then."""

    def __init__(self, path: str, model: Any) -> None:
        """Raises ModelError for quantized weights."""
        quantized = getattr(model.config, "quantization_config", None)
        if quantized is not None:
            raise ModelError(f"{path}: its weights are quantized; training needs plain ones (bfloat16, float16 or float32)")
        self._path, self._model = path, model
        self._tensors: dict[str, ModuleTensor] = {}
        self._groups: dict[str, int] = {}  # names of tied tensors have the same number
        for name, tensor in model.state_dict(keep_vars=True).items():
            owner, _, leaf = name.rpartition(".")
            self._tensors[name] = ModuleTensor(model.get_submodule(owner), leaf)
            self._groups[name] = id(tensor)

    @torch.no_grad()
    def fill(self, module: nn.Module, device: torch.device, parameters: torch.device | None = None) -> None:
        """Give every meta tensor of `module`, which holds the model or a part of it, memory on `device` and its value.

        `parameters`: the device for parameters if it is another one (host memory, for offloading). Raises ModelError if the
        checkpoint lacks a tensor, or has one of another shape.
        """
        materialize(module, parameters or device)
        # That gave each name a tensor of its own, so tied ones have come apart.
        self._model.tie_weights()
        self._read({id(part) for part in module.modules()})
        # Also those that nothing was read into, such as shards without rows: else they would be drawn at random.
        for tensor in self._model.parameters():
            setattr(tensor, LOADED, True)
        self._model.initialize_weights()  # what no file holds: buffers that a config determines, such as rotary frequencies
        for part in module.modules():
            for name, buffer in part.named_buffers(recurse=False):
                setattr(part, name, buffer.to(device))

    @torch.no_grad()
    def read_into(self, tensors: dict[str, ModuleTensor]) -> None:
        """Read the values of the model's tensors into those of another one, given by the names that they have in this model.

        Raises ModelError as `fill` does.
        """
        self._tensors = tensors
        self._read({id(entry.module) for entry in tensors.values()})

    def _read(self, held: set[int]) -> None:
        with WeightFiles(self._path, self._model.config) as files:
            conversions, unknown = loading_conversions(self._model, self._tensors, files)
            if unknown:
                log.info("%s: %d tensors have no place in the model, such as %s", self._path, len(unknown), unknown[0])
            filled: set[str] = set()
            for conversion in conversions:
                filled.update(self._fill_one(conversion, files, held))
        self._check_complete(filled, held)

    def _fill_one(self, conversion: Conversion, files: WeightFiles, held: set[int]) -> Iterable[str]:
        """Read a conversion's results into the model's tensors; their names."""
        entry = self._tensors[conversion.name]
        if id(entry.module) not in held:
            return [conversion.name]
        target = entry.tensor()
        if conversion.converter is None:
            [source] = conversion.names()
            self._check_shape(conversion.name, files.shape(source), target)
            self._put(conversion.name, files.read(source, region_of(target)))
            return [conversion.name]
        region = region_of(target)
        mine = None if region is None else conversion.rows(region[0].start, region[0].stop)
        if mine is not None and region is not None:
            # Ranks beyond the last row hold nothing, and a converter cannot run without a source.
            if local_of(target).numel():
                rows = mine.make(files.read, self._model)[conversion.name]
                self._put(conversion.name, rows[(slice(None), *region[1:])])
            return [conversion.name]
        made = conversion.make(files.read, self._model)
        for name, tensor in made.items():
            other = self._tensors[name].tensor()
            self._check_shape(name, tuple(tensor.shape), other)
            self._put(name, tensor[region_of(other) or ...])
        return list(made)

    def _put(self, name: str, source: Tensor) -> None:
        tensor = self._tensors[name].tensor()
        target = local_of(tensor)
        if source.shape != target.shape:
            raise ModelError(f"{self._path}: {name}: a part has shape {tuple(source.shape)}, expected {tuple(target.shape)}")
        # Filled already, by another name: tied names are one tensor here and may be two in the files.
        if getattr(tensor, LOADED, False) and not torch.equal(target, source.to(target)):
            raise ModelError(f"{self._path}: the config ties {name} to another tensor, and the checkpoint has two that differ")
        target.copy_(source)
        setattr(tensor, LOADED, True)

    def _check_shape(self, name: str, shape: tuple[int, ...], target: Tensor) -> None:
        if shape != tuple(target.shape):
            raise ModelError(f"{self._path}: {name} has shape {shape} in the checkpoint and {tuple(target.shape)} in the model")

    def _check_complete(self, filled: set[str], held: set[int]) -> None:
        groups = {self._groups[name] for name in filled}
        wanted = [name for name, entry in self._tensors.items() if id(entry.module) in held]
        missing = [name for name in wanted if self._groups[name] not in groups]
        if missing:
            raise ModelError(f"{self._path}: the checkpoint has no weights for {missing[0]} ({len(missing)} missing)")


def region_of(tensor: Tensor) -> Region | None:
    """The region of a sharded tensor that is this rank's, one slice a dimension; None for one that is not sharded.

    Raises ModelError if it is more than one region: rows of two matrices that are kept as one.
    """
    if not isinstance(tensor, DTensor):
        return None
    mesh, placements = tensor.device_mesh, tensor.placements
    for axis, placement in enumerate(placements):
        # FSDP2 shards what tensor parallelism has split: of the same dimension, the outer axis then has parts of each inner part.
        inner = (a for a in range(axis + 1, mesh.ndim) if placements[a].is_shard(getattr(placement, "dim", None)))
        if isinstance(placement, _StridedShard) and placement.split_factor != math.prod(mesh.size(a) for a in inner):
            raise ModelError(f"a tensor of shape {tuple(tensor.shape)} is sharded as {placements}: not one region a rank")
    sizes, starts = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def local_of(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def materialize(module: nn.Module, device: torch.device) -> None:
    """Memory for every meta parameter, on `device`, and every meta buffer, on the host. The others stay as they are."""

    def real(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            return torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)

    module._apply(real)  # type: ignore[no-untyped-call]  # as nn.Module.to_empty does; FSDP notices, and takes the new tensors as its shards

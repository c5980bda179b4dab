"""Shards of several ranks of one machine, put together in shared memory: each tensor is whole there, and nothing gathers it.

Row shards follow each other in the order of their ranks, so the ranks' memory can be parts of one segment. It costs no memory: a
rank's shard moves there, and the rank trains on it where it is.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.errors import ConfigError
from agentrl.weights import shared
from agentrl.weights.bucket import ALIGN

TOKEN_BYTES = ALIGN
"""Before the first tensor: what rank 0 wrote there, by which the others see that it is the same memory."""


@dataclass(frozen=True, slots=True)
class RowShard:
    """What one rank has of the tensor `name`, of `shape` as a whole: `padded`, the same number of elements on every rank, flat;
    beyond the tensor's last row they mean nothing. `move(memory)` makes `memory`, like `padded`, the shard's place from now on;
    it has the same values."""

    name: str
    shape: tuple[int, ...]
    padded: Tensor
    move: Callable[[Tensor], None]


@dataclass(frozen=True, slots=True)
class Joined:
    """The segment `flat`, uint8, and the tensors in it by name: views, which change when a rank writes to its shard."""

    flat: Tensor
    whole: dict[str, Tensor]


def join(shards: Sequence[RowShard], number: int, count: int) -> Joined:
    """Move the shards of `count` ranks, of which this is `number`, into one segment; a collective of all ranks of the process
    group. Raises ConfigError on every rank, and nothing is moved, if one of them cannot reach it."""
    starts, size = _places(shards, count)
    made, problem = _made(size) if number == 0 else ("", "")
    [(file, token), *_] = [each.split(" ") for each in gathered(made or "- -")]  # the first rank's
    flat = torch.empty(0, dtype=torch.uint8)
    try:
        if number > 0 and file != "-":
            problem = _unlike(file, token, size)
        if not problem and file != "-":
            flat = _mapped(file, size)
        refused = [each for each in gathered(problem) if each]
    finally:
        if number == 0 and file != "-":
            Path(file).unlink(missing_ok=True)  # each has mapped it, or will not: a kill from here on leaves nothing
    if refused:
        raise ConfigError(f"weights.route = in_place: {refused[0]}")
    whole = {}
    for shard, start in zip(shards, starts, strict=True):
        bytes_here = flat[start + number * shard.padded.nbytes :][: shard.padded.nbytes]
        # A storage that begins there: what copies a state (a checkpoint in the background) takes whole storages, which would be
        # all ranks' weights, and takes a DTensor whose rows begin later in theirs for a plain tensor.
        place = torch.from_numpy(bytes_here.numpy()).view(shard.padded.dtype)
        place.copy_(shard.padded)
        shard.move(place)
        elements = torch.Size(shard.shape).numel()
        every = flat[start:][: elements * shard.padded.itemsize].view(shard.padded.dtype)
        whole[shard.name] = every.view(shard.shape)
    gathered("")  # what rank 0 sends is there
    return Joined(flat, whole)


def gathered(mine: Any) -> list[Any]:
    """What each rank has, in their order; a collective."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def _places(shards: Sequence[RowShard], count: int) -> tuple[list[int], int]:
    """At which byte each tensor begins, and how long the segment is: every tensor has room for the padding of all ranks."""
    starts, at = [], TOKEN_BYTES
    for shard in shards:
        starts.append(at)
        at += -(-shard.padded.nbytes * count // ALIGN) * ALIGN
    return starts, at


def _made(size: int) -> tuple[str, str]:
    """A file in shared memory with its token, as "FILE TOKEN"; or why there can be none."""
    if not shared.FOLDER.is_dir():
        return "", f"this machine has no {shared.FOLDER}"
    descriptor, name = tempfile.mkstemp(prefix="agentrl-weights-", dir=shared.FOLDER)
    token = os.urandom(TOKEN_BYTES)
    try:
        os.posix_fallocate(descriptor, 0, size)  # without it, a write beyond the memory that is left would end the process
        os.pwrite(descriptor, token, 0)
    except OSError as problem:
        Path(name).unlink()
        return "", f"no room in {shared.FOLDER} for {size >> 20} MiB of weights ({problem.strerror})"
    finally:
        os.close(descriptor)
    return f"{name} {token.hex()}", ""


def _unlike(file: str, token: str, size: int) -> str:
    """Why a file is not the one that rank 0 made; "" if it is."""
    path = Path(file)
    if not path.is_file() or path.stat().st_size != size:
        return "the trainer's ranks do not share memory (several machines?)"
    with path.open("rb") as found:
        return "" if found.read(TOKEN_BYTES).hex() == token else "the trainer's ranks do not share memory (another file)"


def _mapped(file: str, size: int) -> Tensor:
    """The segment, uint8, with a descriptor that stays open: another process finds it by that."""
    descriptor, storages = os.open(file, os.O_RDWR), cast(Any, torch.UntypedStorage)
    try:
        storage = storages._new_shared_fd_cpu(descriptor, size)
    finally:
        os.close(descriptor)  # torch has one of its own
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (size,), (1,))

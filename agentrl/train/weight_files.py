"""The tensors in a model's files, read where and when they are wanted: a whole tensor, or only a region of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor

from agentrl.errors import ModelError
from agentrl.plain_data import read_json

Region = tuple[slice, ...]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
OLD_SINGLE, OLD_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


class WeightFiles:
    """The weights of a model folder or hub name, mapped and not read: a tensor's bytes come from the page cache, which all
    processes of a node share. Use it in a `with` block; what `read` returns must be copied within it."""

    def __init__(self, path: str, config: Any) -> None:
        """`config`: the model's transformers config. Raises ModelError if there are no weights or a file is not readable."""
        self._path, self._open = path, ExitStack()
        self._held: dict[str, Any] = {}  # a slice object of safetensors, or a tensor mapped by torch
        try:
            for file in weight_files(path, getattr(config, "transformers_weights", None)):
                self._held.update(self._tensors(file))
        except (OSError, ValueError, RuntimeError) as error:
            raise ModelError(f"{path}: its weights cannot be read: {str(error).strip().splitlines()[0]}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Before the files are closed that they point into.
        self._held.clear()
        self._open.close()

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def shape(self, name: str) -> tuple[int, ...]:
        held = self._held[name]
        return tuple(held.shape if isinstance(held, Tensor) else held.get_shape())

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """A tensor, or a region of it (one slice a dimension), in the type that the file has. A view of the mapped file."""
        found: Tensor = self._held[name][region or ...]
        return found

    def _tensors(self, file: str) -> dict[str, Any]:
        if file.endswith(".safetensors"):
            handle = self._open.enter_context(safe_open(file, framework="pt"))
            return {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118  # the handle is not a mapping
        # weights_only: a pickle from elsewhere could run code.
        held: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        return held


def weight_files(path: str, named: str | None = None) -> list[str]:
    """The files that hold a model's weights, downloaded if `path` is a hub name. `named`: the file that the model's config
    names, if it names one. Raises OSError if there is none."""
    # As transformers prefers them: a folder may have both kinds, and must be the same model here and there.
    names = [named] if named else [SINGLE, INDEX, OLD_SINGLE, OLD_INDEX]
    for name in names:
        found = local_file(path, name)
        if found is None:
            continue
        if not name.endswith(".json"):
            return [found]
        parts = sorted(set(read_json(Path(found).read_text(encoding="utf-8"))["weight_map"].values()))
        files = [local_file(path, part) for part in parts]
        missing = [part for part, file in zip(parts, files, strict=True) if file is None]
        if missing:
            raise OSError(f"{name} names {missing[0]}, which is not there")
        return [file for file in files if file is not None]
    raise OSError(f"there is no file {' or '.join(names)}")


def local_file(path: str, name: str) -> str | None:
    """A file of a model folder, or of a model of a hub, which is fetched; None if it has none."""
    if Path(path).is_dir():
        return str(Path(path) / name) if (Path(path) / name).is_file() else None
    from transformers.utils import cached_file

    found: str | None = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    return found

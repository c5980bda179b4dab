"""Writing safetensors files tensor by tensor: none of them needs to be in memory as a whole."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch
from torch import Tensor

from agentrl.errors import ModelError
from agentrl.files import naming
from agentrl.train.weight_files import INDEX, SINGLE

MAX_FILE_BYTES = 2 << 30
_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True)
class FilePosition:
    """Where a tensor's bytes go: an open file, and the position in it."""

    file: BinaryIO
    start: int


class WeightWriter:
    """The weight files of a model folder, in the format of https://github.com/huggingface/safetensors: the length of a header,
    the header (JSON), the bytes. Since it says where each tensor lies, they may come in any order.

    Files have temporary names until all tensors are there: a folder that was left half-written has no weights. Use it in a
    `with` block.
    """

    def __init__(self, folder: Path, expected: Mapping[str, Tensor], max_bytes: int = MAX_FILE_BYTES) -> None:
        """`expected`: all tensors that will be written, in the order of files; meta tensors will do."""
        self._folder, self._expected = folder, dict(expected)
        self._missing = set(expected)
        self._positions: dict[str, FilePosition] = {}
        self._files = ExitStack()
        groups = _grouped(expected, max_bytes)
        count = len(groups)
        self._names = [SINGLE if count == 1 else f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
        self._of = {name: file for file, group in zip(self._names, groups, strict=True) for name in group}
        try:
            for file, group in zip(self._names, groups, strict=True):
                self._start(self._aside(file), group)
        except BaseException:
            self._end(publish=False)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end(publish=kind is None and not self._missing)
        if kind is None and self._missing:
            raise ModelError(f"export: no weights for {min(self._missing)} ({len(self._missing)} missing)")

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor. Raises ModelError if it is not among the expected ones, or is unlike the one expected."""
        expected = self._expected.get(name)
        if expected is None or name not in self._missing:
            raise ModelError(f"export: no place for weights named {name}")
        if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
            raise ModelError(f"export: {name} is {tensor.dtype} {tuple(tensor.shape)}, expected {tuple(expected.shape)}")
        position = self._positions[name]
        with naming(Path(position.file.name)):
            position.file.seek(position.start)
            # As bytes, since numpy has no bfloat16; flat, since a scalar cannot be viewed as bytes.
            position.file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        self._missing.discard(name)

    def _end(self, publish: bool) -> None:
        """Close the files, which writes what is left of them, and give them their names, or remove them."""
        try:
            self._files.close()
            if publish:
                self._publish()
        finally:
            for name in self._names:
                self._aside(name).unlink(missing_ok=True)

    def _aside(self, name: str) -> Path:
        return self._folder / f".{name}.writing"

    def _start(self, path: Path, group: list[str]) -> None:
        # The largest elements first, so that each tensor begins at a multiple of its element's size; as safetensors does.
        names = sorted(group, key=lambda name: (-self._expected[name].element_size(), name))
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        starts, end = {}, 0
        for name in names:
            tensor = self._expected[name]
            starts[name], end = end, end + _bytes(tensor)
            entry = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [starts[name], end]}
            header[name] = entry
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        # Spaces up to a multiple of 8, so that the tensors begin aligned in a mapped file; the format allows them.
        text += b" " * (-len(text) % 8)
        self._files.enter_context(naming(path))
        file = self._files.enter_context(path.open("wb"))
        file.write(len(text).to_bytes(8, "little") + text)
        self._positions.update({name: FilePosition(file, 8 + len(text) + start) for name, start in starts.items()})

    def _publish(self) -> None:
        for old in self._folder.glob("model*.safetensors*"):
            if old.name in (SINGLE, INDEX) or re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", old.name):
                old.unlink()  # of an earlier export: a reader would prefer it, or take both
        for name in self._names:
            self._aside(name).replace(self._folder / name)
        if len(self._names) == 1:
            return
        total = {
            "total_parameters": sum(tensor.numel() for tensor in self._expected.values()),
            "total_size": sum(_bytes(tensor) for tensor in self._expected.values()),
        }
        # The index last: files that it does not name yet are not a model to any reader.
        index = {"metadata": total, "weight_map": dict(sorted(self._of.items()))}
        (self._folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _grouped(expected: Mapping[str, Tensor], max_bytes: int) -> list[list[str]]:
    """The names of each file, in order: as many as fit, but at least one."""
    groups: list[list[str]] = [[]]
    held = 0
    for name, tensor in expected.items():
        if groups[-1] and held + _bytes(tensor) > max_bytes:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += _bytes(tensor)
    return groups

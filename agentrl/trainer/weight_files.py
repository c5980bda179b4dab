"""Weight files of a model: read tensors by region, write them one by one, and check headers against a config."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from torch import Tensor

from agentrl.engines.weights.parameters import loading_conversions
from agentrl.utils.errors import ModelError
from agentrl.utils.files import naming
from agentrl.utils.parsing import read_json

Region = tuple[slice, ...]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
OLD_SINGLE, OLD_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


OTHER_WEIGHTS = ("*.safetensors", "*.bin", "*.pth", "*.pt", "*.ckpt", "*.gguf", "*.h5", "*.msgpack", "*.index.json")
"""Patterns of weight files and their indexes."""


@dataclass(frozen=True, slots=True)
class Header:
    """Dtype (as the file names it) and shape of a stored tensor."""

    dtype: str
    shape: tuple[int, ...]


class WeightFiles(ExitStack):
    """Memory-mapped weights of a model folder or hub name; all processes of a node share the page cache.

    Use it in a `with` block, and copy results of `read` within it."""

    def __init__(self, path: str, named: str | None = None, fetch: bool = True) -> None:
        """Map the files. Arguments and errors as for `weight_files`; also raises ModelError for a damaged file."""
        super().__init__()
        self._held: dict[str, Any] = {}  # a slice object of safetensors, or a tensor mapped by torch
        for file in weight_files(path, named, fetch):
            try:
                if file.suffix == ".safetensors":
                    handle = self.enter_context(safe_open(str(file), framework="pt"))
                    self._held |= {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118  # not a mapping
                else:  # weights_only: an untrusted pickle could run code. mmap: no tensor is read.
                    self._held |= torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            except (SafetensorError, OSError, ValueError, RuntimeError) as problem:
                raise ModelError(
                    f"{file.name} ({file.stat().st_size} bytes) is damaged or cut off: "
                    f"{str(problem).strip().splitlines()[0]}; fetch it again"
                ) from problem
        self.callback(self._held.clear)  # before closing the files, into which they point

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def header(self, name: str) -> Header:
        held = self._held[name]
        if isinstance(held, Tensor):
            return Header(str(held.dtype).removeprefix("torch."), tuple(held.shape))
        return Header(held.get_dtype(), tuple(held.get_shape()))

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """Return a tensor or a region (one slice per dimension), as a view of the mapped file, in its dtype."""
        found: Tensor = self._held[name][region or ...]
        return found


def weight_files(path: str, named: str | None = None, fetch: bool = True) -> list[Path]:
    """Return the weight files of a model. `named`: file named by its config. `fetch`: download missing ones of a hub name.

    Raises ModelError, to which callers add the path, if a file is missing or the index is damaged.
    """
    # The order of transformers: a folder may have both kinds, and must give the same model.
    for name in [named] if named else [SINGLE, INDEX, OLD_SINGLE, OLD_INDEX]:
        found = local_file(path, name, fetch)
        if found is None:
            continue
        if not name.endswith(".json"):
            return [found]
        try:
            parts = sorted(set(read_json(found.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as problem:
            raise ModelError(f"{name} is not an index of weights ({problem!r}); fetch it again") from problem
        files = {part: local_file(path, part, fetch) for part in parts}
        missing = [part for part, file in files.items() if file is None]
        if missing:
            raise ModelError(
                f"{len(missing)} of the {len(parts)} files that {name} names are not there: {list_names(missing)}; fetch them"
            )
        return [file for file in files.values() if file is not None]
    others = sorted({file.name for pattern in OTHER_WEIGHTS for file in Path(path).glob(pattern)})
    if "adapter_model.safetensors" in others:
        raise ModelError(
            "it holds adapters alone: merge them into their base model first (peft: merge_and_unload, save_pretrained)"
        )
    if ggufs := [name for name in others if name.endswith(".gguf")]:
        raise ModelError(f"it holds a GGUF file. Convert it: agentrl init-model FOLDER --from {Path(path) / ggufs[0]}")
    have = (
        f", found {list_names(others)}; convert it with the script of the model's family" if others else "; fetch the whole model"
    )
    raise ModelError(
        f"it has no weights: expected {SINGLE} or {INDEX}{have}, or load it in transformers, and save_pretrained(FOLDER)"
    )


def local_file(path: str, name: str, fetch: bool = True) -> Path | None:
    """Return a file of a model folder or hub name, or None. `fetch`: download it, else look in the cache alone."""
    if Path(path).is_dir():
        return Path(path) / name if (Path(path) / name).is_file() else None
    from huggingface_hub import try_to_load_from_cache
    from transformers.utils import cached_file

    found = cached_file(path, name, _raise_exceptions_for_missing_entries=False) if fetch else try_to_load_from_cache(path, name)
    return Path(found) if isinstance(found, str) else None


# Writing

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


class WeightWriter:
    """Writer of a model folder's weight files, in the format of https://github.com/huggingface/safetensors.

    A file is the length of the header, the header (JSON), and the bytes. The header has the position of each tensor, so tensors
    may arrive in any order. Files have temporary names until all tensors are written: an incomplete folder has no weights. Use it
    in a `with` block.
    """

    def __init__(self, folder: Path, expected: Mapping[str, Tensor], max_bytes: int = MAX_FILE_BYTES) -> None:
        """`expected`: all tensors to write, in the order of files; may be on the meta device."""
        self._folder, self._expected = folder, dict(expected)
        self._missing = set(expected)
        self._positions: dict[str, tuple[BinaryIO, int]] = {}  # where a tensor's bytes begin
        self._files = ExitStack()
        self._split = split_torch_state_dict_into_shards(self._expected, max_shard_size=max_bytes)
        try:
            for part, group in self._split.filename_to_tensors.items():
                # Largest elements first, like safetensors: each tensor begins at a multiple of its element size.
                header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
                starts, end = {}, 0
                for name in sorted(group, key=lambda name: (-self._expected[name].element_size(), name)):
                    tensor = self._expected[name]
                    starts[name], end = end, end + tensor.nbytes
                    offsets = [starts[name], end]
                    header[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
                text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
                # Padded with spaces to a multiple of 8, as the format allows, so that tensors are aligned in a mapped file.
                text += b" " * (-len(text) % 8)
                self._files.enter_context(naming(self._temporary(part)))
                file = self._files.enter_context(self._temporary(part).open("wb"))
                file.write(len(text).to_bytes(8, "little") + text)
                self._positions.update({name: (file, 8 + len(text) + start) for name, start in starts.items()})
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
        """Write one tensor. Raises ModelError if it is not expected, or has another shape or dtype."""
        expected = self._expected.get(name)
        if expected is None or name not in self._missing:
            raise ModelError(f"export: no place for weights named {name}")
        if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
            raise ModelError(f"export: {name} is {tensor.dtype} {tuple(tensor.shape)}, expected {tuple(expected.shape)}")
        file, start = self._positions[name]
        with naming(Path(file.name)):
            file.seek(start)
            # As bytes, because numpy has no bfloat16; flat, because a scalar cannot be viewed as bytes.
            file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        self._missing.discard(name)

    def _end(self, publish: bool) -> None:
        """Close the files, then give them their final names, or remove them."""
        try:
            self._files.close()
            if not publish:
                return
            for old in self._folder.glob("model*.safetensors*"):
                if old.name in (SINGLE, INDEX) or re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", old.name):
                    old.unlink()  # of an earlier export: a reader would prefer it, or read both
            for name in self._split.filename_to_tensors:
                self._temporary(name).replace(self._folder / name)
            if self._split.is_sharded:
                total = {"total_parameters": sum(tensor.numel() for tensor in self._expected.values()), **self._split.metadata}
                # The index last: without it, no reader takes the files for a model.
                index = {"metadata": total, "weight_map": dict(sorted(self._split.tensor_to_filename.items()))}
                text = json.dumps(index, indent=2, sort_keys=True) + "\n"
                (self._folder / INDEX).write_text(text, encoding="utf-8")
        finally:
            for name in self._split.filename_to_tensors:
                self._temporary(name).unlink(missing_ok=True)

    def _temporary(self, name: str) -> Path:
        return self._folder / f".{name}.writing"


# Checks of stored tensors

SHOWN = 3
"""Maximum names that an error lists; the others are counted."""
PLAIN = ("F64", "F32", "F16", "BF16", "float64", "float32", "float16", "bfloat16")

HARMLESS = {
    "rotary frequencies, which the config determines": r"(^|\.)(inv_freq|cos_cached|sin_cached)$",
    "attention masks": r"\.(attn|attention)\.(bias|masked_bias)$",
    "layers that predict several tokens at once": r"(^|\.)mtp(\.|_)",
    "parts for images, video or sound": r"(^|\.)(visual|vision_\w+|multi_modal_projector|mm_projector|image_\w+|audio_\w+"
    r"|embed_vision|embed_audio|connector|talker|speech_\w+|perceiver\w*)\.",
    "heads for other tasks": r"^(score|classifier|v_head|value_head)\.",
}
"""Patterns of checkpoint tensors outside of the causal language model, by the reason to ignore them."""


def has_weights(path: str) -> bool:
    """Return True for a hub name or a folder with any weight file."""
    return not Path(path).is_dir() or any(any(Path(path).glob(pattern)) for pattern in OTHER_WEIGHTS)


def stored_tensors(path: str, named: str | None = None) -> dict[str, Header]:
    """Return the headers of a model's tensors by name. `named`: as for `weight_files`.

    For a hub name that is not on this machine, only headers are downloaded. Raises ModelError if a file is missing, damaged, of
    another format, or a git-LFS pointer.
    """
    here = Path(path).is_dir()
    with suppress(ModelError):
        here = here or bool(weight_files(path, named, fetch=False))
    if here:
        with WeightFiles(path, named, fetch=False) as files:
            return {name: files.header(name) for name in files}
    from huggingface_hub import get_safetensors_metadata
    from huggingface_hub.errors import NotASafetensorsRepoError

    try:
        parts = get_safetensors_metadata(path).files_metadata
    except NotASafetensorsRepoError as problem:
        raise ModelError(
            f"the hub has no {SINGLE} or {INDEX} of it; convert it first: load it in transformers, save_pretrained"
        ) from problem
    return {name: Header(info.dtype, tuple(info.shape)) for part in parts.values() for name, info in part.tensors.items()}


def check_tensors(model: Any, stored: Mapping[str, Header]) -> list[str]:
    """Compare stored tensors with `model`, on the meta device. Returns descriptions of ignored tensors, by reason.

    Raises ModelError if tensors are missing, unknown, of another shape, or quantized."""
    odd = sorted(name for name, tensor in stored.items() if tensor.dtype not in PLAIN)
    quantized = [name for name in odd if name.endswith(("weight", "weight_packed", "qweight", "_blocks"))]
    if quantized:
        verb = "is" if len(quantized) == 1 else "are"
        raise ModelError(
            f"{list_names(quantized)} {verb} stored as {stored[quantized[0]].dtype}: the weights are quantized, and "
            "its config.json does not say how; take the checkpoint that they were made from (bfloat16, float16 or float32)"
        )
    wanted = dict(model.state_dict(keep_vars=True))
    conversions, unknown = loading_conversions(model, wanted, stored)
    filled: set[int] = set()
    wrong: list[str] = []
    for conversion in conversions:
        try:
            made = conversion.make(lambda name: torch.empty(stored[name].shape, device="meta"), model)
        except (RuntimeError, ValueError, IndexError) as problem:
            wrong.append(f"{conversion.name} (its parts do not fit together: {str(problem).splitlines()[0]})")
            continue
        filled.update(id(wanted[name]) for name in made)
        for name, tensor in made.items():
            if tensor.shape != wanted[name].shape:
                own_size, due = ("x".join(map(str, part.shape)) or "a number" for part in (tensor, wanted[name]))
                wrong.append(f"{name} ({own_size} in its files, {due} by config.json)")
    own = {id(tensor): name for name, tensor in reversed(wanted.items())}  # a tied tensor by the first of its names
    missing = [name for name, tensor in wanted.items() if id(tensor) not in filled and own[id(tensor)] == name]
    left_out, strange = _sort_tensors(model, unknown)
    problems = [
        f"{len(wrong)} have another shape: {list_names(wrong)}" if wrong else "",
        f"{len(missing)} of {len(own)} are not in its files: {list_names(missing)}" if missing and not wrong else "",
        f"{len(strange)} of its files have no place in {type(model).__name__}: {list_names(strange)}" if strange else "",
    ]
    if any(problems):
        raise ModelError(
            f"its weights do not match its config.json: tensors: {'; '.join(filter(None, problems))}. Fetch the model again, "
            "or correct config.json; convert a checkpoint of another program to the format of transformers"
        )
    return [f"{count} tensors not used: {reason}" for reason, count in left_out.items()]


def _sort_tensors(model: Any, unknown: Iterable[str]) -> tuple[Counter[str], list[str]]:
    """Divide unknown tensors into harmless ones, counted by reason, and others."""
    ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    text = model.config.get_text_config()
    layers = getattr(text, "num_hidden_layers", None)
    behind = getattr(text, "num_nextn_predict_layers", None) or 0  # extra layers after the model's, in some families
    counts: Counter[str] = Counter()
    strange = []
    for name in unknown:
        number = re.search(r"\blayers\.(\d+)\.", name)
        reason = next((reason for reason, pattern in HARMLESS.items() if re.search(pattern, name)), None)
        if reason is None and number and isinstance(layers, int) and layers <= int(number[1]) < layers + behind:
            reason = "layers that predict several tokens at once"
        if reason is None and any(pattern.search(name) for pattern in ignored):
            reason = f"left out by {type(model).__name__}"
        if reason is None:
            strange.append(name)
        else:
            counts[reason] += 1
    return counts, strange


def list_names(names: list[str]) -> str:
    """List the first SHOWN names and count the rest."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")

"""What a model's weight files hold and lack, from their headers: no tensor is read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import ModelError
from agentrl.plain_data import read_json
from agentrl.train.weight_files import INDEX, OLD_INDEX, OLD_SINGLE, SINGLE
from agentrl.weights.conversions import loading_conversions

SHOWN = 3
"""Names of a list that an error shows; of the others it says how many there are."""
LFS = b"version https://git-lfs"
PLAIN = ("F64", "F32", "F16", "BF16", "float64", "float32", "float16", "bfloat16")
OTHER_WEIGHTS = ("*.safetensors", "*.bin", "*.pth", "*.pt", "*.ckpt", "*.gguf", "*.h5", "*.msgpack", "*.index.json")
"""Files that hold weights, or say which do."""

HARMLESS = {
    "rotary frequencies, which the config determines": r"(^|\.)(inv_freq|cos_cached|sin_cached)$",
    "attention masks": r"\.(attn|attention)\.(bias|masked_bias)$",
    "layers that predict several tokens at once": r"(^|\.)mtp(\.|_)",
    "parts for images, video or sound": r"(^|\.)(visual|vision_\w+|multi_modal_projector|mm_projector|image_\w+|audio_\w+"
    r"|embed_vision|embed_audio|connector|talker|speech_\w+|perceiver\w*)\.",
    "heads for other tasks": r"^(score|classifier|v_head|value_head)\.",
}
"""What checkpoints hold beside a causal language model, and why it can be left out."""


@dataclass(frozen=True, slots=True)
class Header:
    """A tensor of a file: its type, by the name that the file gives it, and its shape."""

    dtype: str
    shape: tuple[int, ...]


def has_weights(path: str) -> bool:
    """Whether a folder has a file of weights, whole or not; True for a hub name."""
    return not Path(path).is_dir() or any(any(Path(path).glob(pattern)) for pattern in OTHER_WEIGHTS)


def has_safetensors(path: str) -> bool:
    """Whether a folder has weights as transformers saves them, whole or not; True for a hub name."""
    return not Path(path).is_dir() or any((Path(path) / name).is_file() for name in (SINGLE, INDEX))


def stored_tensors(path: str, named: str | None = None) -> dict[str, Header]:
    """The tensors of a model by name. `named`: the file that the model's config names, if it names one. Of a hub name that is not
    on this machine, headers alone are fetched.

    Raises ModelError: a file is missing, damaged, of another kind, or a git-LFS pointer.
    """
    folder = Path(path) if Path(path).is_dir() else _in_cache(path)
    if folder is None:
        return _of_hub(path)
    return {name: stored for file in _files(folder, named) for name, stored in _tensors(file).items()}


def check_pointers(folder: Path) -> None:
    """Raise ModelError if a file of a model folder is a git-LFS pointer."""
    for file in sorted(file for file in folder.iterdir() if file.is_file() and file.stat().st_size < 1024):
        if file.read_bytes().startswith(LFS):
            raise ModelError(
                f"{file.name} is a git-LFS pointer ({file.stat().st_size} bytes), not the file itself: run `git lfs pull` in the "
                "folder, or fetch the model with `hf download NAME --local-dir FOLDER`"
            )


def check_tensors(model: Any, stored: Mapping[str, Header]) -> list[str]:
    """Raise ModelError if the stored tensors are not those of `model`, a transformers model on the meta device: some are missing,
    have no place in it, have another shape, or are quantized. Returns what is stored and left out, by reason."""
    odd = sorted(name for name, tensor in stored.items() if tensor.dtype not in PLAIN)
    quantized = [name for name in odd if name.endswith(("weight", "weight_packed", "qweight", "_blocks"))]
    if quantized:
        raise ModelError(
            f"{named(quantized)} {_are(quantized)} stored as {stored[quantized[0]].dtype}: the weights are quantized, and its "
            "config.json does not say how; take the checkpoint that they were made from (bfloat16, float16 or float32)"
        )
    wanted = dict(model.state_dict(keep_vars=True))
    conversions, unknown = loading_conversions(model, wanted, stored)
    filled: set[int] = set()
    wrong: list[str] = []
    for conversion in conversions:
        try:
            made = conversion.make(lambda name: _meta(stored[name]), model)
        except (RuntimeError, ValueError, IndexError) as problem:
            wrong.append(f"{conversion.name} (its parts do not fit together: {str(problem).splitlines()[0]})")
            continue
        filled.update(id(wanted[name]) for name in made)
        wrong += [
            f"{name} ({_sizes(made[name].shape)} in its files, {_sizes(wanted[name].shape)} by config.json)"
            for name in made
            if made[name].shape != wanted[name].shape
        ]
    own = {id(tensor): name for name, tensor in reversed(wanted.items())}  # a tied tensor by the first of its names
    missing = [name for name, tensor in wanted.items() if id(tensor) not in filled and own[id(tensor)] == name]
    left_out, strange = _sorted(model, unknown)
    problems = [
        f"{len(wrong)} have another shape: {named(wrong)}" if wrong else "",
        f"{len(missing)} of {len(own)} are not in its files: {named(missing)}" if missing and not wrong else "",
        f"{len(strange)} of its files have no place in {type(model).__name__}: {named(strange)}" if strange else "",
    ]
    if any(problems):
        raise ModelError(
            f"its weights are not those of its config.json: tensors, {'; '.join(filter(None, problems))}. Fetch the model again, "
            "or correct config.json; a checkpoint of another program must be converted to the form that transformers saves"
        )
    return [f"{count} tensors not used: {reason}" for reason, count in left_out.items()]


def _sorted(model: Any, unknown: Iterable[str]) -> tuple[Counter[str], list[str]]:
    """Tensors without a place in the model: those known to be harmless, counted by reason, and the others."""
    ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    counts: Counter[str] = Counter()
    strange = []
    for name in unknown:
        number = re.search(r"\blayers\.(\d+)\.", name)
        reason = next((reason for reason, pattern in HARMLESS.items() if re.search(pattern, name)), None)
        if reason is None and number is not None and isinstance(layers, int) and _behind(model, int(number[1]), layers):
            reason = "layers that predict several tokens at once"
        if reason is None and any(pattern.search(name) for pattern in ignored):
            reason = f"left out by {type(model).__name__}"
        if reason is None:
            strange.append(name)
        else:
            counts[reason] += 1
    return counts, strange


def _behind(model: Any, number: int, layers: int) -> bool:
    """Whether a layer is one of those that some families keep behind the model's own, to predict several tokens."""
    return layers <= number < layers + (getattr(model.config.get_text_config(), "num_nextn_predict_layers", None) or 0)


def named(names: list[str]) -> str:
    """The first of them, and how many more there are."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _sizes(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape)) or "a number"


def _meta(stored: Header) -> Any:
    import torch

    return torch.empty(stored.shape, device="meta")


def _files(folder: Path, config_named: str | None) -> list[Path]:
    # As WeightFiles looks for them.
    for name in [config_named] if config_named else [SINGLE, INDEX, OLD_SINGLE, OLD_INDEX]:
        if not (folder / name).is_file():
            continue
        return _of_index(folder / name) if name.endswith(".json") else [folder / name]
    others = sorted({file.name for pattern in OTHER_WEIGHTS for file in folder.glob(pattern)})
    if "adapter_model.safetensors" in others:
        raise ModelError(
            "it holds adapters alone: merge them into their base model first (peft: merge_and_unload, save_pretrained)"
        )
    if ggufs := [name for name in others if name.endswith(".gguf")]:
        raise ModelError(f"it holds a GGUF file, which is read once: agentrl init-model FOLDER --from {folder / ggufs[0]}")
    raise ModelError(
        f"it has no weights: expected {SINGLE} or {INDEX}"
        + (f", found {named(others)}; convert it with the script of the model's family" if others else "; fetch the whole model")
        + ", or load it in transformers, and save_pretrained(FOLDER)"
    )


def _of_index(index: Path) -> list[Path]:
    try:
        parts = sorted(set(read_json(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as problem:
        raise ModelError(f"{index.name} is not an index of weights ({problem!r}); fetch it again") from problem
    missing = [part for part in parts if not (index.parent / part).is_file()]
    if missing:
        raise ModelError(
            f"{len(missing)} of the {len(parts)} files that {index.name} names are not there: {named(missing)}; fetch them"
        )
    return [index.parent / part for part in parts]


def _tensors(file: Path) -> dict[str, Header]:
    import torch
    from safetensors import SafetensorError, safe_open

    try:
        if file.suffix == ".safetensors":
            with safe_open(str(file), framework="pt") as handle:
                slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118  # the handle is not a mapping
                return {name: Header(part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
        # weights_only: a pickle from elsewhere could run code. mmap: no tensor is read.
        held = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        return {name: Header(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in held.items()}
    except (SafetensorError, OSError, ValueError, RuntimeError) as problem:
        raise ModelError(
            f"{file.name} ({file.stat().st_size} bytes) is damaged or cut off: {str(problem).strip().splitlines()[0]}; fetch it "
            "again"
        ) from problem


def _in_cache(path: str) -> Path | None:
    """The folder of a hub name's files on this machine; None if weights are not all there."""
    from huggingface_hub import try_to_load_from_cache

    for name in (SINGLE, INDEX, OLD_SINGLE, OLD_INDEX):
        found = try_to_load_from_cache(path, name)
        if isinstance(found, str):
            folder = Path(found).parent
            whole = not name.endswith(".json") or all(
                (folder / part).is_file() for part in read_json(Path(found).read_text(encoding="utf-8"))["weight_map"].values()
            )
            return folder if whole else None
    return None


def _of_hub(path: str) -> dict[str, Header]:
    from huggingface_hub import get_safetensors_metadata
    from huggingface_hub.errors import NotASafetensorsRepoError

    try:
        files = get_safetensors_metadata(path).files_metadata
    except NotASafetensorsRepoError as problem:
        raise ModelError(
            f"the hub has no {SINGLE} or {INDEX} of it; convert it first: load it in transformers, save_pretrained"
        ) from problem
    return {name: Header(info.dtype, tuple(info.shape)) for file in files.values() for name, info in file.tensors.items()}

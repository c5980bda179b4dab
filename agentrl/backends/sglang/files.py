"""The files of a model folder: what the servers load when a run starts, and the names that they know the weights under."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from safetensors import safe_open

from agentrl.backends.parameters import Expected
from agentrl.errors import EngineError, ModelError
from agentrl.weights.bucket import Named


def weight_files(model: str) -> list[Path]:
    """The safetensors files of a folder or of a hub name, which is downloaded if it is not there. Raises ModelError."""
    folder = Path(model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        try:
            folder = Path(snapshot_download(model, allow_patterns=["*.safetensors"]))
        except (HfHubHTTPError, LocalEntryNotFoundError, ValueError) as problem:
            raise ModelError(f"{model}: its weights cannot be read: {problem}") from problem
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{model} has no safetensors files, which SGLang's servers would load")
    return files


def tensors_of(files: list[Path], size: int) -> Iterator[list[Named]]:
    """All tensors in lists of at most `size` bytes, or of one."""
    part: list[Named] = []
    used = 0
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is not a mapping
                tensor = file.get_tensor(name)
                if part and used + tensor.nbytes > size:
                    yield part
                    part, used = [], 0
                part.append((name, tensor))
                used += tensor.nbytes
    if part:
        yield part


def check_names(files: list[Path], expected: Expected) -> None:
    """Raise EngineError if the files name weights in another way than the trainer, which publishes under the names that
    transformers saves a model with: SGLang's loaders know those of the files, and skip some others without a word."""
    stored = {name for path in files for name in _names(path)}
    same = stored | {name for name, other in expected.tied.items() if other in stored}
    aliases = {other for name, other in expected.tied.items() if name in stored}
    unknown = sorted(expected.shapes.keys() - same - aliases)
    if unknown:
        raise EngineError(
            f"sglang: the model's files have other names for its weights than transformers saves it with ({unknown[0]} and "
            f"{len(unknown) - 1} more), and SGLang loads by those of the files: such a model cannot be trained with this engine"
        )


def _names(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        return list(file.keys())

"""What the files hold that a config only names: an evaluation of other weights under an old path is another evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from agentrl.catalog import EnvRef, find_tools
from agentrl.catalog.scoring import find_spec
from agentrl.config import TrainConfig
from agentrl.config.identity import Identity, digest_of

_CHUNK = 64 << 10
_CHUNKS = 128


def contents_of(config: TrainConfig) -> Identity:
    """Digests of the reward spec, and of the files of the model, the environment and the tool sets, for an identity.

    Models on a hub or behind an API, and environments of installed packages, have none. Raises CatalogError or
    RewardSpecError if the spec, the environment or a tool set is not found.
    """
    env = EnvRef.of(config)
    found: Identity = {"the content of env.reward": digest_of(find_spec(env, config.env.reward))}
    model = Path(config.model.path or "")
    files = {
        "model.path": sorted(_plain(model.iterdir())) if config.model.path and model.is_dir() else [],
        "env.id": sorted(_sources(env.entry.path)),
        "tools.sets": [find_tools(name) for name in config.tools.sets],
    }
    for key, paths in files.items():
        if paths:
            found[f"the files of {key}"] = digest_of([[path.name, _digest(path)] for path in paths])
    return found


def _sources(path: Path | None) -> Iterator[Path]:
    """The environment's file and, if it has a folder of its own, what lies beside it; tests decide nothing."""
    if path is None:
        return
    if path.name != "env.py":
        yield path
        return
    for file in _plain(path.parent.rglob("*")):
        if "__pycache__" not in file.parts and not file.name.startswith("test_"):
            yield file


def _plain(paths: Iterator[Path]) -> Iterator[Path]:
    return (path for path in paths if path.is_file() and not path.name.startswith("."))


def _digest(path: Path) -> str:
    """Of a file's size and content; of a large one, as weights are, of chunks spread evenly over it, which takes no time."""
    size, found = path.stat().st_size, sha256()
    found.update(str(size).encode())
    with path.open("rb") as file:
        if size <= _CHUNK * _CHUNKS:
            found.update(file.read())
            return found.hexdigest()
        for chunk in range(_CHUNKS):
            file.seek(chunk * (size - _CHUNK) // (_CHUNKS - 1))
            found.update(file.read(_CHUNK))
    return found.hexdigest()

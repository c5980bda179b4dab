"""The manifest of a checkpoint: every file with its size and SHA-256, written last, so that what has one is complete.

Sizes are looked at whenever checkpoints are listed: a crash leaves files missing or short. Sums are compared before one is
loaded: a disk, or a person, may change what was written, and a model with a flipped bit trains on without a word.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePath
from typing import Any

from agentrl.errors import CheckpointError
from agentrl.files import atomic_write, file_sha256, read_plain
from agentrl.plain_data import json_text, read_json

MANIFEST = "manifest.json"
_READERS = 4


def seal(folder: Path, step: int, score: float | None = None) -> None:
    """Flush all files of `folder` and write its manifest last."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())  # else the manifest could reach the disk before the data that it vouches for
    for path in [folder, *(p for p in folder.rglob("*") if p.is_dir())]:
        sync_folder(path)
    files = {
        str(path.relative_to(folder)): {"size": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, _sums(paths), strict=True)
    }
    write_manifest(folder, {"step": step, "files": files} | ({} if score is None else {"score": score}))


def is_whole(folder: Path) -> bool:
    """True if the manifest exists and every file that it lists has the listed size."""
    try:
        files = read_manifest(folder)["files"].items()
        return all(_within(name) and (folder / name).stat().st_size == _size(said) for name, said in files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return False


def check_intact(folder: Path) -> None:
    """Read every file that the manifest lists. Raises CheckpointError naming those that are not as they were written. A
    manifest without sums, of an older version, is compared by sizes."""
    if not is_whole(folder):
        raise CheckpointError(f"{folder}: a file is missing or short, or the manifest is damaged")
    files = {name: said["sha256"] for name, said in read_manifest(folder)["files"].items() if isinstance(said, dict)}
    try:
        found = _sums([folder / name for name in files])
    except OSError as problem:
        raise CheckpointError(f"{folder}: a file cannot be read: {problem}") from None
    changed = [name for (name, was), now in zip(files.items(), found, strict=True) if was != now]
    if changed:
        raise CheckpointError(f"{folder}: {', '.join(changed)}: not as written (SHA-256 differs)")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Step, files and, if it was evaluated, score. Raises OSError or ValueError if there is none that can be read."""
    found: dict[str, Any] = read_json(read_plain(folder / MANIFEST))
    return found


def check_model(folder: Path) -> None:
    """`check_intact` of a model folder of a run, if it has a manifest. Raises CheckpointError."""
    if os.path.lexists(folder / MANIFEST):
        check_intact(folder)


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Replace the manifest: a reader sees the old one or the new one, never half of one."""
    atomic_write(folder / MANIFEST, json_text(manifest))
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Flush a folder: a new or renamed file in it survives a power cut only then."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _within(name: str) -> bool:
    """Whether a file that a manifest names is in its folder: outside may be a device, which is read for ever."""
    path = PurePath(name)
    return not path.is_absolute() and ".." not in path.parts


def _size(said: Any) -> int:
    return int(said["size"] if isinstance(said, dict) else said)


def _sums(paths: Sequence[Path]) -> list[str]:
    with ThreadPoolExecutor(_READERS, thread_name_prefix="checkpoint-sums") as pool:  # hashlib lets go of the interpreter's lock
        return list(pool.map(file_sha256, paths))

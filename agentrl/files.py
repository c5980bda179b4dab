"""Files that readers see complete at any moment, and their digests."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path


def atomic_write(path: Path, text: str) -> None:
    """Write to a temporary file, fsync, rename: readers (and a kill) find the old file or the new one, never half of one."""
    atomic_write_all(path, [text])


def atomic_write_all(path: Path, parts: Iterable[str]) -> None:
    """The same for a text in parts, with one part at a time in memory. If producing a part raises, the old file stays."""
    # In the same folder, because a rename is atomic only within one file system.
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())  # before the rename: after a power loss the new name could otherwise have no content
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

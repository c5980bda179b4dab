"""Which test files the words of a command line mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

from agentrl.errors import UserError, did_you_mean

PATTERNS = ("test_*.py", "*_test.py")
SKIPPED = (".*", "build", "dist", "node_modules", "venv", "__pycache__", "*.egg")
"""Folders that are not searched, unless they are named. Patterns and these are pytest's defaults."""


def find_files(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Each file, and what pytest gets of it: the file, or the tests named by `FILE::TEST`. Without words: the folder `tests`.

    Raises UserError for a path that is not there, and if there is no test file at all.
    """
    found: dict[str, list[str]] = {}
    for word in words or ["tests"]:
        path, colons, test = word.partition("::")
        for file in _files(Path(path)):
            found.setdefault(file, []).append(f"{file}{colons}{test}")
    if not found:
        raise UserError(f"no test file ({' or '.join(PATTERNS)}) in {', '.join(words) or 'tests'}")
    # A file that is named as a whole is run as a whole.
    return {file: (file,) if file in targets else tuple(dict.fromkeys(targets)) for file, targets in found.items()}


def _files(path: Path) -> Iterator[str]:
    if path.is_file():
        yield _shown(path)
    elif path.is_dir():
        yield from (_shown(file) for file in _below(path))
    else:
        near = [str(other) for other in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(f"{path}: there is no such file or folder; {did_you_mean(str(path), near, 'name test files or folders')}")


def _below(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            if not any(fnmatch(path.name, pattern) for pattern in SKIPPED):
                yield from _below(path)
        elif any(fnmatch(path.name, pattern) for pattern in PATTERNS):
            yield path


def _shown(path: Path) -> str:
    """Below the working directory as pytest shows it."""
    whole, here = path.resolve(), Path.cwd()
    return str(whole.relative_to(here)) if whole.is_relative_to(here) else str(whole)

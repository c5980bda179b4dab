"""Atomic writes, safe opening of plain files, text decoding, and digests."""

from __future__ import annotations

import codecs
import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from agentrl.utils.errors import FULL, DiskFullError, OutputError


def expand_home(path: str) -> str:
    """Replace a leading `~` by the home folder; unchanged without a home folder."""
    return os.path.expanduser(path) if path == "~" or path.startswith("~/") else path  # noqa: PTH111 - Path raises without one


def atomic_write(path: Path, text: str | Iterable[str], *, private: bool = False) -> None:
    """Write a file by temporary file, fsync and rename, so that readers (and a kill) never see a partial file. `text` in parts is
    written one part at a time; if producing a part raises, the old file stays. `private`: only the owner may read it."""
    # In the same folder, because a rename is atomic only within a file system.
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if private:
            temporary.unlink(missing_ok=True)
            temporary.touch(mode=0o600)
        with naming(path), temporary.open("w", encoding="utf-8") as file:
            file.writelines([text] if isinstance(text, str) else text)
            file.flush()
            os.fsync(file.fileno())  # before the rename: after a power loss the new name could otherwise be an empty file
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the path to an OSError of a write, which, unlike one of `open`, names no file."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def full_text(path: Path | str, then: str) -> str:
    """Format a message for a full disk: the path, free bytes there, and the remedy `then`."""
    there = Path(path).absolute()
    while not there.exists():
        there = there.parent
    most = f"the disk is full ({shutil.disk_usage(there).free} bytes are free)"
    return f"{path}: {most}: free some space, or raise a quota or ulimit -f, and {then}"


def disk_full(error: BaseException | None) -> bool:
    """Return True if `error` or one of its causes reports a full disk."""
    seen: set[int] = set()  # an exception raised from itself is a cycle
    # Also by text: an error from another rank or process keeps only the text of the OSError.
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OutputError):
            return False
        if isinstance(error, DiskFullError) or (isinstance(error, OSError) and error.errno in FULL):
            return True
        if any(os.strerror(number) in str(error) for number in FULL):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def explain_full_disk(place: Path | str, then: str) -> Iterator[None]:
    """Convert errors of a full disk, raised here, on a rank or by a library, into DiskFullError, which names the file (default:
    `place`), the free space, and the remedy `then`."""
    try:
        yield
    except Exception as error:
        if not disk_full(error):
            raise
        named = error.filename if isinstance(error, OSError) and error.filename else place
        raise DiskFullError(f"{error}; {then}" if isinstance(error, DiskFullError) else full_text(named, then)) from error


def plain_file(path: str, flags: int) -> int:
    """An `opener` for `open` that accepts only plain files: raises OSError, with the path, for a pipe (on which it would block),
    a folder or a device."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a plain file", path)
    return descriptor


def open_plain(path: Path) -> BufferedReader:
    """Open a plain file for reading bytes. Raises OSError, also for other file types."""
    return open(path, "rb", opener=plain_file)


def shown_path(path: Path | str) -> str:
    """Format a path for messages: relative to the working folder if inside it."""
    path, here = Path(path), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def read_text(path: Path) -> str:
    """Read a user's text file in UTF-8, with or without a byte order mark. Raises OSError, and UnicodeDecodeError with a remedy
    for another encoding."""
    return decode_text(path.read_bytes())


def decode_text(data: bytes) -> str:
    """Decode a file's bytes as `read_text` does."""
    if data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) or (b"\0" in data[:8] and len(data) % 2 == 0):  # also UTF-32
        raise UnicodeDecodeError("utf-8", data[:8], 0, 1, "the file is UTF-16 or UTF-32; save it as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        reason = f"{error.reason}; save it as UTF-8"
        raise UnicodeDecodeError(error.encoding, error.object, error.start, error.end, reason) from None


def read_plain(path: Path, errors: str = "strict") -> str:
    """Read a plain UTF-8 file. Raises OSError, also for other file types; ValueError for other encodings (see `errors`)."""
    with open_plain(path) as file:
        return file.read().decode("utf-8", errors)


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content in hexadecimal."""
    with open_plain(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

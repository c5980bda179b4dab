"""One driver a run folder: who writes into it holds a lock, which ends with the process however that ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import shlex
import socket
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from agentrl.errors import ConfigError
from agentrl.files import plain_file
from agentrl.plain_data import read_json

log = logging.getLogger(__name__)

LOCK = ".lock"
_NONE = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a run folder. Raises ConfigError, naming the process that holds it and
    since when, if another does. A process that was killed holds none: the kernel gives it back.

    On a file system without locks (some network ones) a warning in the log takes its place.
    """
    with open(folder / LOCK, "a+", encoding="utf-8", opener=plain_file) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(_held(folder, file)) from None
        except OSError as error:
            if error.errno not in _NONE:
                raise
            log.warning("%s: the file system has no locks, so nothing keeps a second driver out: %s", folder, error)
        _note(file)
        yield


def check_unlocked(folder: Path) -> None:
    """Raise ConfigError, as `locked` does, if a process writes the run in a folder. Leaves the folder as it is."""
    if not (folder / LOCK).is_file():
        return
    with open(folder / LOCK, encoding="utf-8", opener=plain_file) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(_held(folder, file)) from None
        except OSError as error:
            if error.errno not in _NONE:
                raise


def _note(file: IO[str]) -> None:
    file.seek(0)
    file.truncate()
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]) if sys.argv else "Python"  # embedded, it may have no arguments
    since = datetime.now(UTC).isoformat(timespec="seconds")
    json.dump({"pid": os.getpid(), "host": socket.gethostname(), "since": since, "command": command}, file)
    file.flush()


def _read(file: IO[str]) -> dict[str, Any]:
    file.seek(0)
    try:
        found: dict[str, Any] = read_json(file.read())
    except ValueError:  # it has just been taken
        return {}
    return found


def _held(folder: Path, file: IO[str]) -> str:
    by = _read(file)
    if not by:
        return f"{folder}: another process is writing this run"
    here = f"kill {by['pid']}" if by["host"] == socket.gethostname() else f"on {by['host']}: kill {by['pid']}"
    return (
        f"{folder}: process {by['pid']} on {by['host']} has been writing this run since {by['since']} ({by['command']}). Wait "
        f"for it, or end it ({here}; it then leaves a checkpoint), or choose another name: name={folder.name}-2"
    )

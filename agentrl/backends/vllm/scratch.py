"""Where the replicas' processes have their temporary files: the Unix sockets by which vLLM's processes talk, the file in which
they meet, the folders of multiprocessing. All of them stay if one of the processes is killed."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

VARIABLE = "TMPDIR"
SEMAPHORE = re.compile(r"/dev/shm/sem\.mp-\w+")
ROOM = 50
"""Characters of a folder for temporary files in which another has room for vLLM's sockets: the path of a socket has 107."""


class Scratch:
    """A folder of temporary files for the replicas on this machine, removed by who started them, who is not killed with them."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._semaphores: set[str] = set()

    def environment(self) -> dict[str, str]:
        """What a replica is started with; the folder is made by the first call."""
        if self._folder is None:
            parent = tempfile.gettempdir()
            where = parent if len(parent) <= ROOM else "/tmp"
            self._folder = tempfile.TemporaryDirectory(prefix="rl-vllm-", dir=where, ignore_cleanup_errors=True)
        return {VARIABLE: self._folder.name}

    def note(self) -> None:
        """Before one of the processes is killed: the semaphores that they have in /dev/shm, none of which is in the folder.
        multiprocessing's tracker would remove them, and Ray kills that with the replica."""
        if self._folder is not None:
            for process in _started_with(f"{VARIABLE}={self._folder.name}".encode()):
                with suppress(OSError):
                    self._semaphores.update(SEMAPHORE.findall((process / "maps").read_text()))

    def close(self) -> None:
        """Remove all of it, once the replicas have ended; idempotent."""
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.cleanup()
        while self._semaphores:
            Path(self._semaphores.pop()).unlink(missing_ok=True)


def _started_with(variable: bytes) -> Iterator[Path]:
    """The folders in /proc of processes with it in their environment; none but on Linux."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if variable in (process / "environ").read_bytes().split(b"\0"):
                yield process


def settle_scratch() -> None:
    """In a replica: on another machine the folder is not there, and that machine's own is taken. Before vLLM is imported."""
    if not Path(os.environ.get(VARIABLE, "/")).is_dir():
        del os.environ[VARIABLE]
        tempfile.tempdir = None

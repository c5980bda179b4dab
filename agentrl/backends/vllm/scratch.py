"""Where the replicas' processes have their temporary files: the Unix sockets by which vLLM's processes talk, the file in which
they meet, the folders of multiprocessing. All of them stay if one of the processes is killed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

VARIABLE = "TMPDIR"
ROOM = 50
"""Characters of a folder for temporary files in which another has room for vLLM's sockets: the path of a socket has 107."""


class Scratch:
    """A folder of temporary files for the replicas on this machine, removed by who started them, who is not killed with them."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def environment(self) -> dict[str, str]:
        """What a replica is started with; the folder is made by the first call."""
        if self._folder is None:
            parent = tempfile.gettempdir()
            where = parent if len(parent) <= ROOM else "/tmp"
            self._folder = tempfile.TemporaryDirectory(prefix="rl-vllm-", dir=where, ignore_cleanup_errors=True)
        return {VARIABLE: self._folder.name}

    def close(self) -> None:
        """Remove it, once the replicas have ended; idempotent."""
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.cleanup()


def settle_scratch() -> None:
    """In a replica: on another machine the folder is not there, and that machine's own is taken. Before vLLM is imported."""
    if not Path(os.environ.get(VARIABLE, "/")).is_dir():
        del os.environ[VARIABLE]
        tempfile.tempdir = None

"""Where the replicas' processes have their temporary files: the Unix sockets by which vLLM's processes talk, the file in which
they meet, the folders of multiprocessing. All of them stay if one of the processes is killed, as do multiprocessing's semaphores,
which are named after the folder here."""

from __future__ import annotations

import fcntl
import multiprocessing.process
import os
import tempfile
from contextlib import suppress
from pathlib import Path

VARIABLE = "TMPDIR"
SHM = Path("/dev/shm")
"""Where Linux has named semaphores, as `sem.NAME`."""
ROOM = 42
"""Characters of a folder for temporary files in which another has room for vLLM's sockets: the path of a socket has 107."""


class Scratch:
    """A folder of temporary files for the replicas on this machine, removed by who started them, who is not killed with them. If
    he is, the keeper of his Ray finds it by his process id (cluster/ray_keeper.py)."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._held = -1

    def environment(self) -> dict[str, str]:
        """What a replica is started with; the folder is made by the first call."""
        if self._folder is None:
            parent = tempfile.gettempdir()
            where = parent if len(parent) <= ROOM else "/tmp"
            self._folder = tempfile.TemporaryDirectory(prefix=f"rl-vllm-{os.getpid()}-", dir=where, ignore_cleanup_errors=True)
            self._held = os.open(self._folder.name, os.O_RDONLY)
            with suppress(OSError):  # a file system without locks
                fcntl.flock(self._held, fcntl.LOCK_EX)
        return {VARIABLE: self._folder.name}

    def close(self) -> None:
        """Remove it, once the replicas have ended; idempotent."""
        folder, self._folder = self._folder, None
        if folder is not None:
            os.close(self._held)
            folder.cleanup()
            for path in SHM.glob(f"sem.{Path(folder.name).name}-*"):
                with suppress(FileNotFoundError):
                    path.unlink()


def settle_scratch() -> None:
    """In a replica, before vLLM is imported: on another machine the folder is not there, and that machine's own is taken.

    Semaphores that are made here, and in processes that multiprocessing starts from here, get names that begin with the folder's.
    Who would unlink them, multiprocessing's resource tracker, is a child of this process and is killed with it."""
    folder = Path(os.environ.get(VARIABLE, "/"))
    if folder.is_dir():
        config = getattr(multiprocessing.process.current_process(), "_config", {})  # Python offers no other way
        config["semprefix"] = f"/{folder.name}"
    else:
        del os.environ[VARIABLE]
        tempfile.tempdir = None

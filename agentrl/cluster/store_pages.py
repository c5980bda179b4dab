"""Pages of Ray's object store, made while the episodes of a run are played, not while its first batch is written.

The store is shared memory that nothing has touched when Ray starts. The kernel makes and clears a page at its first touch, which
takes several times as long as copying to it, and in a virtual machine far longer: the host has to find a page too. The pages
that are made here are those that the batch is written to a moment later: no memory is taken that the run would not take, and it
is the store's, which gives it back when Ray ends, however it ends.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from pathlib import Path
from typing import Any

TOKEN_BYTES = 32
"""Of a token in the columns of a batch: 25 as it is collated, and advantages and another policy's logprobs."""
LEAST_BYTES = 64 << 20
"""Pages are made so many at a time; a batch with fewer is written in less time than is worth a thread."""
PIECE_BYTES = 16 << 20
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14: a page fault for writing on each page, which changes nothing in it
_FIRST_OBJECT_BYTES = 1 << 18


class StorePages:
    """The pages of this machine's object store that the next batch needs, as far as it is known."""

    def __init__(self) -> None:
        self._update = self._tokens = self._made = 0
        self._thread: threading.Thread | None = None

    def played(self, update: int, tokens: int) -> None:
        """More `tokens` will be in the batch of an update: make their pages in a thread, if there are not as many yet."""
        if update != self._update:
            self._update, self._tokens = update, 0
        self._tokens += tokens
        wanted = self._tokens * TOKEN_BYTES
        if wanted - self._made >= LEAST_BYTES and (self._thread is None or not self._thread.is_alive()):
            # A daemon: where it is when the process ends does not matter. Nor does the end of Ray, which unmaps the store:
            # the kernel then refuses, and what it finds in that place instead it would leave as it is.
            self._thread = threading.Thread(target=make_pages, args=(self._made, wanted), daemon=True, name="agentrl-pages")
            self._made = wanted
            self._thread.start()

    def wait(self) -> None:
        """Until the pages that were asked for are there."""
        if self._thread is not None:
            self._thread.join()


def make_pages(begin: int, end: int) -> int:
    """Make the pages between two places of the store, in bytes from its beginning, where Ray places objects as long as it has
    room there; returns how many bytes of them there are. 0 if this system has no such call, or no store in shared memory;
    what memory has no room for is left out."""
    place, size = _store()
    made = 0
    for at in range(begin, min(end, size), PIECE_BYTES):
        length = min(PIECE_BYTES, end - at, size - at)
        if _madvise()(place + at, length, _POPULATE_WRITE):
            break
        made += length
    return made


def _store() -> tuple[int, int]:
    """Address and bytes of the store as this process has it mapped; (0, 0) if it has none. Ray maps it with the first object."""
    found = _mapped()
    if not found[1]:
        import ray  # a run without Ray has this module too

        ray.put(bytes(_FIRST_OBJECT_BYTES))
        found = _mapped()
    return found


def _mapped() -> tuple[int, int]:
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    places = [line.split()[0].split("-") for line in lines if "/dev/shm/plasma" in line]
    sizes = [(int(first, 16), int(last, 16) - int(first, 16)) for first, last in places]
    return max(sizes, key=lambda one: one[1], default=(0, 0))


@cache
def _madvise() -> Any:
    call = ctypes.CDLL(None, use_errno=True).madvise
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return call

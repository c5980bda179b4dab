"""Name the stage of a replica's start for the display. vLLM reports none: it is read from the files that its processes map."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

PROCESS = "a process for the replica"
IMPORT = "import of vLLM"
ENGINE = "vLLM's engine process, which imports it again"
PREPARE = "weights and KV cache"
WEIGHTS = "weights"
CACHE = "KV cache and a first step"
GROUP = "stage"
"""Ray's concurrency group of `VllmActor.stage`: a thread of its own, which answers while the start blocks the actor's loop."""
EVERY_S = 2.0


class StartStage:
    """Follows one start, in the replica. `imported`: the replica's own process has vLLM."""

    def __init__(self) -> None:
        self.imported = self._loading = False

    def now(self) -> str:
        """The stage, in a few words."""
        if not self.imported:
            return IMPORT
        maps = "".join(_maps())
        if ".safetensors\n" in maps or ".bin\n" in maps:
            self._loading = True
            return WEIGHTS
        if self._loading:
            return CACHE
        return PREPARE if "/vllm/_C" in maps else ENGINE


def _maps() -> Iterator[str]:
    """The files in the memory of this process's children, as Linux lists them; nothing elsewhere."""
    for child in psutil.Process().children(recursive=True):
        with suppress(OSError):  # psutil's own reads smaps, which takes long and holds the process up
            yield Path(f"/proc/{child.pid}/maps").read_text()

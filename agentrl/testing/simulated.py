"""Simulated cards: their memory is kept in files, so that the scheduler can be tried on a machine without any.

A test takes memory with `hold`, which is given back when the block or the process ends, as a real card's is; what it takes with
`leak` stays, as after a process that a driver cannot end.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from agentrl.testing.cards import CardMemory

FOLDER = "AGENTRL_SIMULATED_CARDS"
"""The environment variable with the folder of files."""
TOTAL = 81_920
"""MiB of a simulated card."""
_numbers = itertools.count()


class SimulatedCards:
    """Cards 0 to `count` - 1, a folder each. Entries of processes that have ended are dropped at the start."""

    read_every = 0.05

    def __init__(self, folder: Path, count: int) -> None:
        self._folder, self._count = folder.resolve(), count
        for card in range(count):
            (self._folder / str(card)).mkdir(parents=True, exist_ok=True)
            for path, _, pid, started in self._entries(card):
                if _started(pid) != started:
                    path.unlink(missing_ok=True)
        self.env: Mapping[str, str] = {FOLDER: str(self._folder)}
        self.locks = self._folder

    def read(self) -> list[CardMemory]:
        """What is in use now, leaks included."""
        found = []
        for card in range(self._count):
            used = sum(mib for _, mib, *_ in self._entries(card))
            found.append(CardMemory(card, f"simulated-{card}", "simulated", used, TOTAL))
        return found

    def holders(self, card: int) -> list[str]:
        """Who holds the card's memory."""
        return [
            f"pid {pid}" + ("" if _started(pid) == started else ", which has ended") for _, _, pid, started in self._entries(card)
        ]

    def _entries(self, card: int) -> list[tuple[Path, int, int, str]]:
        found = []
        for path in sorted((self._folder / str(card)).glob("*.json")):
            try:
                entry = json.loads(path.read_text())
            except (FileNotFoundError, ValueError):  # it is being removed, or written
                continue
            if entry["leak"] or _started(entry["pid"]) == entry["started"]:
                found.append((path, entry["mib"], entry["pid"], entry["started"]))
        return found


@contextmanager
def hold(mib: int, card: int = 0) -> Iterator[None]:
    """Hold memory of a simulated card, in MiB, while the block lasts. `card`: which of those that this process may see.
    Raises RuntimeError without such a card."""
    path = _entry(mib, card, leak=False)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def leak(mib: int, card: int = 0) -> None:
    """Take memory of a simulated card that nothing gives back."""
    _entry(mib, card, leak=True)


def _entry(mib: int, card: int, leak: bool) -> Path:
    folder = os.environ.get(FOLDER)
    visible = [word for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word]
    if folder is None or card >= len(visible):
        raise RuntimeError(
            f"there is no simulated card {card} here: `agentrl test --simulate N` gives a file those that it declares"
        )
    pid = os.getpid()
    path = Path(folder) / visible[card] / f"{pid}.{next(_numbers)}.json"
    hidden = path.with_suffix(".new")
    hidden.write_text(json.dumps({"pid": pid, "started": _started(pid), "mib": mib, "leak": leak}))
    hidden.rename(path)
    return path


def _started(pid: int) -> str | None:
    """When a process began, in the kernel's ticks; None if it has ended. Its number alone may be another one's by now."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X") else fields[19].decode()

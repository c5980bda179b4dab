"""The cards of this machine: which there are, and how much of their memory is in use, as `nvidia-smi` says.

`nvidia-smi` comes with NVIDIA's driver wherever its library NVML does, so nothing has to be installed for it.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agentrl.errors import ResourceError

VISIBLE = "CUDA_VISIBLE_DEVICES"
_QUERY = ["--query-gpu=index,uuid,name,memory.used,memory.total", "--format=csv,noheader,nounits"]
_HOLDERS = ["--query-compute-apps=gpu_uuid,pid,process_name,used_memory", "--format=csv,noheader,nounits"]
_LONGEST = 30.0
"""Seconds that nvidia-smi may take."""


@dataclass(frozen=True)
class CardMemory:
    """One card, and its memory in MiB. `number`: as nvidia-smi counts, in the order of the PCI bus."""

    number: int
    uuid: str
    name: str
    used: int
    total: int


class CardReader(Protocol):
    """Where cards and their memory are read. `env`: what a file's process gets so that its cards are these. `locks`: the folder
    of the files that keep two schedulers apart. `read_every`: seconds between two readings."""

    env: Mapping[str, str]
    locks: Path
    read_every: float

    def read(self) -> list[CardMemory]:
        """All cards. Raises ResourceError if they cannot be read."""

    def holders(self, card: int) -> list[str]:
        """Who holds memory of a card, as far as it can be seen from here."""


class NvidiaSmi:
    """The cards that `nvidia-smi` lists."""

    read_every = 1.0

    def __init__(self) -> None:
        # CUDA itself counts the fastest card first, where cards differ.
        self.env: Mapping[str, str] = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        self.locks = Path(tempfile.gettempdir())
        self._uuids: dict[int, str] = {}

    def read(self) -> list[CardMemory]:
        """All cards. Raises ResourceError if nvidia-smi is missing, fails, or does not say what is in use."""
        found = [self._card(line) for line in self._ask(_QUERY)]
        self._uuids = {card.number: card.uuid for card in found}
        return found

    def holders(self, card: int) -> list[str]:
        """The processes with memory on a card; none are seen from inside most containers."""
        try:
            rows = [[part.strip() for part in line.split(",")] for line in self._ask(_HOLDERS)]
        except ResourceError:
            return []
        return [f"pid {row[1]} ({Path(row[2]).name})" for row in rows if len(row) >= 3 and row[0] == self._uuids.get(card)]

    def _ask(self, query: Sequence[str]) -> list[str]:
        program = shutil.which("nvidia-smi")
        if program is None:
            raise ResourceError("there is no nvidia-smi on the PATH, hence no card that agentrl test could use")
        try:
            done = subprocess.run([program, *query], capture_output=True, text=True, timeout=_LONGEST, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ResourceError(f"nvidia-smi did not answer: {error}") from error
        if done.returncode != 0:
            raise ResourceError(f"nvidia-smi failed with code {done.returncode}: {(done.stdout + done.stderr).strip()[:500]}")
        return [line for line in done.stdout.splitlines() if line.strip()]

    def _card(self, line: str) -> CardMemory:
        parts = [part.strip() for part in line.split(",")]
        if len(parts) != 5 or not all(parts[at].isdigit() for at in (0, 3, 4)):
            raise ResourceError(f"nvidia-smi does not say how much of a card's memory is in use: {line!r}")
        return CardMemory(int(parts[0]), parts[1], parts[2], int(parts[3]), int(parts[4]))


def chosen(cards: Sequence[CardMemory], asked: Sequence[int] | None, visible: str | None) -> list[int]:
    """The numbers of the cards to use: those that `asked` names (None: all) among those that `visible`, the value of
    CUDA_VISIBLE_DEVICES (None: not set), leaves.

    Raises ResourceError for a card that is not there or hidden, and for a part of one (MIG), whose memory is not known by itself.
    """
    seen = [card.number for card in cards] if visible is None else _seen(cards, visible)
    if asked is None:
        return seen
    for number in asked:
        if number not in [card.number for card in cards]:
            raise ResourceError(f"there is no card {number}; there are {', '.join(str(card.number) for card in cards) or 'none'}")
        if number not in seen:
            raise ResourceError(f"card {number} is hidden by {VISIBLE}={visible}")
    return list(dict.fromkeys(asked))


def _seen(cards: Sequence[CardMemory], visible: str) -> list[int]:
    """As CUDA reads the variable: numbers or the beginnings of UUIDs; the first that names no card hides the rest."""
    found = []
    for word in (part.strip() for part in visible.split(",")):
        if word.startswith("MIG-"):
            raise ResourceError(f"{VISIBLE}={visible} names a part of a card (MIG): agentrl test gives whole cards")
        match = [card.number for card in cards if word == str(card.number) or (len(word) > 4 and card.uuid.startswith(word))]
        if len(match) != 1:
            break
        found += match
    return found


class CardLocks:
    """Files that keep other schedulers of this machine off a card. The kernel drops a lock with the process that has it."""

    def __init__(self, folder: Path, uuids: Mapping[int, str]) -> None:
        self._paths = {card: folder / f"agentrl-card-{re.sub(r'[^A-Za-z0-9-]', '_', uuid)}.lock" for card, uuid in uuids.items()}
        self._open: dict[int, int] = {}

    def take(self, card: int) -> bool:
        """Lock a card; whether it worked."""
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        path = self._paths[card]
        try:
            file = os.open(path, flags)
        except FileNotFoundError:
            # Only now with O_CREAT: in a sticky folder the kernel refuses it for a file of another user.
            file = os.open(path, flags | os.O_CREAT, 0o444)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            return False
        self._open[card] = file
        return True

    def drop(self, card: int) -> None:
        """Unlock it, if it is locked."""
        if (file := self._open.pop(card, None)) is not None:
            os.close(file)

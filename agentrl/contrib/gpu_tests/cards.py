"""The cards of this machine: their memory, the ones to use, and those that are free."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.utils.errors import ResourceError

VISIBLE = "CUDA_VISIBLE_DEVICES"
ENV = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""Added to a file's environment: CUDA itself counts the fastest card first, where cards differ."""
IN_USE_MIB = 256
"""A card with more than this in use is not free; a driver alone takes a few MiB, a display 100 to 200."""
_CARDS = "--query-gpu=index,uuid,name,memory.used,memory.total"
_HOLDERS = "--query-compute-apps=gpu_uuid,pid,process_name,used_memory"
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


def _ask(query: str) -> list[list[str]]:
    """The table that nvidia-smi prints. Raises ResourceError."""
    program = shutil.which("nvidia-smi")
    if program is None:
        raise ResourceError("there is no nvidia-smi on the PATH, hence no card that agentrl test could use")
    command = [program, query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ResourceError(f"nvidia-smi did not answer: {error}") from error
    if done.returncode != 0:
        raise ResourceError(f"nvidia-smi failed with code {done.returncode}: {(done.stdout + done.stderr).strip()[:500]}")
    return [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def read_cards() -> list[CardMemory]:
    """All cards. Raises ResourceError if nvidia-smi is missing, fails, or does not say which are in use."""
    found = []
    for parts in _ask(_CARDS):
        if len(parts) != 5 or not all(parts[at].isdigit() for at in (0, 3, 4)):
            raise ResourceError(f"nvidia-smi does not say how much of a card's memory is in use: {', '.join(parts)!r}")
        found.append(CardMemory(int(parts[0]), parts[1], parts[2], int(parts[3]), int(parts[4])))
    return found


def choose_cards(cards: Sequence[CardMemory], asked: Sequence[int] | None, visible: str | None) -> list[CardMemory]:
    """The cards to use: those that `asked` names (None: all) among those that `visible`, the value of CUDA_VISIBLE_DEVICES
    (None: not set), leaves.

    Raises ResourceError for a card that is not there or hidden, and for a part of one (MIG), whose memory is not known by itself.
    """
    seen = list(cards) if visible is None else _visible_cards(cards, visible)
    for number in asked or ():
        if number not in [card.number for card in cards]:
            raise ResourceError(f"there is no card {number}; there are {', '.join(str(card.number) for card in cards) or 'none'}")
        if number not in [card.number for card in seen]:
            raise ResourceError(f"card {number} is hidden by {VISIBLE}={visible}")
    return [card for card in seen if asked is None or card.number in asked]


def _visible_cards(cards: Sequence[CardMemory], visible: str) -> list[CardMemory]:
    """As CUDA reads the variable: numbers or the beginnings of UUIDs; the first that names no card hides the rest."""
    found = []
    for word in (part.strip() for part in visible.split(",")):
        if word.startswith("MIG-"):
            raise ResourceError(f"{VISIBLE}={visible} names a part of a card (MIG): agentrl test gives whole cards")
        match = [card for card in cards if word == str(card.number) or (len(word) > 4 and card.uuid.startswith(word))]
        if len(match) != 1:
            break
        found += match
    return found


class CardPool:
    """The cards of a run. A card is free if no file has it, no other `agentrl test` holds its lock, and the last reading found
    at most `limit` MiB in use: so also a file's memory must be back before another file gets the card.

    `missing`: the reason why there is no card at all. `locks`: the folder of the files that keep two schedulers apart.
    """

    def __init__(
        self, cards: Sequence[CardMemory], limit: int = IN_USE_MIB, missing: str = "", locks: Path = Path(tempfile.gettempdir())
    ) -> None:
        self.cards, self.missing = {card.number: card for card in cards}, missing
        self._limit, self._folder = limit, locks
        self._used: dict[int, int] = {}
        self._locks: dict[int, int] = {}
        self._locked_out: set[int] = set()
        self._given: dict[int, str] = {}
        self._unread = ""

    def refresh(self) -> None:
        """Read the cards' memory. Without an answer no card is free."""
        for card in list(self._locked_out):
            if self._lock(card):
                self._unlock(card)
        try:
            self._used, self._unread = {card.number: card.used for card in read_cards()}, ""
        except ResourceError as error:
            self._used, self._unread = {}, str(error)

    def free(self) -> list[int]:
        """Cards that can be given now, as in the last reading."""
        busy = {*self._locks, *self._locked_out}
        return [card for card in self.cards if card not in busy and self._used.get(card, self._limit + 1) <= self._limit]

    def take(self, cards: Sequence[int], file: str) -> bool:
        """Give cards to a file; False if another scheduler of this machine has just taken one."""
        if not all(map(self._lock, cards)):
            self._release(cards)
            return False
        self._given |= dict.fromkeys(cards, file)
        return True

    def give_back(self, cards: Sequence[int]) -> None:
        """A file has ended: its cards are free once a new reading finds their memory back."""
        self._release(cards)
        for card in cards:
            self._used.pop(card, None)

    def _release(self, cards: Sequence[int]) -> None:
        for card in cards:
            if card in self._locks:
                self._unlock(card)

    def _lock(self, card: int) -> bool:
        """Lock a card; whether it worked. The kernel drops a lock with the process that has it."""
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        path = self._folder / f"agentrl-card-{re.sub(r'[^A-Za-z0-9-]', '_', self.cards[card].uuid)}.lock"
        try:
            file = os.open(path, flags)
        except FileNotFoundError:
            # Only now with O_CREAT: in a sticky folder the kernel refuses it for a file of another user.
            file = os.open(path, flags | os.O_CREAT, 0o444)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            self._locked_out.add(card)
            return False
        self._locked_out.discard(card)
        self._locks[card] = file
        return True

    def _unlock(self, card: int) -> None:
        os.close(self._locks.pop(card))

    def not_free(self) -> str:
        """The cards that others use, or whose memory a file has not given back, and their known state."""
        busy = [card for card in self.cards if card not in self._locks and card not in self.free()]
        return "; ".join(f"card {card}: {self._describe(card)}" for card in busy)

    def _describe(self, card: int) -> str:
        if card in self._locked_out:
            return "taken by another `agentrl test`"
        if card not in self._used:
            return self._unread or "not read yet"
        try:  # none are seen from inside most containers
            rows = [row for row in _ask(_HOLDERS) if len(row) >= 3 and row[0] == self.cards[card].uuid]
        except ResourceError:
            rows = []
        by = f", held by {' and '.join(f'pid {row[1]} ({Path(row[2]).name})' for row in rows)}" if rows else ""
        after = f", last given to {self._given[card]}" if card in self._given else ""
        return f"{self._used[card]} MiB in use (free: at most {self._limit}){by}{after}"

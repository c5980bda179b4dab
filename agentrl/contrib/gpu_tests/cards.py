"""The cards of this machine, simulated cards, and the pool of free ones."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agentrl.utils.errors import ResourceError

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
    """Reader of cards and their memory. `env`: what a file's process gets so that its cards are these. `locks`: the folder of
    the files that keep two schedulers apart. `read_every`: seconds between two readings."""

    env: Mapping[str, str]
    locks: Path
    read_every: float

    def read(self) -> list[CardMemory]:
        """All cards. Raises ResourceError if they cannot be read."""

    def holders(self, card: int) -> list[str]:
        """Processes that hold memory of a card, as far as they can be seen from here."""


class NvidiaSmi:
    """The cards that `nvidia-smi` lists."""

    read_every = 1.0

    def __init__(self) -> None:
        # CUDA itself counts the fastest card first, where cards differ.
        self.env: Mapping[str, str] = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        self.locks = Path(tempfile.gettempdir())
        self._uuids: dict[int, str] = {}

    def read(self) -> list[CardMemory]:
        """All cards. Raises ResourceError if nvidia-smi is missing, fails, or does not list the cards in use."""
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


def choose_cards(cards: Sequence[CardMemory], asked: Sequence[int] | None, visible: str | None) -> list[int]:
    """The numbers of the cards to use: those that `asked` names (None: all) among those that `visible`, the value of
    CUDA_VISIBLE_DEVICES (None: not set), leaves.

    Raises ResourceError for a card that is not there or hidden, and for a part of one (MIG), whose memory is not known by itself.
    """
    seen = [card.number for card in cards] if visible is None else _visible_cards(cards, visible)
    if asked is None:
        return seen
    for number in asked:
        if number not in [card.number for card in cards]:
            raise ResourceError(f"there is no card {number}; there are {', '.join(str(card.number) for card in cards) or 'none'}")
        if number not in seen:
            raise ResourceError(f"card {number} is hidden by {VISIBLE}={visible}")
    return list(dict.fromkeys(asked))


def _visible_cards(cards: Sequence[CardMemory], visible: str) -> list[int]:
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


# Simulated cards: their memory is kept in files, so that the scheduler can be tried on a machine without any.
#
# A test takes memory with `hold`, which is given back when the block or the process ends, as a real card's is; what it takes with
# `leak` stays, as after a process that a driver cannot end.

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
                if _start_time(pid) != started:
                    path.unlink(missing_ok=True)
        self.env: Mapping[str, str] = {FOLDER: str(self._folder)}
        self.locks = self._folder

    def read(self) -> list[CardMemory]:
        """Memory in use now, leaks included."""
        found = []
        for card in range(self._count):
            used = sum(mib for _, mib, *_ in self._entries(card))
            found.append(CardMemory(card, f"simulated-{card}", "simulated", used, TOTAL))
        return found

    def holders(self, card: int) -> list[str]:
        """Processes that hold the card's memory."""
        return [
            f"pid {pid}" + ("" if _start_time(pid) == started else ", which has ended")
            for _, _, pid, started in self._entries(card)
        ]

    def _entries(self, card: int) -> list[tuple[Path, int, int, str]]:
        found = []
        for path in sorted((self._folder / str(card)).glob("*.json")):
            try:
                entry = json.loads(path.read_text())
            except (FileNotFoundError, ValueError):  # it is being removed, or written
                continue
            if entry["leak"] or _start_time(entry["pid"]) == entry["started"]:
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
    hidden.write_text(json.dumps({"pid": pid, "started": _start_time(pid), "mib": mib, "leak": leak}))
    hidden.rename(path)
    return path


def _start_time(pid: int) -> str | None:
    """Start time of a process, in the kernel's ticks; None if it has ended. Its number alone may be another one's by now."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X") else fields[19].decode()


IN_USE_MIB = 256
"""A card with more than this in use is not free; a driver alone takes a few MiB, a display 100 to 200."""
SETTLE_S = 20.0
"""Seconds that a card's memory has to come back after a file has ended."""


class CardPool:
    """The cards `numbers` of a reader. Each is free, taken by a file, settling after one, in use by others, or out of service.

    `say` gets a line for everything that a user should know.
    """

    def __init__(
        self,
        reader: CardReader,
        numbers: Sequence[int],
        locks: CardLocks,
        say: Callable[[str], None],
        in_use_mib: int = IN_USE_MIB,
        settle_s: float = SETTLE_S,
        missing: str = "",
    ) -> None:
        self._reader, self._numbers, self._locks, self._say = reader, list(numbers), locks, say
        self._limit, self._settle_s = in_use_mib, settle_s
        self._taken: dict[int, str] = {}
        self._settling: dict[int, tuple[str, float]] = {}
        self._used: dict[int, int] = {}
        self._locked_out: set[int] = set()
        self._read_at: float | None = None
        self._unread: str | None = None
        self.missing = missing
        """Reason why there is no card at all; "" with one."""
        self.out: dict[int, str] = {}
        """Cards out of service, and why."""

    @property
    def in_service(self) -> list[int]:
        """All cards but those out of service."""
        return [card for card in self._numbers if card not in self.out]

    @property
    def settling(self) -> bool:
        """True if the memory of a card is still waited for."""
        return bool(self._settling)

    def refresh(self, now: float) -> None:
        """Read the cards' memory, if the last reading is old enough. Cards whose memory is back are free; those that had
        their time are out of service."""
        if not self._numbers or (self._read_at is not None and now - self._read_at < self._reader.read_every):
            return
        self._read_at = now
        for card in list(self._locked_out):
            if self._locks.take(card):
                self._locked_out.discard(card)
                self._locks.drop(card)
        try:
            self._used = {card.number: card.used for card in self._reader.read()}
            self._unread = None
        except ResourceError as error:
            if self._unread is None:
                self._say(f"no card can be given at present: {error}")
            self._used, self._unread = {}, str(error)
        for card, (who, since) in list(self._settling.items()):
            used = self._used.get(card)
            if used is not None and used <= self._limit:
                self._leave(card)
            elif now - since >= self._settle_s:
                self._retire(card, f"{now - since:.0f} s after {who} ended: {self._card_facts(card)}")

    def free(self) -> list[int]:
        """Cards that can be given now, as in the last reading."""
        busy = {*self._taken, *self._settling, *self._locked_out, *self.out}
        return [card for card in self._numbers if card not in busy and self._used.get(card, self._limit + 1) <= self._limit]

    def foreign(self) -> dict[int, str]:
        """Cards in service that others use, and how that is seen."""
        ours = {*self._taken, *self._settling, *self.out, *self.free()}
        return {card: self._card_facts(card) for card in self._numbers if card not in ours}

    def take(self, cards: Sequence[int], who: str) -> bool:
        """Give cards to a file; False if another scheduler of this machine has just taken one."""
        for card in cards:
            if not self._locks.take(card):
                self._locked_out.add(card)
                for other in cards:
                    self._locks.drop(other)
                return False
        self._taken |= dict.fromkeys(cards, who)
        return True

    def give_back(self, cards: Sequence[int], now: float) -> None:
        """A file has ended: its cards are free once their memory is back."""
        for card in cards:
            self._settling[card] = (self._taken.pop(card), now)
        self._read_at = None

    def retire(self, cards: Sequence[int], why: str) -> None:
        """Take a file's cards out of service."""
        for card in cards:
            self._taken.pop(card, None)
            self._retire(card, why)

    def _retire(self, card: int, why: str) -> None:
        self.out[card] = why
        self._leave(card)
        self._say(f"card {card} is out of service: {why}")

    def _leave(self, card: int) -> None:
        self._settling.pop(card, None)
        self._locks.drop(card)

    def _card_facts(self, card: int) -> str:
        """Facts about a card that is not free."""
        if card in self._locked_out:
            return "taken by another `agentrl test`"
        if card not in self._used:
            return self._unread or "not listed any more"
        holders = self._reader.holders(card)
        by = f", held by {' and '.join(holders)}" if holders else ""
        return f"{self._used[card]} MiB in use (free: at most {self._limit}){by}"

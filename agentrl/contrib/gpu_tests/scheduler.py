"""Cards of this machine, and a scheduler that starts test files as cards become free, largest first."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.contrib.gpu_tests.session import STOP_S, VISIBLE, Case, FileJob, FileResult, FileSession
from agentrl.run.display import clock
from agentrl.utils.errors import ResourceError
from agentrl.utils.event_loop import cancel_all

READ_S = 1.0
"""Seconds between readings of the cards' memory."""
HEARTBEAT_S = 30.0
"""Seconds between status lines."""


class Scheduler:
    """Runs `jobs` on the pool's cards, and files without cards on `slots`. `wait`: seconds to wait for busy cards while no file
    of this run uses cards. `say` gets lines for the terminal, `ended` gets each result."""

    def __init__(
        self,
        jobs: Sequence[FileJob],
        pool: CardPool,
        start: Callable[[FileJob, tuple[int, ...]], FileSession],
        *,
        slots: int,
        wait: float,
        say: Callable[[str], None],
        ended: Callable[[FileResult], None],
    ) -> None:
        self.pool, self._slots, self._wait = pool, slots, wait
        self._start, self._say, self._ended = start, say, ended
        # Most cards first, then by name.
        self.waiting = {job.file: job for job in sorted(jobs, key=lambda job: (-job.gpus, job.file))}
        self.running: dict[asyncio.Task[FileResult], tuple[FileSession, float]] = {}
        """Sessions with their start times."""
        self.interrupted = False
        self.results: list[FileResult] = []
        self._blocked_since: float | None = None

    def stop(self) -> None:
        """Handle Ctrl-C: the first is passed to running files and starts no more; the second kills everything."""
        if not self.interrupted:
            self.interrupted = True
            self._say(f"stopping: {STOP_S:.0f} s to end (Ctrl-C again: none); {len(self.waiting)} files will not be run")
            for job in list(self.waiting.values()):
                self._not_run(job, "interrupted (Ctrl-C) before its file began")
        for session, _ in self.running.values():
            session.stop("interrupted")

    async def run(self) -> list[FileResult]:
        """Run all files and return their results in order of completion."""
        now = asyncio.get_running_loop().time
        said_at = now()
        try:
            while self.waiting or self.running:
                self._start_files(now())
                if self.running and now() - said_at >= HEARTBEAT_S:
                    self._say(self.state(now()))
                    said_at = now()
                if self.running:
                    await asyncio.wait(self.running, timeout=READ_S, return_when=asyncio.FIRST_COMPLETED)
                elif self.waiting:
                    await asyncio.sleep(READ_S)
                for task in [task for task in self.running if task.done()]:
                    session, _ = self.running.pop(task)
                    if session.why != "stuck":  # the cards of a stuck session stay taken
                        self.pool.give_back(session.cards)
                    self.results.append(task.result())
                    self._ended(task.result())
        finally:
            await cancel_all(self.running)  # after an error in this method
        return self.results

    def _start_files(self, now: float) -> None:
        """Start the files that can start now, and report those that never can."""
        if any(job.gpus for job in self.waiting.values()):
            self.pool.refresh()
        for job in list(self.waiting.values()):
            if job.gpus > len(self.pool.cards):
                there = f"{_needs(job)}, and {len(self.pool.cards) or 'none'} can be used"
                self._not_run(job, f"{there}: {self.pool.missing}" if self.pool.missing else there)
            elif not job.gpus:
                if sum(not session.cards for session, _ in self.running.values()) < self._slots:
                    self._begin(job, (), now)
            elif len(free := self.pool.free()) >= job.gpus and self.pool.take(cards := tuple(free[: job.gpus]), job.file):
                self._begin(job, cards, now)
        # Files wait too long only while no file of this run uses cards, since its end would free some.
        blocked = [job for job in self.waiting.values() if job.gpus]
        if not blocked or any(session.cards for session, _ in self.running.values()):
            self._blocked_since = None
        elif self._blocked_since is None:
            self._blocked_since = now
        elif now - self._blocked_since >= self._wait:
            free_now = f"{len(self.pool.free())} free after {self._wait:.0f} s; {self.pool.not_free()}"
            for job in blocked:
                self._not_run(job, f"{_needs(job)}, {free_now}")

    def _begin(self, job: FileJob, cards: tuple[int, ...], now: float) -> None:
        session = self._start(job, cards)
        self.running[asyncio.create_task(session.result())] = session, now
        del self.waiting[job.file]
        self._say(f"start   {job.file}{on_cards(cards)}")

    def _not_run(self, job: FileJob, reason: str) -> None:
        del self.waiting[job.file]
        cases = tuple(Case(name, "not run", reason=reason) for name in job.tests)
        result = FileResult(job.file, cases, job.gpus, problem=None if self.interrupted else f"not run: {reason}")
        self.results.append(result)
        self._ended(result)

    def state(self, now: float) -> str:
        """Return a status line on running and waiting files."""
        running = []
        for session, began in self.running.values():
            test = f" ({session.current})" if session.current else ""
            running.append(f"{session.job.file}{on_cards(session.cards)} for {clock(now - began)}{test}")
        waiting = f"; waiting: {len(self.waiting)}" if self.waiting else ""
        return f"running: {', '.join(running)}{waiting}"


def _needs(job: FileJob) -> str:
    return f"needs {job.gpus} card{'s' if job.gpus > 1 else ''}"


def on_cards(cards: Sequence[int]) -> str:
    """Format cards, for example " on cards 0,1"."""
    return f" on card{'s' if len(cards) > 1 else ''} {','.join(map(str, cards))}" if cards else ""


# Cards


IN_USE_MIB = 256
"""Memory in use above which a card is busy; a driver alone takes a few MiB, a display 100 to 200."""
_CARDS = "--query-gpu=index,uuid,memory.used"
_HOLDERS = "--query-compute-apps=gpu_uuid,pid,process_name,used_memory"
_LONGEST = 30.0
"""Timeout of nvidia-smi in seconds."""


@dataclass(frozen=True)
class CardMemory:
    """A card and its memory in use, in MiB. `number`: index in nvidia-smi, in the order of the PCI bus."""

    number: int
    uuid: str
    used: int


def _ask(query: str) -> list[list[str]]:
    """Run a query of nvidia-smi and return its table. Raises ResourceError if that fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        raise ResourceError("nvidia-smi is not on the PATH, so agentrl test cannot use any card")
    command = [program, query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ResourceError(f"nvidia-smi did not answer: {error}") from error
    if done.returncode != 0:
        raise ResourceError(f"nvidia-smi failed with code {done.returncode}: {(done.stdout + done.stderr).strip()[:500]}")
    return [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def read_cards() -> list[CardMemory]:
    """Read all cards. Raises ResourceError if nvidia-smi is missing, fails, or does not report memory in use."""
    found = []
    for parts in _ask(_CARDS):
        if len(parts) != 3 or not (parts[0].isdigit() and parts[2].isdigit()):
            raise ResourceError(f"nvidia-smi does not say how much of a card's memory is in use: {', '.join(parts)!r}")
        found.append(CardMemory(int(parts[0]), parts[1], int(parts[2])))
    return found


def choose_cards(cards: Sequence[CardMemory], asked: Sequence[int] | None, visible: str | None) -> list[CardMemory]:
    """Return the cards that `asked` names (None: all) among those in `visible`, the value of CUDA_VISIBLE_DEVICES (None: not
    set).

    Raises ResourceError for a missing or hidden card, and for a MIG instance, whose memory nvidia-smi does not list separately.
    """
    # As in CUDA: numbers or prefixes of UUIDs; the first entry that names no card hides the rest.
    seen = list(cards) if visible is None else []
    for word in () if visible is None else map(str.strip, visible.split(",")):
        if word.startswith("MIG-"):
            raise ResourceError(f"{VISIBLE}={visible} names a part of a card (MIG): agentrl test gives whole cards")
        match = [card for card in cards if word == str(card.number) or (len(word) > 4 and card.uuid.startswith(word))]
        if len(match) != 1:
            break
        seen += match
    for number in asked or ():
        if number not in [card.number for card in cards]:
            raise ResourceError(f"there is no card {number}; there are {', '.join(str(card.number) for card in cards) or 'none'}")
        if number not in [card.number for card in seen]:
            raise ResourceError(f"card {number} is hidden by {VISIBLE}={visible}")
    return [card for card in seen if asked is None or card.number in asked]


class CardPool:
    """Cards of a run. A card is free if no file has it, no other `agentrl test` holds its lock, and the last reading found at
    most `limit` MiB in use; so the memory of one file must be released before the next gets the card.

    `missing`: reason why there is no card at all. `locks`: folder of the lock files that separate two schedulers.
    """

    def __init__(
        self, cards: Sequence[CardMemory], limit: int = IN_USE_MIB, missing: str = "", locks: Path = Path(tempfile.gettempdir())
    ) -> None:
        self.cards, self.missing = {card.number: card for card in cards}, missing
        self._limit, self._folder = limit, locks
        self._locks: dict[int, int] = {}  # open lock files of the cards in use by files
        self._busy = dict.fromkeys(self.cards, "not read yet")  # reasons why other cards are not free
        self._given: dict[int, str] = {}

    def refresh(self) -> None:
        """Read the cards' memory and locks. If nvidia-smi fails, no card is free."""
        try:
            used = {card.number: card.used for card in read_cards()}
        except ResourceError as error:
            self._busy = dict.fromkeys(self.cards.keys() - self._locks.keys(), str(error))
            return
        own = self.cards.keys() - self._locks.keys()
        self._busy = dict.fromkeys(own - used.keys(), "nvidia-smi does not list it")  # for example fallen off the bus
        for card in own & used.keys():
            if used[card] > self._limit:
                self._busy[card] = f"{used[card]} MiB in use (free: at most {self._limit})"
            elif self._lock(card):
                os.close(self._locks.pop(card))

    def free(self) -> list[int]:
        """Return the cards that were free in the last reading."""
        return [card for card in self.cards if card not in self._locks and card not in self._busy]

    def take(self, cards: Sequence[int], file: str) -> bool:
        """Assign cards to a file; return False if another scheduler has just taken one."""
        if not all(map(self._lock, cards)):
            self._release(cards)
            return False
        self._given |= dict.fromkeys(cards, file)
        return True

    def give_back(self, cards: Sequence[int]) -> None:
        """Release the cards of an ended file; they are free once a reading finds their memory released."""
        self._release(cards)
        self._busy |= dict.fromkeys(cards, "not read yet")

    def _release(self, cards: Sequence[int]) -> None:
        for card in cards:
            if card in self._locks:
                os.close(self._locks.pop(card))

    def _lock(self, card: int) -> bool:
        """Lock a card and return True on success. The kernel releases the lock when this process ends."""
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        path = self._folder / f"agentrl-card-{re.sub(r'[^A-Za-z0-9-]', '_', self.cards[card].uuid)}.lock"
        try:
            file = os.open(path, flags)
        except FileNotFoundError:
            # O_CREAT only now: in a sticky folder the kernel refuses it for an existing file of another user.
            file = os.open(path, flags | os.O_CREAT, 0o444)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            self._busy[card] = "taken by another `agentrl test`"
            return False
        self._locks[card] = file
        return True

    def not_free(self) -> str:
        """Describe the cards that are busy outside this run, or whose memory a file did not release."""
        try:  # most containers hide other processes
            rows = [row for row in _ask(_HOLDERS) if len(row) >= 3]
        except ResourceError:
            rows = []
        said = []
        for card, why in sorted(self._busy.items()):
            by = " and ".join(f"pid {row[1]} ({Path(row[2]).name})" for row in rows if row[0] == self.cards[card].uuid)
            after = f", last given to {self._given[card]}" if card in self._given else ""
            said.append(f"card {card}: {why}{f', held by {by}' if by else ''}{after}")
        return "; ".join(said)

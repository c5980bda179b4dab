"""Which cards are free: not ours, not in use by others, and with their memory back since we had them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agentrl.errors import ResourceError
from agentrl.testing.cards import CardLocks, CardReader

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
        """Why there is no card at all, if there is none."""
        self.out: dict[int, str] = {}
        """Cards out of service, and why."""

    @property
    def in_service(self) -> list[int]:
        """All cards but those out of service."""
        return [card for card in self._numbers if card not in self.out]

    @property
    def settling(self) -> bool:
        """Whether the memory of a card is still waited for."""
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
                self._retire(card, f"{now - since:.0f} s after {who} ended: {self._told(card)}")

    def free(self) -> list[int]:
        """Cards that can be given now, as of the last reading."""
        busy = {*self._taken, *self._settling, *self._locked_out, *self.out}
        return [card for card in self._numbers if card not in busy and self._used.get(card, self._limit + 1) <= self._limit]

    def foreign(self) -> dict[int, str]:
        """Cards in service that others use, and how that is seen."""
        ours = {*self._taken, *self._settling, *self.out, *self.free()}
        return {card: self._told(card) for card in self._numbers if card not in ours}

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

    def _told(self, card: int) -> str:
        """What is known of a card that is not free."""
        if card in self._locked_out:
            return "taken by another `agentrl test`"
        if card not in self._used:
            return self._unread or "not listed any more"
        holders = self._reader.holders(card)
        by = f", held by {' and '.join(holders)}" if holders else ""
        return f"{self._used[card]} MiB in use (free: at most {self._limit}){by}"

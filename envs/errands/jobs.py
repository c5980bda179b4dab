"""Jobs in English: their wordings, their gold calls, and what they leave in the state."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()  # noqa: SIM905
RESTAURANTS = """Aurora Basilico Cantina Darbar Estrella Fjord Gingko Harbour Indigo Juniper Kumo Lotus Mirador Nonna
Olive Pergola Quince Rosmarin Saffron Tamarind Umami Verdura Willow Zest""".split()  # noqa: SIM905
GOODS = """lamps chairs mugs pens towels plates candles batteries folders brushes cushions spoons baskets clocks mirrors
bottles blankets notebooks hammers ladders stamps buckets scissors kettles magnets ribbons shelves sponges tiles trays
umbrellas vases whistles envelopes bulbs cables curtains dice erasers forks""".split()  # noqa: SIM905
FIRST = """Ada Ben Cleo Dan Eva Finn Gail Hugo Ines Jon Kay Leo Mia Ned Olga Pia Quin Rosa Sam Tara""".split()  # noqa: SIM905
LAST = """Adler Boyd Cruz Doyle Ekman Frost Grant Hale Ito Jansen Koch Lund Moss Nolan Orr Pike""".split()  # noqa: SIM905
NEWS = tuple(
    f"{thing} {end}"
    for thing in ("The meeting", "The lunch", "The tour", "The call", "The rehearsal", "The exam", "The visit", "The repair")
    for end in ("is at noon.", "moves to Friday.", "is cancelled.", "starts at nine.", "takes two hours.", "is in room 12.")
)
CHORES = tuple(
    f"{verb} {thing}"
    for verb in ("check", "clean", "collect", "pay for", "pack", "return")
    for thing in ("the bike", "the books", "the parcel", "the tickets", "the suit", "the tent", "the keys")
)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of job: its wordings, and its gold calls from the values that fill these."""

    wordings: tuple[str, ...]
    draw: Callable[[random.Random], dict[str, Any]]
    calls: Callable[[dict[str, Any]], list[tuple[str, dict[str, Any]]]]


@dataclass(frozen=True, slots=True)
class Job:
    """`values` fill a wording of the kind."""

    kind: str
    values: dict[str, Any]

    def text(self, rng: random.Random) -> str:
        return rng.choice(KINDS[self.kind].wordings).format(**self.values)

    def calls(self) -> list[dict[str, Any]]:
        return [{"name": name, "arguments": arguments} for name, arguments in KINDS[self.kind].calls(self.values)]


def order_number(item: str, quantity: int) -> int:
    """Four digits that the answer of `order` alone shows."""
    return 1000 + crc32(f"{item}/{quantity}".encode()) % 9000


def _email(name: str) -> str:
    return name.lower().replace(" ", ".") + f"@{('delphi', 'orbit', 'tandem')[crc32(name.encode()) % 3]}.example"


def _name(rng: random.Random) -> str:
    return f"{rng.choice(FIRST)} {rng.choice(LAST)}"


KINDS = {
    "table": Kind(
        (
            "Book a table for {guests} at {restaurant} on {day}.",
            "Reserve a table at {restaurant} for {guests} people on {day}.",
            "On {day} we are {guests} for dinner at {restaurant}; please book.",
            "Get us a table at {restaurant}, {day}, {guests} guests.",
        ),
        lambda rng: {"restaurant": rng.choice(RESTAURANTS), "day": rng.choice(DAYS), "guests": rng.randint(2, 9)},
        lambda v: [("book_table", v)],
    ),
    "order": Kind(
        (
            "Order {quantity} {item}.",
            "Buy {quantity} {item}.",
            "We need {quantity} more {item}.",
            "Please get {quantity} {item}.",
        ),
        lambda rng: {"item": rng.choice(GOODS), "quantity": rng.randint(2, 30)},
        lambda v: [("order", v)],
    ),
    "cancel": Kind(
        ("Cancel the {item}.", "We have enough {item} after all: cancel that order.", "Please cancel the order of {item}."),
        lambda rng: {},  # made from an order
        lambda v: [("cancel_order", {"number": order_number(**v)})],
    ),
    "note": Kind(
        ('Email {to}: "{text}"', 'Send "{text}" to {to}.', 'Let {to} know: "{text}"', 'Write "{text}" to {to}.'),
        lambda rng: {"to": _email(_name(rng)), "text": rng.choice(NEWS)},
        lambda v: [("send_email", v)],
    ),
    "mail": Kind(
        ('Email {name}: "{text}"', 'Send "{text}" to {name}.', 'Let {name} know: "{text}"', 'Write "{text}" to {name}.'),
        lambda rng: {"name": _name(rng), "text": rng.choice(NEWS)},
        lambda v: [("find_email", {"name": v["name"]}), ("send_email", {"to": _email(v["name"]), "text": v["text"]})],
    ),
    "reminder": Kind(
        (
            "Remind me on {day} to {text}.",
            "Set a reminder for {day}: {text}.",
            "I have to {text} on {day}; remind me.",
            "{day}: {text}. Set a reminder.",
        ),
        lambda rng: {"day": rng.choice(DAYS), "text": rng.choice(CHORES)},
        lambda v: [("remind", v)],
    ),
}
SINGLE = ("table", "order", "note", "reminder")


def draw_jobs(rng: random.Random, calls: int, lookups: float, cancels: float) -> list[Job]:
    """Jobs of `calls` calls in all, none twice, no item or order number twice; a cancellation comes anywhere after its order."""
    jobs: list[Job] = []
    cancelled: list[Job] = []
    used: set[str] = set()
    left = calls
    while left:
        chance = rng.random() if left > 1 else 1.0
        kind = "mail" if chance < lookups else "order" if chance < lookups + cancels else rng.choice(SINGLE)
        values = KINDS[kind].draw(rng)
        marks = {values["item"], str(order_number(**values))} if kind == "order" else {str(values)}
        if marks & used:
            continue
        used |= marks
        jobs.append(Job(kind, values))
        left -= 2 if chance < lookups + cancels else 1
        if lookups <= chance < lookups + cancels:
            cancelled.append(jobs[-1])
    rng.shuffle(jobs)
    for order in cancelled:
        jobs.insert(rng.randint(jobs.index(order) + 1, len(jobs)), Job("cancel", order.values))
    return jobs


def final_state(jobs: Sequence[Job]) -> dict[str, list[list[Any]]]:
    """What is booked, ordered, cancelled, sent and set once all jobs are done."""
    cancelled = [job.values for job in jobs if job.kind == "cancel"]
    done: dict[str, list[list[Any]]] = {name: [] for name in LISTS.values()}
    for job in jobs:
        for call in job.calls():
            if call["name"] in LISTS and job.values not in (cancelled if job.kind == "order" else []):
                done[LISTS[call["name"]]].append(list(call["arguments"].values()))
    done["cancelled"] = [list(values.values()) for values in cancelled]
    return in_order(done)


LISTS = {"book_table": "tables", "order": "orders", "cancel_order": "cancelled", "send_email": "mails", "remind": "reminders"}


def in_order(done: dict[str, list[list[Any]]]) -> dict[str, list[list[Any]]]:
    """The lists sorted, so that the order of the calls does not count."""
    return {name: sorted(entries, key=str) for name, entries in done.items()}

"""A move: one thing that the user may ask for, with the calls that do it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Json = Any
Call = tuple[str, dict[str, Json]]


@dataclass(frozen=True, slots=True)
class Slot:
    """A detail that can be omitted from a request: the request without it, a question for it, the words by
    which the user recognizes such a question, and the user's reply."""

    text: str
    ask: str
    words: tuple[str, ...]
    reply: str


@dataclass(frozen=True, slots=True)
class Move:
    """`text`: the full request. `calls`: the calls that do it, including lookups. `answer`: the requested value.
    `vital`: the tool without which it is impossible, if there is one."""

    text: str
    calls: tuple[Call, ...]
    answer: str | None = None
    slot: Slot | None = None
    vital: str | None = None


Skill = Callable[[dict[str, Json], random.Random], Move | None]


def pick_contact(world: Mapping[str, Json], rng: random.Random, other: str = "") -> tuple[str, Json] | None:
    """(address, record) of a contact whose name is unique."""
    names = Counter(row["name"] for row in world["contacts"].values())
    found = [(email, row) for email, row in world["contacts"].items() if names[row["name"]] == 1 and email != other]
    return rng.choice(found) if found else None


def pick_event(world: Mapping[str, Json], rng: random.Random) -> tuple[str, Json] | None:
    """(id, record) of one of the initial events."""
    # Ids of events created by the user's requests are longer (see Apps._new_id).
    found = [(key, row) for key, row in world["events"].items() if len(key) < 5]
    return rng.choice(found) if found else None


def pick_mail(world: Mapping[str, Json], rng: random.Random) -> tuple[str, Json] | None:
    """(id, record) of a received mail."""
    found = [(key, row) for key, row in world["mail"].items() if row["folder"] != "sent"]
    return rng.choice(found) if found else None


def pick_file(world: Mapping[str, Json], rng: random.Random) -> tuple[str, str] | None:
    """(path, name) of a file whose name is unique."""
    names = Counter(path.rpartition("/")[2] for path in world["files"])
    found = [(path, name) for path in world["files"] if names[name := path.rpartition("/")[2]] == 1]
    return rng.choice(found) if found else None


def sender_name(row: Mapping[str, Json]) -> str:
    """The name in "Name <address>"."""
    return str(row["sender"]).partition(" <")[0]

"""Small worlds of three tables (who, what, and events), and databases filled from a seed."""

from __future__ import annotations

import random
import sqlite3
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Table:
    """A table's name and columns. The first column is its key."""

    name: str
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class World:
    """Who (id, label, group, year), what (id, label, kind, number), events (id, who, what, amount, day)."""

    name: str
    who: Table
    what: Table
    event: Table
    groups: tuple[str, ...]
    kinds: tuple[str, ...]
    labels: tuple[str, ...]
    number: tuple[int, int]
    amount: tuple[int, int]


def _world(name: str, who: str, what: str, event: str, groups: str, kinds: str, labels: str,
           number: tuple[int, int], amount: tuple[int, int]) -> World:  # fmt: skip
    def table(text: str) -> Table:
        first, *rest = text.split()
        return Table(first, tuple(rest))

    return World(
        name,
        table(who),
        table(what),
        table(event),
        tuple(groups.split()),
        tuple(kinds.split()),
        tuple(labels.split()),
        number,
        amount,
    )


WORLDS: dict[str, World] = {
    world.name: world
    for world in (
        _world(
            "shop",
            "customers id name city joined",
            "products id title category price",
            "orders id customer_id product_id quantity day",
            "Lyon Bergen Porto Graz Turku Leeds",
            "tea tools toys paper lamps",
            "Alder Birch Cedar Dawn Ember Flint Grove Haze Iris Juniper",
            (3, 120),
            (1, 12),
        ),
        _world(
            "library",
            "members id name town since",
            "books id title genre pages",
            "loans id member_id book_id days day",
            "Orford Penn Quay Ruthin Selby Thame",
            "crime poetry travel science history",
            "River Stone Winter Harbor Garden Mirror Signal Letter Island Tower",
            (60, 900),
            (1, 40),
        ),
        _world(
            "clinic",
            "patients id name district born",
            "treatments id title ward fee",
            "visits id patient_id treatment_id minutes day",
            "north south east west center harbor",
            "eyes heart skin teeth bones",
            "Check Scan Wash Graft Trace Lift Probe Mend Cast Dose",
            (20, 400),
            (5, 90),
        ),
        _world(
            "fleet",
            "drivers id name depot hired",
            "vehicles id plate type seats",
            "trips id driver_id vehicle_id distance day",
            "Aster Briar Clover Daisy Elder Fern",
            "bus van truck tram taxi",
            "KX LM NP QR ST UV WA YB ZC HD",
            (2, 80),
            (3, 400),
        ),
        _world(
            "school",
            "students id name house entered",
            "courses id title subject credits",
            "marks id student_id course_id points day",
            "Hawk Otter Lynx Raven Badger Heron",
            "maths music biology art latin",
            "Basics Methods Seminar Studio Project Workshop Survey Reading Theory Practice",
            (1, 30),
            (1, 100),
        ),
    )
}
_FIRST = """Ada Ben Cleo Dan Eva Finn Gail Hugo Ines Jon Kay Leo Mia Ned Olga Pia Quin Rosa Sam Tara""".split()  # noqa: SIM905
_LAST = """Adler Boyd Cruz Doyle Ekman Frost Grant Hale Ito Jansen
Koch Lund Moss Nolan Orr Pike Reyes Stone""".split()  # noqa: SIM905


def schema(world: World) -> str:
    """The CREATE statements as the policy reads them."""
    event = world.event.columns
    keys = {event[1]: f" REFERENCES {world.who.name}", event[2]: f" REFERENCES {world.what.name}"}
    return "\n".join(
        [
            _create(world.who, ("INTEGER PRIMARY KEY", "TEXT UNIQUE", "TEXT", "INTEGER"), {}),
            _create(world.what, ("INTEGER PRIMARY KEY", "TEXT UNIQUE", "TEXT", "INTEGER"), {}),
            _create(world.event, ("INTEGER PRIMARY KEY", "INTEGER", "INTEGER", "INTEGER", "TEXT"), keys),
        ]
    )


def _create(table: Table, types: tuple[str, ...], keys: dict[str, str]) -> str:
    columns = [f"{name} {kind}{keys.get(name, '')}" for name, kind in zip(table.columns, types, strict=True)]
    return f"CREATE TABLE {table.name} ({', '.join(columns)});"


@lru_cache(maxsize=256)
def database(name: str, seed: int, rows: int) -> bytes:
    """A serialized SQLite database of a world with `rows` events; the same arguments give the same bytes.

    It has one `who` row per eight events and one `what` row per twelve; about a tenth of each has no event.
    """
    world, rng = WORLDS[name], random.Random(f"{name}/{seed}/{rows}")
    connection = sqlite3.connect(":memory:")
    connection.executescript(schema(world))
    people = rng.sample([f"{first} {last}" for first in _FIRST for last in _LAST], min(max(6, rows // 8), 300))
    things = _titles(world, rng, max(6, rows // 12))
    whos = [(i, person, rng.choice(world.groups), rng.randint(1990, 2024)) for i, person in enumerate(people, 1)]
    whats = [(i, thing, rng.choice(world.kinds), rng.randint(*world.number)) for i, thing in enumerate(things, 1)]
    active, used = _most(rng, whos), _most(rng, whats)
    events = [(i, rng.choice(active)[0], rng.choice(used)[0], rng.randint(*world.amount), _day(rng)) for i in range(1, rows + 1)]
    for table, content in ((world.who, whos), (world.what, whats), (world.event, events)):
        marks = ", ".join("?" * len(table.columns))
        connection.executemany(f"INSERT INTO {table.name} VALUES ({marks})", content)
    connection.commit()
    image = connection.serialize()
    connection.close()
    return image


def _titles(world: World, rng: random.Random, count: int) -> list[str]:
    """Distinct titles of a word and a number."""
    numbered = [f"{label} {number}" for label in world.labels for number in range(10, 60)]
    return rng.sample(numbered, count)


def _most(rng: random.Random, rows: list[tuple[int, str, str, int]]) -> list[tuple[int, str, str, int]]:
    return rng.sample(rows, max(3, len(rows) * 9 // 10))


def _day(rng: random.Random) -> str:
    return f"{rng.choice((2024, 2025))}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"

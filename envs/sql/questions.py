"""Questions over a world on five levels, each with the SQL that answers it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from .worlds import World


@dataclass(frozen=True, slots=True)
class Question:
    """`ordered`: the question asks for an order of the rows, so that it matters."""

    text: str
    sql: str
    ordered: bool = False


Form = Callable[[World, random.Random], Question]


@dataclass(frozen=True, slots=True)
class _Words:
    """Short names for a world's tables and columns, for writing SQL."""

    who: str
    label: str
    group: str
    year: str
    what: str
    title: str
    kind: str
    number: str
    event: str
    who_id: str
    what_id: str
    amount: str
    day: str


def _words(world: World) -> _Words:
    who, what, event = world.who, world.what, world.event
    _, label, group, year = who.columns
    _, title, kind, number = what.columns
    _, who_id, what_id, amount, day = event.columns
    return _Words(who.name, label, group, year, what.name, title, kind, number, event.name, who_id, what_id, amount, day)


def _both(w: _Words) -> str:
    return f"{w.event} e JOIN {w.who} a ON a.id = e.{w.who_id} JOIN {w.what} b ON b.id = e.{w.what_id}"


# -- level 1: one table ------------------------------------------------------------------------------


def count_group(world: World, rng: random.Random) -> Question:
    w, group, year = _words(world), rng.choice(world.groups), rng.randint(1995, 2020)
    return Question(
        f"How many {w.who} with the {w.group} {group} have a {w.year} of {year} or later?",
        f"SELECT COUNT(*) FROM {w.who} WHERE {w.group} = '{group}' AND {w.year} >= {year}",
    )


def list_titles(world: World, rng: random.Random) -> Question:
    w, kind = _words(world), rng.choice(world.kinds)
    low, high = world.number
    limit = rng.randint(low, (low + high) // 2)
    return Question(
        f"Which {w.what} of the {w.kind} {kind} have {w.number} above {limit}? Give the {w.title}.",
        f"SELECT {w.title} FROM {w.what} WHERE {w.kind} = '{kind}' AND {w.number} > {limit}",
    )


def extreme(world: World, rng: random.Random) -> Question:
    w, day = _words(world), f"{rng.choice((2024, 2025))}-{rng.randint(1, 12):02}"
    word, function = rng.choice((("largest", "MAX"), ("smallest", "MIN"), ("average", "AVG"), ("total", "SUM")))
    return Question(
        f"What is the {word} {w.amount} among the {w.event} of the month {day}?",
        f"SELECT {function}({w.amount}) FROM {w.event} WHERE {w.day} LIKE '{day}-%'",
    )


# -- level 2: groups and order -----------------------------------------------------------------------


def group_counts(world: World, rng: random.Random) -> Question:
    w, limit = _words(world), rng.randint(*world.number)
    return Question(
        f"For each {w.kind} of {w.what}, how many {w.what} have {w.number} of at most {limit}? Leave out a "
        f"{w.kind} that has none. Columns: {w.kind}, count.",
        f"SELECT {w.kind}, COUNT(*) FROM {w.what} WHERE {w.number} <= {limit} GROUP BY {w.kind}",
    )


def earliest(world: World, rng: random.Random) -> Question:
    w, count, group = _words(world), rng.randint(2, 4), rng.choice(world.groups)
    way, word = rng.choice((("ASC", "lowest"), ("DESC", "highest")))
    return Question(
        f"Give the {count} {w.who} of the {w.group} {group} with the {word} {w.year}, {word} first (equal ones by "
        f"{w.label}). Columns: {w.label}, {w.year}.",
        f"SELECT {w.label}, {w.year} FROM {w.who} WHERE {w.group} = '{group}' ORDER BY {w.year} {way}, {w.label} LIMIT {count}",
        ordered=True,
    )


def busy_years(world: World, rng: random.Random) -> Question:
    w, least = _words(world), rng.randint(2, 4)
    year = rng.randint(1991, 2015)
    return Question(
        f"Which {w.group} values have at least {least} {w.who} with a {w.year} after {year}? Columns: {w.group}, their count.",
        f"SELECT {w.group}, COUNT(*) FROM {w.who} WHERE {w.year} > {year} GROUP BY {w.group} HAVING COUNT(*) >= {least}",
    )


# -- level 3: two tables -----------------------------------------------------------------------------


def group_total(world: World, rng: random.Random) -> Question:
    w, group = _words(world), rng.choice(world.groups)
    day = f"{rng.choice((2024, 2025))}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
    return Question(
        f"What is the total {w.amount} of the {w.event} of {w.who} with the {w.group} {group} from {day} on?",
        f"SELECT SUM(e.{w.amount}) FROM {w.event} e JOIN {w.who} a ON a.id = e.{w.who_id} "
        f"WHERE a.{w.group} = '{group}' AND e.{w.day} >= '{day}'",
    )


def who_did(world: World, rng: random.Random) -> Question:
    w = _words(world)
    low, high = world.amount
    limit = rng.randint((low + 2 * high) // 3, high - 1)
    return Question(
        f"Which {w.who} have at least one of the {w.event} with {w.amount} above {limit}? Give each {w.label} once.",
        f"SELECT DISTINCT a.{w.label} FROM {w.who} a JOIN {w.event} e ON a.id = e.{w.who_id} WHERE e.{w.amount} > {limit}",
    )


def per_kind(world: World, rng: random.Random) -> Question:
    w, limit = _words(world), rng.randint(*world.number)
    return Question(
        f"For each {w.kind}, how many {w.event} are of {w.what} with {w.number} of at least {limit}? Leave out a "
        f"{w.kind} with none. Columns: {w.kind}, count.",
        f"SELECT b.{w.kind}, COUNT(*) FROM {w.event} e JOIN {w.what} b ON b.id = e.{w.what_id} "
        f"WHERE b.{w.number} >= {limit} GROUP BY b.{w.kind}",
    )


# -- level 4: three tables ---------------------------------------------------------------------------


def weighted(world: World, rng: random.Random) -> Question:
    w, kind = _words(world), rng.choice(world.kinds)
    year = rng.choice((2024, 2025))
    return Question(
        f"For each {w.group}, what is the sum of {w.amount} times {w.number} over the {w.event} of {year} with "
        f"{w.what} of the {w.kind} {kind}? Leave out a {w.group} with none. Columns: {w.group}, sum.",
        f"SELECT a.{w.group}, SUM(e.{w.amount} * b.{w.number}) FROM {_both(w)} "
        f"WHERE b.{w.kind} = '{kind}' AND e.{w.day} LIKE '{year}-%' GROUP BY a.{w.group}",
    )


def heavy(world: World, rng: random.Random) -> Question:
    w, kind = _words(world), rng.choice(world.kinds)
    limit = rng.randint(world.amount[1], world.amount[1] * 2)
    return Question(
        f"Which {w.who} have a total {w.amount} above {limit} over their {w.event} with {w.what} of the {w.kind} "
        f"{kind}? Columns: {w.label}, total.",
        f"SELECT a.{w.label}, SUM(e.{w.amount}) FROM {_both(w)} WHERE b.{w.kind} = '{kind}' "
        f"GROUP BY a.id HAVING SUM(e.{w.amount}) > {limit}",
    )


def top_titles(world: World, rng: random.Random) -> Question:
    w, group, count = _words(world), rng.choice(world.groups), rng.randint(2, 5)
    return Question(
        f"Give the {count} {w.what} with the largest total {w.amount} over the {w.event} of {w.who} with the "
        f"{w.group} {group}, largest first (equal ones by {w.title}). Columns: {w.title}, total.",
        f"SELECT b.{w.title}, SUM(e.{w.amount}) AS total FROM {_both(w)} WHERE a.{w.group} = '{group}' "
        f"GROUP BY b.id ORDER BY total DESC, b.{w.title} LIMIT {count}",
        ordered=True,
    )


# -- level 5: nested ---------------------------------------------------------------------------------


def never(world: World, rng: random.Random) -> Question:
    w, kind, year = _words(world), rng.choice(world.kinds), rng.randint(1995, 2015)
    return Question(
        f"Which {w.who} with a {w.year} after {year} have none of the {w.event} with {w.what} of the {w.kind} "
        f"{kind}? Give the {w.label}.",
        f"SELECT a.{w.label} FROM {w.who} a WHERE a.{w.year} > {year} AND a.id NOT IN (SELECT e.{w.who_id} FROM "
        f"{w.event} e JOIN {w.what} b ON b.id = e.{w.what_id} WHERE b.{w.kind} = '{kind}')",
    )


def above_own(world: World, rng: random.Random) -> Question:
    w, group = _words(world), rng.choice(world.groups)
    return Question(
        f"Which {w.what} were in {w.event} of {w.who} with the {w.group} {group} and have a {w.number} above the "
        f"average {w.number} of all {w.what} of their own {w.kind}? Give each {w.title} once.",
        f"SELECT DISTINCT b.{w.title} FROM {_both(w)} WHERE a.{w.group} = '{group}' AND b.{w.number} > "
        f"(SELECT AVG(c.{w.number}) FROM {w.what} c WHERE c.{w.kind} = b.{w.kind})",
    )


def leaders(world: World, rng: random.Random) -> Question:
    w, kind = _words(world), rng.choice(world.kinds)
    year = rng.choice((2024, 2025))
    return Question(
        f"For each {w.group}, who has the largest total {w.amount} over the {w.event} of {year} with {w.what} of "
        f"the {w.kind} {kind}? Of equal ones take the first by {w.label}; leave out a {w.group} with none. "
        f"Columns: {w.group}, {w.label}, total.",
        f"SELECT grp, lbl, total FROM (SELECT a.{w.group} AS grp, a.{w.label} AS lbl, SUM(e.{w.amount}) AS total, "
        f"ROW_NUMBER() OVER (PARTITION BY a.{w.group} ORDER BY SUM(e.{w.amount}) DESC, a.{w.label}) AS place "
        f"FROM {_both(w)} WHERE b.{w.kind} = '{kind}' AND e.{w.day} LIKE '{year}-%' GROUP BY a.id) WHERE place = 1",
    )


FORMS: dict[int, tuple[Form, ...]] = {
    1: (count_group, list_titles, extreme),
    2: (group_counts, earliest, busy_years),
    3: (group_total, who_did, per_kind),
    4: (weighted, heavy, top_titles),
    5: (never, above_own, leaders),
}

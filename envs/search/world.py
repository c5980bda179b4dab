"""A generated encyclopedia: entities, facts about them, and one page per entity.

A fact is stated only on its subject's page, so that each hop of a question needs another page.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache

from agentrl.contrib.toolkit.bm25 import Bm25
from agentrl.env import task_rng

from .names import Names


@dataclass(frozen=True, slots=True)
class Relation:
    """A kind of fact. `target` is the object's kind, or a unit ("year", "metres", "kilometres").

    `phrase` names the object given the subject, `inverse` the subject given the object (None: not used).
    """

    subject: str
    target: str
    phrase: str
    inverse: str | None
    told: tuple[str, ...]

    @property
    def entity(self) -> bool:
        """Whether the object is an entity with its own page."""
        return self.target in KINDS


KINDS = ("person", "town", "company", "college", "ship", "book", "river", "mountain")
_SHARES = {
    "person": 8,
    "town": 4,
    "company": 3,
    "college": 2,
    "ship": 2,
    "book": 3,
    "river": 2,
    "mountain": 1,
}

RELATIONS = (
    Relation(
        "person",
        "town",
        "the birthplace of {}",
        None,
        ("{s} was born in {o}.", "The birthplace of {s} is {o}."),
    ),
    Relation(
        "person",
        "college",
        "the college attended by {}",
        None,
        ("{s} studied at {o}.", "As a student, {s} attended {o}."),
    ),
    Relation(
        "person",
        "person",
        "the teacher of {}",
        None,
        ("{s} learned the trade from {o}, who remained the only teacher.", "The teacher of {s} was {o}."),
    ),
    Relation("person", "year", "the year of birth of {}", None, ("{s} was born in the year {o}.",)),
    Relation(
        "company",
        "person",
        "the founder of {}",
        "the company founded by {}",
        ("{s} was founded by {o}.", "The founder of {s} is {o}."),
    ),
    Relation(
        "company",
        "town",
        "the town that is the seat of {}",
        None,
        ("{s} has its seat in {o}.", "The head office of {s} stands in {o}."),
    ),
    Relation("company", "year", "the founding year of {}", None, ("{s} began business in {o}.",)),
    Relation(
        "town",
        "person",
        "the mayor of {}",
        "the town whose mayor is {}",
        ("The mayor of {s} is {o}.", "{o} has been elected mayor of {s}."),
    ),
    Relation(
        "town",
        "river",
        "the river of {}",
        None,
        ("{s} lies on the river {o}.", "The river {o} flows through {s}."),
    ),
    Relation("town", "year", "the charter year of {}", None, ("{s} received its charter in {o}.",)),
    Relation(
        "college",
        "town",
        "the home town of {}",
        None,
        ("{s} is at home in {o}.", "The halls of {s} are in {o}."),
    ),
    Relation(
        "college",
        "person",
        "the rector of {}",
        "the college whose rector is {}",
        ("The rector of {s} is {o}.", "{s} is led by its rector, {o}."),
    ),
    Relation(
        "ship",
        "company",
        "the builder of {}",
        "the ship built by {}",
        ("{s} was built by {o}.", "The builder of {s} was {o}."),
    ),
    Relation(
        "ship",
        "person",
        "the captain of {}",
        "the ship whose captain is {}",
        ("The captain of {s} is {o}.", "{s} sails under captain {o}."),
    ),
    Relation("ship", "year", "the year of launch of {}", None, ("{s} was launched in {o}.",)),
    Relation(
        "book",
        "person",
        "the author of {}",
        "the book written by {}",
        ("{s} was written by {o}.", "The author of {s} is {o}."),
    ),
    Relation(
        "book",
        "company",
        "the printer of {}",
        None,
        ("{s} was printed by {o}.", "The first printing of {s} came from {o}."),
    ),
    Relation("book", "year", "the year of publication of {}", None, ("{s} appeared in {o}.",)),
    Relation(
        "river",
        "mountain",
        "the mountain that is the source of {}",
        None,
        ("{s} rises on {o}.", "The spring of {s} is on {o}."),
    ),
    Relation("river", "kilometres", "the length in kilometres of {}", None, ("{s} is {o} kilometres long.",)),
    Relation(
        "mountain",
        "person",
        "the first climber of {}",
        "the mountain first climbed by {}",
        ("{s} was first climbed by {o}.", "{o} was the first person to climb {s}."),
    ),
    Relation("mountain", "metres", "the height in metres of {}", None, ("{s} is {o} metres high.",)),
)
_FILLER = (
    "Much has been written about {s}, little of it reliable.",
    "An exhibition on {s} toured several towns.",
    "Older maps and lists spell the name of {s} differently.",
    "{s} is not to be confused with {x}.",
    "A long article compares {s} with {x}.",
    "Visitors rarely ask about {s}.",
    "A song about {s} was popular for a season.",
)


@dataclass(frozen=True, slots=True)
class Fact:
    """Subject and object as entity numbers; if the object is a number, it is in `value` and `object` is -1."""

    relation: Relation
    subject: int
    object: int
    value: str


@dataclass(frozen=True, slots=True)
class Page:
    """One document: what `search` lists and `open` shows."""

    id: str
    title: str
    kind: str
    text: str


class Corpus:
    """All pages of one world, with its index and (for building questions) its facts. Read-only."""

    def __init__(self, rng: random.Random, split: str, documents: int) -> None:
        names = Names(rng, split)
        self.kinds = _kinds(rng, documents)
        self.names = [names.draw(kind) for kind in self.kinds]
        self.facts = _facts(rng, self.kinds)
        self.of_subject: dict[int, list[Fact]] = {}
        self.of_object: dict[int, list[Fact]] = {}
        for fact in self.facts:
            self.of_subject.setdefault(fact.subject, []).append(fact)
            if fact.relation.entity:
                self.of_object.setdefault(fact.object, []).append(fact)
        self.pages = [self._page(rng, number) for number in range(documents)]
        self.by_id = {page.id: page for page in self.pages}
        self.index = Bm25([f"{page.title} {page.text}" for page in self.pages])

    def name_of(self, fact: Fact) -> str:
        """The object of a fact as text."""
        return self.names[fact.object] if fact.relation.entity else fact.value

    def _page(self, rng: random.Random, number: int) -> Page:
        name, kind = self.names[number], self.kinds[number]
        told = [rng.choice(fact.relation.told).format(s=name, o=self.name_of(fact)) for fact in self.of_subject.get(number, [])]
        told += [line.format(s=name, x=rng.choice(self.names)) for line in rng.sample(_FILLER, rng.randint(1, 3))]
        rng.shuffle(told)
        return Page(f"p{number + 1}", name, kind, " ".join([f"{name} is a {kind}.", *told]))


@lru_cache(maxsize=64)
def corpus(seed: int, split: str, documents: int) -> Corpus:
    """The world of a seed; cached for the other members of its group."""
    return Corpus(task_rng("agentrl/Search-v0/world", split, seed), split, documents)


def _kinds(rng: random.Random, documents: int) -> list[str]:
    kinds = list(KINDS) * 2
    kinds += rng.choices(KINDS, [_SHARES[kind] for kind in KINDS], k=documents - len(kinds))
    rng.shuffle(kinds)
    return kinds


def _facts(rng: random.Random, kinds: list[str]) -> list[Fact]:
    of_kind = {kind: [i for i, other in enumerate(kinds) if other == kind] for kind in KINDS}
    facts: list[Fact] = []
    for number, kind in enumerate(kinds):
        for relation in RELATIONS:
            if relation.subject != kind:
                continue
            if relation.entity:
                other = rng.choice([i for i in of_kind[relation.target] if i != number])
                facts.append(Fact(relation, number, other, ""))
            else:
                low, high = {"year": (1400, 1999), "metres": (900, 8000), "kilometres": (30, 2500)}[relation.target]
                facts.append(Fact(relation, number, -1, str(rng.randint(low, high))))
    return facts

"""A multi-hop question over a corpus, with the searches and pages that answer it."""

from __future__ import annotations

import random
from dataclasses import dataclass

from agentrl.utils.errors import TaskDataError

from .world import Corpus, Fact


@dataclass(frozen=True, slots=True)
class Question:
    """`steps`: (query, page id) of every page that has to be found, in order; `trail`: the entities
    on the way to the answer, which a hasty policy may mistake for it."""

    text: str
    answer: str
    steps: tuple[tuple[str, str], ...]
    trail: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Hop:
    fact: Fact
    back: bool


def ask(rng: random.Random, corpus: Corpus, hops: int, back_share: float, k: int) -> Question:
    """A question that needs `hops` facts and can be answered through searches of `k` results.

    `back_share`: probability that a hop goes from a fact's object to its subject, if the subject is unique.
    Raises TaskDataError if the corpus has no such chain (rare: 2000 random walks are tried).
    """
    for _ in range(2000):
        start = rng.randrange(len(corpus.names))
        chain = _walk(rng, corpus, start, hops, back_share)
        if chain is not None:
            question = _question(corpus, start, chain)
            if question.answer not in question.text and _solvable(corpus, question, k):
                return question
    raise TaskDataError(f"search: no question with {hops} hops in a corpus of {len(corpus.pages)} pages")


def _walk(rng: random.Random, corpus: Corpus, start: int, hops: int, back_share: float) -> list[_Hop] | None:
    here, seen, chain = start, {start}, list[_Hop]()
    for hop in range(hops):
        last = hop == hops - 1
        options = [
            _Hop(fact, False)
            for fact in corpus.of_subject.get(here, [])
            if (last or fact.relation.entity) and fact.object not in seen
        ]
        back = [_Hop(fact, True) for fact in _inverses(corpus, here) if fact.subject not in seen]
        if back and (not options or rng.random() < back_share):
            options = back
        if not options:
            return None
        chain.append(rng.choice(options))
        fact = chain[-1].fact
        here = fact.subject if chain[-1].back else fact.object
        seen.add(here)
    return chain


def _inverses(corpus: Corpus, here: int) -> list[Fact]:
    """Facts with object `here` whose relation has exactly one subject for it."""
    facts = [fact for fact in corpus.of_object.get(here, []) if fact.relation.inverse is not None]
    return [fact for fact in facts if sum(other.relation is fact.relation for other in facts) == 1]


def _question(corpus: Corpus, start: int, chain: list[_Hop]) -> Question:
    phrase = f"the {corpus.kinds[start]} {corpus.names[start]}"
    here, steps, opened, trail = start, list[tuple[str, str]](), set[int](), [corpus.names[start]]
    for hop in chain:
        relation, page = hop.fact.relation, hop.fact.subject
        query = (relation.inverse or relation.phrase).format(corpus.names[here]) if hop.back else corpus.names[here]
        phrase = (relation.inverse or "").format(phrase) if hop.back else relation.phrase.format(phrase)
        if page not in opened:
            opened.add(page)
            steps.append((query, corpus.pages[page].id))
        here = hop.fact.subject if hop.back else hop.fact.object
        trail.append(corpus.names[here] if here >= 0 else hop.fact.value)
    what = "What is" if here < 0 else "What is the name of"
    return Question(f"{what} {phrase}?", trail[-1], tuple(steps), tuple(trail[:-1]))


def _solvable(corpus: Corpus, question: Question, k: int) -> bool:
    """Whether each page is among the results of its query."""
    return all(any(corpus.pages[number].id == page for number, _ in corpus.index.top(query, k)) for query, page in question.steps)

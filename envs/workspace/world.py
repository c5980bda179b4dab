"""A generated world: people, mail, events and files, with unique names where requests refer to them."""

from __future__ import annotations

import random
from datetime import date, timedelta
from typing import Any

Json = Any
FIRST = """Alma Boris Cleo Dario Elif Fritz Greta Hana Igor Jude Kemal Lena Milo Nadia Oskar Petra Rafi Selma
Tomas Una Viktor Wanda Xaver Ylva Zora""".split()  # noqa: SIM905
LAST = """Acker Bright Conte Duran Ember Frost Galli Hagen Imani Jonker Kovac Lowry Mertens Nassar Ortiz Pavlov
Reyes Sato Tully Unger Vogel Winter Yilmaz Zhou""".split()  # noqa: SIM905
TOPICS = """budget harvest museum bridge orchestra satellite bakery archive festival lighthouse vineyard tram
library glacier theatre harbour planetarium greenhouse carnival observatory market quarry""".split()  # noqa: SIM905
_COMPANIES = ["arbor", "borealis", "cobalt", "delphi", "ember"]
_KINDS = ["plan", "report", "invoice", "minutes", "schedule", "offer", "survey", "draft"]
_MEETINGS = ["review", "kick-off", "walkthrough", "workshop", "interview", "rehearsal", "briefing"]
GROUPS = ["board", "choir", "design team", "field crew", "reading circle"]
_FOLDERS = ["archive", "travel", "suppliers"]
START = date(2031, 3, 3)


def draw_world(rng: random.Random, size: int) -> dict[str, Json]:
    """A world; `size` (0..200) is the amount of everything beyond the minimum."""
    contacts = _contacts(rng, 12 + size // 3)
    world: dict[str, Json] = {"created": 0, "contacts": contacts, "folders": [], "files": {}}
    world["mail_folders"] = ["inbox", "sent", *_FOLDERS]
    world["mail"] = _mail(rng, contacts, 16 + size)
    world["events"] = _events(rng, contacts, 12 + size // 2)
    _fill_files(rng, world, 12 + size // 2)
    return world


def person(rng: random.Random) -> tuple[str, str, str]:
    """(name, mail address, company)."""
    first, last, company = rng.choice(FIRST), rng.choice(LAST), rng.choice(_COMPANIES)
    return f"{first} {last}", f"{first.lower()}.{last.lower()}@{company}.example", company


def phone(rng: random.Random) -> str:
    return f"+{rng.randint(1, 99)} {rng.randint(100, 999)} {rng.randint(1000, 9999)}"


def day(rng: random.Random) -> str:
    """A day within three weeks."""
    return (START + timedelta(days=rng.randint(1, 21))).isoformat()


def clock(rng: random.Random) -> str:
    return f"{rng.randint(7, 19):02d}:{rng.choice(['00', '15', '30', '45'])}"


def _contacts(rng: random.Random, count: int) -> dict[str, Json]:
    found: dict[str, Json] = {}
    names: set[str] = set()
    while len(found) < count:
        name, email, company = person(rng)
        if name not in names:
            names.add(name)
            groups = [group for group in GROUPS if rng.random() < 0.3]
            found[email] = {"name": name, "phone": phone(rng), "company": company, "groups": groups}
    return found


def _mail(rng: random.Random, contacts: dict[str, Json], count: int) -> dict[str, Json]:
    people = [f"{row['name']} <{email}>" for email, row in contacts.items()]
    # A few people write most of the mail, so that requests about all mail of a person vary in size.
    weights = [1 / (rank + 1) for rank in range(len(people))]
    pairs = rng.sample([(topic, kind) for topic in TOPICS for kind in _KINDS], min(count, 170))
    return {
        f"m{number}": {
            "folder": rng.choice(["inbox", "inbox", "inbox", *_FOLDERS]),
            "sender": rng.choices(people, weights)[0],
            "to": ["me"],
            "subject": f"{topic.capitalize()} {kind}",
            "body": f"Please look at the {kind} for the {topic}; the reference is {rng.randint(1000, 9999)}.",
            "read": rng.random() < 0.5,
            "flagged": False,
            "origin": None,
        }
        for number, (topic, kind) in enumerate(pairs, start=1)
    }


def _events(rng: random.Random, contacts: dict[str, Json], count: int) -> dict[str, Json]:
    pairs = rng.sample([(topic, kind) for topic in TOPICS for kind in _MEETINGS], min(count, 150))
    days = [day(rng) for _ in range(max(3, count // 4))]
    return {
        f"e{number}": {
            "title": f"{topic.capitalize()} {kind}",
            "day": rng.choice(days),
            "start": clock(rng),
            "minutes": rng.choice([30, 45, 60, 90]),
            "attendees": rng.sample(list(contacts), rng.randint(0, 3)),
            "reminder": None,
        }
        for number, (topic, kind) in enumerate(pairs, start=1)
    }


def _fill_files(rng: random.Random, world: dict[str, Json], count: int) -> None:
    tops = rng.sample(TOPICS, 3)
    world["folders"] = ["/", "/notes", "/projects", *(f"/projects/{topic}" for topic in tops)]
    pairs = rng.sample([(topic, kind) for topic in TOPICS for kind in _KINDS], min(count, 170))
    for topic, kind in pairs:
        folder = rng.choice(world["folders"][1:])
        code = f"{rng.choice('KLMNPQ')}-{rng.randint(10000, 99999)}"
        text = f"The {kind} of the {topic} has the code {code}."
        world["files"][f"{folder}/{topic}_{kind}.txt"] = {"text": text, "shared": []}

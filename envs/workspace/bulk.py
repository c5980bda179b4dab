"""Requests for many actions at once, and questions."""

from __future__ import annotations

import random
from typing import Any

from .move import Move, Skill, pick_contact, pick_event, sender_name
from .world import GROUPS, TOPICS

Json = Any


def move_all_mail(world: dict[str, Json], rng: random.Random) -> Move | None:
    name = _some_sender(world, rng)
    folder = rng.choice([f for f in world["mail_folders"] if f not in ("inbox", "sent")])
    ids = [key for key, row in _from(world, name) if row["folder"] == "inbox"]
    if not ids:
        return None
    moves = tuple(("move_mail", {"mail_id": key, "folder": folder}) for key in ids)
    text = f'Move all mail from {name} that is in my inbox to the folder "{folder}".'
    return Move(text, (("search_mail", {"sender": name}), *moves))


def mark_all_read(world: dict[str, Json], rng: random.Random) -> Move | None:
    name = _some_sender(world, rng)
    ids = [key for key, row in _from(world, name) if not row["read"]]
    if not ids:
        return None
    marks = tuple(("mark_mail", {"mail_id": key, "read": True}) for key in ids)
    text = f"Mark all unread mail from {name} as read."
    return Move(text, (("search_mail", {"sender": name, "unread_only": True}), *marks))


def clear_day(world: dict[str, Json], rng: random.Random) -> Move | None:
    day = _busy_day(world, rng)
    ids = [key for key, row in world["events"].items() if row["day"] == day]
    cancels = tuple(("cancel_event", {"event_id": key}) for key in ids)
    return Move(f"Cancel everything on {day}.", (("list_events", {"day": day}), *cancels)) if day else None


def remind_day(world: dict[str, Json], rng: random.Random) -> Move | None:
    day = _busy_day(world, rng)
    ids = [key for key, row in world["events"].items() if row["day"] == day]
    minutes = rng.choice([5, 25, 45])
    sets = tuple(("set_reminder", {"event_id": key, "minutes": minutes}) for key in ids)
    text = f"Set a reminder of {minutes} minutes for every event on {day}."
    return Move(text, (("list_events", {"day": day}), *sets)) if day else None


def mail_group(world: dict[str, Json], rng: random.Random) -> Move | None:
    group = rng.choice(GROUPS)
    emails = [email for email, row in world["contacts"].items() if group in row["groups"]]
    subject, body = f"{rng.choice(TOPICS).capitalize()} date {rng.randint(10, 99)}", "Please keep the date free."
    sends = tuple(("send_mail", {"to": email, "subject": subject, "body": body}) for email in emails)
    text = f'Send everybody in the group "{group}" a mail of their own: subject "{subject}", text "{body}"'
    return Move(text, (("list_group", {"group": group}), *sends)) if emails else None


def invite_group(world: dict[str, Json], rng: random.Random) -> Move | None:
    event, group = pick_event(world, rng), rng.choice(GROUPS)
    members = [email for email, row in world["contacts"].items() if group in row["groups"]]
    if event is None or not members or set(members) & set(event[1]["attendees"]):
        return None
    key, row = event
    adds = tuple(("add_attendee", {"event_id": key, "email": email}) for email in members)
    text = f'Invite everybody in the group "{group}" to the "{row["title"]}".'
    return Move(text, (("find_events", {"title": row["title"]}), ("list_group", {"group": group}), *adds))


def empty_folder(world: dict[str, Json], rng: random.Random) -> Move | None:
    folder = rng.choice([f for f in world["folders"] if f != "/"])
    paths = [path for path in world["files"] if path.rpartition("/")[0] == folder]
    if not paths:
        return None
    deletes = tuple(("delete_file", {"path": path}) for path in paths)
    text = f"Delete all files that are directly in {folder}; keep its folders."
    return Move(text, (("list_folder", {"path": folder}), *deletes))


def ask_phone(world: dict[str, Json], rng: random.Random) -> Move | None:
    if (found := pick_contact(world, rng)) is None:
        return None
    name, number = found[1]["name"], found[1]["phone"]
    return Move(f"What is the phone number of {name}?", (("find_contacts", {"name": name}),), answer=number)


def ask_unread(world: dict[str, Json], rng: random.Random) -> Move | None:
    name = _some_sender(world, rng)
    count = sum(not row["read"] for _, row in _from(world, name))
    calls = (("search_mail", {"sender": name, "unread_only": True}),)
    return Move(f"How many unread mails do I have from {name}?", calls, answer=str(count))


def ask_start(world: dict[str, Json], rng: random.Random) -> Move | None:
    if (found := pick_event(world, rng)) is None:
        return None
    row = found[1]
    text = f'At what time does the "{row["title"]}" start?'
    return Move(text, (("find_events", {"title": row["title"]}),), answer=row["start"])


def ask_code(world: dict[str, Json], rng: random.Random) -> Move | None:
    coded = [(path, row["text"]) for path, row in world["files"].items() if " has the code " in row["text"]]
    if not coded:
        return None
    path, text = rng.choice(coded)
    code = text.split(" has the code ")[1].split(".")[0]
    if sum(code in other for _, other in coded) > 1:
        return None
    return Move(f"Which file holds the code {code}? Give its path.", (("search_text", {"text": code}),), answer=path)


def ask_booked(world: dict[str, Json], rng: random.Random) -> Move | None:
    day = _busy_day(world, rng)
    if day is None:
        return None
    total = sum(row["minutes"] for row in world["events"].values() if row["day"] == day)
    text = f"How many minutes of events do I have on {day}, all events added up?"
    return Move(text, (("list_events", {"day": day}),), answer=str(total))


def _some_sender(world: dict[str, Json], rng: random.Random) -> str:
    return sender_name(rng.choice([row for row in world["mail"].values() if row["folder"] != "sent"] or
                                  [{"sender": "nobody"}]))  # fmt: skip


def _from(world: dict[str, Json], name: str) -> list[tuple[str, Json]]:
    return [(key, row) for key, row in world["mail"].items() if row["folder"] != "sent" and sender_name(row) == name]


def _busy_day(world: dict[str, Json], rng: random.Random) -> str | None:
    days = sorted(row["day"] for row in world["events"].values())
    return str(rng.choice(days)) if days else None


BULK: tuple[Skill, ...] = (
    move_all_mail, mark_all_read, clear_day, remind_day, mail_group, invite_group, empty_folder,
)  # fmt: skip
QUESTIONS: tuple[Skill, ...] = (ask_phone, ask_unread, ask_start, ask_code, ask_booked)

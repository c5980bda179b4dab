"""Requests for single actions."""

from __future__ import annotations

import random
from typing import Any

from .move import Move, Skill, Slot, pick_contact, pick_event, pick_file, pick_mail, sender_name
from .world import GROUPS, TOPICS, clock, day, person, phone

Json = Any
_LINES = ("Thank you, I agree.", "Please call me about this.", "I will come back to you.", "Approved.")
_TIME_WORDS = ("time", "when", "start", "clock", "o'clock", "day", "date")


def new_event(world: dict[str, Json], rng: random.Random) -> Move | None:
    title = f"{rng.choice(TOPICS).capitalize()} {rng.choice(['lunch', 'visit', 'call'])}"
    when, start, minutes = day(rng), clock(rng), rng.choice([15, 30, 45, 60, 120])
    if any(row["title"] == title for row in world["events"].values()):
        return None
    return Move(
        f'Create an event "{title}" on {when} at {start} for {minutes} minutes.',
        (("create_event", {"title": title, "day": when, "start": start, "minutes": minutes}),),
        slot=Slot(
            f'Create an event "{title}" on {when} for {minutes} minutes.',
            "At what time shall it start?", _TIME_WORDS, f"At {start}.",
        ),
    )  # fmt: skip


def new_note(world: dict[str, Json], rng: random.Random) -> Move | None:
    path = f"/notes/{rng.choice(TOPICS)}_{rng.randint(10, 99)}.txt"
    text = f"{rng.choice(_LINES)} Number {rng.randint(100, 999)}."
    if path in world["files"]:
        return None
    return Move(
        f'Write a file {path} with exactly this text: "{text}"',
        (("write_file", {"path": path, "text": text}),),
        slot=Slot(
            f'Write a file in /notes with exactly this text: "{text}"', "What shall the file be called?",
            ("name", "called", "path", "file"), f"Call it {path}.",
        ),
    )  # fmt: skip


def mail_to_address(world: dict[str, Json], rng: random.Random) -> Move | None:
    _, email, _ = person(rng)
    subject, body = f"{rng.choice(TOPICS).capitalize()} question {rng.randint(10, 99)}", rng.choice(_LINES)
    return Move(
        f'Send a mail to {email} with the subject "{subject}" and the text "{body}"',
        (("send_mail", {"to": email, "subject": subject, "body": body}),),
        slot=Slot(
            f'Send a mail to {email} with the text "{body}"', "What subject shall it have?",
            ("subject", "title"), f"The subject is: {subject}",
        ),
    )  # fmt: skip


def new_contact(world: dict[str, Json], rng: random.Random) -> Move | None:
    name, email, company = person(rng)
    number = phone(rng)
    if email in world["contacts"] or any(row["name"] == name for row in world["contacts"].values()):
        return None
    return Move(
        f"Add {name} of {company} to my contacts: {email}, phone {number}.",
        (("add_contact", {"name": name, "email": email, "phone": number, "company": company}),),
        slot=Slot(
            f"Add {name} of {company} to my contacts: {email}.", "What is the phone number?",
            ("phone", "number"), f"The phone number is {number}.",
        ),
    )  # fmt: skip


def new_folder(world: dict[str, Json], rng: random.Random) -> Move | None:
    path = f"/projects/{rng.choice(TOPICS)}_{rng.randint(10, 99)}"
    if path in world["folders"]:
        return None
    return Move(f"Create the folder {path}.", (("create_folder", {"path": path}),))


def mail_to_person(world: dict[str, Json], rng: random.Random) -> Move | None:
    if (found := pick_contact(world, rng)) is None:
        return None
    email, row = found
    subject, body = f"{rng.choice(TOPICS).capitalize()} news {rng.randint(10, 99)}", rng.choice(_LINES)
    return Move(
        f'Write to {row["name"]}: subject "{subject}", text "{body}"',
        (_find_person(row), ("send_mail", {"to": email, "subject": subject, "body": body})),
        slot=Slot(
            f'Send somebody a mail for me: subject "{subject}", text "{body}"', "Who shall I send it to?",
            ("who", "recipient", "address", "send it", "to whom"), f"To {row['name']}.",
        ),
    )  # fmt: skip


def move_event(world: dict[str, Json], rng: random.Random) -> Move | None:
    if (found := pick_event(world, rng)) is None:
        return None
    key, row = found
    when, start = day(rng), clock(rng)
    if (when, start) == (row["day"], row["start"]):
        return None
    return Move(
        f'Move the "{row["title"]}" to {when} at {start}.',
        (_find_event(row), ("move_event", {"event_id": key, "day": when, "start": start})),
        slot=Slot(
            f'Move the "{row["title"]}".', "To which day and time shall I move it?",
            _TIME_WORDS, f"To {when} at {start}.",
        ),
    )  # fmt: skip


def cancel_event(world: dict[str, Json], rng: random.Random) -> Move | None:
    if (found := pick_event(world, rng)) is None:
        return None
    key, row = found
    return Move(
        f'Cancel the "{row["title"]}".',
        (_find_event(row), ("cancel_event", {"event_id": key})),
        vital="cancel_event",
    )


def remind(world: dict[str, Json], rng: random.Random) -> Move | None:
    if (found := pick_event(world, rng)) is None:
        return None
    key, row = found
    minutes = rng.choice([n for n in (10, 15, 20, 30, 60) if n != row["reminder"]])
    return Move(
        f'Remind me {minutes} minutes before the "{row["title"]}".',
        (_find_event(row), ("set_reminder", {"event_id": key, "minutes": minutes})),
        slot=Slot(
            f'Set a reminder for the "{row["title"]}".', "How many minutes before?",
            ("minute", "long", "before", "when", "time", "early", "advance"), f"{minutes} minutes before.",
        ),
        vital="set_reminder",
    )  # fmt: skip


def invite(world: dict[str, Json], rng: random.Random) -> Move | None:
    event, contact = pick_event(world, rng), pick_contact(world, rng)
    if event is None or contact is None or contact[0] in event[1]["attendees"]:
        return None
    return Move(
        f'Invite {contact[1]["name"]} to the "{event[1]["title"]}".',
        (
            _find_event(event[1]),
            _find_person(contact[1]),
            ("add_attendee", {"event_id": event[0], "email": contact[0]}),
        ),
        vital="add_attendee",
    )


def change_phone(world: dict[str, Json], rng: random.Random) -> Move | None:
    if (found := pick_contact(world, rng)) is None:
        return None
    email, row = found
    number = phone(rng)
    return Move(
        f"{row['name']} has a new phone number: {number}. Please update the contact.",
        (_find_person(row), ("update_contact", {"email": email, "phone": number})),
        slot=Slot(
            f"{row['name']} has a new phone number. Please update the contact.", "What is the new number?",
            ("phone", "number"), f"It is {number}.",
        ),
    )  # fmt: skip


def into_group(world: dict[str, Json], rng: random.Random) -> Move | None:
    found, group = pick_contact(world, rng), rng.choice(GROUPS)
    if found is None or group in found[1]["groups"]:
        return None
    email, row = found
    return Move(
        f'Put {row["name"]} into the group "{group}".',
        (_find_person(row), ("add_to_group", {"email": email, "group": group})),
        vital="add_to_group",
    )


def reply(world: dict[str, Json], rng: random.Random) -> Move | None:
    if (found := pick_mail(world, rng)) is None:
        return None
    key, row = found
    body = rng.choice(_LINES)
    return Move(
        f'Answer the mail "{row["subject"]}" from {sender_name(row)} with "{body}"',
        (_find_mail(row), ("reply_mail", {"mail_id": key, "body": body})),
        slot=Slot(
            f'Answer the mail "{row["subject"]}" from {sender_name(row)}.', "What shall the answer say?",
            ("what", "say", "text", "answer", "reply", "write", "content"), f'Write exactly: "{body}"',
        ),
    )  # fmt: skip


def flag(world: dict[str, Json], rng: random.Random) -> Move | None:
    found = pick_mail(world, rng)
    if found is None or found[1]["flagged"]:
        return None
    return Move(
        f'Flag the mail "{found[1]["subject"]}" from {sender_name(found[1])}.',
        (_find_mail(found[1]), ("flag_mail", {"mail_id": found[0], "flagged": True})),
        vital="flag_mail",
    )


def drop_mail(world: dict[str, Json], rng: random.Random) -> Move | None:
    if (found := pick_mail(world, rng)) is None:
        return None
    return Move(
        f'Delete the mail "{found[1]["subject"]}" from {sender_name(found[1])}.',
        (_find_mail(found[1]), ("delete_mail", {"mail_id": found[0]})),
        vital="delete_mail",
    )


def forward(world: dict[str, Json], rng: random.Random) -> Move | None:
    mail, contact = pick_mail(world, rng), pick_contact(world, rng)
    if mail is None or contact is None:
        return None
    return Move(
        f'Forward the mail "{mail[1]["subject"]}" from {sender_name(mail[1])} to {contact[1]["name"]}.',
        (
            _find_mail(mail[1]),
            _find_person(contact[1]),
            ("forward_mail", {"mail_id": mail[0], "to": contact[0]}),
        ),
        vital="forward_mail",
    )


def move_file(world: dict[str, Json], rng: random.Random) -> Move | None:
    if (found := pick_file(world, rng)) is None:
        return None
    path, name = found
    folders = [f for f in world["folders"] if f not in ("/", path.rpartition("/")[0])]
    folder = rng.choice(folders)
    return Move(
        f"Move the file {name} to {folder}.",
        (("find_files", {"name": name}), ("move_file", {"path": path, "folder": folder})),
        slot=Slot(
            f"Move the file {name} to another folder.", "To which folder?",
            ("folder", "where", "which", "destination"), f"To {folder}.",
        ),
    )  # fmt: skip


def append(world: dict[str, Json], rng: random.Random) -> Move | None:
    if (found := pick_file(world, rng)) is None:
        return None
    path, name = found
    line = f"{rng.choice(_LINES)} ({rng.randint(100, 999)})"
    calls = (("find_files", {"name": name}), ("append_file", {"path": path, "line": line}))
    return Move(f'Add this line to the file {name}: "{line}"', calls)


def share(world: dict[str, Json], rng: random.Random) -> Move | None:
    file, contact = pick_file(world, rng), pick_contact(world, rng)
    if file is None or contact is None or contact[0] in world["files"][file[0]]["shared"]:
        return None
    return Move(
        f"Share the file {file[1]} with {contact[1]['name']}.",
        (
            ("find_files", {"name": file[1]}),
            _find_person(contact[1]),
            ("share_file", {"path": file[0], "email": contact[0]}),
        ),
        vital="share_file",
    )


def send_phone(world: dict[str, Json], rng: random.Random) -> Move | None:
    about = pick_contact(world, rng)
    to = pick_contact(world, rng, about[0]) if about else None
    if about is None or to is None:
        return None
    subject, body = f"Phone of {about[1]['name']}", about[1]["phone"]
    return Move(
        f'Send {to[1]["name"]} a mail with the subject "{subject}"; the text is only the number.',
        (
            _find_person(about[1]),
            _find_person(to[1]),
            ("send_mail", {"to": to[0], "subject": subject, "body": body}),
        ),
    )


def send_text(world: dict[str, Json], rng: random.Random) -> Move | None:
    file, to = pick_file(world, rng), pick_contact(world, rng)
    if file is None or to is None or "\n" in (text := world["files"][file[0]]["text"]):
        return None
    return Move(
        f'Send {to[1]["name"]} a mail with the subject "{file[1]}" and the text of the file {file[1]}.',
        (
            ("find_files", {"name": file[1]}),
            ("read_file", {"path": file[0]}),
            _find_person(to[1]),
            ("send_mail", {"to": to[0], "subject": file[1], "body": text}),
        ),
    )


def _find_person(row: Json) -> tuple[str, dict[str, Json]]:
    return "find_contacts", {"name": row["name"]}


def _find_event(row: Json) -> tuple[str, dict[str, Json]]:
    return "find_events", {"title": row["title"]}


def _find_mail(row: Json) -> tuple[str, dict[str, Json]]:
    return "search_mail", {"sender": sender_name(row), "subject": row["subject"]}


SKILLS: tuple[Skill, ...] = (
    new_event, new_note, mail_to_address, new_contact, new_folder, mail_to_person, move_event, cancel_event,
    remind, invite, change_phone, into_group, reply, flag, drop_mail, forward, move_file, append, share,
    send_phone, send_text,
)  # fmt: skip

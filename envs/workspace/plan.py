"""A task: a sequence of requests, planned on a separate world so that each one fits the results of the previous ones."""

from __future__ import annotations

import pickle
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.env import Tool

from .apps import Apps, export
from .back import Past, back, remember
from .bulk import BULK, QUESTIONS
from .calendar import Calendar
from .contacts import Contacts
from .files import Files
from .mail import Mail
from .move import Call, Move
from .skills import SKILLS

Json = Any
APPS: dict[str, list[Tool]] = {
    app.__name__.lower(): [item for item in vars(app).values() if isinstance(item, Tool)]
    for app in (Files, Mail, Calendar, Contacts)
}
TOOLS: dict[str, Tool] = {item.name: item for tools in APPS.values() for item in tools}

MOST_PER_REQUEST = 10
LONG = 60
"""Tasks of more calls than this are long: requests far above the mean are left out, else a few of them are most of the work."""


@dataclass(frozen=True, slots=True)
class Wish:
    """Parameters of tasks: ranges of calls and requests, shares of requests, the world's size, and the functions of apps that the
    task is not about."""

    calls: tuple[int, int]
    requests: tuple[int, int]
    questions: float
    missing: float
    withheld: float
    distractors: int
    recalls: float = 0.0
    closed: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Request:
    """A move as presented to the policy. `asked`: its slot is omitted at first. `withheld`: its vital tool is not
    available; `restored`: it becomes available once the policy has said that it is missing."""

    move: Move
    asked: bool = False
    withheld: bool = False
    restored: bool = False

    @property
    def calls(self) -> tuple[Call, ...]:
        """The calls that the request finally takes."""
        return () if self.withheld and not self.restored else self.move.calls


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """The world before, the requests, and the world after them."""

    before: dict[str, Json]
    requests: list[Request]
    after: dict[str, Json]


class Desk(Files, Mail, Calendar, Contacts):
    """The apps on a separate world."""

    def __init__(self, world: dict[str, Json]) -> None:
        self.world = world

    def run(self, calls: tuple[Call, ...]) -> None:
        """Make the calls, in order."""
        for name, arguments in calls:
            run_tool(self, name, arguments)


def run_tool(apps: Apps, name: str, arguments: Mapping[str, Json]) -> Json:
    """Call a tool as plain Python. Raises ToolError if it refuses."""
    return TOOLS[name].function(apps, **arguments)


def is_write(name: str) -> bool:
    """Whether a tool changes the world."""
    return not TOOLS[name].options.read_only


def private(world: dict[str, Json]) -> dict[str, Json]:
    """A deep copy; through pickle, which is several times faster here than `copy.deepcopy`."""
    copied: dict[str, Json] = pickle.loads(pickle.dumps(world, pickle.HIGHEST_PROTOCOL))
    return copied


def draw_plan(rng: random.Random, wish: Wish, before: dict[str, Json], target: int) -> TaskPlan | None:
    """One attempt at requests that take `target` calls in total; None if it fails."""
    count = min(rng.randint(*wish.requests), target)
    desk = Desk(private(before))
    requests: list[Request] = []
    banned, past = set(wish.closed), Past()
    left = target
    while len(requests) < count:
        rest = count - len(requests) - 1
        request = None
        if wish.recalls and rng.random() < wish.recalls:
            request = _recalled(rng, desk.world, past, banned, left, rest)
        if request is None:
            request = _next(rng, wish, desk.world, requests, banned, left, rest)
            if request is None:
                return None
            past |= remember(desk.world, request.calls)
        requests.append(request)
        desk.run(request.calls)
        left -= len(request.calls)
        if request.withheld and request.move.vital is not None:
            banned.add(request.move.vital)
    wrote = any(is_write(name) for request in requests for name, _ in request.calls)
    return TaskPlan(before, requests, export(desk.world)) if left == 0 and wrote else None


def _recalled(rng: random.Random, world: dict[str, Json], past: Past, banned: set[str], left: int, rest: int) -> Request | None:
    kept = dict(past)
    move = back(world, kept, rng)
    if move is None or any(name in banned for name, _ in move.calls):
        return None
    cost = len(move.calls)
    if (cost != left) if rest == 0 else (cost > left - rest):
        return None
    past.clear()
    past.update(kept)
    return Request(move)


def _next(
    rng: random.Random,
    wish: Wish,
    world: dict[str, Json],
    before: list[Request],
    banned: set[str],
    left: int,
    rest: int,
) -> Request | None:
    """A request that leaves at least a call for each of the `rest` requests, and none after the last."""
    if rest and rng.random() < wish.withheld:
        request = _withheld(rng, world, before, banned)
        spent = len(request.calls) if request is not None else 0
        if request is not None and rest <= left - spent <= MOST_PER_REQUEST * rest:
            return request
    # The calls that a short request leaves must still fit into the following requests.
    question = rng.random() < wish.questions and left - 1 <= MOST_PER_REQUEST * rest
    fair = left / (rest + 1)
    moves: list[Move] = []
    for _ in range(60 if rest == 0 else 16):
        skills = QUESTIONS if question else BULK if rng.random() < fair / (fair + 4) else SKILLS
        move = rng.choice(skills)(world, rng)
        if move is None or any(name in banned for name, _ in move.calls):
            continue
        cost = len(move.calls)
        if wish.calls[1] > LONG and cost > max(MOST_PER_REQUEST, 1.5 * fair):
            continue
        if (cost == left) if rest == 0 else (cost <= left - rest):
            moves.append(move)
    if not moves:
        return None
    moves.sort(key=lambda move: abs(len(move.calls) - fair))
    move = rng.choice(moves[: max(1, len(moves) // 2)])
    return Request(move, asked=move.slot is not None and rng.random() < wish.missing)


def _withheld(rng: random.Random, world: dict[str, Json], before: list[Request], banned: set[str]) -> Request | None:
    used = {name for request in before for name, _ in request.calls}
    for _ in range(12):
        move = rng.choice(SKILLS)(world, rng)
        fit = move is not None and not any(name in banned for name, _ in move.calls)
        if move is not None and fit and move.vital and move.vital not in used:
            return Request(move, withheld=True, restored=rng.random() < 0.5)
    return None

"""A person's files, mail, calendar and contacts: requests over several turns, some of them traps."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from agentrl.data.trajectory import Json
from agentrl.env import Message, Task, ToolCall, ToolEnv, draw, task_rng
from agentrl.utils.errors import ConfigError, TaskDataError

from .apps import export
from .calendar import Calendar
from .contacts import Contacts
from .files import Files
from .gold import gold_script
from .mail import Mail
from .plan import APPS, MOST_PER_REQUEST, TOOLS, Request, TaskPlan, Wish, draw_plan, is_write, private
from .teacher import Teacher
from .user import User
from .world import START, draw_world

_SYSTEM = """\
You look after a person's files, mail, calendar and contacts through functions. Do exactly what each request \
says and nothing else. Today is {today}.
- When a request lacks something that you need to know and cannot look up, ask for it. Ask for nothing else.
- When a request needs a function that you do not have, say so in a reply with a line that begins with the word \
CANNOT and a colon; do not try to get round it.
- When a request asks for a value, give it in a last line that begins with the word ANSWER and a colon.
- When a request is done, say so in a short reply; the next request follows."""


class Workspace(Files, Mail, Calendar, Contacts, ToolEnv):
    """Do what a user asks for, request by request; `calls` is the number of calls in the shortest solution."""

    id = "agentrl/Workspace-v0"
    reward = "workspace"
    summary = "files, mail, calendar, contacts: 41 functions, several user turns, 1 to 200 calls"
    order_free = False

    def __init__(
        self,
        *,
        calls: int | Sequence[int] = (3, 8),
        requests: int | Sequence[int] = (2, 3),
        questions: float = 0.15,
        missing: float = 0.2,
        withheld: float = 0.15,
        distractors: int = 10,
        offered: int = 40,
        recalls: float = 0.0,
        apps: Sequence[str] = tuple(APPS),
        **base: Any,
    ) -> None:
        """`calls`: a number or [lowest, highest] of required calls, 1..200. `requests`: of requests, 1..60, at
        most `calls` and at least a tenth of it. `questions`: share of requests that ask for a value, 0..0.5.
        `missing`: share of requests that omit a detail until it is asked for, `withheld`: share whose function
        is not available, both 0..1. `distractors`: additional mails, events, files and contacts, 0..100. `offered`:
        functions available besides those needed, 0..40. `recalls`: share of requests that have an earlier change taken back,
        which needs what was read before it, 0..1. `apps`: those that requests are about. Raises ConfigError for values outside
        these ranges."""
        super().__init__(**base)
        for name, share, top in (
            ("questions", questions, 0.5),
            ("missing", missing, 1),
            ("withheld", withheld, 1),
            ("recalls", recalls, 1),
        ):
            if not 0 <= share <= top:
                raise ConfigError(f"workspace: {name} = {share!r}; expected a share within 0..{top}")
        for name, number, most in (("distractors", distractors, 100), ("offered", offered, 40)):
            if not 0 <= number <= most:
                raise ConfigError(f"workspace: {name} = {number!r}; expected 0..{most}")
        if not apps or not set(apps) <= set(APPS):
            raise ConfigError(f"workspace: apps = {list(apps)!r}; expected some of {', '.join(APPS)}")
        many, some = _range("calls", calls, 200), _range("requests", requests, 60)
        if some[0] > many[0]:
            raise ConfigError(f"workspace: {some[0]} requests take more than {many[0]} calls; lower `requests`")
        if many[0] > MOST_PER_REQUEST * some[1]:
            raise ConfigError(f"workspace: {some[1]} requests have no {many[0]} calls; raise `requests`")
        closed = frozenset(item.name for app, tools in APPS.items() if app not in apps for item in tools)
        self.wish = Wish(many, some, questions, missing, withheld, distractors, recalls, closed)
        self.offered = offered
        self.world: dict[str, Json] = {}
        self.person = User([])

    # -- tasks -------------------------------------------------------------------------------------

    def make_task(self, rng_seed: int, split: str) -> Task:
        rng = task_rng(self.id, split, rng_seed)
        plan = draw(rng, split, self._propose, _fingerprint)
        turns, told = gold_script(plan.requests)
        calls = [call for request in plan.requests for call in request.calls]
        withheld = [r.move.vital for r in plan.requests if r.withheld]
        declined = [i for i, request in enumerate(plan.requests) if request.withheld]
        return Task(
            id=f"workspace/{split}/{rng_seed}",
            seed=rng_seed,
            split=split,
            data={
                "world": plan.before,
                "requests": [_public(request) for request in plan.requests],
                "tools": self._offer(rng, {name for name, _ in calls}, withheld),
            },
            gold={
                "world": plan.after,
                "talk": {"told": told, "declined": declined, "closed": len(plan.requests)},
                "turns": turns,
                "writes": [{"name": name, "arguments": args} for name, args in calls if is_write(name)],
            },
        )

    def _propose(self, rng: random.Random) -> TaskPlan:
        for _ in range(40):
            # A world costs more to make than a plan, so several plans are tried on each.
            target = rng.randint(*self.wish.calls)
            before = draw_world(rng, self.wish.distractors + target)
            for _ in range(8):
                plan = draw_plan(rng, self.wish, before, target)
                if plan is not None:
                    return plan
        low, high = self.wish.calls
        raise TaskDataError(
            f"workspace: none of 320 plans came out at {low} to {high} calls; raise `requests`, or name more `apps`"
        )

    def _offer(self, rng: random.Random, needed: set[str], withheld: Sequence[str | None]) -> list[str]:
        closed = self.wish.closed
        spare = [name for name in TOOLS if name not in needed and name not in withheld and name not in closed]
        chosen = needed.union(rng.sample(spare, min(self.offered, len(spare))))
        return [name for name in TOOLS if name in chosen and name not in withheld]

    def prompt(self, task: Task) -> list[Message]:
        first = task.data["requests"][0]["text"]
        return [Message("system", _SYSTEM.format(today=START.isoformat())), Message("user", first)]

    # -- the episode -------------------------------------------------------------------------------

    async def setup(self, task: Task) -> None:
        self.world = private(task.data["world"])
        self.person = User(task.data["requests"])
        beside = {name: item for name, item in self.toolbox.table.items() if name not in TOOLS}  # of tool sets
        self.toolbox.table = {name: TOOLS[name] for name in task.data["tools"]} | beside

    def state(self) -> Json:
        return {
            "world": export(self.world) if self.world else {},
            "talk": self.person.talk(),
            "needless": self.person.needless,
        }

    async def user_reply(self, message: Message) -> list[Message] | None:
        words, tool = self.person.hear(message.content)
        if tool is not None:
            self.toolbox.add(TOOLS[tool])
            shown = json.dumps(TOOLS[tool].schema["function"])
            words = f"I have switched a function on for you: {shown}\nNow please do it."
        return None if words is None else [Message("user", words)]

    # -- scripted policies -------------------------------------------------------------------------

    def gold_turns(self, task: Task) -> list[Message]:
        return [_message(turn) for turn in task.gold["turns"]]

    def teacher(self, task: Task, rng: Any, **params: Any) -> Teacher:
        return Teacher(rng, self.gold_turns(task), **params)


def _range(name: str, value: int | Sequence[int], most: int) -> tuple[int, int]:
    low, high = (value, value) if isinstance(value, int) else (value[0], value[-1])
    if not 1 <= low <= high <= most:
        raise ConfigError(f"workspace: {name} = {value!r}; expected a number or [low, high] within 1..{most}")
    return low, high


def _fingerprint(plan: TaskPlan) -> str:
    """The requests and their calls; the rest of the world does not count."""
    return json.dumps([[r.move.text, r.calls, r.asked, r.withheld, r.move.answer] for r in plan.requests])


def _public(request: Request) -> dict[str, Json]:
    """A request as the simulated user knows it."""
    move, slot = request.move, request.move.slot if request.asked else None
    return {
        "text": slot.text if slot else move.text,
        "slot": {"words": list(slot.words), "reply": slot.reply} if slot else None,
        "question": move.answer is not None,
        "withheld": move.vital if request.withheld else None,
        "restored": request.restored,
    }


def _message(turn: dict[str, Json]) -> Message:
    if "text" in turn:
        return Message("assistant", turn["text"])
    return Message("assistant", tool_calls=(ToolCall(turn["name"], dict(turn["arguments"])),))

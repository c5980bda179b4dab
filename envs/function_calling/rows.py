"""The common form of a function-calling task, to which all layouts are converted, and its check."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice, product
from typing import NoReturn

from agentrl.contrib.offline.layouts import messages_of
from agentrl.data.chat_forms import FormError, pair_results
from agentrl.data.trajectory import Json, Message
from agentrl.env.call_options import call_fault
from agentrl.reward.call_matching import AllowedValues, gold_calls
from agentrl.reward.values import UnscorableError

NO_FUNCTION = "NO FUNCTION"
MISSING = "MISSING"
MOST_CHOICES = 1000
"""Of allowed values of a call's arguments, tried until one fits."""
KINDS = ("single", "multiple", "parallel", "parallel_multiple", "irrelevance", "missing")


class BadRowError(Exception):
    """An invalid row: `field` names the place in it."""

    def __init__(self, field_name: str, message: str) -> None:
        super().__init__(message)
        self.field = field_name


class UnsolvableError(BadRowError):
    """A row whose gold no answer can match: it is always left out, and counted."""


def bad(field_name: str, message: str) -> NoReturn:
    """Raise BadRowError."""
    raise BadRowError(field_name, message)


@dataclass(frozen=True, slots=True)
class Row:
    """`messages` up to the policy's turn; `tools` in OpenAI's format; the correct answer.

    `scoring`: "sets" (`calls`: name and, for each argument, the allowed values), "bfcl" (`calls` as in the
    Berkeley leaderboard's answers), "any" (some call, right or wrong) or "answer" (no call, and one of `answers`).
    """

    id: str
    messages: list[dict[str, Json]]
    tools: list[dict[str, Json]]
    scoring: str
    calls: list[dict[str, Json]] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    kind: str = ""

    def named(self) -> str:
        """The kind: as given, or from the number of calls and tools."""
        if self.kind or self.scoring == "any":
            return self.kind or "relevance"
        if self.scoring == "answer":
            return "irrelevance"
        names = Counter(call_name(call) for call in self.calls)
        if len(self.calls) == 1:
            return "single" if len(self.tools) == 1 else "multiple"
        return "parallel" if len(names) == 1 else "parallel_multiple"


def history(messages: list[dict[str, Json]]) -> list[Message]:
    """The messages of a row. Raises FormError, which names the key that is not read."""
    return list(pair_results(messages_of(messages, "messages").messages, strict=False))


def call_name(call: dict[str, Json]) -> str:
    """The function name of a gold call in either form."""
    return str(call["name"]) if "name" in call and isinstance(call["name"], str) else next(iter(call))


def fitting_arguments(call: Mapping[str, Json], parameters: Mapping[str, Json]) -> tuple[dict[str, Json], str | None]:
    """The first allowed values that a tool's schema takes, without what may be left out; and the fault if it takes none of the
    first `MOST_CHOICES`."""
    required = parameters.get("required", ())
    chosen = {key: values for key, values in call["arguments"].items() if "" not in values or key in required}
    choices = product(*([value for value in values if value != ""] or [""] for values in chosen.values()))
    faults = list[str]()
    for values in islice(choices, MOST_CHOICES):
        arguments = dict(zip(chosen, values, strict=True))
        if (fault := call_fault(str(call["name"]), arguments, parameters)) is None:
            return arguments, None
        faults.append(fault)
    first = {key: next((value for value in values if value != ""), "") for key, values in chosen.items()}
    return first, None if next(choices, None) else faults[0]


def check_row(row: Row) -> Row:
    """Returns the row. Raises BadRowError if its parts are not consistent."""
    names = [tool["function"]["name"] for tool in row.tools]
    if duplicates := [name for name, count in Counter(names).items() if count > 1]:
        bad("tools", f"two tools are called {duplicates[0]!r}")
    try:
        last = history(row.messages)[-1].role if row.messages else ""
    except FormError as problem:
        bad(problem.key, problem.problem)
    if last not in ("user", "tool"):
        bad("messages", "the last message must be the user's or a tool's")
    for number, call in enumerate(row.calls):
        if call_name(call) not in names:
            bad("calls", f"{call_name(call)!r} is not one of the tools ({', '.join(names[:8]) or 'there are none'})")
        if row.scoring == "sets":
            try:
                (read,) = gold_calls([call], AllowedValues)
            except UnscorableError as problem:
                bad(f"calls[{number}]", str(problem))
            if read.by == "user":
                bad(f"calls[{number}].by", "no user makes calls here, so that none at all would be right. Leave it out")
            tool = row.tools[names.index(call_name(call))]["function"]
            if (wrong := fitting_arguments(call, tool["parameters"])[1]) is not None:
                bad(
                    f"calls[{number}]",
                    f"no call of {call_name(call)!r} has these arguments: {wrong}. Write such as its schema takes",
                )
    if row.scoring in ("sets", "bfcl") and not row.calls:
        bad("calls", "expected at least one call")
    if row.scoring == "answer" and not row.answers:
        bad("answers", "expected at least one text, or no such key")
    if row.scoring == "any" and not names:
        bad("tools", "expected at least one tool")
    return row

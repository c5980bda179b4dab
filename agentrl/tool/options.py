"""`Options`: how a tool is called, how strictly its arguments are checked, and what a policy reads of its errors."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Literal, get_args

from agentrl.errors import did_you_mean
from agentrl.tool.validate import Problem
from agentrl.trajectory import Blame as Blame

OnTimeout = Literal["stop", "answer"]
Caller = Literal["assistant", "user"]
Check = Literal["strict", "lenient", "off"]

MAX_OUTPUT = 2048
"""Tokens of an answer, where neither the tool nor its environment says."""

_FIELD = re.compile(r"\{(\w+)\}")
_FIELDS = ("message", "json", "error", "tool")


@dataclass(frozen=True, slots=True)
class Options:
    """How a tool is called.

    `timeout` (seconds) and `max_output` (tokens; None: the environment's, `ToolEnv.max_output`) bound every call. `on_timeout`
    says what happens after a timeout: "stop" ends the episode; with "answer" the policy is told and continues. `late` says who is
    responsible for it: the "infrastructure" (default with "stop": the episode ends unscored) or the "policy" (default with
    "answer", and right for tools that run what the policy wrote: the episode ends there and is scored).
    `parallel=False` keeps other calls of the turn from overlapping this one. `concurrency` bounds the calls that
    run at the same time in this process, over all episodes. `inline` runs a plain function on the event loop instead
    of in a thread: for functions that take microseconds and never wait. `process` runs a plain module function
    in a child process, which is killed after a timeout: for functions that may hang. Arguments and result are
    pickled; nothing else is shared. `read_only` promises that the call does not change any state. `by`: who may call it, the
    policy or the environment's simulated user (docs/users.md): the tools of one are not offered to the other, and the time of
    the user's is never the policy's fault.

    `check` says what arguments are checked against; what the policy is shown is the tool's schema in any case. "strict": that
    schema. "lenient": only whether Python would make the call; argument names that the function does not take, or lacks, are
    answered with Python's own words. Values are passed on as they are ("5" stays "5", 5 is fine for a float), except those of a
    parameter whose annotation is no JSON type, which become it if they can. "off": nothing, and nothing is converted.

    `on_error`: "stop" ends the episode unscored if the function raises anything but ToolError; with "answer" the policy reads the
    exception's text, as it always does for ToolError. By default "stop" if `check` is "strict", else "answer": what is not
    checked makes functions raise, and a policy must not escape a bad reward by a wrong argument.

    `error`: the text that the policy reads in place of an answer, by default the environment's (`ToolEnv.error_text`). In it,
    `{message}` stands for the message, `{json}` for the same as a JSON text with its quotes, `{error}` for its kind
    ("tool_error", say) and `{tool}` for the tool's name.

    Raises ValueError for another name in braces, or another `check` or `on_error`.
    """

    timeout: float = 30.0
    on_timeout: OnTimeout = "stop"
    late: Blame | None = None
    max_output: int | None = None
    parallel: bool = True
    concurrency: int | None = None
    inline: bool = False
    process: bool = False
    read_only: bool = False
    by: Caller = "assistant"
    check: Check = "strict"
    on_error: OnTimeout | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        if self.check not in get_args(Check):
            raise ValueError(f'check = {self.check!r}; expected "strict", "lenient" or "off"')
        if self.on_error not in (None, *get_args(OnTimeout)):
            raise ValueError(f'on_error = {self.on_error!r}; expected "stop" or "answer"')
        for name in _FIELD.findall(self.error or ""):
            if name not in _FIELDS:
                known = ", ".join(f"{{{field}}}" for field in _FIELDS)
                raise ValueError(f"error: {{{name}}} stands for nothing; {did_you_mean(name, _FIELDS, f'known: {known}')}")

    @property
    def policy_late(self) -> bool:
        """Whether the policy is responsible for a call that timed out."""
        if self.by == "user":
            return False
        return self.late == "policy" or (self.late is None and self.on_timeout == "answer")

    @property
    def answers_errors(self) -> bool:
        """Whether the policy reads of what the function raises, whatever it is."""
        return self.on_error == "answer" or (self.on_error is None and self.check != "strict")


DEFAULT = Options()


def formed(form: str, tool: str, problem: Problem) -> str:
    """The text of `Options.error` for a problem."""
    message = json.dumps(problem.message, ensure_ascii=False)
    values = {"message": problem.message, "json": message, "error": problem.kind, "tool": tool}
    return _FIELD.sub(lambda field: values[field[1]], form)

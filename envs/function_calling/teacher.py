"""An imperfect scripted policy: mostly the correct calls, sometimes one too few or a wrong value."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agentrl.env import Message, ToolCall
from agentrl.env.authoring import GoldTeacher, check_shares


class Teacher(GoldTeacher):
    """Plays the gold turn with random errors.

    `wrong`: probability that a call has a wrong or missing argument. `fewer`: probability that the last of several
    calls is left out. `abstain`: probability of no call if some are expected, and the reverse. `rng` needs only
    `random()`.
    """

    def __init__(
        self, gold: Message, tools: list[str], rng: Any, *, wrong: float = 0.2, fewer: float = 0.2, abstain: float = 0.05
    ) -> None:
        check_shares(wrong=wrong, fewer=fewer, abstain=abstain)
        calls = gold.tool_calls
        if rng.random() < abstain:
            turn = Message("assistant", "NO FUNCTION") if calls else Message(
                "assistant", tool_calls=(ToolCall(tools[int(rng.random() * len(tools))], {}),))  # fmt: skip
        else:
            if len(calls) > 1 and rng.random() < fewer:
                calls = calls[:-1]
            turn = replace(gold, tool_calls=tuple(self._err(call, rng, wrong) for call in calls))
        super().__init__([turn], rng)

    def _err(self, call: ToolCall, rng: Any, wrong: float) -> ToolCall:
        arguments = dict(call.arguments or {})
        if not arguments or rng.random() >= wrong:
            return call
        key = list(arguments)[int(rng.random() * len(arguments))]
        if rng.random() < 0.5:
            del arguments[key]
        else:
            value = arguments[key]
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            arguments[key] = value + 1 if number else "unknown"
        return replace(call, arguments=arguments)

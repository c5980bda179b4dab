"""The calls of a turn, asked of ToolSandbox at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence

from agentrl.data.trajectory import Json, ToolCall
from agentrl.env import ToolEnv

Ask = Callable[[Sequence[ToolCall]], Awaitable[Sequence[str]]]
"""Makes calls; their answers, in the same order."""


class CallsTogether:
    """The first call of a turn asks for the answers of all of them (those of the benchmark's tools, with arguments that could be
    read); each of the others finds its own. Part of one episode's state."""

    def __init__(self, names: Iterable[str]) -> None:
        """`names`: of the benchmark's tools; others (a tool set's) are not its own."""
        self.names = frozenset(names)
        self.due: list[tuple[ToolCall, str]] = []
        self.answered = -1  # turns when calls were made last

    async def answer(self, env: ToolEnv, name: str, arguments: dict[str, Json], ask: Ask) -> str:
        """The answer to a call. One that is in no turn (made by itself) is asked for alone."""
        turns = env.trajectory.turns
        if (found := self._found(len(turns), name, arguments)) is not None:
            return found
        made = (
            [one for one in turns[-1].message.tool_calls if one.name in self.names and one.arguments is not None] if turns else []
        )
        if (name, arguments) not in [(one.name, one.arguments) for one in made] or self.answered == len(turns):
            made = [ToolCall(name, arguments)]
        self.due, self.answered = list(zip(made, await ask(made), strict=True)), len(turns)
        return self._found(len(turns), name, arguments) or ""

    def _found(self, turn: int, name: str, arguments: dict[str, Json]) -> str | None:
        if self.answered != turn:
            return None
        places = [i for i, (one, _) in enumerate(self.due) if (one.name, one.arguments) == (name, arguments)]
        return self.due.pop(places[0])[1] if places else None

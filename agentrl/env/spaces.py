"""Gymnasium spaces of a conversation: lists of messages as observations, assistant turns as actions."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import gymnasium
import numpy as np

from agentrl.env.sample import sample_arguments
from agentrl.tool import Toolbox
from agentrl.trajectory import Json, Message, as_row, message_of

Observation = list[Message]
Action = Message | str


class MessagesSpace(gymnasium.Space[Observation]):
    """Every list of messages."""

    def __init__(self, seed: int | np.random.Generator | None = None) -> None:
        super().__init__(None, None, seed)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def contains(self, x: Any) -> bool:
        return isinstance(x, list) and all(isinstance(item, Message) for item in x)

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> Observation:
        """One user message of random words."""
        words = self.np_random.integers(0, 1000, size=int(self.np_random.integers(1, 9)))
        return [Message("user", " ".join(f"w{word}" for word in words))]

    def to_jsonable(self, sample_n: Iterable[Observation]) -> list[Any]:
        return [[as_row(message) for message in sample] for sample in sample_n]

    def from_jsonable(self, sample_n: Iterable[Any]) -> list[Any]:
        return [[message_of(row) for row in sample] for sample in sample_n]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MessagesSpace)

    __hash__ = gymnasium.Space.__hash__

    def __repr__(self) -> str:
        return "MessagesSpace()"


class ToolCallSpace(gymnasium.Space[Action]):
    """An assistant turn: any text, or any assistant message. Malformed calls are legal actions.

    `sample` gives the text of one schema-valid call (plain text if there are no tools).
    """

    def __init__(self, toolbox: Toolbox, seed: int | np.random.Generator | None = None) -> None:
        super().__init__(None, None, seed)
        self._toolbox: Toolbox | None = toolbox
        self._frozen: list[dict[str, Json]] = []

    def __getstate__(self) -> dict[str, Any]:
        """A pickled space (AsyncVectorEnv compares them) has the schemas but not the functions."""
        return {**self.__dict__, "_toolbox": None, "_frozen": self.schemas()}

    def schemas(self) -> list[dict[str, Json]]:
        """Function schemas of the tools that can be called now."""
        return self._frozen if self._toolbox is None else self._toolbox.schemas()

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) or (isinstance(x, Message) and x.role == "assistant")

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> Action:
        schemas = self.schemas()
        if not schemas:
            return f"w{int(self.np_random.integers(0, 1000))}"
        function = schemas[int(self.np_random.integers(len(schemas)))]["function"]
        arguments = sample_arguments(function["parameters"], self.np_random)
        body = json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)
        return f"<tool_call>\n{body}\n</tool_call>"

    def to_jsonable(self, sample_n: Iterable[Action]) -> list[Any]:
        return [sample if isinstance(sample, str) else as_row(sample) for sample in sample_n]

    def from_jsonable(self, sample_n: Iterable[Any]) -> list[Any]:
        return [sample if isinstance(sample, str) else message_of(sample) for sample in sample_n]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ToolCallSpace) and self.schemas() == other.schemas()

    __hash__ = gymnasium.Space.__hash__

    def __repr__(self) -> str:
        return f"ToolCallSpace({', '.join(schema['function']['name'] for schema in self.schemas())})"

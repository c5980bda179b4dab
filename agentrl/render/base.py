"""The renderer contract: messages to token ids by appending only, and sampled ids back to a message."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.errors import RenderError
from agentrl.executors import by_size
from agentrl.render.streaming import TurnReader
from agentrl.trajectory import Json, Message

CHARACTERS_PER_TOKEN = 4  # of English text with a large vocabulary, roughly


class Renderer(ABC):
    """Turns a conversation into token ids by appending only; stateless and shared by all episodes."""

    tools_need_system = False
    """Whether tools are shown only in prompts that begin with a system message."""

    @property
    @abstractmethod
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end an assistant turn."""

    @abstractmethod
    def start(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of the opening messages, up to and including the opening of the assistant's turn."""

    @abstractmethod
    def extend(self, finish: str, messages: Sequence[Message], last: int | None = None) -> list[int]:
        """The suffix after a sampled assistant turn: closes that turn (in full if `finish` is not
        "stop", so that no stop token was sampled), adds `messages` and opens the next assistant turn.

        `last` is the id that was sampled last. Where several tokens end a turn, each also says what follows it (GLM ends a turn
        of calls with the token that opens their answers); None stands for the one that `messages` follow.

        Raises RenderError if the template would rewrite what came before.
        """

    @abstractmethod
    def parse(self, token_ids: Sequence[int], finish: str) -> Message:
        """The assistant message that sampled ids decode to. Malformed tool calls are kept as ToolCall with
        `arguments=None` and `error` set; never raises, whatever the ids."""

    @abstractmethod
    def assistant(self, message: Message) -> list[int]:
        """The inverse of `parse`: ids of an assistant turn as a policy would have sampled them, ending in
        the stop token (for supervised training on scripted transcripts).

        Raises RenderError if the message is not an assistant's.
        """

    def keeps(self, message: Message, following: Sequence[Message], earlier: Sequence[Message] = (), begun: int = 0) -> bool:
        """Whether a ledger stays as it is once `following` is appended to the sampled turn `message`.

        False if the chat template then drops the reasoning of turns in it, say: the ledger forks, and the new
        one begins with `start` of all messages. `earlier` is what came before `message`, and the ledger began with the first
        `begun` of it; without them only this turn is looked at.
        """
        return True

    def reader(self, stops: Sequence[str] = ()) -> TurnReader:
        """Reads one turn while it is sampled, which one of the texts `stops` may end."""
        return TurnReader()

    async def astart(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """`start`, without holding up the event loop: long texts are rendered in a thread."""
        return await by_size(characters(messages), self.start, messages, tools)

    async def aextend(self, finish: str, messages: Sequence[Message], last: int | None = None) -> list[int]:
        """`extend`, likewise."""
        return await by_size(characters(messages), self.extend, finish, messages, last)

    async def aparse(self, token_ids: Sequence[int], finish: str) -> Message:
        """`parse`, likewise."""
        return await by_size(CHARACTERS_PER_TOKEN * len(token_ids), self.parse, token_ids, finish)

    def grammar(
        self, schema: Json = None, tools: Sequence[Mapping[str, Any]] = (), several: bool = True, reasons: bool = True
    ) -> str:
        """The grammar (`Sampling.grammar`) of a turn that is JSON which fits `schema`, if that is not None, or calls of
        `tools`: one, or one or more if `several`; `reasons`: after a reasoning, if it likes. Raises RenderError if none is known
        for this renderer's turns."""
        raise RenderError(f"{type(self).__name__} knows no grammar of its turns")

    @property
    def call_end(self) -> str:
        """The text that ends a call; empty if the syntax has none."""
        return ""

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> Renderer:
        """The renderer for an episode that offers these tools (function schemas). It differs only if the
        tool-call syntax has untyped values: `parse` then reads each value as its declared type."""
        return self


def characters(messages: Sequence[Message]) -> int:
    """The characters of messages, roughly: calls count as they were sampled."""
    return sum(
        len(message.content) + len(message.reasoning or "") + sum(len(call.raw) for call in message.tool_calls)
        for message in messages
    )

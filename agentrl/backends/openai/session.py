"""One session of the OpenAI-compatible server: a client's conversations as token ledgers."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from agentrl.backends.openai.messages import identity, read_messages, unique_ids, write_message
from agentrl.render.base import Renderer
from agentrl.rollout.engine import Engine, Generation, Sampling
from agentrl.trajectory import Json, Message, TokenLedger


@dataclass(slots=True)
class Branch:
    """One conversation: its messages so far and the ledger that holds them as tokens."""

    tools: str
    ledger: TokenLedger
    history: list[str]
    turns: int
    finish: str
    messages: list[Message]  # the last one is what was sampled last
    begun: int  # so many of them began the ledger
    stop: int | None  # the id that ended the last turn


@dataclass(frozen=True, slots=True)
class Answer:
    """One turn: its message as the client sees it, what was sampled for it, the number of prompt tokens, and whether
    a stop string ended it."""

    message: Message
    generation: Generation
    prompt_tokens: int
    stopped: bool


@dataclass(frozen=True, slots=True)
class StopStrings:
    """Texts that end a turn, for an engine that only supports stop tokens."""

    texts: tuple[str, ...]
    decode: Callable[[Sequence[int]], str]

    def cut(self, generation: Generation) -> Generation:
        """The generation up to the token that completes the first stop string; the same object if there is none.

        Its finish becomes "length": no stop token was sampled, so the renderer closes the turn.
        """
        ids = generation.token_ids
        if not self._has(ids):
            return generation
        # A longer prefix keeps the stop string once it is complete, so bisection finds the token with few decodings.
        count = bisect_left(range(len(ids)), True, key=lambda index: self._has(ids[: index + 1])) + 1
        return Generation(ids[:count], generation.logprobs[:count], generation.versions[:count], "length")

    def strip(self, message: Message) -> Message:
        """The message without the stop string and whatever follows it in its last token."""
        reasoning = None if message.reasoning is None else self._before(message.reasoning)
        return replace(message, content=self._before(message.content), reasoning=reasoning)

    def _has(self, ids: Sequence[int]) -> bool:
        text = self.decode(ids)
        return any(stop in text for stop in self.texts)

    def _before(self, text: str) -> str:
        starts = [start for stop in self.texts if (start := text.find(stop)) >= 0]
        return text[: min(starts, default=len(text))]


@dataclass(slots=True)
class AgentSession:
    """All requests of one agent. A request that continues an earlier answer extends that ledger; any other (a
    sub-agent, an edited history) starts a new one. Each sampled token is marked as sampled in exactly one ledger."""

    key: str
    branches: list[Branch] = field(default_factory=list)
    requests: int = 0

    @property
    def ledgers(self) -> list[TokenLedger]:
        return [branch.ledger for branch in self.branches]

    async def complete(
        self,
        engine: Engine,
        renderer: Renderer,
        rows: Sequence[Mapping[str, Json]],
        tools: Sequence[Mapping[str, Json]],
        sampling: Sampling,
        stops: StopStrings | None = None,
    ) -> Answer:
        """Answer one request. With `stops` the turn ends at the first of them: what was sampled after the token that
        completes it is discarded, as if sampling had stopped there.

        Raises EngineError, RenderError or RequestError; the session is then unchanged.
        """
        messages, renderer = read_messages(rows), renderer.with_tools(tools)
        history = [identity(row) for row in rows]
        signature = json.dumps(list(tools), sort_keys=True)
        parent = self._parent(history, signature, messages, renderer)
        self.requests += 1
        if parent is None:
            keep, prompt = 0, renderer.start(messages, tools)
            ledger, turns, begun = TokenLedger(), 0, len(messages)
        else:
            keep, turns, begun = len(parent.ledger), parent.turns, parent.begun
            suffix = renderer.extend(parent.finish, messages[len(parent.history) :], parent.stop)
            ledger, prompt = parent.ledger, [*parent.ledger.ids(), *suffix]
        generation = await engine.generate(prompt, sampling, f"{self.key}/{id(ledger):x}")
        kept = generation if stops is None else stops.cut(generation)
        stopped, generation = kept is not generation, kept
        message = unique_ids(renderer.parse(generation.token_ids, generation.finish), turns)
        if stops is not None and stopped:
            message = stops.strip(message)
        # While the engine sampled, another request may have continued the same branch: this one then gets its own.
        if parent is not None and len(ledger) != keep:
            ledger, parent = ledger.fork(keep), None
        ledger.append_context(prompt[keep:], turns)
        ledger.append_sampled(generation.token_ids, generation.logprobs, generation.versions, turns)
        branch = Branch(
            signature,
            ledger,
            [*history, identity(write_message(message))],
            turns + 1,
            generation.finish,
            [*messages, message],
            begun,
            generation.token_ids[-1] if generation.finish == "stop" and generation.token_ids else None,
        )
        if parent is not None:
            self.branches[self.branches.index(parent)] = branch
        else:
            self.branches.append(branch)
        return Answer(message, generation, len(prompt), stopped)

    def to_json(self) -> dict[str, Json]:
        return {"session": self.key, "ledgers": [ledger.to_json() for ledger in self.ledgers]}

    def _parent(self, history: list[str], tools: str, messages: list[Message], renderer: Renderer) -> Branch | None:
        """The longest branch whose messages the request repeats and to which it then adds only answers."""
        fitting = [
            branch
            for branch in self.branches
            if branch.tools == tools
            and history[: len(branch.history)] == branch.history
            and len(history) > len(branch.history)
            and all(message.role != "assistant" for message in messages[len(branch.history) :])
            and renderer.keeps(branch.messages[-1], messages[len(branch.history) :], branch.messages[:-1], branch.begun)
        ]
        return max(fitting, key=lambda branch: len(branch.history), default=None)

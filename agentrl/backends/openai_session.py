"""One session of the OpenAI-compatible server: a client's conversations as token ledgers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agentrl.backends.openai_chat import identity, read_messages, unique_ids, write_message
from agentrl.render.base import Renderer
from agentrl.rollout.engine import Engine, Generation, Sampling
from agentrl.trajectory import Json, Message, TokenLedger


@dataclass(slots=True)
class Branch:
    """One line of conversation: its messages so far and the ledger that holds them as tokens."""

    tools: str
    ledger: TokenLedger
    history: list[str]
    turns: int
    finish: str
    last: Message


@dataclass(slots=True)
class Session:
    """All that one agent asked. A request that continues an earlier answer extends that ledger; any other (a
    sub-agent, an edited history) opens a new one. Each sampled token is in exactly one ledger as sampled."""

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
    ) -> tuple[Message, Generation, int]:
        """Answer one request; returns the turn, what was sampled, and the number of prompt tokens.

        Raises EngineError, RenderError or RequestError; the session is then as it was.
        """
        messages = read_messages(rows)
        history = [identity(row) for row in rows]
        signature = json.dumps(list(tools), sort_keys=True)
        parent = self._parent(history, signature, messages, renderer)
        self.requests += 1
        if parent is None:
            keep, prompt = 0, renderer.start(messages, tools)
            ledger, turns = TokenLedger(), 0
        else:
            keep, turns = len(parent.ledger), parent.turns
            suffix = renderer.extend(parent.finish, messages[len(parent.history) :])
            ledger, prompt = parent.ledger, [*parent.ledger.ids(), *suffix]
        generation = await engine.generate(prompt, sampling, f"{self.key}/{id(ledger):x}")
        message = unique_ids(renderer.with_tools(tools).parse(generation.token_ids, generation.finish), turns)
        if parent is not None and len(ledger) != keep:
            ledger, parent = ledger.fork(keep), None  # another request went on from here meanwhile
        ledger.append_context(prompt[keep:], turns)
        ledger.append_sampled(generation.token_ids, generation.logprobs, generation.versions, turns)
        branch = Branch(
            signature,
            ledger,
            [*history, identity(write_message(message))],
            turns + 1,
            generation.finish,
            message,
        )
        if parent is not None:
            self.branches[self.branches.index(parent)] = branch
        else:
            self.branches.append(branch)
        return message, generation, len(prompt)

    def to_json(self) -> dict[str, Json]:
        return {"session": self.key, "ledgers": [ledger.to_json() for ledger in self.ledgers]}

    def _parent(
        self, history: list[str], tools: str, messages: list[Message], renderer: Renderer
    ) -> Branch | None:
        """The longest branch whose messages the request repeats and then only adds answers to."""
        fitting = [
            branch
            for branch in self.branches
            if branch.tools == tools
            and history[: len(branch.history)] == branch.history
            and len(history) > len(branch.history)
            and all(message.role != "assistant" for message in messages[len(branch.history) :])
            and renderer.keeps(branch.last, messages[len(branch.history) :])
        ]
        return max(fitting, key=lambda branch: len(branch.history), default=None)

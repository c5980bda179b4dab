"""One endpoint session: an agent's conversations recorded as token ledgers, independent of the protocol."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from agentrl.contrib.toolkit.turns import TurnReader, grammar_of, reader_of
from agentrl.data.chat_forms import pair_results
from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import Json, Message, Turn
from agentrl.engines.chat_format import RequestError, number_calls
from agentrl.render.base import Renderer
from agentrl.render.syntaxes import SYNTAXES
from agentrl.reward.values import equality_key
from agentrl.rollout.engine import Engine, Generation, OnTokens, Sampling, Usage, derive
from agentrl.utils.errors import AgentrlError, EngineError, PromptTooLongError, RenderError, fault_text
from agentrl.utils.event_loop import OwnedTasks, cancel_all
from agentrl.utils.threads import in_thread

log = logging.getLogger(__name__)

# Requests


def refusal_of(problem: Exception) -> RequestError:
    """Convert a failure into the error that the client gets. A too long prompt is the client's error (it would retry a server
    error); engine failures are the server's."""
    if isinstance(problem, RequestError):
        return problem
    if isinstance(problem, PromptTooLongError):
        return RequestError(f"messages: {problem}", code="context_length_exceeded")
    if isinstance(problem, RenderError):
        return RequestError(f"messages: {problem}")
    if isinstance(problem, UnicodeEncodeError):
        return RequestError("the request has half of a character (a lone surrogate)")
    if isinstance(problem, AgentrlError):
        return RequestError(str(problem), status=503, code="engine_failed")
    log.error("a request of an agent failed", exc_info=problem)
    return RequestError(fault_text(problem), status=500)


@dataclass(frozen=True, slots=True)
class Ask:
    """A request: a conversation to continue, with options.

    `tools`: function schemas as in OpenAI's chat completions. `max_tokens`, `seed`: None uses the run's. `choices`: number of
    answers. `schema`: JSON Schema of an answer without a call, or None. `schema_field`, `stop_field`: the request's names of
    these. `calls`: the turn must be a call; `only`: of this tool. `single`: at most one call per turn. `other`: requested
    sampling parameters, which are ignored in favour of the run's."""

    messages: list[Message]
    tools: list[dict[str, Json]] = field(default_factory=list)
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    choices: int = 1
    logprobs: bool = False
    stop_field: str = "stop"
    schema: Json = None
    schema_field: str = "response_format"
    calls: bool = False
    only: str | None = None
    single: bool = False
    other: Mapping[str, Json] = field(default_factory=dict)


def in_order(messages: Sequence[Message]) -> list[Message]:
    """Order the results of each turn by its calls, and add their names, for templates that write no ids."""
    return list(pair_results(messages, strict=False))


def identity(message: Message) -> Hashable:
    """Return a key that is equal for equal messages of a history, however a client sends them back. It ignores reasoning, which
    clients drop, white space around an assistant's text, which some strip, and the difference of 1.0 and 1."""
    calls = tuple((call.id, call.name, equality_key(call.arguments)) for call in message.tool_calls)
    content = message.content.strip() if message.role == "assistant" else message.content
    return message.role, content, calls, message.tool_call_id


def cut(message: Message, texts: Sequence[str]) -> tuple[Message, str | None]:
    """Cut a turn at its first stop string, with the rest of the last token; returns the message and the stop string."""
    reasoning, content = message.reasoning or "", message.content
    found = min(((at, text) for text in texts if (at := content.find(text)) >= 0), default=None)
    if found is None:
        thought = min(((at, text) for text in texts if (at := reasoning.find(text)) >= 0), default=None)
        kept = message if thought is None else replace(message, reasoning=reasoning[: thought[0]])
        return kept, None if thought is None else thought[1]
    return replace(message, content=content[: found[0]]), found[1]


# Conversations

SampleTurn = Callable[[Sampling], Awaitable[Generation]]
Around = Callable[[SampleTurn, Sequence[int], Sampling, str], Awaitable[Generation]]
"""Samples a turn by its first argument; the others are the prompt, the sampling, and the request key."""


@dataclass(frozen=True, slots=True)
class ServedPolicy:
    """The policy that answers all sessions. `sampling`: the run's; its `max_tokens` limits a turn. `decode`: the tokenizer's, or
    None. `around`: may limit each turn. `warned`: ignored request fields that were already logged."""

    engine: Engine
    renderer: Renderer
    sampling: Sampling
    decode: Callable[[Sequence[int]], str] | None = None
    around: Around = lambda turn, prompt, sampling, key: turn(sampling)
    warned: set[str] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Branch:
    """One conversation and the ledger with its tokens. `key`: its request key for the engine. `shown`: identities of the messages
    as the client sees them; `messages`: as in the ledger, the last one sampled last, the first `begun` of them its start. `last`:
    the token that ended the last turn. `busy`: number of requests that continue it now."""

    key: str
    tools: str
    begun: int
    ledger: TokenLedger = field(default_factory=TokenLedger)
    shown: list[Hashable] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    finish: str = ""
    last: int | None = None
    busy: int = 0


@dataclass(frozen=True, slots=True)
class Position:
    """Position of the next turn: after the first `keep` tokens of `parent`'s ledger, or in a new ledger (`parent` is None).
    `prompt`: all ids before it."""

    parent: Branch | None
    keep: int
    prompt: list[int]
    begun: int

    @property
    def routed_tokens(self) -> int:
        """Number of leading prompt tokens with recorded experts."""
        return 0 if self.parent is None else min(self.parent.ledger.routed_tokens, self.keep)


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice: the turn as the client sees it, its samples, the tokens used, and the stop string that ended it."""

    message: Message
    generation: Generation
    used: Usage
    stopped: str | None = None


@dataclass(frozen=True, slots=True)
class SampledPart:
    """Sampled tokens of a choice, and the text that they add to its content."""

    choice: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]


Emit = Callable[[SampledPart], None]


class AgentSession:
    """All requests of one agent's episode. A request that continues an earlier answer extends its ledger; any other (another
    agent of the episode, a changed history, a second choice) gets its own. Each sampled token is marked as sampled in exactly one
    ledger.

    `served`: the policy. `turns`: all answers in chronological order, with the position of their last token. `failure`: the
    engine's last failure, or None. `other`: requested sampling parameters that were ignored, with counts. `requests`: number of
    answered or failed requests. `added`: number of turns in the record that were not sampled. `kept`: conversations by the id of
    the response that ended them, for protocols in which a request names the one that it continues.
    """

    def __init__(self, name: str, served: ServedPolicy, *, seed: int | None = None) -> None:
        """`seed`: of all sampling here; None: random."""
        self.name = name
        self.turns: list[Turn] = []
        self.failure: EngineError | None = None
        self.other: dict[str, int] = {}
        self.requests = self.added = 0
        self.kept: dict[str, list[Message]] = {}
        self.served, self._seed = served, seed
        self._branches: list[Branch] = []
        self._keys = 0
        self._newest: Branch | None = None
        self._running = OwnedTasks()
        self._closed = False

    @property
    def ledgers(self) -> list[TokenLedger]:
        """Ledgers of sampled tokens with their prompts; `Turn.ledger` is an index into it."""
        return [branch.ledger for branch in self._branches]

    @property
    def conversations(self) -> list[list[Message]]:
        """The messages of each ledger."""
        return [list(branch.messages) for branch in self._branches]

    @property
    def messages(self) -> list[Message]:
        """The most recently answered conversation; empty before the first answer."""
        return [] if self._newest is None else list(self._newest.messages)

    def ledger_of_request(self, key: str) -> int | None:
        """Return the index of the ledger that an engine request with this key continues, or None."""
        return next((number for number, branch in enumerate(self._branches) if branch.key == key), None)

    def begin(self, ask: Ask, emit: Emit | None = None) -> asyncio.Task[list[Answer]]:
        """Start `answer` as a task that `close` cancels."""
        if self._closed:
            raise RequestError(f"session {self.name} is over", status=404, code="session_not_found")
        return self._running.start(self.answer(ask, emit), f"a request of session {self.name}")

    async def close(self) -> None:
        """Cancel turns in progress without recording them, and refuse new ones."""
        self._closed = True
        await self._running.close()

    async def answer(self, ask: Ask, emit: Emit | None = None) -> list[Answer]:
        """Sample each choice and record it; `emit` receives tokens as they are sampled.

        Raises EngineError, RenderError or RequestError; the ledgers are then unchanged.
        """
        renderer = self.served.renderer.with_tools(ask.tools)
        sampling = await self._sampling(ask)
        for name, value in ask.other.items():
            self.other[name] = self.other.get(name, 0) + 1
            if name not in self.served.warned:
                self.served.warned.add(name)
                log.warning("an agent requests %s = %s; ignored, its turns use the run's sampling (logged once)", name, value)
        number, self.requests = self.requests, self.requests + 1
        parent = self._parent(ask, renderer)
        if parent is not None:
            parent.busy += 1
        began = time.monotonic()
        try:
            position = await self._position(ask, parent, renderer)
            # Keep the engine's key of a conversation, so that it hits the prefix cache.
            keys = [parent.key] if parent is not None and parent.busy == 1 else []
            while len(keys) < ask.choices:
                keys.append(f"{self.name}/{self._keys}")
                self._keys += 1
            seeds = [self._seed_of(ask, number, choice) for choice in range(ask.choices)]
            listeners = [emit and _sink(choice, reader_of(renderer, ask.stop), emit) for choice in range(ask.choices)]
            routed = None if sampling.experts_from is None else position.routed_tokens
            asked = [replace(sampling, seed=seed, experts_from=routed) for seed in seeds]
            generations = await self._sample(position, asked, keys, listeners)
            messages = [await renderer.aparse(generation.token_ids, generation.finish) for generation in generations]
        except EngineError as problem:
            if not isinstance(problem, PromptTooLongError):
                self.failure = problem
            raise
        finally:
            if parent is not None:
                parent.busy -= 1
        seconds = time.monotonic() - began
        # No await from here on: all choices are recorded, or none.
        choices = zip(keys, generations, messages, strict=True)
        return [self._record(ask, position, key, one, message, seconds) for key, one, message in choices]

    def to_json(self) -> dict[str, Json]:
        return {"session": self.name, "ledgers": [ledger.to_json() for ledger in self.ledgers]}

    async def _position(self, ask: Ask, parent: Branch | None, renderer: Renderer) -> Position:
        if parent is None:
            # Restore the raw text of calls sampled here: a template may drop text next to calls.
            raw = {call.id: call.raw for turn in self.turns for call in turn.message.tool_calls}
            messages = [
                replace(one, tool_calls=tuple(replace(call, raw=raw.get(call.id, "")) for call in one.tool_calls))
                for one in ask.messages
            ]
            return Position(None, 0, await renderer.astart(messages, ask.tools), len(messages))
        # Read everything before the await: another request may extend the parent during it.
        ids, fresh = parent.ledger.ids(), ask.messages[len(parent.shown) :]
        suffix = await renderer.aextend(parent.finish, fresh, parent.last)
        return Position(parent, len(ids), [*ids, *suffix], parent.begun)

    def _parent(self, ask: Ask, renderer: Renderer) -> Branch | None:
        """Return the longest branch that the request repeats and extends only by messages other than the assistant's; of several,
        the least busy one."""
        history, messages = [identity(message) for message in ask.messages], ask.messages
        tools = json.dumps(ask.tools, sort_keys=True)
        fitting = [
            branch
            for branch in self._branches
            if branch.tools == tools
            and history[: len(branch.shown)] == branch.shown
            and len(history) > len(branch.shown)
            and all(message.role != "assistant" for message in messages[len(branch.shown) :])
            and renderer.keeps(branch.messages[-1], messages[len(branch.shown) :], branch.messages[:-1], branch.begun)
        ]
        return max(fitting, key=lambda branch: (len(branch.shown), -branch.busy), default=None)

    async def _sample(
        self, position: Position, samplings: Sequence[Sampling], keys: Sequence[str], listeners: Sequence[OnTokens | None]
    ) -> list[Generation]:
        """Sample one turn per key; if one fails, cancel the others."""
        engine, prompt = self.served.engine, position.prompt

        def sample(sampling: Sampling, key: str, tell: OnTokens | None) -> Awaitable[Generation]:
            def turn(own: Sampling) -> Awaitable[Generation]:
                return engine.generate(prompt, own, key) if tell is None else engine.stream(prompt, own, key, tell)

            return self.served.around(turn, prompt, sampling, key)

        tasks = [asyncio.ensure_future(turn) for turn in map(sample, samplings, keys, listeners)]
        try:
            generations = await asyncio.gather(*tasks)
        finally:
            await cancel_all(tasks)
        if any(generation.finish == "abort" for generation in generations):
            raise EngineError(f"a request of session {self.name} was aborted")
        return generations

    def _record(self, ask: Ask, position: Position, key: str, generation: Generation, parsed: Message, seconds: float) -> Answer:
        turn = len(self.turns) + self.added
        message = number_calls(parsed, turn)
        # Calls that the client cannot see as such become text: malformed ones, or without offered tools.
        calls = tuple(call for call in message.tool_calls if call.arguments is not None and ask.tools)
        rest = [call.raw for call in message.tool_calls if call.arguments is None or not ask.tools]
        shown = replace(message, content="\n".join(part for part in (message.content, *rest) if part), tool_calls=calls)
        stopped = None
        if generation.finish == "stop_string" and ask.stop:
            shown, stopped = cut(shown, ask.stop)
            # A stop string of white space is missing in the parsed text.
            stopped = stopped or (None if ask.single and shown.tool_calls else ask.stop[0])
        branch = self._branch(position, key, json.dumps(ask.tools, sort_keys=True))
        try:
            branch.ledger.append_context(position.prompt[position.keep :], turn)
            branch.ledger.append_sampled(generation.token_ids, generation.logprobs, generation.versions, turn)
            if generation.experts is not None:
                branch.ledger.add_experts(position.routed_tokens, generation.experts)
        except ValueError as fault:  # only a faulty engine makes what a ledger refuses
            self.failure = EngineError(f"turn {turn} of session {self.name}: {fault}")
            raise self.failure from None
        branch.shown = [*map(identity, ask.messages), identity(shown)]
        branch.messages = [*ask.messages, message]
        branch.finish = generation.finish
        branch.last = generation.token_ids[-1] if generation.finish == "stop" and generation.token_ids else None
        self._newest = branch
        used = generation.counts(len(position.prompt))
        record = Turn(turn, message, prompt_tokens=used.prompt_tokens, sampled_tokens=used.sampled_tokens, usd=used.usd)
        record.ledger, record.end = self._branches.index(branch), len(branch.ledger) - 1
        record.seconds, record.finish = seconds, generation.finish
        self.turns.append(record)
        return Answer(shown, generation, used, stopped)

    def _branch(self, position: Position, key: str, tools: str) -> Branch:
        """Return the branch to append a turn to: its parent, or a fork of it if another turn has extended that."""
        parent = position.parent
        if parent is not None and len(parent.ledger) == position.keep:
            parent.key = key  # the parent's own may be that of a request that now forks it
            return parent
        ledger = TokenLedger() if parent is None else parent.ledger.fork(position.keep)
        self._branches.append(Branch(key, tools, position.begun, ledger))
        return self._branches[-1]

    async def _sampling(self, ask: Ask) -> Sampling:
        """Return the run's sampling parameters with the request's permitted changes."""
        own, renderer = self.served.sampling, self.served.renderer
        most = own.max_tokens if ask.max_tokens is None else min(ask.max_tokens, own.max_tokens)
        sampling = replace(own, max_tokens=most, stop_token_ids=renderer.stop_token_ids)
        if ask.logprobs and self.served.decode is None:
            raise RequestError("logprobs: not supported by this server: it was made without a tokenizer (decode=...)")
        if ask.stop:
            sampling = await self._check_supported(replace(sampling, stop=ask.stop), ask.stop_field)
        if ask.schema is not None or ask.calls:
            key = "tool_choice" if ask.calls else ask.schema_field
            tools = [tool for tool in ask.tools if ask.only in (None, tool["function"]["name"])]
            try:
                grammar = grammar_of(renderer, None if ask.calls else ask.schema, tools, not ask.single and ask.only is None)
            except RenderError as problem:
                raise RequestError(f"{key}: {problem}") from None
            sampling = await self._check_supported(replace(sampling, grammar=grammar), key)
        elif ask.single and ask.tools:
            known = SYNTAXES.get(renderer.syntax)
            if known is None or not known.close:
                raise RequestError("parallel_tool_calls: false is not supported: nothing ends a single call of this model")
            sampling = await self._check_supported(replace(sampling, stop=(*ask.stop, known.close)), "parallel_tool_calls")
        return sampling

    async def _check_supported(self, sampling: Sampling, field: str) -> Sampling:
        """Return `sampling`. Raises RequestError, which names the field, if the engine does not support it."""
        # In a thread, as the engine may have to load its tokenizer first.
        if reason := await in_thread("load", self.served.engine.refusal, sampling):
            raise RequestError(f"{field}: {reason.partition(': ')[2]}")
        return sampling

    def _seed_of(self, ask: Ask, number: int, choice: int) -> int | None:
        """Mix the session's seed into the request's: agents of a group may all send the same seed, but must not sample the same
        tokens."""
        if self._seed is None:
            return ask.seed if ask.seed is None or not choice else derive(ask.seed, "choice", choice)
        if ask.seed is None:
            return derive(self._seed, "request", number, choice)
        return derive(self._seed, "seed", ask.seed, choice)


def _sink(choice: int, reader: TurnReader, emit: Emit) -> OnTokens:
    return lambda token_ids, logprobs: emit(SampledPart(choice, reader.read(token_ids), token_ids, logprobs))


# Streaming


class Live:
    """One streamed request. The text pieces of a choice add up to the content of its message."""

    def __init__(self, session: AgentSession, ask: Ask) -> None:
        self._queue: asyncio.Queue[SampledPart | None] = asyncio.Queue()
        self._texts = [""] * ask.choices
        self._first: SampledPart | None = None
        self._task = session.begin(ask, self._queue.put_nowait)
        self._task.add_done_callback(lambda _: self._queue.put_nowait(None))

    async def wait_for_start(self) -> None:
        """Wait for the first sample. Raises the request's error if it fails before: a stream begins with status 200."""
        try:
            self._first = await self._queue.get()
        except asyncio.CancelledError:
            self._task.cancel()
            raise
        if self._first is None:
            self.answers()

    async def parts(self) -> AsyncIterator[SampledPart]:
        """Yield sampled parts, then the rest of each content without tokens. Cancels the request if the reader stops. Raises the
        request's error, and RequestError if the tokenizer's later tokens change earlier text."""
        try:
            item = self._first
            while item is not None:
                self._texts[item.choice] += item.text
                yield item
                item = await self._queue.get()
        finally:
            self._task.cancel()
        for choice, (answer, text) in enumerate(zip(self.answers(), self._texts, strict=True)):
            if not answer.message.content.startswith(text):
                raise RequestError("the streamed text differs from the message's start; request it without stream", status=500)
            if rest := answer.message.content[len(text) :]:
                yield SampledPart(choice, rest, [], [])

    def answers(self) -> list[Answer]:
        """Return all choices after the stream has ended. Raises the request's error."""
        if self._task.cancelled():
            raise RequestError("the session is over", status=404, code="session_not_found")
        return self._task.result()

"""One session of the endpoint: an agent's conversations as token ledgers, whatever protocol it speaks."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from agentrl.contrib.toolkit.turns import TurnReader, grammar_of, reader_of
from agentrl.data.chat_forms import pair_results
from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import Json, Message, Turn
from agentrl.engines.chat_format import RequestError, number_calls
from agentrl.render.base import Renderer
from agentrl.render.syntaxes import SYNTAXES
from agentrl.rollout.engine import Engine, Generation, OnTokens, Sampling, derive
from agentrl.utils.errors import AgentrlError, EngineError, PromptTooLongError, RenderError, fault_text
from agentrl.utils.event_loop import OwnedTasks
from agentrl.utils.threads import in_thread

log = logging.getLogger(__name__)

# Requests


def refusal_of(problem: Exception) -> RequestError:
    """Any failure of a request, as the client hears of it. A prompt that is too long is the client's (a server's error would
    make it try again); what fails in the engine is the server's."""
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
    return RequestError(fault_text(problem), status=500)


@dataclass(frozen=True, slots=True)
class Ask:
    """A request: a conversation to be continued, and how.

    `tools`: function schemas in the form of OpenAI's chat completions. `max_tokens`, `seed`: None leaves them to the run.
    `choices`: how many answers. `schema`: what an answer that is no call must fit as JSON, if that is not None. `schema_field`
    and `stop_field`: the request's names for these. `calls`: whether the turn must be a call; `only`: of this tool. `single`:
    at most one call a turn. `other`: sampling that the request asks for, in place of which the run's own is used.
    """

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
    """The same with the results of each turn in the order of its calls, and named as these, for templates that write no ids."""
    return list(pair_results(messages, strict=False))


def identity(message: Message) -> str:
    """A key that is equal for equal messages of a history, however a client writes them on the way back. Without reasoning,
    which clients drop, and the white space around an assistant's text, which some strip."""
    calls = [(call.id, call.name, call.arguments) for call in message.tool_calls]
    content = message.content.strip() if message.role == "assistant" else message.content
    return json.dumps([message.role, content, calls, message.tool_call_id], sort_keys=True)


def cut(message: Message, texts: Sequence[str]) -> tuple[Message, str | None]:
    """A turn that a stop string ended, without it and whatever follows it in the last token; and the stop string."""
    reasoning, content = message.reasoning or "", message.content
    found = min(((at, text) for text in texts if (at := content.find(text)) >= 0), default=None)
    if found is None:
        thought = min(((at, text) for text in texts if (at := reasoning.find(text)) >= 0), default=None)
        kept = message if thought is None else replace(message, reasoning=reasoning[: thought[0]])
        return kept, None if thought is None else thought[1]
    return replace(message, content=content[: found[0]]), found[1]


# Conversations


@dataclass(frozen=True, slots=True)
class ServedPolicy:
    """The policy that answers the requests of all sessions. `sampling`: the run's; its `max_tokens` is a turn's limit.
    `decode`: the tokenizer's, None without one. `warned`: fields of requests that were said to be ignored."""

    engine: Engine
    renderer: Renderer
    sampling: Sampling
    decode: Callable[[Sequence[int]], str] | None = None
    warned: set[str] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Branch:
    """One conversation as it went on, and the ledger that holds it as tokens. `key`: its name for the engine. `shown`: the
    messages as the client sees them, by `identity`; `messages` as they are in the ledger, the last one sampled last, the
    first `begun` of them its beginning. `last`: the token that ended the last turn. `busy`: requests that continue it now."""

    key: str
    tools: str
    begun: int
    ledger: TokenLedger = field(default_factory=TokenLedger)
    shown: list[str] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    finish: str = ""
    last: int | None = None
    busy: int = 0


@dataclass(frozen=True, slots=True)
class Position:
    """Position of the next turn: behind the first `keep` tokens of `parent`'s ledger, or in a new ledger (`parent` is None).
    `prompt`: all ids before it."""

    parent: Branch | None
    keep: int
    prompt: list[int]
    begun: int

    @property
    def routed_tokens(self) -> int:
        """Number of the prompt's first tokens that have experts already."""
        return 0 if self.parent is None else min(self.parent.ledger.routed_tokens, self.keep)


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice: the turn as the client sees it, its samples, the number of prompt tokens, its number in the
    session, and the stop string that ended it."""

    message: Message
    generation: Generation
    prompt_tokens: int
    turn: int
    stopped: str | None = None


@dataclass(frozen=True, slots=True)
class Heard:
    """Tokens of a choice as they were sampled, and what they add to the text that its content begins with."""

    choice: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]


Hear = Callable[[Heard], None]


class AgentSession:
    """All requests of one agent's episode. A request that continues an earlier answer goes on in that ledger; any other
    (another agent of the same episode, a changed history, a second choice) has a ledger of its own. Each sampled token is
    marked as sampled in exactly one ledger.

    `turns`: all answers in the order in which they came to be, with the place of their last token. `failure`: what the engine
    last failed with, None if it never did. `other`: sampling that requests asked for; the run's own was used instead,
    and how many asked for it. `requests`: those that were answered or failed. `kept`: conversations by the ids of responses that
    ended them, for protocols in which a request names the one that it continues.
    """

    def __init__(self, name: str, served: ServedPolicy, *, seed: int | None = None) -> None:
        """`seed`: of all that is sampled here; None for chance."""
        self.name = name
        self.turns: list[Turn] = []
        self.failure: EngineError | None = None
        self.other: dict[str, int] = {}
        self.requests = 0
        self.kept: dict[str, list[Message]] = {}
        self._served, self._seed = served, seed
        self._branches: list[Branch] = []
        self._keys = 0
        self._newest: Branch | None = None
        self._running = OwnedTasks()
        self._closed = False

    @property
    def ledgers(self) -> list[TokenLedger]:
        """Sampled tokens with their prompts; `Turn.ledger` counts in it."""
        return [branch.ledger for branch in self._branches]

    @property
    def conversations(self) -> list[list[Message]]:
        """The messages of each ledger."""
        return [list(branch.messages) for branch in self._branches]

    @property
    def messages(self) -> list[Message]:
        """The conversation that was answered last; empty before the first answer."""
        return [] if self._newest is None else list(self._newest.messages)

    def ledger_of_request(self, key: str) -> int | None:
        """The number of the ledger that the engine's request of this name goes on in; None if it begins another."""
        return next((number for number, branch in enumerate(self._branches) if branch.key == key), None)

    @property
    def sampling(self) -> Sampling:
        """Sampling parameters of its turns; `max_tokens` is a turn's limit."""
        return self._served.sampling

    def begin(self, ask: Ask, hear: Hear | None = None) -> asyncio.Task[list[Answer]]:
        """Answer a request, in a task that `close` ends; see `answer`."""
        if self._closed:
            raise RequestError(f"session {self.name} is over", status=404, code="session_not_found")
        return self._running.start(self.answer(ask, hear), f"a request of session {self.name}")

    async def close(self) -> None:
        """End turns in progress without a record, and refuse new ones."""
        self._closed = True
        await self._running.close()

    async def answer(self, ask: Ask, hear: Hear | None = None) -> list[Answer]:
        """Sample each choice and record it; `hear` gets all that is sampled meanwhile.

        Raises EngineError, RenderError or RequestError; the ledgers are then unchanged.
        """
        renderer = self._served.renderer.with_tools(ask.tools)
        sampling = await self._sampling(ask)
        for name, value in ask.other.items():
            self.other[name] = self.other.get(name, 0) + 1
            if name not in self._served.warned:
                self._served.warned.add(name)
                log.warning("an agent asks for %s = %s; its turns are sampled as the run says (said once)", name, value)
        number, self.requests = self.requests, self.requests + 1
        parent = self._parent(ask, renderer)
        if parent is not None:
            parent.busy += 1
        began = time.monotonic()
        try:
            position = await self._position(ask, parent, renderer)
            # The engine's name of a conversation stays, so that its cache is found.
            keys = [parent.key] if parent is not None and parent.busy == 1 else []
            while len(keys) < ask.choices:
                keys.append(f"{self.name}/{self._keys}")
                self._keys += 1
            seeds = [self._seed_of(ask, number, choice) for choice in range(ask.choices)]
            told = [_teller(choice, reader_of(renderer, ask.stop), hear) for choice in range(ask.choices)] if hear else None
            routed = None if sampling.experts_from is None else position.routed_tokens
            asked = [replace(sampling, seed=seed, experts_from=routed) for seed in seeds]
            generations = await self._sample(position, asked, keys, told)
            messages = [await renderer.aparse(generation.token_ids, generation.finish) for generation in generations]
        except EngineError as problem:
            if not isinstance(problem, PromptTooLongError):
                self.failure = problem
            raise
        finally:
            if parent is not None:
                parent.busy -= 1
        seconds = time.monotonic() - began
        # Nothing is awaited from here on: all choices are recorded, or none.
        choices = zip(keys, generations, messages, strict=True)
        return [self._record(ask, position, key, one, message, seconds) for key, one, message in choices]

    def to_json(self) -> dict[str, Json]:
        return {"session": self.name, "ledgers": [ledger.to_json() for ledger in self.ledgers]}

    async def _position(self, ask: Ask, parent: Branch | None, renderer: Renderer) -> Position:
        if parent is None:
            # Calls that were sampled here say so: a template may drop what the policy said next to them.
            raw = {call.id: call.raw for turn in self.turns for call in turn.message.tool_calls}
            messages = [
                replace(one, tool_calls=tuple(replace(call, raw=raw.get(call.id, "")) for call in one.tool_calls))
                for one in ask.messages
            ]
            return Position(None, 0, await renderer.astart(messages, ask.tools), len(messages))
        # All of it before the await: another request may continue the parent meanwhile.
        ids, fresh = parent.ledger.ids(), ask.messages[len(parent.shown) :]
        suffix = await renderer.aextend(parent.finish, fresh, parent.last)
        return Position(parent, len(ids), [*ids, *suffix], parent.begun)

    def _parent(self, ask: Ask, renderer: Renderer) -> Branch | None:
        """The longest branch whose messages the request repeats and to which it then adds only answers; of several such the
        first that no other request continues at the moment."""
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
        self, position: Position, samplings: Sequence[Sampling], keys: Sequence[str], told: Sequence[OnTokens] | None
    ) -> list[Generation]:
        """One turn for each key; if one fails, the others are given up."""
        engine, prompt = self._served.engine, position.prompt
        turns = (
            [engine.generate(prompt, one, key) for one, key in zip(samplings, keys, strict=True)]
            if told is None
            else [engine.stream(prompt, one, key, tell) for one, key, tell in zip(samplings, keys, told, strict=True)]
        )
        tasks = [asyncio.ensure_future(turn) for turn in turns]
        try:
            generations = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if any(generation.finish == "abort" for generation in generations):
            raise EngineError(f"a request of session {self.name} was aborted")
        return generations

    def _record(self, ask: Ask, position: Position, key: str, generation: Generation, parsed: Message, seconds: float) -> Answer:
        turn = len(self.turns)
        message = number_calls(parsed, turn)
        # The client sees as text what is no call for it: one that is malformed, or of a tool where none was offered.
        calls = tuple(call for call in message.tool_calls if call.arguments is not None and ask.tools)
        rest = [call.raw for call in message.tool_calls if call.arguments is None or not ask.tools]
        shown = replace(message, content="\n".join(part for part in (message.content, *rest) if part), tool_calls=calls)
        stopped = None
        if generation.finish == "stop_string" and ask.stop:
            shown, stopped = cut(shown, ask.stop)
            # White space that ended the turn is nowhere in what was parsed.
            stopped = stopped or (None if ask.single and shown.tool_calls else ask.stop[0])
        branch = self._branch(position, key, json.dumps(ask.tools, sort_keys=True))
        try:
            branch.ledger.append_context(position.prompt[position.keep :], turn)
            branch.ledger.append_sampled(generation.token_ids, generation.logprobs, generation.versions, turn)
            if generation.experts is not None:
                branch.ledger.add_experts(position.routed_tokens, generation.experts)
        except ValueError as fault:  # what a ledger refuses only an engine can have made
            self.failure = EngineError(f"turn {turn} of session {self.name}: {fault}")
            raise self.failure from None
        branch.shown = [*map(identity, ask.messages), identity(shown)]
        branch.messages = [*ask.messages, message]
        branch.finish = generation.finish
        branch.last = generation.token_ids[-1] if generation.finish == "stop" and generation.token_ids else None
        self._newest = branch
        record = Turn(turn, message, prompt_tokens=len(position.prompt), sampled_tokens=len(generation.token_ids))
        record.ledger, record.end = self._branches.index(branch), len(branch.ledger) - 1
        record.seconds, record.finish = seconds, generation.finish
        self.turns.append(record)
        return Answer(shown, generation, len(position.prompt), turn, stopped)

    def _branch(self, position: Position, key: str, tools: str) -> Branch:
        """The branch that a turn is appended to: its parent, or a fork of it if another turn went on there meanwhile."""
        parent = position.parent
        if parent is not None and len(parent.ledger) == position.keep:
            return parent
        ledger = TokenLedger() if parent is None else parent.ledger.fork(position.keep)
        self._branches.append(Branch(key, tools, position.begun, ledger))
        return self._branches[-1]

    async def _sampling(self, ask: Ask) -> Sampling:
        """The run's sampling, with what a request may choose."""
        own, renderer = self._served.sampling, self._served.renderer
        most = own.max_tokens if ask.max_tokens is None else min(ask.max_tokens, own.max_tokens)
        sampling = replace(own, max_tokens=most, stop_token_ids=renderer.stop_token_ids)
        if ask.logprobs and self._served.decode is None:
            raise RequestError("logprobs: not supported by this server: it was made without a tokenizer (decode=...)")
        if ask.stop:
            sampling = await self._able(replace(sampling, stop=ask.stop), ask.stop_field)
        if ask.schema is not None or ask.calls:
            key = "tool_choice" if ask.calls else ask.schema_field
            tools = [tool for tool in ask.tools if ask.only in (None, tool["function"]["name"])]
            try:
                grammar = grammar_of(renderer, None if ask.calls else ask.schema, tools, not ask.single and ask.only is None)
            except RenderError as problem:
                raise RequestError(f"{key}: {problem}") from None
            sampling = await self._able(replace(sampling, grammar=grammar), key)
        elif ask.single and ask.tools:
            known = SYNTAXES.get(renderer.syntax)
            if known is None or not known.close:
                raise RequestError("parallel_tool_calls: false is not supported: nothing ends a single call of this model")
            sampling = await self._able(replace(sampling, stop=(*ask.stop, known.close)), "parallel_tool_calls")
        return sampling

    async def _able(self, sampling: Sampling, field: str) -> Sampling:
        """Raises RequestError, which names the field, if the engine cannot sample so."""
        # In a thread, since the engine may have to read its tokenizer first.
        if reason := await in_thread("load", self._served.engine.refusal, sampling):
            raise RequestError(f"{field}: {reason.partition(': ')[2]}")
        return sampling

    def _seed_of(self, ask: Ask, number: int, choice: int) -> int | None:
        """A session's seed is mixed into the request's: the members of a group, whose agents may all ask with the same seed,
        must not sample the same tokens."""
        if self._seed is None:
            return ask.seed if ask.seed is None or not choice else derive(ask.seed, "choice", choice)
        if ask.seed is None:
            return derive(self._seed, "request", number, choice)
        return derive(self._seed, "seed", ask.seed, choice)


def _teller(choice: int, reader: TurnReader, hear: Hear) -> OnTokens:
    return lambda token_ids, logprobs: hear(Heard(choice, reader.read(token_ids), token_ids, logprobs))


# Streams


class Live:
    """One request. All that is heard of a choice's text is together the content of its message."""

    def __init__(self, session: AgentSession, ask: Ask) -> None:
        self._queue: asyncio.Queue[Heard | None] = asyncio.Queue()
        self._told = [""] * ask.choices
        self._first: Heard | None = None
        self._task = session.begin(ask, self._queue.put_nowait)
        self._task.add_done_callback(lambda _: self._queue.put_nowait(None))

    async def begun(self) -> None:
        """Return once something was sampled. Raises what the request fails with before: a stream has begun with status 200."""
        try:
            self._first = await self._queue.get()
        except asyncio.CancelledError:
            self._task.cancel()
            raise
        if self._first is None:
            self.answers()

    async def heard(self) -> AsyncIterator[Heard]:
        """Sampled parts, until the end, and then the rest of each content, without tokens. If the reader goes away the request is
        ended: nobody would see the tokens. Raises what the request failed with, and RequestError for a tokenizer whose later
        tokens change the text of earlier ones."""
        try:
            item = self._first
            while item is not None:
                self._told[item.choice] += item.text
                yield item
                item = await self._queue.get()
        finally:
            self._task.cancel()
        for choice, (answer, told) in enumerate(zip(self.answers(), self._told, strict=True)):
            if not answer.message.content.startswith(told):
                raise RequestError("the streamed text is not how the message begins; ask without stream", status=500)
            if rest := answer.message.content[len(told) :]:
                yield Heard(choice, rest, [], [])

    def answers(self) -> list[Answer]:
        """All choices, once all was heard. Raises what the request failed with."""
        if self._task.cancelled():
            raise RequestError("the session is over", status=404, code="session_not_found")
        return self._task.result()

"""Run an episode with an agent instead of the built-in loop."""

from __future__ import annotations

import asyncio
import importlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b
from typing import Any, TypeVar

from agentrl.config.schema import AgentConfig
from agentrl.contrib.agents.endpoint import SERVES, Endpoint, ToolServer
from agentrl.contrib.agents.programs import Program, program_of
from agentrl.contrib.agents.record import MODEL, Episode, Gate, Outcome, Record, text_of
from agentrl.contrib.agents.session import AgentSession, SampleTurn
from agentrl.data.trajectory import Blame, Json, Message, StopReason, ToolResult, Trajectory
from agentrl.engines.chat_format import RequestError
from agentrl.env import ToolEnv
from agentrl.reward import Scorer
from agentrl.rollout.deadlines import CutError, Waits, Watch, blame_of
from agentrl.rollout.engine import Generation, Sampling, derive
from agentrl.rollout.episode import EpisodeSpec, Limits, Policy, complete, play_and_score, sampling_attributes
from agentrl.rollout.player import AGENTS
from agentrl.utils.errors import (
    AgentFaultError,
    AgentrlError,
    ConfigError,
    EngineError,
    EnvError,
    PolicyTimeoutError,
    PromptTooLongError,
    UserLimitError,
)
from agentrl.utils.event_loop import cancel_all, end, in_time, loop_clock
from agentrl.utils.redaction import map_texts
from agentrl.utils.spans import TracePlace, at, here, span
from agentrl.utils.threads import in_thread

Answer = TypeVar("Answer")
_SETTLES_WITHIN = 1.0
"""Seconds to wait for sampled turns to be recorded, and for dropped requests to be cancelled."""
_DROPS = 4
"""Maximum requests, for each turn of `max_turns`, that an agent may drop before their answer."""


class EpisodeOverError(Exception):
    """The episode ends for the reason `stop`, without a fault."""

    def __init__(self, stop: StopReason, error: str | None = None) -> None:
        super().__init__(stop.value)
        self.stop, self.error = stop, error


class AgentEpisode:
    """`EpisodeDriver` of an agent. The first event that ends the episode is its stop reason, whatever the agent does then."""

    def __init__(
        self,
        env: ToolEnv,
        policy: Policy,
        spec: EpisodeSpec,
        limits: Limits,
        watch: Watch,
        config: AgentConfig,
        program: Program,
        endpoint: Endpoint,
        tools: ToolServer,
    ) -> None:
        self.error: str | None = None
        self.env, self.policy, self.spec, self.limits, self.config = env, policy, spec, limits, config
        self.waits = Waits(spec.key, limits.turn_timeout, limits.episode_timeout, watch)
        self.watch, self.program, self.endpoint, self.server = watch, program, endpoint, tools
        self.record: Record | None = None
        self.session: AgentSession | None = None
        self.about: dict[str, Json] = {}
        self.engine_s = self.env_s = self.agent_s = 0.0
        self._over: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._gate = Gate()
        self._asked = 0  # requests for a turn so far; below, those that were sampled
        self._sampled = 0
        self._reserved = 0  # tokens that running requests may add to the ledgers
        self._dropped = 0  # requests that the agent gave up before their answer
        self._gave_up = False  # it has dropped one of these, or a call whose time is not the policy's
        self._owed = 0  # such calls that are running
        self._prompts: Counter[str] = Counter()
        self._busy, self._idle_since, self._quiet = 0, 0.0, 0.0
        self._ended = False  # the agent has ended by itself
        self._answers = set[asyncio.Task[Any]]()  # of calls and messages that the environment has not answered yet
        self._opened: Trajectory | None = None
        self._place: TracePlace | None = None

    # -- the course ----------------------------------------------------------------------------------

    async def run(self) -> StopReason:
        self._place = here()  # requests and calls run in tasks of the servers
        reset = self.env.areset(seed=self.spec.task_seed, options={"split": self.spec.split})
        observation, _ = await self._env(reset, "the setup", limit=self.limits.env_timeout)
        self._opened = self.env.trajectory
        if self.env.has_user and not self.config.user:
            raise AgentFaultError(f"environment {self.env.id} has a user, with whom this agent does not talk (agent.user)")
        most, policy, routed = self.limits.max_turn_tokens, self.policy, 0 if self.policy.router_replay else None
        sampling = Sampling(most, policy.temperature, policy.top_p, policy.top_k, experts_from=routed)
        access = self.endpoint.open(self.spec.key, engine=policy.engine, sampling=sampling, around=self.sample)
        self.session = session = self.endpoint.session(self.spec.key)
        self.record = Record(self.env, session)
        base = self.server.open(self)
        episode = Episode(
            self.spec.key,
            [{"role": message.role, "content": message.content} for message in observation],
            self.schemas() if self.config.tools == "mcp" else [],
            access.openai_url,
            access.anthropic_url,
            self,
            access.key,
            f"{base}/mcp" if self.config.tools == "mcp" else None,
            f"{base}/user" if self.config.user else None,
        )
        try:
            return await self._conclude(await self._play(episode))
        except EpisodeOverError as over:
            await asyncio.gather(*self._answers, return_exceptions=True)  # as the built-in loop ends after a turn
            if not self.env.is_open:
                raise EnvError(str(self.env.trajectory.error)) from None
            self._check_asked(f"the episode ended ({over.stop.value}) before the policy's first turn", over.error)
            self.error = over.error
            return over.stop
        finally:
            self.server.drop(base)
            await cancel_all(self._answers)
            await self.endpoint.take(self.spec.key)
            self.record.catch_up()

    async def end(self, stop: StopReason, error: str | None) -> Trajectory:
        trajectory = await complete(self.env, self._opened, self.spec, stop, error, self.waits.used)
        if self.session is not None:
            trajectory.ledgers = [ledger for ledger in self.session.ledgers if len(ledger)]
            self.about |= {"requests": self.session.requests, "other_sampling": dict(self.session.other)}
        trajectory.agent = self.about
        trajectory.timings = {"engine_s": self.engine_s, "env_s": self.env_s, "agent_s": self.agent_s}
        return trajectory

    async def _play(self, episode: Episode) -> Outcome:
        """Run the agent's program. Raises the error that ends the episode earlier, and ends the program."""
        task = asyncio.create_task(self.program.run(episode, self.about), name=f"the agent of {self.spec.key}")
        either: set[asyncio.Future[Any]] = {task, self._over}
        first = asyncio.create_task(asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED))
        clock = loop_clock()
        clock.enter()
        self._idle_since = clock.now()

        def left(passed: float) -> float:
            self._charge()
            return min(self.config.idle_timeout - self._quiet, self.waits.limit - self.waits.used["infrastructure"])

        try:
            with self.watch.waits(f"{self.spec.key} (agent)", lambda: "its agent"):
                if not await in_time(first, left, self.watch.poll_s):
                    if self._quiet < self.config.idle_timeout:
                        raise self.waits.out_of_time("its agent")
                    said = f"no request, tool call or end for {self.config.idle_timeout:g} s (agent.idle_timeout)"
                    raise AgentFaultError(f"the agent did nothing: {said}")
            if self._over.done():
                # The endpoint still has to record sampled turns; requests of an ended agent are cancelled.
                assert self.session is not None
                until = time.monotonic() + _SETTLES_WITHIN
                while len(self.session.turns) < self._sampled and time.monotonic() < until:
                    await asyncio.sleep(0.002)
                raise self._over.result()
            return task.result()
        except OSError as problem:
            raise AgentFaultError(f"the agent cannot be started: {problem}") from problem
        finally:
            self._charge()
            clock.users -= 1
            first.cancel()
            await end(task, f"the agent of episode {self.spec.key}")

    async def _conclude(self, ended: Outcome) -> StopReason:
        """Finish after the agent has ended by itself: pass its answer to the environment."""
        assert self.record is not None and self.session is not None
        # Finish calls that it did not await before the end: a scored episode does not change.
        self._ended, waits = True, bool(self._owed)
        await asyncio.gather(*self._answers, return_exceptions=True)
        if self._over.done():
            raise self._over.result()
        self.record.catch_up()
        if ended.failure is not None:
            message = f"the agent failed ({ended.failure})"
            self._check_asked(message)
            if waits or self._reserved or self._gave_up:  # its client timed out: their latency is not the policy's fault
                raise AgentFaultError(f"{message} while it waited for the engine or a tool")
            if self.config.blame == "policy":
                raise EpisodeOverError(StopReason.AGENT_FAILED, message)
            raise AgentFaultError(message)
        said = f"its output: {ended.output[-500:]}" if ended.output else None
        self._check_asked("the agent ended without a turn of the policy; does it use OPENAI_BASE_URL?", said)
        last = self.record.answer(ended.output if self.config.answer == "output" else None)
        if last is not None and not self.env.has_finished:
            await self._env(self.env.areply(last), "the user's reply", blame_of(self.env, last.message))
        return StopReason.MAX_TOKENS if last is not None and last.finish == "length" else StopReason.DONE

    def _check_asked(self, *words: str | None) -> None:
        """Raise AgentFaultError if the policy sampled nothing: not its fault, and nothing to learn from."""
        assert self.session is not None
        if not self.session.turns:
            raise AgentFaultError("; ".join(filter(None, words)))

    def _stop(self, why: Exception) -> None:
        if not self._over.done():
            self._over.set_result(why)

    # -- the agent's requests ------------------------------------------------------------------------

    async def sample(self, ask: SampleTurn, token_ids: Sequence[int], sampling: Sampling, key: str) -> Generation:
        """Sample a turn for the endpoint: limited, seeded and accounted for. Raises RequestError if the episode is over or its
        budget used up, and EngineError."""
        until = time.monotonic() + _SETTLES_WITHIN
        while self._sampled < self._asked >= self.limits.max_turns and time.monotonic() < until:
            await asyncio.sleep(0.02)  # a request that the agent has just dropped is no turn, but may not be cancelled yet
        self._check_open()
        assert self.record is not None and self.session is not None
        self.record.catch_up()
        place = self.session.ledger_of_request(key)
        held = 0 if place is None else len(self.session.ledgers[place])
        room, most = self._room(len(token_ids), held), min(sampling.max_tokens, self.limits.max_turn_tokens)
        if self._asked >= self.limits.max_turns:
            self._stop(EpisodeOverError(StopReason.MAX_TURNS))
            raise RequestError(f"the episode's {self.limits.max_turns} turns are used up", code="max_turns")
        if self._dropped >= _DROPS * self.limits.max_turns:
            message = f"the agent dropped {self._dropped} requests before their answers; raise its client's time limit"
            self._stop(AgentFaultError(message))
            raise RequestError(message, code="episode_over")
        if room[0] <= 0:
            message = f"a prompt of {len(token_ids)} tokens leaves no room in this episode ({room[1].value})"
            self._stop(EpisodeOverError(room[1], None if self._sampled else message))
            raise PromptTooLongError(message)
        tokens = min(most, room[0])
        own = replace(sampling, max_tokens=tokens, seed=self._seed(token_ids, place))
        reserved = len(token_ids) - held + tokens
        self._reserved += reserved
        number, self._asked = self._asked, self._asked + 1
        began = time.monotonic()
        try:
            with self._at_work(), at(self._place), span("generation", "turn") as opened:
                generation = await self.waits.engine(self.policy.engine, ask(own), key, f"turn {number}", tokens)
                if opened is not None:
                    opened.set(**sampling_attributes(generation, own, len(token_ids)))
        except asyncio.CancelledError:  # it is no turn: the agent may ask again
            self._gave_up = True
            self._dropped, self._asked = self._dropped + 1, self._asked - 1
            raise
        except (ConfigError, CutError, EngineError) as fault:
            self._stop(fault)
            raise RequestError(str(fault), code="episode_over") if isinstance(fault, CutError) else fault from None
        finally:
            self._reserved -= reserved
            self.engine_s += time.monotonic() - began
        if generation.finish == "abort":
            self._stop(EngineError(f"the request was aborted in turn {number}"))
        elif generation.finish == "length" and tokens < most:
            # The episode's budget truncated this turn, so the agent must not act on it.
            self._stop(EpisodeOverError(room[1]))
            self.record.cut = True
        self._sampled += 1
        return generation

    def schemas(self) -> list[dict[str, Json]]:
        """Return the environment's current tools."""
        return self.env.toolbox.schemas()

    async def call(self, name: str, arguments: Mapping[str, Json]) -> ToolResult:
        """Execute a tool call in the environment. Raises AgentrlError if the episode is over, or ends without a result."""
        return await self._answer_whole(self._call(name, arguments))

    async def _call(self, name: str, arguments: Mapping[str, Json]) -> ToolResult:
        self._check_open()
        assert self.record is not None
        self.record.catch_up()
        turn, call = self.record.match_call(text_of(name), map_texts(dict(arguments), text_of))
        alone = (found := self.env.toolbox.find(name)) is not None and not found.options.parallel
        async with self._gate.hold(shared=not alone):
            self._check_open()
            work = self.env.acall(turn, call)
            result = await self._note_answer(work, f"tool {name}", blame_of(self.env, Message("assistant", tool_calls=(call,))))
        turn.seconds += result.seconds
        if self.env.has_finished:
            self._stop(EpisodeOverError(StopReason.DONE))
        return result

    async def say(self, text: str) -> list[str] | None:
        """Return the reply of the environment's user; None ends the conversation and the episode. Raises as `call`."""
        return await self._answer_whole(self._say(text))

    async def _say(self, text: str) -> list[str] | None:
        self._check_open()
        if not self.config.user:
            raise AgentrlError("this run's agents do not talk with a user (agent.user)")
        assert self.record is not None
        self.record.catch_up()
        turn = self.record.record_message(text_of(text))
        replies = await self._note_answer(self.env.areply(turn), "the user's reply", "infrastructure")
        if replies is None or self.env.has_finished:
            self._stop(EpisodeOverError(StopReason.DONE))
            return None
        self.record.heard.update(message.content for message in replies)
        return [message.content for message in replies]

    async def _answer_whole(self, answer: Coroutine[Any, Any, Answer]) -> Answer:
        """Await an answer to the agent; the environment finishes it even if the agent gives up."""
        # A call that is cut in the environment ends the episode there.
        task = asyncio.create_task(answer)
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise AgentrlError("the episode is over") from None
            self._gave_up |= self._owed > 0
            raise

    async def _note_answer(self, work: Awaitable[Answer], what: str, blame: Blame) -> Answer:
        """Await the environment's answer to the agent; an error ends the episode."""
        owed = blame == "infrastructure"
        self._owed += owed
        try:
            with at(self._place):
                return await self._env(work, what, blame)
        except AgentrlError as fault:
            limits = {PolicyTimeoutError: StopReason.MAX_TOOL_TIME, UserLimitError: StopReason.MAX_TURNS}
            reached = next((reason for kind, reason in limits.items() if isinstance(fault, kind)), None)
            self._stop(fault if reached is None else EpisodeOverError(reached, str(fault)))
            raise AgentrlError(f"the episode is over: {fault}") from None
        finally:
            self._owed -= owed

    # -- limits --------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._over.done() or self._ended:
            raise RequestError("the episode is over", status=404, code="episode_over")

    def _room(self, prompt: int, held: int) -> tuple[int, StopReason]:
        """Return the tokens left for a turn, and the stop reason without any. `held`: tokens of the prompt that are in the
        ledger already."""
        assert self.session is not None
        taken = sum(map(len, self.session.ledgers)) + self._reserved
        episode = self.limits.max_episode_tokens - taken - (prompt - held)
        context = self.limits.context - prompt
        reason = StopReason.MAX_TOKENS if episode <= context else StopReason.CONTEXT_FULL
        return min(episode, context), reason

    def _seed(self, token_ids: Sequence[int], place: int | None) -> int:
        """Derive the turn's seed: in the first conversation from the turn number, as the built-in loop does; else from the prompt
        and its count, as concurrent requests arrive in any order."""
        assert self.session is not None
        if place == 0 or (place is None and not self._asked):
            return derive(self.spec.seed, "turn", sum(turn.ledger == 0 for turn in self.session.turns))
        digest = blake2b(repr(list(token_ids)).encode(), digest_size=16).hexdigest()
        number, self._prompts[digest] = self._prompts[digest], self._prompts[digest] + 1
        return derive(self.spec.seed, "prompt", digest, number)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Charge the time inside to the engine or environment; outside of all of these it is the agent's."""
        self._charge()
        self._quiet, self._busy = 0.0, self._busy + 1
        try:
            yield
        finally:
            self._charge()
            self._busy -= 1
            self._idle_since = loop_clock().now()

    def _charge(self) -> None:
        """Charge the agent's own time to the episode."""
        now = loop_clock().now()
        if not self._busy:
            passed = now - self._idle_since
            self._quiet += passed
            self.agent_s += passed
            self.waits.used["infrastructure"] += passed  # the agent's program is not trained
        self._idle_since = now

    # -- internals -----------------------------------------------------------------------------------

    async def _env(
        self, answer: Awaitable[Answer], what: str, blame: Blame = "infrastructure", limit: float = float("inf")
    ) -> Answer:
        began = time.monotonic()
        try:
            with self._at_work(), span("environment", what):
                return await self.waits.environment(self.env, answer, what, blame, limit)
        finally:
            self.env_s += time.monotonic() - began


@AGENTS.register("program")
class Harness:
    """The agent of a run with its servers: one endpoint and one tool server for all episodes of this process, started with the
    first episode."""

    def __init__(self, config: AgentConfig, decode: Callable[[Sequence[int]], str] | None = None) -> None:
        """`decode`: the tokenizer's. Raises ConfigError or DependencyError if the agent does not exist or cannot be served."""
        self._config, self._decode = config, decode
        self._program, self._tools = program_of(config), ToolServer(config.host)
        self._slots = asyncio.Semaphore(config.concurrency)
        self._opening = asyncio.Lock()
        self._endpoint: Endpoint | None = None

    async def play(
        self, env: ToolEnv, policy: Policy, spec: EpisodeSpec, limits: Limits, scorer: Scorer | None, watch: Watch
    ) -> Trajectory:
        """Run an episode as `run_episode`, with the agent's program instead of the turn loop."""
        async with self._slots:
            endpoint = await self._open(policy)
            episode = AgentEpisode(env, policy, spec, limits, watch, self._config, self._program, endpoint, self._tools)
            with watch.count_cut(lambda: episode.session.ledgers if episode.session else []):
                return await play_and_score(episode, env, spec, limits, scorer, watch)

    async def close(self) -> None:
        """Stop the servers and the program; idempotent."""
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            await endpoint.close()
            await self._tools.close()
        await self._program.close()

    async def _open(self, policy: Policy) -> Endpoint:
        async with self._opening:
            if self._endpoint is None:
                for name in SERVES:  # seconds of imports, during which other episodes continue
                    await in_thread("load", importlib.import_module, name)
                endpoint = Endpoint(policy.engine, policy.renderer, model=MODEL, host=self._config.host, decode=self._decode)
                await endpoint.start()
                await self._tools.start()
                self._endpoint = endpoint
            return self._endpoint

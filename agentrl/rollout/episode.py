"""Run one episode: messages to the environment, token ids to the engine, an exact record of both, and a score.

In this order: scores of finished episodes; an episode's identity, limits, policy and end; the loop over turns."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Protocol, TypeVar

from agentrl.config import RolloutConfig
from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import Blame, Json, Message, StopReason, Task, Trajectory, Turn
from agentrl.env import ToolEnv
from agentrl.env.authoring import check_answer
from agentrl.render.base import Renderer
from agentrl.reward import Score, Scorer
from agentrl.rollout.context import ContextPolicy, Moment, Stop, elide_outputs
from agentrl.rollout.deadlines import CutError, Waits, Watch, blame_of
from agentrl.rollout.engine import Engine, Generation, Sampling, derive
from agentrl.rollout.starts import prefix_of, scripted_ids
from agentrl.utils.errors import (
    AgentFaultError,
    AgentrlError,
    EngineError,
    EnvError,
    HungError,
    ToolTimeoutError,
    fault_text,
    user_code,
)
from agentrl.utils.event_loop import LateError
from agentrl.utils.spans import span

# Scores


async def score_episode(trajectory: Trajectory, scorer: Scorer, key: str, watch: Watch) -> None:
    """Score the finished episode `key` on its own, once."""
    with watch.waits(key, lambda: f"its score by reward spec {scorer.name}"), span("scoring", scorer.name, track=key) as opened:
        try:
            _record_score(trajectory, await scorer.ascore(trajectory))
        except (LateError, HungError) as fault:
            _mark_unscored(trajectory, scorer, str(fault))
        if opened is not None:
            opened.set(reward=trajectory.reward, success=None if trajectory.success is None else float(trajectory.success))


def _mark_unscored(trajectory: Trajectory, scorer: Scorer, error: str) -> None:
    """Mark an episode whose scoring failed as an infrastructure fault: without reward, so that it is retried."""
    trajectory.stop, trajectory.error = StopReason.ENV_ERROR, error
    trajectory.cause = {"blame": "infrastructure"}
    _record_score(trajectory, Score(None, evidence={"unscored": error}, metrics=dict.fromkeys(scorer.ids)))


async def score_group(trajectories: Sequence[Trajectory], scorer: Scorer) -> None:
    """Score the members of a group again, jointly, because group leaves of the reward spec compare them."""
    try:
        with span("scoring", f"{scorer.name} of a group", track="groups"):
            scores = await scorer.ascore_group(trajectories)
    except (LateError, HungError) as fault:
        for trajectory in trajectories:
            _mark_unscored(trajectory, scorer, str(fault))
        return
    for trajectory, score in zip(trajectories, scores, strict=True):
        _record_score(trajectory, score)


def _record_score(trajectory: Trajectory, score: Score) -> None:
    trajectory.reward, trajectory.success = score.value, score.success
    trajectory.evidence = score.evidence
    trajectory.metrics = dict(score.metrics)
    for turn in trajectory.turns:
        turn.reward = score.turns.get(turn.index)


# Identity, limits and policy of an episode

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """Identity of an episode: its task and its position in the run. `key`: unique id, which also routes its requests to one
    prefix cache. `given`: number of gold tool calls made before the policy begins (`rollout.start`)."""

    task_seed: int
    split: str
    seed: int
    member: int
    key: str
    given: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one episode; times in seconds, lengths in tokens.

    `context`: the model's context length, which bounds each ledger. `max_episode_tokens`: bound on the sum over all ledgers,
    which is the number of tokens that training on the episode computes. `turn_timeout`: a request is given up after this long
    without a token from the engine. `episode_timeout`: limits the policy's own code and, separately, the infrastructure; time
    at the engine counts for neither (see `deadlines.Waits`). `env_timeout`: limits the environment's setup and teardown.
    """

    max_turns: int
    max_turn_tokens: int
    max_episode_tokens: int
    turn_timeout: float
    episode_timeout: float
    context: int
    env_timeout: float = 120.0

    @classmethod
    def of(cls, config: RolloutConfig, context: int) -> Limits:
        """Limits from the [rollout] section and the model's context length."""
        names = (one.name for one in fields(cls) if one.name != "context")
        return cls(context=context, **{name: getattr(config, name) for name in names})


@dataclass(frozen=True, slots=True)
class Policy:
    """Engine, renderer and sampling parameters: everything that turns messages into the next message.

    `context`: handles a conversation that outgrows the model's context. `writer`: the policy that writes summaries;
    None means this policy. `router_replay`: record in the ledgers which experts the engine routed each token to.
    """

    engine: Engine
    renderer: Renderer
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    context: ContextPolicy = field(default_factory=Stop)
    writer: Policy | None = None
    router_replay: bool = False

    def at(self, temperature: float, trained: bool = False) -> Policy:
        """Copy of this policy at another temperature (0: greedy); its episodes are not trained on unless `trained`."""
        return replace(self, temperature=temperature, router_replay=self.router_replay and trained)


class EpisodeDriver(Protocol):
    """Driver of an episode: `RunningEpisode` goes turn by turn, `contrib.agents` runs an external agent program."""

    error: str | None

    async def run(self) -> StopReason:
        """Play to the end. Raises CutError, AgentFaultError, EngineError or EnvError if the episode is cut short."""
        ...

    async def end(self, stop: StopReason, error: str | None) -> Trajectory:
        """Tear the environment down and complete the record."""
        ...


async def play_and_score(
    episode: EpisodeDriver, env: ToolEnv, spec: EpisodeSpec, limits: Limits, scorer: Scorer | None, watch: Watch
) -> Trajectory:
    """Play an episode to its end and score it; see `run_episode`."""
    started = time.monotonic()
    env.teardown_timeout = env.opening_timeout = limits.env_timeout
    error: str | None = None
    try:
        stop = await episode.run()
        error = episode.error
    except CutError as cut:
        stop, error = cut.stop, str(cut)
    except EngineError as fault:
        stop, error = StopReason.ENGINE_ERROR, str(fault)
    except AgentFaultError as fault:
        stop, error = StopReason.AGENT_ERROR, str(fault)
    except ToolTimeoutError as fault:
        stop, error = StopReason.TOOL_TIMEOUT, str(fault)
    except EnvError as fault:
        stop, error = StopReason.ENV_ERROR, str(fault)
    except BaseException:
        try:
            await env.aclose()
        except Exception:  # must not replace the error that ends the episode, which may be a cancellation
            log.exception("the teardown of environment %s failed", env.id)
        raise
    # Also after a fault: always tear the environment down and complete the record.
    with watch.waits(spec.key, lambda: f"the end of environment {env.id}"):
        trajectory = await episode.end(stop, error)
    trajectory.timings["episode_s"] = time.monotonic() - started
    if scorer is not None:
        await score_episode(trajectory, scorer, spec.key, watch)
    return trajectory


def sampling_attributes(generation: Generation, sampling: Sampling, prompt: int) -> dict[str, str | float | None]:
    """Attributes of a turn's sampling span."""
    used = generation.counts(prompt)
    return {
        "input_tokens": used.prompt_tokens,
        "output_tokens": used.sampled_tokens,
        "finish": generation.finish,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": sampling.max_tokens,
        "version": generation.versions[-1] if generation.versions else None,
    }


async def complete(
    env: ToolEnv, record: Trajectory | None, spec: EpisodeSpec, stop: StopReason, error: str | None, used: Mapping[Blame, float]
) -> Trajectory:
    """Tear the environment down and record how the episode ended; the caller fills in ledgers and timings. `record`: None if
    the reset failed."""
    if record is None:  # the task is unknown
        trajectory = Trajectory(env.id, Task("", spec.task_seed, spec.split))
        trajectory.stop, trajectory.error = stop, error
    else:
        trajectory = record
        try:
            await env.aend(stop, error)
        except AgentrlError as fault:
            trajectory.stop, trajectory.error = StopReason.ENV_ERROR, f"environment {env.id}: {fault}"
        except Exception as fault:
            log.exception("the end of environment %s failed (task seed %d)", env.id, spec.task_seed)
            trajectory.stop = StopReason.ENV_ERROR
            trajectory.error = f"environment {env.id}: its end failed: {fault_text(fault)}"
    timed = trajectory.stop in (StopReason.MAX_EPISODE_TIME, StopReason.EPISODE_TIMEOUT)
    seconds: dict[str, Json] = {f"{party}_s": taken for party, taken in used.items()} if timed else {}
    blame = trajectory.stop.blame
    trajectory.cause = None if blame is None else {"blame": blame, **seconds}
    trajectory.seed, trajectory.member = spec.seed, spec.member
    return trajectory


# The loop over turns

Answer = TypeVar("Answer")


async def run_episode(
    env: ToolEnv,
    policy: Policy,
    spec: EpisodeSpec,
    limits: Limits,
    scorer: Scorer | None,
    watch: Watch | None = None,
    hook: EpisodeHook | None = None,
) -> Trajectory:
    """Run one episode to its end and score it once; without a `scorer` it stays unscored (see `score_episode`).

    An infrastructure fault (engine, environment, their timeouts) never raises here and never becomes a reward: it is recorded
    as a StopReason with `reward` None. If the policy's own code uses up its time, the episode is truncated and scored.
    Cancellation tears the environment down and propagates. `watch` is notified of the start and end of each wait.
    """
    episode = RunningEpisode(env, policy, spec, limits, watch := watch or Watch(), hook)
    with watch.count_cut(lambda: episode.ledgers):
        return await play_and_score(episode, env, spec, limits, scorer, watch)


class EpisodeHook:
    """Hook that replaces an episode's beginning, inspects it before each turn, or changes its record."""

    async def begin(self, episode: RunningEpisode) -> StopReason | None:
        """Begin the episode. Returns the stop reason if it has already ended, else None."""
        return await episode.begin()

    async def before(self, turn: int, episode: RunningEpisode) -> None:
        """Inspect the episode before it samples `turn`. May raise EnvError."""

    def complete(self, trajectory: Trajectory) -> None:
        """Change the record of the ended episode before it is scored."""


class RunningEpisode:
    """State of one episode while it runs."""

    def __init__(
        self, env: ToolEnv, policy: Policy, spec: EpisodeSpec, limits: Limits, watch: Watch, hook: EpisodeHook | None
    ) -> None:
        self.env, self.policy, self.spec, self.limits, self.hook = env, policy, spec, limits, hook
        self.renderer = policy.renderer
        self.waits = Waits(spec.key, limits.turn_timeout, limits.episode_timeout, watch)
        self.error: str | None = None
        self.ledgers = [TokenLedger()]  # the last one is current; a rewritten history starts a new one
        self.shown: list[Message] = []  # the conversation as the model sees it
        self.offered: list[dict[str, Json]] = []
        self.opening = self.begun = 0  # messages of the reset, and those of `shown` with which the current ledger began
        # The next prompt, appended to a ledger only when a turn samples after it.
        self.fork, self.suffix = False, list[int]()
        self.rewrites: list[dict[str, Json]] = []
        self.record: Trajectory | None = None
        self.engine_s = self.turn_s = self.env_s = 0.0

    async def run(self) -> StopReason:
        ended = await (self.begin() if self.hook is None else self.hook.begin(self))
        assert self.record is not None
        for turn in range(len(self.record.turns), self.limits.max_turns if ended is None else 0):
            room, reason = self._room()
            if room <= 0:
                return reason
            if self.hook is not None:
                await self.hook.before(turn, self)
            self._extend(turn)
            with span("turn", f"turn {turn}"):
                ended = await self._turn(turn, room, reason)
            if ended is not None:
                return ended
        return ended or StopReason.MAX_TURNS

    async def begin(self) -> StopReason | None:
        """Reset the environment and make the `given` gold calls. Returns a stop reason if they do not fit, else None. Raises
        EnvError if they end the episode."""
        reset = self.env.areset(seed=self.spec.task_seed, options={"split": self.spec.split})
        observation, _ = await self._env(ToolEnv.areset, reset, "the setup", limit=self.limits.env_timeout)
        self.record = self.env.trajectory
        self._offer_tools()
        self.shown, self.opening, self.begun = list(observation), len(observation), len(observation)
        # A prompt beyond a limit leaves no room for a turn, but its row must respect the limit; a slice of it has no images.
        most = min(self.limits.max_episode_tokens, self.limits.context)
        prompt = await self.renderer.astart(observation, self.offered)
        self.ledgers[-1].append_context(prompt if len(prompt) <= most else prompt[:most], turn=0)
        # Turns of gold calls are context, not trained on.
        given = prefix_of(self.env.gold_turns(self.env.task), self.spec.given) if self.spec.given else ()
        for said in given:
            for ids in scripted_ids(self.renderer, said):
                turn = len(self.record.turns)
                room, reason = self._room(len(ids))
                if room < len(ids) or turn >= self.limits.max_turns:
                    return reason if room < len(ids) else StopReason.MAX_TURNS
                self._extend(turn)
                self.ledgers[-1].append_context(ids, turn)
                message = await self.renderer.aparse(ids, "stop")
                answer = self.env.astep(message)
                observation, _, *over, _ = await self._env(ToolEnv.astep, answer, f"gold turn {turn}")
                self.record.given += 1
                if any(over):
                    raise EnvError(f"{self.record.task.id}: gold turn {turn} ended the episode, so none can begin after it")
                await self._next_prompt(Generation(ids, [], [], "stop"), message, observation)
        return None

    async def _turn(self, turn: int, room: int, reason: StopReason) -> StopReason | None:
        """Sample a turn of at most `room` tokens and step the environment. Returns the stop reason (`reason` if the room was too
        small), or None if the episode continues."""
        assert self.record is not None
        record, prompt_tokens = self.record, len(self.ledgers[-1])
        generation = await self._generate(room, turn)
        message = await self.renderer.aparse(generation.token_ids, generation.finish)
        if generation.finish == "length" and room < self.limits.max_turn_tokens:
            # The episode's budget cut this turn short: it is recorded, but the environment must not see half a turn.
            if generation.token_ids:
                record.messages.append(message)
                record.turns.append(Turn(index=len(record.turns), message=message))
                self._record_tokens(record.turns[-1], generation, prompt_tokens)
            return reason
        try:
            blame, answer = blame_of(self.env, message), self.env.astep(message)
            observation, _, terminated, truncated, info = await self._env(ToolEnv.astep, answer, f"turn {turn}", blame)
        finally:
            # Even if the step was cut: the turn is in the record and may be scored, so it needs its token positions.
            if len(record.turns) > turn:
                self._record_tokens(record.turns[turn], generation, prompt_tokens)
        if terminated:
            # Cut at `max_turn_tokens`: the model did not stop by itself.
            cut = generation.finish == "length" and not message.tool_calls
            return StopReason.MAX_TOKENS if cut else StopReason.DONE
        if truncated:
            self.error = info.get("error")
            return StopReason(info.get("stop", StopReason.MAX_TURNS))
        await self._next_prompt(generation, message, observation)
        return None

    async def _next_prompt(self, generation: Generation, message: Message, observation: Sequence[Message]) -> None:
        """Prepare the next prompt from the environment's answer; `_extend` appends it to a ledger.

        If the conversation is rewritten (by the context policy, or by a chat template that drops old reasoning), the prompt
        becomes the context of a new ledger. Earlier samples stay in the old ledger and are trained there.
        """
        assert self.record is not None
        limits, turn = self.limits, len(self.record.turns)
        before = self.shown = [*self.shown, self.record.turns[-1].message, *observation]
        fork, ids = await self._prompt(generation, message, before[: len(before) - len(observation)], observation)
        tokens = len(ids) if fork else len(self.ledgers[-1]) + len(ids)
        ask = partial(self._ask, generation, message, observation)
        moment = Moment(before, self.opening, len(observation), tokens, limits.max_turn_tokens, limits.context, ask)
        # No prompt follows the last turn, so a summary would be sampled for nothing.
        context = self.policy.context
        with user_code(f"rollout.context {type(context).__name__}: rewrite", context.rewrite, context):
            rewritten = await context.rewrite(moment) if turn < limits.max_turns else None
        if rewritten is not None:
            fork, self.shown = True, rewritten
            ids = await self.renderer.astart(rewritten, self.env.toolbox.schemas())
            # By identity: a new message may equal an old one.
            known = {id(message) for message in before}
            added = [{"role": m.role, "content": m.content} for m in self.shown if id(m) not in known]
            self.rewrites.append({"turn": turn, "ledger": len(self.ledgers), "tokens": len(ids), "added": added})
        self.fork, self.suffix = fork, ids

    async def _prompt(
        self, generation: Generation, message: Message, earlier: list[Message], fresh: Sequence[Message]
    ) -> tuple[bool, list[int]]:
        """Return True and the whole prompt if a new ledger must begin, else False and the suffix to append.

        `earlier` ends with the sampled turn; `fresh` are the messages after it.
        """
        tools = self.env.toolbox.schemas()
        # A prompt shows the tools at its beginning, so changed ones rewrite it.
        if tools != self.offered or not self.renderer.keeps(message, fresh, earlier[:-1], self.begun):
            return True, await self.renderer.astart([*earlier, *fresh], tools)
        stopped = generation.finish == "stop" and bool(generation.token_ids)
        return False, await self.renderer.aextend(generation.finish, fresh, generation.token_ids[-1] if stopped else None)

    def _extend(self, turn: int) -> None:
        """Append the next prompt to the current ledger, or to a new one."""
        if self.fork:
            self.ledgers.append(TokenLedger())
            self.begun = len(self.shown)
            self._offer_tools()
        self.ledgers[-1].append_context(self.suffix, turn)
        self.fork, self.suffix = False, []

    def _offer_tools(self) -> None:
        """Note the tools that the current ledger shows, and parse calls by their types."""
        self.offered = self.env.toolbox.schemas()
        self.renderer = self.policy.renderer.with_tools(self.offered)

    async def _ask(
        self, generation: Generation, message: Message, observation: Sequence[Message], instruction: Message, tokens: int
    ) -> str | None:
        """Return the model's answer to the conversation followed by `instruction`; see `Moment.ask`. Tokens that this policy
        samples for it enter the ledger like a turn (numbered as the next one), but neither the record nor the environment sees
        them. If the newest tool output does not fit, a marker replaces it."""
        assert self.record is not None
        if (writer := self.policy.writer) is not None:  # another model, so its tokens do not enter the ledger
            ids = await writer.renderer.astart([*self.shown, instruction], self.env.toolbox.schemas())
            answer = await self._sample(writer, ids, tokens, "summary", f"{self.spec.key}.summary")
            return (await writer.renderer.aparse(answer.token_ids, answer.finish)).content
        earlier = self.shown[: len(self.shown) - len(observation)]
        for fresh in (list(observation), elide_outputs(observation)):
            self.fork, self.suffix = await self._prompt(generation, message, earlier, [*fresh, instruction])
            room, _ = self._room(tokens)
            if room == tokens:
                break
        if room < 1:
            return None
        turn = len(self.record.turns)
        self._extend(turn)
        answer = await self._generate(room, turn, "summary")
        return (await self.renderer.aparse(answer.token_ids, answer.finish)).content

    async def _env(
        self,
        method: Callable[..., Awaitable[Answer]],
        answer: Awaitable[Answer],
        what: str,
        blame: Blame = "infrastructure",
        limit: float = math.inf,
    ) -> Answer:
        """Await the environment (`Waits.environment`). Raises HookError if an overridden `method` returns a value of the wrong
        type."""
        began = time.monotonic()
        try:
            with span("environment", what):
                found = await self.waits.environment(self.env, answer, what, blame, limit)
            check_answer(self.env.id, method, getattr(type(self.env), method.__name__), found)
            return found
        finally:
            self.env_s += time.monotonic() - began

    def _room(self, most: int | None = None) -> tuple[int, StopReason]:
        """Return the tokens left for the next turn, at most `most` (default: `max_turn_tokens`), and the stop reason if that is
        too few."""
        episode = self.limits.max_episode_tokens - sum(map(len, self.ledgers)) - len(self.suffix)
        context = self.limits.context - len(self.suffix) - (0 if self.fork else len(self.ledgers[-1]))
        reason = StopReason.MAX_TOKENS if episode <= context else StopReason.CONTEXT_FULL
        return min(self.limits.max_turn_tokens if most is None else most, episode, context), reason

    async def _generate(self, room: int, turn: int, purpose: str = "turn") -> Generation:
        """Sample a continuation of the ledger and append it."""
        generation = await self._sample(self.policy, self.ledgers[-1].ids(), room, purpose, self.spec.key)
        try:
            self.ledgers[-1].append_sampled(generation.token_ids, generation.logprobs, generation.versions, turn)
            if generation.experts is not None:
                self.ledgers[-1].add_experts(self.ledgers[-1].routed_tokens, generation.experts)
        except ValueError as fault:
            # Only an engine can produce values that a ledger rejects: the episode is unscored and retried, the run continues.
            raise EngineError(f"{purpose} {turn}: {fault}") from None
        return generation

    async def _sample(self, policy: Policy, ids: list[int], room: int, purpose: str, key: str) -> Generation:
        assert self.record is not None
        turn, own = len(self.record.turns), policy is self.policy
        sampling = Sampling(
            max_tokens=room,
            temperature=policy.temperature,
            top_p=policy.top_p,
            top_k=policy.top_k,
            stop_token_ids=policy.renderer.stop_token_ids,
            # Derived from the turn, not from a call counter: a turn's random stream is the same with and without summaries.
            seed=derive(self.spec.seed, purpose, turn),
            experts_from=self.ledgers[-1].routed_tokens if own and policy.router_replay else None,
        )
        began = time.monotonic()
        try:
            with span("generation", purpose) as opened:
                answer = policy.engine.generate(ids, sampling, key)
                generation = await self.waits.engine(policy.engine, answer, key, f"{purpose} {turn}", room)
                if opened is not None:
                    opened.set(**sampling_attributes(generation, sampling, len(ids)))
        finally:
            self.turn_s = time.monotonic() - began
            self.engine_s += self.turn_s
        if generation.finish == "abort":
            raise EngineError(f"the request was aborted in {purpose} {turn}")
        return generation

    def _record_tokens(self, turn: Turn, generation: Generation, prompt_tokens: int) -> None:
        turn.ledger, turn.end = len(self.ledgers) - 1, len(self.ledgers[-1]) - 1
        used = generation.counts(prompt_tokens)
        turn.prompt_tokens, turn.sampled_tokens, turn.usd = used.prompt_tokens, used.sampled_tokens, used.usd
        turn.finish = generation.finish
        turn.seconds = self.turn_s + sum(result.seconds for result in turn.results)

    async def end(self, stop: StopReason, error: str | None) -> Trajectory:
        trajectory = await complete(self.env, self.record, self.spec, stop, error, self.waits.used)
        trajectory.ledgers = list(filter(len, self.ledgers))
        trajectory.rewrites = self.rewrites
        if self.hook is not None:
            self.hook.complete(trajectory)
        trajectory.timings = {"engine_s": self.engine_s, "env_s": self.env_s}
        return trajectory

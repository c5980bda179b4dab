"""The step-wise loop (`agentrl.session`): the parts of a run, and sampling."""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, cast

from agentrl.config import TrainConfig, to_toml
from agentrl.config.envs import entry_of, one_temperature
from agentrl.config.schema import RolloutConfig
from agentrl.data.chat_forms import pair_results
from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import Group, Json, Message, Task, Trajectory, Turn
from agentrl.engines.chat_format import RequestError, read_messages
from agentrl.rollout.engine import Sampling, derive
from agentrl.rollout.episode import score_group
from agentrl.rollout.player import Evaluation, RunEnv
from agentrl.run.api.base import Both, Config, config_of, section_of_call
from agentrl.run.api.trainer import Trainer
from agentrl.run.checks import check_config
from agentrl.run.config_file import load_whole, open_folder
from agentrl.run.display import Display
from agentrl.run.folder import RunFolder
from agentrl.run.interrupt import Interrupt
from agentrl.run.provenance import Provenance, updates_done
from agentrl.run.run_log import RunLog
from agentrl.run.session import (
    Session,
    evaluate_env,
    forget_evaluation,
    needs_warm_start,
    open_session,
    play_tasks,
    republish_to_new_replicas,
)
from agentrl.run.sft import warm_start
from agentrl.trainer.estimator_inputs import needs_greedy
from agentrl.trainer.families import packing_of
from agentrl.trainer.update_hooks import UpdateHook
from agentrl.utils.errors import ConfigError, EngineError, StepOrderError, checks_arguments
from agentrl.utils.processor import raise_gc_threshold
from agentrl.utils.terminal import console
from agentrl.utils.threads import in_thread

# The policy

FIRST = 2**30
"""Number of the first manually played group, above those of a run's ledger."""
NUMBERS = "session"
"""Key of `Numbers` among hooks and in checkpoints."""

Prompt = str | Sequence[Message | Mapping[str, Any]] | Sequence[int]


@dataclass(frozen=True, slots=True)
class Draw:
    """One sampled turn. `token_ids`, `logprobs`: of the turn, at `temperature`; `prompt_ids`: tokens of its prompt; `version`: of
    the oldest weights that sampled one of its tokens; `finish`: "stop", "length", "abort" or "stop_string"."""

    text: str
    message: Message
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish: str
    temperature: float

    @property
    def version(self) -> int:
        return min(self.versions, default=0)


class Numbers(UpdateHook):
    """Numbers of the next group and the next call, from which tasks and seeds follow; checkpoints keep them."""

    def __init__(self) -> None:
        self._next = {"group": FIRST, "call": 0}

    def take(self, what: Literal["group", "call"]) -> int:
        """Return the next number."""
        self._next[what] += 1
        return self._next[what] - 1

    def state(self) -> Json:
        return dict(self._next)

    def load_state(self, state: Json) -> None:
        self._next = dict(state)


class LivePolicy:
    """Samples from the policy of a step-wise loop (`agentrl.session`). Calls block; `NAME.aio(...)` is awaitable."""

    def __init__(self, session: Session, trainer: Trainer) -> None:
        self._session, self._trainer, self.held = session, trainer, trainer.held
        self._numbers: Any = session.learner.hooks[NUMBERS]
        self._pools: dict[tuple[str, str], int] = {}

    @property
    def version(self) -> int:
        """Version of the engine's weights: number of published updates."""
        return self._trainer.version

    @Both
    async def sample(
        self,
        prompt: Prompt,
        n: int = 1,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        stop: Sequence[str] = (),
        seed: int | None = None,
    ) -> list[Draw]:
        """Sample `n` answers to a prompt: a string (a user message), messages (`Message` or OpenAI dicts), or token ids.

        Defaults are those of [rollout]: `max_turn_tokens`, `temperature`, `top_p`. `seed`: repeats the same answers under the
        same weights, with engines that sample by seed. Raises StepOrderError if trained weights are not published.
        """
        self._trainer.check_fresh("policy.sample")
        if n < 1:
            raise ConfigError(f"policy.sample: n = {n}: expected at least 1 answer")
        policy, given = self._session.envs[0].policy, {"max_turn_tokens": max_tokens, "temperature": temperature, "top_p": top_p}
        rollout = self._rollout_with("policy.sample", **given)
        _check_tools(tools)
        renderer = policy.renderer.with_tools(tools)
        if not isinstance(prompt, str) and all(isinstance(item, int) and not isinstance(item, bool) for item in prompt):
            ids = [item for item in prompt if isinstance(item, int)]
            if not ids:
                raise ConfigError("policy.sample: prompt = []: expected at least one message or token id")
        else:
            try:
                items: Sequence[Any] = [Message("user", prompt)] if isinstance(prompt, str) else prompt
                messages = [item if isinstance(item, Message) else read_messages([item])[0] for item in items]
            except RequestError as problem:
                raise ConfigError(f"policy.sample: {problem}") from None
            ids = await renderer.astart(pair_results(messages, strict=False), tools)
        call, used = self._numbers.take("call"), policy.temperature if temperature is None else temperature
        base = self._session.config.seed if seed is None else seed

        async def one(number: int) -> Draw:
            at = (number,) if seed is not None else (call, number)
            sampling = Sampling(
                rollout.max_turn_tokens,
                used,
                policy.top_p if top_p is None else top_p,
                policy.top_k,
                renderer.stop_token_ids,
                derive(base, "sample", *at),
                stop=tuple(stop),
            )
            if refusal := policy.engine.refusal(sampling):
                raise ConfigError(f"policy.sample: {refusal}")
            found = await policy.engine.generate(ids, sampling, f"sample{call}.{number}")
            try:
                TokenLedger().append_sampled(found.token_ids, found.logprobs, found.versions, 0)
            except ValueError as fault:
                raise EngineError(f"policy.sample: {fault}") from None
            message = await renderer.aparse(found.token_ids, found.finish)
            return Draw(message.content, message, ids, found.token_ids, found.logprobs, found.versions, found.finish, used)

        return list(await asyncio.gather(*(one(number) for number in range(n))))

    @checks_arguments
    def group(self, draws: Sequence[Draw], rewards: Sequence[float | None], *, task: str = "sample") -> Group:
        """Make a group to train on from answers to one prompt and their rewards, without an environment.

        Raises ConfigError for a wrong number of rewards, a reward that is not finite, or an answer sampled at another temperature
        than the trainer's.
        """
        if len(draws) != len(rewards):
            raise ConfigError(f"policy.group: {len(draws)} answers and {len(rewards)} rewards; expected one each")
        if wrong := [reward for reward in rewards if reward is not None and not math.isfinite(reward)]:
            raise ConfigError(f"policy.group: reward {wrong[0]}: expected a finite number, or None for an answer without a score")
        heat, number, members = one_temperature(self._session.config.rollout, "a policy"), self._numbers.take("group"), []
        for member, (draw, reward) in enumerate(zip(draws, rewards, strict=True)):
            if (draw.temperature or 1.0) != (heat or 1.0):
                raise ConfigError(
                    f"policy.group: an answer was sampled at temperature {draw.temperature:g}, and the trainer computes at "
                    f"rollout.temperature = {heat:g}; sample without temperature=, or set rollout.temperature"
                )
            ledger = TokenLedger()
            ledger.append_context(draw.prompt_ids, 0)
            ledger.append_sampled(draw.token_ids, draw.logprobs, draw.versions, 0)
            turn = Turn(0, draw.message, prompt_tokens=len(draw.prompt_ids), sampled_tokens=len(draw.token_ids))
            turn.ledger, turn.end, turn.finish = 0, len(ledger) - 1, draw.finish
            found = Trajectory("", Task(task, number), member=member, ledgers=[ledger], turns=[turn], messages=[draw.message])
            found.reward, found.terminated = (None if reward is None else float(reward)), True
            members.append(found)
        return Group(number, number, members)

    @Both
    async def collect(self) -> list[Group]:
        """Collect the groups of the next update as a run does, once per publish. They are `rollout.groups` groups of
        `rollout.group_size` episodes on the sampler's tasks, under the group ledger. Raises StalledError as a run,
        StepOrderError out of order."""
        self._trainer.check_fresh("policy.collect")
        if self._trainer.collected is not None:
            raise StepOrderError("policy.collect: the groups of this update were collected already; call trainer.publish() first")
        if not self._trainer.counts_groups:
            raise StepOrderError(
                "policy.collect: an update was published without groups of policy.collect, which counts them; use policy.play "
                "for all updates of a session, or policy.collect for all"
            )
        groups = await republish_to_new_replicas(self._session, self._session.collector.collect())
        self._trainer.collected = groups
        return groups

    @Both
    async def play(
        self,
        env: str | None = None,
        tasks: int | Sequence[int] = 8,
        group_size: int | None = None,
        *,
        split: str = "train",
        temperature: float | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> list[Group]:
        """Play a group of scored episodes per task; `tasks`: seeds of tasks, or a number of next tasks.

        `env`: name of an environment, by default the only one. `group_size`: by default the run's. `temperature`, `params`:
        replace the run's; an episode at another temperature cannot be trained on. Raises StepOrderError if trained weights are
        not published.
        """
        self._trainer.check_fresh("policy.play")
        config, (part, one) = self._session.config, self._part(env)
        advantage = one.algorithm.advantage
        if split == "train" and needs_greedy(advantage):
            raise ConfigError(
                f'algorithm.advantage "{advantage.name}" compares a group with a greedy episode, which policy.play lacks; '
                "use policy.collect"
            )
        size = self._rollout_with("policy.play", group_size=group_size, temperature=temperature).group_size
        if (tasks < 1) if isinstance(tasks, int) else any(seed < 0 for seed in tasks):
            raise ConfigError(f"policy.play: tasks = {tasks!r:.80}: expected a number from 1 on, or seeds from 0 on")
        call = self._numbers.take("call")
        numbers = [self._numbers.take("group") for _ in (range(tasks) if isinstance(tasks, int) else tasks)]
        pool = await in_thread("load", self._pool, part, split)
        seeds = [(number - FIRST) % pool for number in numbers] if isinstance(tasks, int) else [int(seed) for seed in tasks]
        drawn = derive(config.seed, "play", call)
        # Of a task that comes again, further members: the same ones would be the same episodes.
        pairs = [(seed, seeds[:place].count(seed) * size + member) for place, seed in enumerate(seeds) for member in range(size)]
        episodes = await play_tasks(
            self._session, part.name, pairs, seed=drawn, split=split, params=params, temperature=temperature
        )
        groups = []
        for place, (number, seed) in enumerate(zip(numbers, seeds, strict=True)):
            members = episodes[place * size : (place + 1) * size]
            if part.scorer.compares:
                await score_group(members, part.scorer)
            groups.append(Group(number, seed, members, env=part.name))
        return groups

    @Both
    async def evaluate(self, env: str | None = None, n: int | None = None, *, split: str | None = None) -> Evaluation:
        """Play one held-out episode on each of the first `n` tasks, as the run's evaluations do ([eval])."""
        self._trainer.check_fresh("policy.evaluate")
        part, one = self._part(env)
        settings = one.eval
        table = {**dict(settings), "tasks": settings.tasks if n is None else n, "split": split or settings.split}
        section = section_of_call("policy.evaluate", type(settings), table)
        found = await evaluate_env(self._session, part.name, section)
        await forget_evaluation(self._session)
        return found

    def _rollout_with(self, call: str, **given: Any) -> RolloutConfig:
        """Return the [rollout] section with the arguments of a call that are not None. Raises ConfigError."""
        changes = {key: value for key, value in given.items() if value is not None}
        return section_of_call(call, RolloutConfig, {**dict(self._session.config.rollout), **changes})

    def _pool(self, part: RunEnv, split: str) -> int:
        """Return the number of tasks of a split; 2**30 if it is endless."""
        if (part.name, split) not in self._pools:
            env = part.env.build()
            self._pools[part.name, split] = env.task_count(split) or FIRST
            env.close()
        return self._pools[part.name, split]

    def _part(self, env: str | None) -> tuple[RunEnv, TrainConfig]:
        """Return an environment of the session, and the config with it as the only one."""
        envs, config = self._session.envs, self._session.config
        if env is None and len(envs) > 1:
            raise ConfigError(f"policy: the session has several environments ({', '.join(e.name for e in envs)}); name one")
        try:
            number = 0 if env is None else entry_of([{"name": part.name} for part in envs], env)
        except ConfigError as problem:
            raise ConfigError(f"policy: {problem}") from None
        return envs[number], config.alone(config.envs[number])


def _check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise ConfigError for a tool that is not in OpenAI's format."""
    for place, tool in enumerate(tools):
        function: Any = tool.get("function")
        named = isinstance(function, Mapping) and isinstance(function.get("name"), str)
        schema: Any = named and (function.get("parameters") or {})
        whole = isinstance(schema, Mapping) and isinstance(schema.get("properties") or {}, Mapping)
        if not whole or not isinstance(schema.get("required") or [], list | tuple):
            raise ConfigError(
                f"policy.sample: tools[{place}] = {tool!r:.80}: expected a tool in OpenAI's format: "
                '{"type": "function", "function": {"name": ..., "description": ..., "parameters": its JSON Schema}}'
            )


# The loop


def continue_folder(place: RunFolder, made: TrainConfig) -> None:
    """Make `made` the config of a kept session. Raises a UserError as a resumed run does: for what it cannot change."""
    before = load_whole(place.config).model_copy(update={"out": made.out, "name": made.name})  # the folder may have been moved
    Provenance(place, made).check_unchanged(before)
    place.keep_config(to_toml(made), updates_done(place))


CLOSED = "the session is closed; open another one: agentrl.session(config)"


class _Closed:
    """Replaces the session after `close`; any access raises StepOrderError."""

    def __getattr__(self, name: str) -> Any:
        raise StepOrderError(CLOSED)


class StepLoop(AbstractContextManager["StepLoop"], AbstractAsyncContextManager["StepLoop"]):
    """Opened session: `policy` samples, `trainer` trains; `close` (or the end of a `with`) frees everything.

    `folder`: path of its model and checkpoints. `session`: live parts of the run, as in `run/loop.py`.
    """

    def __init__(self, session: Session, run_log: RunLog, held: ExitStack) -> None:
        self.session, self._run_log, self._held = session, run_log, held
        self._closed = False
        self.config = session.config
        self.folder: Path = session.folder.path
        self.trainer = Trainer(session)
        self.policy = LivePolicy(session, self.trainer)

    @Both
    async def close(self) -> None:
        """Stop the engine, episodes and workers; idempotent."""
        if self._closed:
            return
        self._closed, session = True, self.session
        # Also parts that the caller kept must raise this error.
        self.session = self.policy._session = self.trainer._session = cast(Session, _Closed())
        try:
            await session.close()
        finally:
            self._run_log.__exit__(None, None, None)
            await in_thread("files", self._held.close)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close.aio()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"version {self.trainer.version}"
        return f"<StepLoop of {self.config.name!r}, {state}, in {self.folder}>"


@Both
async def session(
    config: Config, *, folder: str | Path | None = None, quiet: bool = True, overrides: Mapping[str, Any] | None = None
) -> StepLoop:
    """Open the parts of a run for a step-wise loop: actors, environments, and the engine with its first weights.

    With an [sft] section the warm start runs first. `config`, `overrides`: as in `agentrl.train`. `folder`: keeps model and
    checkpoints, and continues from the newest checkpoint; by default temporary. Raises a UserError if the user can fix the
    problem, before anything starts.
    """
    made = config_of(config, overrides)
    for name in ("experience", "demonstrations"):
        if getattr(made.algorithm, name) is not None:
            raise ConfigError(
                f"algorithm.{name}: a step-wise loop chooses its own batches, and nothing is added to them; leave it out "
                f"(overrides={{'algorithm.{name}': False}})"
            )
    for name in ("callbacks", "traces", "prometheus", "profile"):
        if getattr(made, name):
            raise ConfigError(f"{name}: a step-wise loop has none. Leave the key out")
    one_temperature(made.rollout, "a step-wise loop")
    await in_thread("load", partial(check_config, capacity=True), made)
    raise_gc_threshold()
    with ExitStack() as held:
        temporary = tempfile.TemporaryDirectory(prefix="agentrl-session-") if folder is None else nullcontext(str(folder))
        path = Path(held.enter_context(temporary)).expanduser().absolute()
        made = made.model_copy(update={"out": str(path.parent), "name": path.name})
        known, occupied = (path / "config.toml").is_file(), path.exists() and (not path.is_dir() or any(path.iterdir()))
        if occupied and not known:
            raise ConfigError(f"folder = {path}: it is not empty and holds no session; name a new folder")
        place = RunFolder(path) if known else await in_thread("files", partial(open_folder, made, overwrite=False))
        held.enter_context(place.lock("close that session, or name another folder"))
        made = made.with_date(place.day())
        if known:
            await in_thread("load", continue_folder, place, made)
        display = Display(console(quiet=True) if quiet else None)
        run_log = RunLog(place, display, [])
        packing = await in_thread("load", packing_of, made)  # decide once for all ranks
        made = made.model_copy(update=packing.sections(made.model, made.optim))
        session = await open_session(made, place, display)
        session.learner.hooks[NUMBERS] = Numbers()
        try:
            if made.rollout.colocate:
                await session.publisher.sleep()
            if needs_warm_start(made, place):
                await warm_start(session, run_log, Interrupt(display.say))
            await session.begin()
        except BaseException:
            await session.close()
            raise
        return StepLoop(session, run_log, held.pop_all())

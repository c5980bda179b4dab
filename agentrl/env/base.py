"""`ToolEnv`: a conversation with tools as a Gymnasium environment."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, TypeVar

from agentrl.data.chat_forms import pair_results
from agentrl.data.trajectory import Message, StopReason, Task, ToolCall, ToolResult, Trajectory, Turn
from agentrl.env.authoring import EnvHooks, Forkable, check_answer
from agentrl.env.call_options import MAX_OUTPUT
from agentrl.env.copying import play_again
from agentrl.env.spaces import Action, MessagesSpace, Observation, ToolCallSpace, run_sync
from agentrl.env.toolbox import CountTokens, Toolbox, estimate_tokens
from agentrl.env.tools import Tool, tool_methods
from agentrl.env.users import GOLD, AsksModel, Parting, RecordedUser, User, make_call, next_step, record_result, user_view
from agentrl.utils.errors import ConfigError, EnvError, PolicyTimeoutError, ToolTimeoutError, UserLimitError, fault_text, place_of
from agentrl.utils.event_loop import LateError, within
from agentrl.utils.search_path import is_given, reward_of

if TYPE_CHECKING:
    from agentrl.reward import Score, Scorer
    from agentrl.reward.replays import Replay, RoundTurns


# Actions

_OPEN = "<tool_call>"


def read_action(action: Any, calls_before: int) -> tuple[Message, int]:
    """Return an action as an assistant message, and the episode's number of calls including it.

    The reasoning of a string (<think>) is split off and the rest parsed in the Hermes form; so is a message whose text has call
    markup but that has no parsed calls. A call whose id is missing or already used in this turn gets `call_N`: N counts calls
    over the episode and skips ids that are taken. Raises TypeError if the action is neither text nor an assistant message.
    """
    if isinstance(action, str):
        from agentrl.render.base import THINK  # imported late, as below

        reasoning, said = THINK.split(action)
        action = Message("assistant", said.lstrip() if reasoning else said, reasoning=reasoning)
    if not isinstance(action, Message) or action.role != "assistant":
        raise TypeError(f"an action is a string or a Message of role assistant, not {action!r}"[:200])
    if not action.tool_calls and _OPEN in action.content:
        # Imported late: an environment that only receives parsed messages needs no parser.
        from agentrl.render.tool_calls import parse_tool_calls

        content, parsed = parse_tool_calls(action.content)
        action = replace(action, content=content, tool_calls=tuple(replace(call, id="") for call in parsed))
    calls, seen, taken = list[ToolCall](), set[str](), {call.id for call in action.tool_calls}
    for number, call in enumerate(action.tool_calls, start=calls_before):
        if not call.id or call.id in seen:
            call = replace(call, id=next(name for name in map("call_{}".format, count(number)) if name not in taken))
            taken.add(call.id)
        calls.append(call)
        seen.add(call.id)
    made = tuple(calls)
    return action if made == action.tool_calls else replace(action, tool_calls=made), calls_before + len(calls)


# The reward of an environment built directly


class ScorerLike(Protocol):
    """The part of `agentrl.reward.score.Scorer` that the Gymnasium interface calls."""

    async def ascore(self, trajectory: Trajectory, /) -> Score: ...


@dataclass(eq=False)
class OwnReward:
    """Scorer by the spec that an environment's class names, compiled when the first episode ends."""

    _env: ToolEnv
    _scorer: Scorer | None = None

    async def ascore(self, trajectory: Trajectory, /) -> Score:
        """Score an episode. Raises CatalogError if the spec is not found, RewardSpecError if it is invalid."""
        if self._scorer is not None:
            return await self._scorer.ascore(trajectory)
        from agentrl.config.schema import RewardConfig  # late: building an environment does not need the reward language
        from agentrl.reward import compile_spec, load_spec, make_context
        from agentrl.reward.compile import given_spec

        name = str(reward_of(type(self._env)))
        spec = given_spec(name) if is_given(name) else load_spec(name)
        self._scorer = compile_spec(spec, context=make_context(RewardConfig(), replay_env=self.replay_env))
        return await self._scorer.ascore(trajectory)

    def replay_env(self, task: Task) -> ToolEnv:
        """Build a new environment with the same parameters, for specs that replay gold calls."""
        args, kwargs = self._env._built_with
        other = type(self._env)(*args, **kwargs)
        other.scorer = None
        other.limit_output(self._env.toolbox.max_output)  # tool results of both environments are compared
        return other


# The environment

log = logging.getLogger(__name__)

T = TypeVar("T")
ResetResult = tuple[Observation, dict[str, Any]]
StepResult = tuple[Observation, float, bool, bool, dict[str, Any]]


class ToolEnv(Forkable):
    """Base class of all environments.

    A subclass sets `id`, `reward` (the name of a spec in the catalog, or a path relative to the file) and `summary`,
    marks its tools with `@tool` (those of the simulated user with `@tool(by="user")`), and implements
    `make_task` and `prompt`; the other hooks have defaults.
    Set episode state in `setup`, as ordinary attributes: snapshots copy all attributes except those named in `shared`.

    For `agentrl env check`: `splits` are the names that `make_task` accepts; `order_free` declares that the calls of a gold
    solution may be made in any order; `idle_share` is the share of tasks in which doing nothing is correct. For rewards that
    replay calls: `scripted` declares that an overridden `user_reply` does not depend on the policy's text. For
    `agentrl env serve --http`: `host_params` are parameters with files, programs or addresses, which a client may not set.

    One object runs one episode at a time. The order of calls is `areset`, `astep`..., `aclose`; `reset`, `step`
    and `close` are their blocking forms.
    """

    is_remote: ClassVar[bool] = False
    """True for a client of an environment server, which returns a task's prompt without an episode."""
    replays: bool = False
    """True in a replay for a reward: an environment must not apply its turn limit, since gold calls are made one per turn."""
    _built_with: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        made = super().__new__(cls)
        made._built_with = (args, kwargs)
        return made

    def __init__(
        self,
        *,
        split: str = "train",
        scorer: ScorerLike | Literal["own"] | None = "own",
        render_mode: str | None = None,
        count_tokens: CountTokens = estimate_tokens,
    ) -> None:
        """`scorer`: scores finished episodes, by default with the spec that the class names; with None or without a spec every
        reward is 0.0 and the caller scores the trajectory. `split`: the default split of `reset`. `count_tokens`: measures the
        output budgets of tools. Raises TypeError for a tool with an invalid signature."""
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ValueError(f"render_mode {render_mode!r}; expected one of {self.metadata['render_modes']}")
        self.split = split
        own = None if self.reward is None else OwnReward(self)
        self.scorer: ScorerLike | None = own if scorer == "own" else scorer
        self.render_mode = render_mode
        self.initial_seed: int | None = None
        self.user: User | None = None
        # The tools of a class are read once: methods in order of definition, then `tools`.
        cls = type(self)
        if "_class_tools" not in cls.__dict__:
            found: list[Tool | Callable[..., Any]] = [*tool_methods(cls), *cls.tools]
            users = [item for item in found if isinstance(item, Tool) and item.options.by == "user"]
            offered = [item for item in found if item not in users]
            cls._class_tools = [Toolbox(items).table for items in (offered, users)]
        most = MAX_OUTPUT if self.max_output is None else self.max_output
        make_box = partial(Toolbox, owner=self, count_tokens=count_tokens, max_output=most)
        self.toolbox, self.user_toolbox = map(make_box, cls._class_tools)
        self._tools_before, self._user_tools_before = self.toolbox.table, self.user_toolbox.table
        self._opened, self._sets = [], {}
        self._env_record: Trajectory | None = None
        self._env_task: Task | None = None
        self._env_open = False
        self._env_ended = False
        self._cut_for: StopReason | None = None
        self._env_calls = 0
        self._env_last: Observation = []

    # -- what an author calls, and the user's side --------------------------------------------------

    async def user_reply(self, message: Message) -> list[Message] | None:
        """Answer an assistant turn without tool calls; None ends the episode.

        By default `self.user` (see `agentrl.env.users`; set it in `setup`) answers. Without a user the episode ends.
        """
        if self.user is None:
            return None
        text = await self.ask_user()
        return None if text is None else [Message("user", text)]

    async def ask_user(self, before: Sequence[Message] = ()) -> str | None:
        """Ask `self.user` for its next message, running any tool calls that it makes first; None if it leaves. `before`: the
        opening's messages so far, if an async `prompt` asks.

        Raises EnvError if the user or one of its tools fails, or for an answer that is neither text, None, a Parting nor a
        message of role "user"; UserLimitError after more than `user_call_limit` calls without a text.
        """
        record, made = self._env_record, 0
        if self.user is None or record is None:
            raise EnvError(f"{self.id}: there is no user to ask (set self.user in setup)")
        while True:
            said: Any = self.user.reply(user_view(record, before))
            answer = await said if inspect.isawaitable(said) else said
            if isinstance(answer, Parting):
                record.parting = answer.text
                return None
            if answer is None or isinstance(answer, str):
                return answer
            if not isinstance(answer, Message) or answer.role != "user":
                raise EnvError(
                    f"the user's reply must be a text, a Message of role 'user' with calls, Parting or None, not {answer!r:.200}"
                )
            if not answer.tool_calls:
                return answer.content
            made += len(answer.tool_calls)
            if made > self.user_call_limit:
                raise UserLimitError(
                    f"the user made {made} calls in one answer, without a text (user_call_limit = {self.user_call_limit})"
                )
            step = next_step(record)
            for place, call in enumerate(answer.tool_calls):  # one at a time, in order
                await make_call(record, self.user_toolbox, call, step, "" if place else answer.content)
                self._note_new_tools()

    def finish(self) -> None:
        """End the episode with this turn; for tools and hooks that apply the task's rules."""
        self._env_ended = True

    def cut(self, stop: StopReason) -> None:
        """Set the stop reason for a step that is about to be cancelled (default: CANCELLED)."""
        self._cut_for = stop

    # -- the record --------------------------------------------------------------------------------

    @property
    def trajectory(self) -> Trajectory:
        """The record so far, with the current or final `state`. Raises EnvError before the first reset."""
        if self._env_record is None:
            raise EnvError(f"{self.id}: no episode yet; call reset first")
        if self._env_open:
            self._env_record.state = self.state()
        return self._env_record

    @property
    def task(self) -> Task:
        """The episode's copy of the task, gold answers included: for the environment only. The record has the original."""
        return self._env_task or self.trajectory.task  # an episode on a remote server has only the record

    @property
    def is_open(self) -> bool:
        """True while an episode is running: after reset, neither finished nor closed."""
        return self._env_open

    # -- Gymnasium ---------------------------------------------------------------------------------

    @cached_property
    def observation_space(self) -> MessagesSpace:  # type: ignore[override]
        return MessagesSpace()

    @cached_property
    def action_space(self) -> ToolCallSpace:  # type: ignore[override]
        return ToolCallSpace(self.toolbox)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        """`areset`, blocking."""
        return run_sync(self.areset(seed=seed, options=options))

    def step(self, action: Action) -> StepResult:
        """`astep`, blocking."""
        return run_sync(self.astep(action))

    def close(self) -> None:
        """`aclose`, blocking."""
        if self._env_open:
            run_sync(self.aclose())

    def render(self) -> Any:
        """Return the latest messages as text, in mode "ansi"."""
        if self.render_mode is None:
            return None
        return "\n".join(f"{message.role}: {message.content}" for message in self._env_last)

    # -- an episode --------------------------------------------------------------------------------

    async def areset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> ResetResult:
        """Start an episode; returns the opening messages and info.

        `seed` selects the task; without it the next one is drawn. `options`: "split"; "task", an existing Task; "user", which
        replaces the environment's user, if it has one: the User of a replay, or "gold" for the one of `gold_user`. Raises
        ValueError for other options and EnvError if the environment's setup fails.
        """
        options = options or {}
        check_options(options)
        await self.aclose()
        # The task is the caller's, the seed's, or the next one of this environment's random stream.
        if seed is None and self._np_random is None:
            seed = self.initial_seed
        if seed is not None:
            super().reset(seed=seed)
        if "task" in options:
            if not isinstance(task := options["task"], Task):
                raise ValueError(f"reset option 'task' must be a Task, got {type(task).__name__}")
        else:
            chosen = int(self.np_random.integers(2**62) if seed is None else seed)  # True is 1
            task = self.make_task(chosen, str(options.get("split", self.split)))
        self._env_record = Trajectory(env_id=self.id, task=task, seed=task.seed)
        task = self._env_task = task.copied()  # hooks and tools may change it, but episodes and scorers share the original
        # Marked open before `setup`, so that a failed setup is torn down too.
        self._env_open, self._env_ended, self._env_calls, self._cut_for = True, False, 0, None
        self.replays = isinstance(options.get("user"), RecordedUser)
        self._tools_before, self._user_tools_before = self.toolbox.table, self.user_toolbox.table
        self._env_last = await self._or_fail(self._start_episode(task, options))
        self._env_record.messages.extend(self._env_last)
        self._env_record.tools = self.toolbox.schemas()
        return list(self._env_last), self._info()

    async def astep(self, action: Action) -> StepResult:
        """Take one assistant turn: answer its tool calls, or let the user answer its text.

        Returns (new messages, reward, terminated, truncated, info). Raises EnvError if the environment fails (ToolTimeoutError
        if a tool hangs); the trajectory then has the stop reason. If the policy is responsible for a tool's timeout, or the user
        makes too many calls, the episode is truncated and `info["error"]` set.
        """
        record = self._running("step")
        message, self._env_calls = read_action(action, self._env_calls)
        turn = Turn(index=len(record.turns), message=message)
        # Recorded before it is answered, so that a failed episode's record has the turn that failed.
        record.messages.append(message)
        record.turns.append(turn)
        try:
            observation, over = await self._or_fail(self._answer(turn), PolicyTimeoutError, UserLimitError)
        except (PolicyTimeoutError, UserLimitError) as why:
            stop = StopReason.MAX_TOOL_TIME if isinstance(why, PolicyTimeoutError) else StopReason.MAX_TURNS
            return [], await self.aend(stop, str(why)), False, True, {**self._info(), "error": str(why)}
        record.messages.extend(observation)
        self._env_last = observation
        reward = await self.aend(StopReason.DONE) if over else 0.0
        return list(observation), reward, over, False, self._info()

    # -- an episode of an agent that makes its calls itself ------------------------------------------

    def record_turn(self, turn: Turn) -> None:
        """Record a turn of an agent that makes its own calls (`acall`), without `astep`. Raises EnvError without a running
        episode."""
        record = self._running("a turn")
        record.messages.append(turn.message)
        record.turns.append(turn)

    async def acall(self, turn: Turn, call: ToolCall) -> ToolResult:
        """Make one call of a turn from `record_turn` and record its result; `has_finished` is true if it ended the episode.
        Raises as `astep`, and PolicyTimeoutError if the policy is responsible for the tool's timeout."""
        record = self._running("a call")
        result = await self._or_fail(self.toolbox.call(call), PolicyTimeoutError)
        record_result(record, turn, result)
        self._note_new_tools()
        return result

    async def areply(self, turn: Turn) -> Observation | None:
        """Return the user's reply to the text of a turn from `record_turn`; None if the conversation is over. Raises as `astep`,
        and UserLimitError."""
        record = self._running("a turn")
        replies: Observation | None = await self._or_fail(self._hook("user_reply", turn.message), UserLimitError)
        record.messages.extend(replies or [])
        return replies

    def user_call(self, call: ToolCall) -> ToolResult:
        """`auser_call`, blocking."""
        return run_sync(self.auser_call(call))

    async def auser_call(self, call: ToolCall) -> ToolResult:
        """Make a call to a user tool without asking the user, for gold replays. Raises as `astep`."""
        record = self._running("a call")
        result = await self._or_fail(make_call(record, self.user_toolbox, call, next_step(record)))
        self._note_new_tools()
        return result

    @property
    def has_user(self) -> bool:
        """True if a user may answer a turn without tool calls."""
        return self.user is not None or type(self).user_reply is not ToolEnv.user_reply

    @property
    def has_finished(self) -> bool:
        """True if a tool or hook has called `finish`."""
        return self._env_ended

    async def aend(self, stop: StopReason, error: str | None = None) -> float:
        """End the running episode with a stop reason, tear it down and return its reward.

        The reward is 0.0 without a scorer, and NaN if the episode is unscored.
        """
        record = self._env_record
        if record is None:
            raise EnvError(f"{self.id}: no episode to end; call reset first")
        if self._env_open and not stop.infrastructure:
            await self._or_fail(self._hook("conclude"))
        record.stop, record.error = stop, error
        record.terminated = stop is StopReason.DONE
        cut = not (record.terminated or stop.infrastructure or stop is StopReason.AGENT_FAILED)
        record.truncated = cut or stop is StopReason.EPISODE_TIMEOUT
        await self.aclose()
        if self.scorer is None or stop.infrastructure:
            return 0.0 if self.scorer is None else float("nan")
        score = await self.scorer.ascore(record)
        record.reward, record.success = score.value, score.success
        record.evidence = getattr(score, "evidence", None)  # a custom scorer may have none
        return float("nan") if score.value is None else float(score.value)

    async def aclose(self) -> None:
        """Tear down the running episode, if any, even on cancellation; the record is kept."""
        if not self._env_open or self._env_record is None:
            return
        if self._env_record.stop is StopReason.DONE and not self._env_record.terminated:  # DONE is the default: nothing ended it
            self._env_record.stop = StopReason.CANCELLED
        try:
            self._env_record.state = self.state() if not self._env_record.stop.infrastructure else None
        finally:
            # Closed before the first await, so that a concurrent aclose does not tear down again; the await is shielded.
            self._env_open = False
            # Tools added or removed in this episode must not carry over to the next one.
            self.toolbox.table, self.user_toolbox.table = self._tools_before, self._user_tools_before
            if self.holds:
                await asyncio.shield(self._tear_down())

    # -- replays -----------------------------------------------------------------------------------

    @property
    def user_repeats(self) -> bool:
        """True if the user in a replay acts the same whatever the policy says."""
        return self.scripted or type(self).user_reply is ToolEnv.user_reply

    def replay(self, record: Trajectory, rounds: Sequence[RoundTurns], found: Replay, *, gold: bool = False) -> None:
        """Replay an episode's rounds for a reward; see `agentrl.reward.replays.MakeEnv`."""
        run_sync(play_again(self, record, rounds, found, gold))

    # -- inside ------------------------------------------------------------------------------------

    def _running(self, what: str) -> Trajectory:
        """The record of the running episode. Raises EnvError without one."""
        if self._env_record is None or not self._env_open:
            raise EnvError(f"{self.id}: {what} without a running episode; call reset first")
        return self._env_record

    async def _start_episode(self, task: Task, options: Mapping[str, Any]) -> Observation:
        """Set up the episode; returns its opening messages."""
        self.toolbox.hidden = self.user_toolbox.hidden = self.hidden(task)
        if self._sources or self._set_makers:
            await self._open_sessions()
        await self._hook("setup", task)
        if self.user is not None and "user" in options:
            user = options["user"]
            self.user = self.gold_user(task) or self.user if user == GOLD else user
            if user == GOLD and isinstance(self.user, AsksModel):
                raise ConfigError(
                    f"{self.id}: its user is a model, and a scripted policy plays without one; the environment needs a "
                    "gold_user(task), or parameters with which its own user is scripted"
                )
        assert self._env_record is not None
        self._env_record.horizon = self.horizon(task)
        opening = self.prompt(task)
        if inspect.isawaitable(opening):
            try:
                opening = await within(self.opening_timeout, opening, f"the opening of environment {self.id}")
            except (LateError, UserLimitError) as fault:  # before the policy's first turn, so not its fault
                raise EnvError(str(fault)) from None
            check_answer(self.id, EnvHooks.prompt, type(self).prompt, opening)
        # A template that writes no ids would attribute a result without a tool name to another call.
        return list(pair_results(list(opening), strict=False))

    async def _hook(self, hook: str, *args: Any) -> Any:
        """Await a hook. Raises EnvError if it is not async, and HookError for an invalid reply of `user_reply`."""
        begun = getattr(self, hook)(*args)
        if not inspect.isawaitable(begun):
            place = place_of(getattr(type(self), hook))
            raise EnvError(f"{self.id}: {hook} is not async. Write `async def {hook}` ({place})")
        answer = await begun
        if hook == "user_reply":
            check_answer(self.id, ToolEnv.user_reply, type(self).user_reply, answer)
        return answer

    async def _tear_down(self) -> None:
        async def free() -> None:
            try:
                await self._hook("teardown")
            finally:
                opened, self._opened = self._opened, []
                for item in opened:
                    await item.close()

        try:
            await within(self.teardown_timeout, free(), f"the teardown of environment {self.id}")
        except LateError as late:
            # The episode has ended and its state is recorded, so the run need not wait.
            log.error("%s; it is abandoned", late)

    async def _answer(self, turn: Turn) -> tuple[Observation, bool]:
        if turn.message.tool_calls:
            turn.results = await self.toolbox.call_all(turn.message.tool_calls)
            self._note_new_tools()
            return [result.message for result in turn.results], self._env_ended
        replies: Observation | None = await self._hook("user_reply", turn.message)
        return replies or [], self._env_ended or replies is None

    def _note_new_tools(self) -> None:
        """Add the schemas of tools that appeared in this turn: the record has every schema ever offered."""
        record = self._env_record
        if record is not None and self.toolbox.table is not self._tools_before:
            known = {schema["function"]["name"] for schema in record.tools}
            record.tools += [item.schema for item in self.toolbox if item.name not in known]

    async def _or_fail(self, work: Awaitable[T], *but: type[BaseException]) -> T:
        """Await `work`; any exception other than `but` fails the episode (`_fail`) and is raised."""
        try:
            return await work
        except but:
            raise
        except BaseException as fault:
            await self._fail(fault)
            raise

    async def _fail(self, fault: BaseException) -> None:
        """Record why the episode failed and tear it down, unless it is cut and scored."""
        record = self._env_record
        assert record is not None
        stop = StopReason.TOOL_TIMEOUT if isinstance(fault, ToolTimeoutError) else StopReason.ENV_ERROR
        if isinstance(fault, asyncio.CancelledError | KeyboardInterrupt):
            stop = StopReason.CANCELLED
        cut, self._cut_for = self._cut_for, None
        record.stop, record.error = cut or stop, fault_text(fault)
        if cut is None or cut.infrastructure:  # else `aend` concludes first
            await self.aclose()

    def _info(self) -> dict[str, Any]:
        record = self._env_record
        assert record is not None
        info: dict[str, Any] = {"task_id": record.task.id, "split": record.task.split, "turns": len(record.turns)}
        if not self._env_open:
            info["stop"] = record.stop.value
        if record.evidence is not None and record.reward is None:
            from agentrl.reward.explain import reasons  # late: playing does not need the reward language

            info["unscored"] = next(reasons(record.evidence), "")
        return info


def plain_prompt(env: ToolEnv, task: Task) -> list[Message]:
    """Return a task's opening messages without an episode. Raises EnvError if `prompt` awaits its user."""
    opening = env.prompt(task)
    if isinstance(opening, list):
        return opening
    if inspect.iscoroutine(opening):
        opening.close()
    raise EnvError(f"{env.id}: its prompt awaits its user, so there is none outside of an episode")


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ValueError for an option that `reset` does not have."""
    if unknown := set(options) - {"split", "task", "user"}:
        raise ValueError(f"reset option {sorted(unknown)[0]!r}; expected 'split', 'task' or 'user'")

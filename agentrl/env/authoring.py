"""Hooks that an environment's author writes: tasks from seeds, teachers, tools, and copied state."""

from __future__ import annotations

import copy
import inspect
import logging
import random
import sys
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import wraps
from hashlib import blake2b
from operator import attrgetter
from typing import Any, ClassVar, NoReturn, Protocol, Self, TypeVar

import gymnasium

from agentrl.data.trajectory import Json, Message, Task, ToolCall
from agentrl.env.call_options import Problem
from agentrl.env.copying import ENVIRONMENT, Snapshot, copy_parts
from agentrl.env.spaces import Action, Observation
from agentrl.env.toolbox import PendingCall, Toolbox, error_text
from agentrl.env.tools import Tool, ToolSession, ToolSet, ToolSource
from agentrl.env.users import User, UserModel
from agentrl.utils.errors import EnvError, HookError, TaskDataError, answer_problem, did_you_mean, is_alien, place_of, raised_text
from agentrl.utils.parsing import json_form

# Tasks from seeds, with train and held-out content that is disjoint by construction.
#
# A hash of the content, not the seed, determines its split: a generator proposes content until
# some belongs to the wanted split.

SPLITS = ("train", "heldout")
HELD_OUT_SHARE = 0.125

T = TypeVar("T")


def task_rng(env_id: str, split: str, seed: int) -> random.Random:
    """Return a task's random stream: the same in every process, different per seed, split and environment."""
    return random.Random(int.from_bytes(blake2b(f"{env_id}/{split}/{seed}".encode(), digest_size=8).digest(), "big"))


def content_split(fingerprint: str) -> str:
    """Return the split of content: a uniform hash holds one eighth of all content out."""
    digest = blake2b(fingerprint.encode(), digest_size=4).digest()
    return "heldout" if int.from_bytes(digest, "big") < HELD_OUT_SHARE * 2**32 else "train"


def draw(
    rng: random.Random, split: str, propose: Callable[[random.Random], T], fingerprint: Callable[[T], str], tries: int = 1000
) -> T:
    """Propose content until some belongs to `split`.

    `fingerprint` must cover everything that makes two tasks the same problem. Raises TaskDataError for an unknown split, or if
    none of `tries` proposals belongs to it (there are too few different tasks to split).
    """
    if split not in SPLITS:
        raise TaskDataError(f"no split {split!r}; expected one of {', '.join(SPLITS)}")
    for _ in range(tries):
        content = propose(rng)
        if content_split(fingerprint(content)) == split:
            return content
    raise TaskDataError(f"none of {tries} generated tasks belongs to split {split!r}: too few different tasks")


# The default teacher

GIVES_UP = "I do not know."


def check_shares(**shares: float) -> None:
    """Raise ValueError for a parameter of a teacher that is no share within 0..1."""
    for name, share in shares.items():
        if not isinstance(share, int | float) or not 0.0 <= share <= 1.0:
            raise ValueError(f"teacher: {name} = {share!r}; expected a share within 0..1")


class GoldTeacher:
    """Teacher that plays the gold turns; before each but the first it gives up with probability `stop`.

    A `stop` above 0 leaves reinforcement learning something to improve after training on this teacher.
    """

    def __init__(self, turns: Sequence[Message], rng: Any, stop: float = 0.0) -> None:
        """`rng.random()` is the only source of randomness. Raises ValueError for a `stop` outside 0..1."""
        check_shares(stop=stop)
        self._turns, self._rng, self._stop = iter(turns), rng, stop
        self._begun = False

    def act(self, observation: list[Message]) -> Message | None:
        """Return the next gold turn, or the turn that gives up; None afterwards."""
        turn = next(self._turns, None)
        if turn is not None and self._begun and self._rng.random() < self._stop:
            self._turns = iter(())
            return Message("assistant", GIVES_UP)
        self._begun = True
        return turn


# Hooks and their defaults

log = logging.getLogger(__name__)

Opening = list[Message] | Awaitable[list[Message]]


class Teacher(Protocol):
    """A scripted policy: answers each observation with an assistant turn, or with None to stop."""

    def act(self, observation: Observation) -> Message | None: ...


class EnvHooks(gymnasium.Env[Observation, Action]):
    """Hooks of `ToolEnv`, from which environments inherit; see there for their use."""

    id: ClassVar[str] = ""
    reward: ClassVar[str | None] = None
    summary: ClassVar[str] = ""
    tools: ClassVar[Sequence[Tool | Callable[..., Any]]] = ()
    shared: ClassVar[frozenset[str]] = frozenset()
    splits: ClassVar[tuple[str, ...]] = SPLITS
    order_free: ClassVar[bool] = False
    idle_share: ClassVar[float] = 0.0
    scripted: ClassVar[bool] = False
    host_params: ClassVar[frozenset[str]] = frozenset()
    metadata: dict[str, Any] = {"render_modes": ["ansi"]}  # noqa: RUF012 - Gymnasium's own attribute

    max_output: ClassVar[int | None] = None
    """Tokens per result of tools without a `max_output`; None: 2048. The config's `env.max_output` overrides it."""

    teardown_timeout: float = 120.0
    """Seconds for `teardown` and closing tool sessions; then both are abandoned and an error is logged."""

    opening_timeout: float = 120.0
    """Seconds for an async `prompt`; then the reset fails with EnvError."""

    user_call_limit: int = 64
    """Tool calls that the user may make in one answer; more truncate the episode, as `max_turns` does."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in {"reset", "step"} & vars(cls).keys() if not cls.__module__.startswith("agentrl.") else ():
            calls = f"a run calls a{name} alone, and {name} only waits for it. Override `async def a{name}`"
            raise TypeError(f"{cls.__name__}.{name}: {calls} ({place_of(vars(cls)[name])})")
        for hook in CHECKED:
            owner = next(one for one in cls.__mro__ if hook in vars(one))
            if (owner is cls or not issubclass(owner, EnvHooks)) and inspect.isfunction(own := vars(owner)[hook]):
                setattr(cls, hook, _check_hook(hook, own))

    def __setattr__(self, name: str, value: Any) -> None:
        """Raise HookError, naming FILE:LINE, for a value that would hide a method or a read-only property, or is no user."""
        if (made := getattr(type(self), name, None)) is not None or name == "user":  # rare: each step sets attributes
            hides = made.fset is None if isinstance(made, property) else inspect.isfunction(made) and not callable(value)
            ours = any(name in vars(base) for base in type(self).__mro__ if base.__module__.startswith("agentrl.env."))
            if (hides and ours) or (name == "user" and not isinstance(value, User | None)):
                at, own = sys._getframe(1), "is the simulated user" if name == "user" else "belongs to ToolEnv"
                fix = f"Choose another name for it ({at.f_code.co_filename}:{at.f_lineno})"
                raise HookError(f"{type(self).__name__}: self.{name} = {value!r:.80}, but {name!r} {own}. {fix}")
        super().__setattr__(name, value)

    @abstractmethod
    def make_task(self, rng_seed: int, split: str) -> Task:
        """Make the task of a seed: equal arguments give equal tasks, and splits share no content."""
        raise NotImplementedError(f"{type(self).__name__}.make_task")

    @abstractmethod
    def prompt(self, task: Task) -> Opening:
        """Return the opening messages (system and user), without anything of `task.gold`. It may be `async def` if the user opens
        the conversation (`ask_user`)."""
        raise NotImplementedError(f"{type(self).__name__}.prompt")

    def check_split(self, split: str) -> None:
        """Raise TaskDataError, with the nearest name, for a split that is not in `splits`."""
        if split not in self.splits:
            hint = did_you_mean(split, self.splits, f"its `splits` are {', '.join(self.splits)}")
            raise TaskDataError(f"{self.id}: no split {split!r}; {hint}")

    def task_count(self, split: str) -> int | None:
        """Return the number of tasks in a finite split: seeds 0 to count - 1 then select each task once, and
        training samples them without replacement, epoch by epoch. None: every seed has a task."""
        return None

    def family(self, task: Task) -> str:
        """Return the task's family, for reports by family and splits that hold out whole families; "" without families."""
        return str(task.data.get("family") or "")

    async def setup(self, task: Task) -> None:
        """Set the episode's state. `teardown` runs afterwards in every case, even if this raises."""

    async def teardown(self) -> None:
        """Free the resources of `setup`. Runs once per episode: at its end, on a fault, on cancellation, on close."""

    async def conclude(self) -> None:
        """Inspect the final state, before `state` is recorded and `teardown` runs.

        For example, run a task's tests. Called once when an episode ends by itself or at a limit; not after a fault, whose
        episode is unscored. It must limit its own time. Raise EnvError if the inspection fails: the episode is then unscored.
        """

    def state(self) -> Json:
        """Return the environment's state as JSON, for state leaves of a reward spec."""
        return None

    def hidden(self, task: Task) -> Mapping[str, Any]:
        """Return the values of the tools' Hidden parameters in this task, by name."""
        return {}

    def error_text(self, call: ToolCall, problem: Problem) -> str:
        """Return the text that the policy reads if a call is refused or a tool raises. Not used for tools with an `error` option.
        By default JSON with the keys "error" (`problem.kind`, for example "unknown_tool") and "message"."""
        return error_text(problem.kind, problem.message)

    def user_models(self) -> Sequence[UserModel]:
        """Return the API models of its users. Each is tested once before a run, so parameters determine them, not a task."""
        return ()

    def gold_turns(self, task: Task) -> list[Message]:
        """Return assistant turns that score the maximum. Raises NotImplementedError without any."""
        raise NotImplementedError(f"{self.id} has no scripted gold policy")

    def horizon(self, task: Task) -> int | None:
        """Return the number of tool calls in a solution, by default in `gold_turns`; None if unknown."""
        try:
            return sum(len(turn.tool_calls) for turn in self.gold_turns(task))
        except NotImplementedError:
            return None
        except HookError:
            raise
        except Exception as fault:  # the horizon is only reported, so a fault must not end the episode
            log.debug("%s: the gold solution of task %s cannot be shown: %s", self.id, task.id, fault)
            return None

    def gold_user(self, task: Task) -> User | None:
        """Return a scripted user for `gold_turns`, if the environment's user may be a model: it says what the solution needs and
        makes the user calls that belong to it. None: use the environment's user."""
        return None

    def teacher(self, task: Task, rng: Any, **params: Any) -> Teacher:
        """Make an imperfect scripted policy for a warm start; `rng.random()` is its only source of randomness.

        By default a `GoldTeacher`, with parameter `stop`. Raises NotImplementedError without gold turns, TypeError for other
        `params`.
        """
        return GoldTeacher(self.gold_turns(task), rng, **params)


CHECKED = frozenset({
    "make_task", "prompt", "task_count", "family", "state", "hidden", "error_text", "user_models", "gold_turns", "horizon",
    "gold_user",
})  # fmt: skip
"""Hooks whose return values are checked on every call."""


def check_answer(env_id: str, hook: Callable[..., Any], own: Callable[..., Any], answer: Any) -> None:
    """Raise HookError, naming FILE:LINE of the `own` hook, for a value that `hook`'s annotation forbids."""
    if text := answer_problem(answer, hook, own):
        raise HookError(f"{env_id}: {hook.__name__} {text}")


def _check_hook(hook: str, own: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(own)
    def call(self: EnvHooks, *args: Any, **kwargs: Any) -> Any:
        asked = None
        if hook == "make_task":
            self.check_split(asked := kwargs["split"] if "split" in kwargs else args[1])
        try:
            answer = own(self, *args, **kwargs)
        except BaseException as problem:  # only of `state`, which is also read where no hook call handles its faults
            if hook != "state" or not is_alien(problem):
                raise
            raise HookError(f"{self.id}: state {raised_text(problem, own)}") from problem
        check_answer(self.id, getattr(EnvHooks, hook), own, answer)
        if asked is not None and answer.split != asked:  # else a training task could count in a held-out score
            wrong = f"{self.id}: make_task, asked for split {asked!r}, returned a task of split {answer.split!r}"
            raise HookError(f"{wrong}. Pass the split on, Task(id, seed, split, ...), at {place_of(own)}")
        if hook != "state":
            return answer
        try:
            return json_form(answer)
        except ValueError as problem:
            raise HookError(f"{self.id}: state is no JSON value: {problem}. Correct it at {place_of(own)}") from None

    return call


# Tools of an environment


class ToolSide(EnvHooks):
    """Tools of a `ToolEnv`: of the policy (`toolbox`), of the user (`user_toolbox`), and their sources."""

    toolbox: Toolbox
    user_toolbox: Toolbox
    _class_tools: ClassVar[list[Mapping[str, Tool]]]
    _sources: tuple[ToolSource, ...] = ()
    _opened: list[ToolSession | ToolSet]
    _set_makers: tuple[Callable[[], ToolSet], ...] = ()
    _sets: dict[str, ToolSet]

    @property
    def queued(self) -> str:
        """Description of the resource that it is queuing for, such as a sandbox; "" if none. That time does not count against
        the episode."""
        return next(filter(None, map(attrgetter("queued"), self._sets.values())), "")

    def limit_output(self, tokens: int) -> None:
        """Limit the results of tools without a `max_output` to this many tokens, overriding the class."""
        self.toolbox.max_output = self.user_toolbox.max_output = tokens

    def add_source(self, source: ToolSource) -> None:
        """Add external tools, for example of an MCP server; each later episode opens its own session. Tools with
        `Options(by="user")` go to the user."""
        self._sources += (source,)

    @property
    def has_sources(self) -> bool:
        """True if episodes offer external tools."""
        return bool(self._sources)

    def add_set(self, make: Callable[[], ToolSet]) -> None:
        """Add a stateful tool set, which `make` creates for each later episode. Raises what `make` raises, and TypeError if a
        tool's name is taken."""
        made = make()
        for item in made.tools():
            (self.user_toolbox if item.options.by == "user" else self.toolbox).add(item)
        self._set_makers += (make,)

    def tool_set(self, name: str) -> ToolSet:
        """Return the tool set of this name in the current or last episode. Raises EnvError for an unknown name."""
        if name not in self._sets:
            raise EnvError(f"{self.id}: no tool set {name!r} in an episode; there are {', '.join(self._sets) or 'none'}")
        return self._sets[name]

    @property
    def waiting(self) -> Sequence[PendingCall]:
        """The calls in progress, of the policy and of the user."""
        return [*self.toolbox.waiting, *self.user_toolbox.waiting]

    async def _open_sessions(self) -> None:
        self._opened, self._sets, owners = [], {}, dict[str, str]()
        for source in self._sources:
            session = source.session()
            self._opened.append(session)
            for item in await session.open():
                box = self.user_toolbox if item.options.by == "user" else self.toolbox
                if item.name in box:
                    raise EnvError(
                        f"{session}: its tool {item.name!r} has the name of one of {owners.get(item.name, self.id)}; set a "
                        "`prefix` for one of them, or leave the tool out: give the others in `tools`"
                    )
                box.add(item)
                owners[item.name] = str(session)
        for make in self._set_makers:
            made = make()
            self._sets[made.name] = made
            self._opened.append(made)
            await made.open()


# Snapshots and forks


class Forkable(ToolSide):
    """Copies of a `ToolEnv` in mid-episode: of all attributes except those named in `shared`."""

    def snapshot(self) -> Snapshot:
        """Save the current episode, detached from this environment. Picklable if its attributes are."""
        return Snapshot(type(self).__name__, copy_parts(self, self, self._unshared_parts()))

    def restore(self, snapshot: Snapshot) -> None:
        """Return to a snapshot, which stays usable. Raises ValueError for one of another class."""
        if snapshot.owner != type(self).__name__:
            raise ValueError(f"a snapshot of {snapshot.owner} does not fit {type(self).__name__}")
        for name in set(self._unshared_parts()) - set(snapshot.parts):
            del self.__dict__[name]
        # Copied each time: several episodes may start from one snapshot.
        self.__dict__.update(copy.deepcopy(snapshot.parts, {id(ENVIRONMENT): self}))

    def fork(self) -> Self:
        """Return a second, independent environment in the same state.

        Override this in an environment with attributes that cannot be copied (a connection, a process).
        """
        return self._fork_within({})

    def _fork_within(self, memo: dict[int, Any]) -> Self:
        # Spaces are left out: the cached action space refers to this environment's toolbox.
        forked = type(self).__new__(type(self))
        forked.__dict__.update({name: value for name, value in self.__dict__.items() if name not in _SPACES})
        forked.__dict__.update(copy_parts(self, forked, self._unshared_parts(), memo))
        return forked

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Fork as part of a larger copy: objects shared with the rest of the original stay shared in the copy."""
        return self._fork_within(memo) if type(self).fork is Forkable.fork else self.fork()

    def __reduce__(self) -> NoReturn:
        made = f"pickle what makes it, as EnvRef({self.id!r}, {{...}}) of agentrl.env.catalog, and build it where it is played"
        raise TypeError(f"{type(self).__name__}: an environment belongs to its process and is not pickled; {made}")

    @property
    def holds(self) -> bool:
        """True if the episode may hold outside resources to free: `teardown` is overridden, or an open session or tool set has a
        `close`."""
        if getattr(self.teardown, "__func__", None) is not EnvHooks.teardown:
            return True
        return bool(self._opened) and any(getattr(item.close, "__func__", None) is not ToolSet.close for item in self._opened)

    def _unshared_parts(self) -> list[str]:
        kept = _SHARED | self.shared
        return [name for name in self.__dict__ if name not in kept]


_SPACES = frozenset({"observation_space", "action_space"})
_SHARED = _SPACES | {
    "scorer", "spec", "split", "render_mode", "initial_seed", "teardown_timeout", "opening_timeout", "_sources", "_set_makers",
    "_built_with",
}  # fmt: skip

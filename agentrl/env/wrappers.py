"""`ToolWrapper`, and the wrappers by name: turns, tools, faults, prompts, users."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import wraps
from hashlib import blake2b
from typing import Any, Self

from agentrl.data.trajectory import Message, StopReason, Task
from agentrl.env.authoring import Opening
from agentrl.env.base import ResetResult, StepResult, ToolEnv
from agentrl.env.call_options import nearest
from agentrl.env.copying import Snapshot
from agentrl.env.spaces import Action, Observation
from agentrl.env.tools import Tool
from agentrl.env.users import GOLD, UserModel
from agentrl.utils.child_process import Child
from agentrl.utils.errors import ConfigError, ToolError
from agentrl.utils.registry import Registry

# The wrapper

WRAPPERS: Registry[Callable[..., ToolEnv]] = Registry(
    "env.wrappers",
    "WRAPPERS",
    "agentrl.env",
    given=1,
    traits={
        "wall_clock": "cuts episodes by the wall clock and leaves them unscored",
        "chance_faults": "makes sound calls fail by chance, so that a scripted solution may fail",
    },
)


class ToolWrapper(ToolEnv):
    """Base class of wrappers: it delegates to `env` (`_METHODS`, `_ATTRIBUTES`); subclasses override `areset` or `astep`.

    Attributes other than `env` are the wrapper's episode state; forks and snapshots copy them, so they must be copyable.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, made in vars(cls).items():
            if name in _INNER or isinstance(made, Tool):
                does = "Change it in `areset` or `astep`, or subclass the environment"
                raise TypeError(f"{cls.__name__}.{name}: no episode would call it, but that of the wrapped environment. {does}")

    def __init__(self, env: ToolEnv) -> None:
        self.env = env

    def make_task(self, rng_seed: int, split: str) -> Task:
        return self.env.make_task(rng_seed, split)

    def prompt(self, task: Task) -> Opening:
        return self.env.prompt(task)

    @property
    def unwrapped(self) -> ToolEnv:
        inner = self.env.unwrapped
        assert isinstance(inner, ToolEnv)
        return inner

    # -- snapshots ---------------------------------------------------------------------------------

    def _own_state(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _NOT_STATE}

    def snapshot(self) -> Snapshot:
        return Snapshot(type(self).__name__, {"inner": self.env.snapshot(), "own": copy.deepcopy(self._own_state())})

    def restore(self, snapshot: Snapshot) -> None:
        if snapshot.owner != type(self).__name__:
            raise ValueError(f"a snapshot of {snapshot.owner} does not fit {type(self).__name__}")
        self.env.restore(snapshot.parts["inner"])
        self.__dict__.update(copy.deepcopy(snapshot.parts["own"]))

    def fork(self) -> Self:
        # Not built by calling the class: a subclass's arguments are unknown here, and their effect is in the attributes.
        forked = type(self).__new__(type(self))
        forked.__dict__.update(copy.deepcopy(self._own_state()))
        forked.env, forked.spec = self.env.fork(), self.spec
        return forked

    @property
    def holds(self) -> bool:
        return self.env.holds or type(self).aclose is not ToolWrapper.aclose

    async def _truncate(self, result: StepResult, stop: StopReason) -> StepResult:
        """Truncate the episode at this step; for subclasses."""
        observation, _, _, _, info = result
        reward = await self.env.aend(stop)
        return observation, reward, False, True, {**info, "stop": stop.value}


_INNER = frozenset({
    "make_task", "setup", "conclude", "teardown", "state", "hidden", "error_text", "user_reply", "ask_user", "tools",
})  # fmt: skip
"""Members that only the wrapped environment's own episode reads."""
_METHODS = (
    "task_count", "state", "add_source", "family", "add_set", "tool_set", "user_models", "gold_turns",
    "horizon", "gold_user", "teacher", "finish", "limit_output", "cut", "render", "areset", "astep", "record_turn", "acall",
    "areply", "auser_call", "aend", "aclose", "close",
)  # fmt: skip
_ATTRIBUTES = (
    "toolbox", "user_toolbox", "waiting", "scorer", "initial_seed", "teardown_timeout", "opening_timeout", "trajectory",
    "is_open", "task", "np_random", "_np_random", "queued", "has_sources", "has_user", "has_finished", "user_repeats",
    "id", "reward", "splits", "order_free", "idle_share", "metadata", "render_mode",
)  # fmt: skip


def _delegate(name: str) -> Any:
    if name in _ATTRIBUTES:
        return property(lambda self: getattr(self.env, name), lambda self, value: setattr(self.env, name, value))

    @wraps(getattr(ToolEnv, name))
    def call(self: ToolWrapper, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.env, name)(*args, **kwargs)

    return call


for _name in (*_METHODS, *_ATTRIBUTES):
    setattr(ToolWrapper, _name, _delegate(_name))


_NOT_STATE = frozenset({"observation_space", "action_space", "env", "spec", "_built_with"})


# Wrap by name


def wrap(env: ToolEnv, name: str, args: Mapping[str, Any]) -> ToolEnv:
    """Wrap `env` in the wrapper of that name. Raises ConfigError for an unknown name or invalid arguments."""
    try:
        wrapped: ToolEnv = WRAPPERS.build(name, args, env, kind=ToolEnv)
    except ValueError as problem:
        raise ConfigError(f"env.wrappers {name!r}: {problem}") from problem
    return wrapped


# Turns


@WRAPPERS.register("turn_limit")
class TurnLimit(ToolWrapper):
    """Truncate episodes after `turns` policy turns (`max_turns`); the last one is still answered."""

    def __init__(self, env: ToolEnv, turns: int) -> None:
        """Raises ValueError if `turns` is below 1."""
        super().__init__(env)
        if turns < 1:
            raise ValueError(f"TurnLimit: turns = {turns}; expected at least 1")
        self.turns = turns

    async def astep(self, action: Action) -> StepResult:
        result = await self.env.astep(action)
        if result[2] or result[3] or len(self.trajectory.turns) < self.turns:
            return result
        return await self._truncate(result, StopReason.MAX_TURNS)


# Other wrappers


@WRAPPERS.register("tool_subset")
class ToolSubset(ToolWrapper):
    """Offer only some of the environment's tools."""

    def __init__(self, env: ToolEnv, names: Sequence[str] | Set[str]) -> None:
        """The first reset raises ConfigError for an unknown tool name."""
        super().__init__(env)
        self.names = frozenset(names)

    async def areset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> ResetResult:
        result = await self.env.areset(seed=seed, options=options)
        for name in sorted(self.names):
            if name not in self.toolbox:
                hint = nearest(name, list(self.toolbox.names))
                raise ConfigError(f"ToolSubset: {self.id} has no tool {name!r}; {hint}")
        self.toolbox.table = {k: v for k, v in self.toolbox.table.items() if k in self.names}
        # The reset recorded all tools, but a spec checks calls against the recorded ones.
        self.trajectory.tools = self.toolbox.schemas()
        return result


@WRAPPERS.register("tool_faults", traits={"chance_faults"})
class ToolFaults(ToolWrapper):
    """Fail a share of the calls with an error message, without running the tool.

    The choice depends only on `seed`, the task, the turn, the tool and the arguments, so a replay has the same faults and a
    fork has no hidden state.
    """

    def __init__(
        self, env: ToolEnv, rate: float, *, seed: int = 0, message: str = "the service is unavailable; try again"
    ) -> None:
        """Raises ValueError for a `rate` outside of [0, 1]."""
        super().__init__(env)
        if not 0.0 <= rate <= 1.0:
            raise ValueError(f"ToolFaults: rate = {rate}; expected a share from 0 to 1")
        self.rate, self.seed, self.message = rate, seed, message

    async def areset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> ResetResult:
        result = await self.env.areset(seed=seed, options=options)
        for item in list(self.toolbox):
            base = (item.function, item.name, item.options, item.method, item.signature)
            self.toolbox.replace(_Flaky(*base, item=item, rate=self.rate, seed=self.seed, message=self.message))
        return result


@dataclass(frozen=True, eq=False, kw_only=True)
class _Flaky(Tool):
    """A tool that fails a share of its calls and forwards the others to `item`."""

    item: Tool
    rate: float
    seed: int
    message: str

    def __deepcopy__(self, memo: dict[int, Any]) -> Tool:
        return replace(self, item=copy.deepcopy(self.item, memo)) if self.bound else self

    def place(self) -> AbstractAsyncContextManager[Child | None]:
        return self.item.place()

    async def invoke(self, owner: Any, values: Mapping[str, Any], child: Child | None = None) -> Any:
        record = owner.trajectory
        # Not `hash`, which differs between processes for text.
        place = f"{self.seed}/{record.task.seed}/{len(record.turns)}/{self.name}/{dict(values)!r}"
        chance = int.from_bytes(blake2b(place.encode(errors="replace"), digest_size=4).digest(), "big") / 2**32
        if chance < self.rate:
            raise ToolError(self.message)
        return await self.item.invoke(owner, values, child)


@WRAPPERS.register("system_prompt")
class SystemPrompt(ToolWrapper):
    """Prepend `text` to the environment's system message, or add one; also in the record.

    The environment's system message is kept, since its tasks may need it, and there is one message, since many chat templates
    accept only one, at the beginning.
    """

    def __init__(self, env: ToolEnv, text: str) -> None:
        super().__init__(env)
        self.text = text

    def prompt(self, task: Task) -> Opening:
        opening = self.env.prompt(task)
        if isinstance(opening, list):
            return self._with(opening)

        async def later() -> list[Message]:
            return self._with(await opening)

        return later()

    async def areset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> ResetResult:
        observation, info = await self.env.areset(seed=seed, options=options)
        opening = self._with(observation)
        self.trajectory.messages[: len(observation)] = opening
        return opening, info

    def _with(self, messages: Observation) -> list[Message]:
        if messages and messages[0].role == "system":
            return [replace(messages[0], content=f"{self.text}\n\n{messages[0].content}"), *messages[1:]]
        return [Message("system", self.text), *messages]


@WRAPPERS.register("gold_user")
class GoldUser(ToolWrapper):
    """Replace the user by that of the gold solution (`ToolEnv.gold_user`), so that no model is called. The "user" option of a
    reset (as in replays) goes first."""

    async def areset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> ResetResult:
        return await self.env.areset(seed=seed, options={"user": GOLD, **(options or {})})

    def user_models(self) -> Sequence[UserModel]:
        return ()

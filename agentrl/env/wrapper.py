"""`ToolWrapper`: an environment around an environment, itself a ToolEnv."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from agentrl.env.base import StepResult, ToolEnv
from agentrl.env.copying import Copier, Snapshot, WrapperCopier
from agentrl.env.hooks import Opening, Teacher
from agentrl.env.spaces import Action, Observation
from agentrl.env.twin import EnvTwin
from agentrl.env.users import User, UserModel
from agentrl.registry import Registry
from agentrl.tool import CountTokens, Toolbox, ToolSet, ToolSource
from agentrl.tool.toolbox import Waiting
from agentrl.trajectory import Json, Message, StopReason, Task, ToolCall, ToolResult, Trajectory, Turn

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
    """Base class of wrappers: everything is delegated to `env`; a subclass changes `areset`, `astep` or both.

    A wrapper's own episode state is in attributes other than `env`; forks and snapshots copy those, so they
    must be copyable.
    """

    def __init__(self, env: ToolEnv) -> None:
        self.env = env
        self.id = env.id  # type: ignore[misc]
        self.reward = env.reward  # type: ignore[misc]
        self.splits = env.splits  # type: ignore[misc]
        self.order_free = env.order_free  # type: ignore[misc]
        self.idle_share = env.idle_share  # type: ignore[misc]
        self.metadata = env.metadata
        self.render_mode = env.render_mode

    # -- delegated to `env` -------------------------------------------------------------------------

    @property
    def unwrapped(self) -> ToolEnv:
        inner = self.env.unwrapped
        assert isinstance(inner, ToolEnv)
        return inner

    @property
    def toolbox(self) -> Toolbox:  # type: ignore[override]
        return self.env.toolbox

    @property
    def user_toolbox(self) -> Toolbox:  # type: ignore[override]
        return self.env.user_toolbox

    @property
    def waiting(self) -> Sequence[Waiting]:
        return self.env.waiting

    @property
    def scorer(self) -> Any:  # type: ignore[override]
        return self.env.scorer

    @property
    def initial_seed(self) -> int | None:  # type: ignore[override]
        return self.env.initial_seed

    @initial_seed.setter
    def initial_seed(self, seed: int | None) -> None:
        self.env.initial_seed = seed

    @property
    def teardown_timeout(self) -> float:  # type: ignore[override]
        return self.env.teardown_timeout

    @teardown_timeout.setter
    def teardown_timeout(self, seconds: float) -> None:
        self.env.teardown_timeout = seconds

    @property
    def opening_timeout(self) -> float:  # type: ignore[override]
        return self.env.opening_timeout

    @opening_timeout.setter
    def opening_timeout(self, seconds: float) -> None:
        self.env.opening_timeout = seconds

    @property
    def trajectory(self) -> Trajectory:
        return self.env.trajectory

    @property
    def is_open(self) -> bool:
        return self.env.is_open

    @property
    def task(self) -> Task:
        return self.env.task

    @property
    def np_random(self) -> Any:  # type: ignore[override]
        return self.env.np_random

    @np_random.setter
    def np_random(self, value: Any) -> None:
        self.env.np_random = value

    @property
    def _np_random(self) -> Any:  # type: ignore[override]
        return self.env._np_random

    def make_task(self, rng_seed: int, split: str) -> Task:
        return self.env.make_task(rng_seed, split)

    def task_count(self, split: str) -> int | None:
        return self.env.task_count(split)

    def prompt(self, task: Task) -> Opening:
        return self.env.prompt(task)

    def state(self) -> Json:
        return self.env.state()

    @property
    def queued(self) -> str:
        return self.env.queued

    @property
    def has_sources(self) -> bool:
        return self.env.has_sources

    def add_source(self, source: ToolSource) -> None:
        self.env.add_source(source)

    def family(self, task: Task) -> str:
        return self.env.family(task)

    def add_set(self, make: Callable[[], ToolSet]) -> None:
        self.env.add_set(make)

    def tool_set(self, name: str) -> ToolSet:
        return self.env.tool_set(name)

    def user_models(self) -> Sequence[UserModel]:
        return self.env.user_models()

    def gold_turns(self, task: Task) -> list[Message]:
        return self.env.gold_turns(task)

    def horizon(self, task: Task) -> int | None:
        return self.env.horizon(task)

    def gold_user(self, task: Task) -> User | None:
        return self.env.gold_user(task)

    def teacher(self, task: Task, rng: Any, **params: Any) -> Teacher:
        return self.env.teacher(task, rng, **params)

    def finish(self) -> None:
        self.env.finish()

    def limit_output(self, tokens: int) -> None:
        self.env.limit_output(tokens)

    def cut(self, stop: StopReason) -> None:
        self.env.cut(stop)

    def render(self) -> Any:
        return self.env.render()

    async def areset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        return await self.env.areset(seed=seed, options=options)

    async def astep(self, action: Action) -> StepResult:
        return await self.env.astep(action)

    def record_turn(self, turn: Turn) -> None:
        self.env.record_turn(turn)

    async def acall(self, turn: Turn, call: ToolCall) -> ToolResult:
        return await self.env.acall(turn, call)

    async def areply(self, turn: Turn) -> Observation | None:
        return await self.env.areply(turn)

    async def auser_call(self, call: ToolCall) -> ToolResult:
        return await self.env.auser_call(call)

    @property
    def has_user(self) -> bool:
        return self.env.has_user

    @property
    def has_finished(self) -> bool:
        return self.env.has_finished

    async def aend(self, stop: StopReason, error: str | None = None) -> float:
        return await self.env.aend(stop, error)

    async def aclose(self) -> None:
        await self.env.aclose()

    def close(self) -> None:
        self.env.close()

    # -- snapshots ---------------------------------------------------------------------------------

    def _own(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _THROUGH}

    def snapshot(self) -> Snapshot:
        parts = {"inner": self.env.snapshot(), "own": copy.deepcopy(self._own())}
        return Snapshot(type(self).__name__, parts)

    def restore(self, snapshot: Snapshot) -> None:
        if snapshot.owner != type(self).__name__:
            raise ValueError(f"a snapshot of {snapshot.owner} does not fit {type(self).__name__}")
        self.env.restore(snapshot.parts["inner"])
        self.__dict__.update(copy.deepcopy(snapshot.parts["own"]))

    def fork(self) -> Self:
        return self.around(self.env.fork())

    def around(self, env: ToolEnv) -> Self:
        """The same wrapper, in the same state, around another environment."""
        # Not by calling the class: a subclass's arguments are not known here, and its copy gets them as attributes.
        forked = type(self).__new__(type(self))
        kept = {name: value for name, value in self.__dict__.items() if name in _THROUGH - {"env"} - _SPACES}
        forked.__dict__.update(kept)
        forked.__dict__.update(copy.deepcopy(self._own()))
        forked.env = env
        return forked

    def as_twin(self) -> EnvTwin:
        return EnvTwin(self, self.env.as_twin().scripted)

    def copier(self) -> Copier | None:
        inner = self.env.copier()
        return None if inner is None else WrapperCopier(self, inner)

    @property
    def holds(self) -> bool:
        return self.env.holds or type(self).aclose is not ToolWrapper.aclose

    @property
    def last_results(self) -> Sequence[ToolResult]:
        return self.env.last_results

    # -- for subclasses ----------------------------------------------------------------------------

    async def _truncate(self, result: StepResult, stop: StopReason) -> StepResult:
        """The same step as the last one of a truncated episode."""
        observation, _, _, _, info = result
        reward = await self.env.aend(stop)
        return observation, reward, False, True, {**info, "stop": stop.value}


def text_size(message: Message, count: CountTokens) -> int:
    """Tokens of a message's text and calls by `count`, without the template's markup."""
    calls = "".join(call.raw or f"{call.name}{call.arguments}" for call in message.tool_calls)
    return count(message.content + calls)


_SPACES = frozenset({"observation_space", "action_space"})
_THROUGH = _SPACES | {
    "env", "id", "reward", "splits", "order_free", "idle_share", "metadata", "render_mode", "spec",
}  # fmt: skip

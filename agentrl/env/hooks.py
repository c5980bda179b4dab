"""What the author of an environment writes: what it is, its hooks and their defaults."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import gymnasium

from agentrl.env.seeds import SPLITS
from agentrl.env.spaces import Action, Observation
from agentrl.env.teachers import GoldTeacher
from agentrl.env.users import User, UserModel
from agentrl.tool import Problem, Tool
from agentrl.tool.output import error_text
from agentrl.trajectory import Json, Message, Task, ToolCall

log = logging.getLogger(__name__)

Opening = list[Message] | Awaitable[list[Message]]


class Teacher(Protocol):
    """A scripted policy: answers each observation with an assistant turn, or with None to stop."""

    def act(self, observation: Observation) -> Message | None: ...


class EnvHooks(gymnasium.Env[Observation, Action]):
    """The hooks of `ToolEnv`, which says how they are used; an environment inherits from that."""

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
    """Tokens of an answer, of tools without a `max_output` of their own; None: 2048. A config's `env.max_output` goes first."""

    teardown_timeout: float = 120.0
    """Seconds for `teardown` and for closing tool sessions; after that they are abandoned with an error in the log."""

    opening_timeout: float = 120.0
    """Seconds for a `prompt` that awaits; after that the reset fails (EnvError)."""

    user_call_limit: int = 64
    """The calls that the user may make to its own tools in one answer; beyond that the episode is cut, as at its most turns."""

    @abstractmethod
    def make_task(self, rng_seed: int, split: str) -> Task:
        """The task of a seed: the same arguments give the same task, and splits share no content."""
        raise NotImplementedError(f"{type(self).__name__}.make_task")

    @abstractmethod
    def prompt(self, task: Task) -> Opening:
        """The opening messages (system and user). They must not contain anything of `task.gold`. It may be `async def`, if the
        user opens the conversation (`ask_user`)."""
        raise NotImplementedError(f"{type(self).__name__}.prompt")

    def task_count(self, split: str) -> int | None:
        """The number of tasks in a split if it is finite: seeds 0 to count - 1 then name each task once, and
        training samples them without replacement, epoch by epoch. None: every seed gives a task."""
        return None

    def family(self, task: Task) -> str:
        """What kind of task it is, for reports by family and splits that hold whole families out; "" if there are no kinds."""
        return str(task.data.get("family") or "")

    async def setup(self, task: Task) -> None:
        """Set the episode's state. `teardown` runs after it in every case, even if it raised."""

    async def teardown(self) -> None:
        """Free what `setup` acquired. Runs once per episode: at its end, on a fault, on cancellation, on close."""

    async def conclude(self) -> None:
        """Look once more at what the policy left (run a task's tests, say), before `state` is recorded and `teardown` runs.

        Called once, when an episode ends by itself or at one of its limits; not after a fault, whose episode is not scored. It
        must end in a time of its own. Raises EnvError if the environment fails at it: the episode is then unscored.
        """

    def state(self) -> Json:
        """The environment's state as JSON, for state leaves of a reward spec."""
        return None

    def hidden(self, task: Task) -> Mapping[str, Any]:
        """Values of the tools' Hidden parameters in this task."""
        return {}

    def error_text(self, call: ToolCall, problem: Problem) -> str:
        """What the policy reads in place of an answer if its call is refused (`problem.kind` says why, "unknown_tool", say) or
        its tool raised, of tools without an `error` option of their own. By default JSON with the keys "error" and "message"."""
        return error_text(problem.kind, problem.message)

    def user_models(self) -> Sequence[UserModel]:
        """The models behind an API that its users will ask, which are then asked once before a run; known from its parameters,
        not from a task."""
        return ()

    def gold_turns(self, task: Task) -> list[Message]:
        """Assistant turns that score the maximum. Raises NotImplementedError if there are none."""
        raise NotImplementedError(f"{self.id} has no scripted gold policy")

    def horizon(self, task: Task) -> int | None:
        """How many tool calls a solution of the task has: those of `gold_turns`. None if it is not known."""
        try:
            return sum(len(turn.tool_calls) for turn in self.gold_turns(task))
        except NotImplementedError:
            return None
        except Exception as fault:  # what is only told of an episode must not end it
            log.debug("%s: the gold solution of task %s cannot be told: %s", self.id, task.id, fault)
            return None

    def gold_user(self, task: Task) -> User | None:
        """The user that goes with `gold_turns`, for an environment whose own may be a model: it says what a solution needs to
        hear and makes those of its calls that belong to it. None: the environment's own."""
        return None

    def teacher(self, task: Task, rng: Any, **params: Any) -> Teacher:
        """An imperfect scripted policy for a warm start; `rng.random()` is its only source of randomness.

        By default the gold turns; before each one but the first it gives up with probability `stop` (see
        `agentrl.env.teachers`). Raises NotImplementedError if there are none, TypeError for other `params`.
        """
        return GoldTeacher(self.gold_turns(task), rng, **params)

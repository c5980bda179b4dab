"""Who rewards an environment's episodes at its Gymnasium interface; of one that is built directly, as `KeyValue(calls=2)`, the
spec that its class names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from agentrl.given import is_given, own_reward
from agentrl.shelves import find_file
from agentrl.trajectory import Task, Trajectory

if TYPE_CHECKING:
    from agentrl.reward import Score, Scorer
    from agentrl.reward.leaf import ReplayEnv


class ScoreLike(Protocol):
    """The part of `agentrl.reward.Score` that the Gymnasium interface reads."""

    @property
    def value(self) -> float | None: ...

    @property
    def success(self) -> bool | None: ...


class ScorerLike(Protocol):
    """The part of `agentrl.reward.Scorer` that the Gymnasium interface calls."""

    async def ascore(self, trajectory: Trajectory, /) -> ScoreLike: ...


class OwnReward:
    """A scorer by the class's own spec, which is read and compiled when the first episode ends.

    `env`: the class; `build`: a new environment of the same parameters, for specs that replay gold calls.
    """

    def __init__(self, env: type[Any], build: Callable[[], ReplayEnv]) -> None:
        self._env = env
        self._build = build

    async def ascore(self, trajectory: Trajectory, /) -> Score:
        """The score of an episode. Raises CatalogError if the spec is not there, RewardSpecError for a bad one."""
        return await self._scorer.ascore(trajectory)

    @cached_property
    def _scorer(self) -> Scorer:
        from agentrl.config.schema import RewardConfig  # here: the reward language is not needed to build an environment
        from agentrl.reward import compile_spec, load_spec, make_context
        from agentrl.reward.context import given_spec

        def twin(task: Task) -> ReplayEnv:
            return self._build()

        name = str(own_reward(self._env))
        spec = given_spec(name) if is_given(name) else load_spec(self._path(name))
        return compile_spec(spec, context=make_context(RewardConfig(), replay_env=twin))

    def _path(self, name: str) -> Path:
        """Beside the file of the class that names the spec, or on a shelf."""
        owner = next(base for base in self._env.__mro__ if "reward" in vars(base))
        try:
            beside = Path(inspect.getfile(owner)).parent / name
        except (OSError, TypeError):  # a class that was typed in has no file
            return find_file(name, "rewards", ".json", "reward spec")
        return beside if beside.is_file() else find_file(name, "rewards", ".json", "reward spec")

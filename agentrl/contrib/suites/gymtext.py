"""A plain Gymnasium environment with small discrete or text spaces, as a tool environment.

The policy acts through one tool, `act`, and sees the observation as text. Gymnasium's rewards are summed
in the state, from which a reward spec can read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from agentrl.data.trajectory import Json, Message, Task
from agentrl.env.authoring import SPLITS
from agentrl.env.base import ToolEnv
from agentrl.env.tools import Tool
from agentrl.utils.errors import CatalogError, TaskDataError, ToolError


class GymTextEnv(ToolEnv):
    """One Gymnasium environment by id; its actions are numbers, named actions, or text."""

    id = "gymnasium/Text-v0"

    def __init__(
        self, *, make: str, make_args: dict[str, Any] | None = None, actions: Sequence[str] = (), rules: str = "", **base: Any
    ) -> None:
        """`make`, `make_args`: arguments of `gymnasium.make`. `actions`: names of a discrete action space's
        actions, in order. `rules`: the system message. Raises CatalogError for an unknown id, and for an
        action space that is neither Discrete nor Text."""
        super().__init__(**base)
        self.make, self.make_args, self.rules = make, dict(make_args or {}), rules
        try:
            self.inner = gymnasium.make(make, **self.make_args)
        except gymnasium.error.Error as problem:
            raise CatalogError(f"gymnasium.make({make!r}): {problem}") from problem
        space = self.inner.action_space
        if isinstance(space, spaces.Discrete):
            start, count = int(space.start), int(space.n)
            if actions and len(actions) != count:
                raise CatalogError(f"{make} has {count} actions, but {len(actions)} names were given")
            if start != 0:
                raise CatalogError(f"{make}: actions that count from {start} are not supported")
            actions = actions or [str(number) for number in range(count)]
        elif isinstance(space, spaces.Text):
            actions = ()
        else:
            raise CatalogError(f"{make}: its action space {space} is neither Discrete nor Text")
        self.first, self.names = "", tuple(actions)
        self.total, self.steps, self.ending = 0.0, 0, ""
        kind: dict[str, Json] = {"type": "string"}
        if self.names:
            kind["enum"] = list(self.names)
        parameters = {"type": "object", "properties": {"action": kind}, "required": ["action"], "additionalProperties": False}
        made = Tool.from_schema("act", "take one action", parameters, _act)
        # As a method the tool is bound to the environment that it is called on, so that a fork acts on itself.
        self.toolbox.add(replace(made, method=True).with_options(parallel=False))

    def make_task(self, rng_seed: int, split: str) -> Task:
        """Even seeds of the inner environment are for training, odd ones are held out."""
        if split not in SPLITS:
            raise TaskDataError(f"{self.make}: no split {split!r}; expected one of {', '.join(SPLITS)}")
        inner_seed = rng_seed * 2 % 2**31 + SPLITS.index(split)
        return Task(f"{self.make}/{split}/{rng_seed}", rng_seed, split, {"seed": inner_seed})

    async def setup(self, task: Task) -> None:
        observation, _ = self.inner.reset(seed=task.data["seed"])
        self.total, self.steps, self.ending = 0.0, 0, ""
        self.first = self._text(observation)

    async def teardown(self) -> None:
        self.ending = self.ending or "left"

    def prompt(self, task: Task) -> list[Message]:
        known = f" Actions: {', '.join(self.names)}." if self.names else ""
        rules = self.rules or f"Play {self.make}: call act until the game ends."
        return [Message("system", rules + known), Message("user", self.first)]

    def state(self) -> Json:
        return {"reward": self.total, "steps": self.steps, "ending": self.ending}

    def act(self, action: str) -> str:
        """One step of the inner environment. Raises ToolError if the game is over."""
        if self.ending:
            raise ToolError("the game is over")
        choice: Any = self.names.index(action) if self.names else action
        observation, reward, terminated, truncated, _ = self.inner.step(choice)
        self.total += float(reward)
        self.steps += 1
        text = self._text(observation)
        if terminated or truncated:
            self.ending = "terminated" if terminated else "truncated"
            self.finish()
            return f"{text}\nThe game is over. Reward: {self.total:g}"
        return text

    def _text(self, observation: Any) -> str:
        if self.inner.render_mode == "ansi":
            return str(self.inner.render())
        if isinstance(observation, np.ndarray):
            return str(observation.tolist())
        return str(observation)


async def _act(env: GymTextEnv, action: str) -> str:
    return env.act(action)

"""Reverse curriculum: start episodes after gold calls, fewer as the policy succeeds (`rollout.start`)."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from agentrl.config.schema import StartConfig
from agentrl.data.trajectory import Message
from agentrl.env.catalog import EnvRef
from agentrl.render.base import Renderer
from agentrl.rollout.samplers import TaskChoice, uniform

if TYPE_CHECKING:
    from agentrl.env import ToolEnv

log = logging.getLogger(__name__)

MOST_BUILT = 64
"""Number of environments, one per set of parameters, cached to look up horizons."""


@dataclass(frozen=True, slots=True)
class StartOutcome:
    """Outcome of a group that began after `given` of its task's `horizon` gold calls. `success`: share of successes (0..1)."""

    index: int
    horizon: int
    given: int
    success: float


class GoldStart:
    """Chooses the number of gold calls given to each group, by the horizon of its task.

    All calls but `left` are given. `left` grows by `step` once the mean success of the last `window` groups of this horizon with
    the current number is at least `threshold`; it never shrinks. A share `whole` of the groups is given none. As with samplers,
    a choice depends only on the run's seed, the group's index and the observations so far, and `observe` is called only at
    updates, in index order.
    """

    def __init__(self, config: StartConfig, env: EnvRef) -> None:
        self.config, self.env = config, env
        self._left: dict[int, int] = {}
        self._recent: dict[int, deque[float]] = {}
        self._built: dict[str, ToolEnv] = {}

    def begin(self, run_seed: int, index: int, choice: TaskChoice) -> TaskChoice:
        """Return `choice` with `horizon` and `given` filled in; unchanged if the task's horizon is unknown."""
        key = json.dumps(dict(choice.params), sort_keys=True, default=repr)
        if key not in self._built:
            if len(self._built) == MOST_BUILT:  # a sampler may use thousands of sets of parameters
                self._built.pop(next(iter(self._built))).close()
            self._built[key] = self.env.with_params(choice.params).build()
        env = self._built[key]
        horizon = env.horizon(env.make_task(choice.seed, "train"))
        if horizon is None:
            return choice
        whole = uniform(run_seed, index, "start") < self.config.whole
        return replace(choice, horizon=horizon, given=0 if whole else self._given_turns(horizon))

    def observe(self, outcomes: Sequence[StartOutcome]) -> None:
        """Learn from the groups that finished since the last update, in index order."""
        for outcome in outcomes:
            horizon = outcome.horizon
            if not outcome.given or outcome.given != self._given_turns(horizon):  # begun with an earlier `left`
                continue
            recent = self._recent.setdefault(horizon, deque(maxlen=self.config.window))
            recent.append(outcome.success)
            if len(recent) == self.config.window and fmean(recent) > self.config.threshold - 1e-9:
                self._left[horizon] = self._left.get(horizon, self.config.left) + self.config.step
                recent.clear()
                log.info("rollout.start: tasks of %d calls now start after %d of them", horizon, self._given_turns(horizon))

    def state(self) -> dict[str, Any]:
        """Return the JSON state for a checkpoint."""
        recent = {str(horizon): list(values) for horizon, values in self._recent.items()}
        return {"left": {str(horizon): left for horizon, left in self._left.items()}, "recent": recent}

    def load(self, state: dict[str, Any]) -> None:
        """Restore the result of `state`."""
        self._left = {int(horizon): left for horizon, left in state["left"].items()}
        self._recent = {int(horizon): deque(values, self.config.window) for horizon, values in state["recent"].items()}

    def metrics(self) -> dict[str, float]:
        """Return the number of calls left to the policy, for each horizon that has advanced."""
        return {f"left/{horizon}": float(min(left, horizon)) for horizon, left in sorted(self._left.items())}

    def _given_turns(self, horizon: int) -> int:
        return max(0, horizon - self._left.get(horizon, self.config.left))


def prefix_of(gold: Sequence[Message], calls: int) -> Iterator[Message]:
    """Yield the first turns of a gold solution until they make `calls` calls; a turn that would exceed this is left out."""
    made = 0
    for turn in gold:
        made += len(turn.tool_calls)
        if made > calls or not calls:
            return
        yield turn
        if made == calls:
            return


def scripted_ids(renderer: Renderer, message: Message) -> list[list[int]]:
    """Return the ids of a scripted turn; one turn per call if the chat template drops calls (gpt-oss keeps only the first)."""
    ids = renderer.assistant(message)
    if len(message.tool_calls) < 2 or len(renderer.parse(ids, "stop").tool_calls) == len(message.tool_calls):
        return [ids]
    first, *later = [replace(message, tool_calls=(call,)) for call in message.tool_calls]
    return [renderer.assistant(part) for part in (first, *(replace(part, content="", reasoning=None) for part in later))]

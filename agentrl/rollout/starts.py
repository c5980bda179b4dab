"""Starts of episodes: after gold calls (`rollout.start`), or from a fork of a running episode (`rollout.branch`)."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from agentrl.config.schema import BranchConfig, StartConfig
from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import Blame, Json, Message, Trajectory, Turn
from agentrl.env.catalog import EnvRef
from agentrl.render.base import Renderer
from agentrl.rollout.samplers import TaskChoice, uniform

if TYPE_CHECKING:
    from agentrl.env import ToolEnv

# Where episodes of training begin: after gold calls, of which there are fewer as the policy succeeds (`rollout.start`).

log = logging.getLogger(__name__)

MOST_BUILT = 64
"""This many environments, one for each set of parameters, are kept to look up horizons."""


@dataclass(frozen=True, slots=True)
class StartOutcome:
    """Outcome of a group that began after `given` gold calls of a task with `horizon` of them: the share of successes."""

    index: int
    horizon: int
    given: int
    success: float


class GoldStart:
    """Number of gold calls for each group, by the horizon of its task: all but `left`, which grows by `step` once the mean
    success of the last `window` groups of this horizon, begun at this very place, is at least `threshold`. It never goes
    back. A share `whole` of the groups is given nothing.

    As with samplers, a choice depends on the run's seed, the group's index and the observations so far, and `observe` is called
    at updates alone, in the order of the groups.
    """

    def __init__(self, config: StartConfig, env: EnvRef) -> None:
        self.config, self.env = config, env
        self._left: dict[int, int] = {}
        self._recent: dict[int, deque[float]] = {}
        self._built: dict[str, ToolEnv] = {}

    def begin(self, run_seed: int, index: int, choice: TaskChoice) -> TaskChoice:
        """The choice, with its task's horizon and the gold calls that its group is given: none if the horizon is unknown."""
        horizon = self._horizon(choice)
        if horizon is None:
            return choice
        whole = uniform(run_seed, index, "start") < self.config.whole
        return replace(choice, horizon=horizon, given=0 if whole else self._given_turns(horizon))

    def observe(self, outcomes: Sequence[StartOutcome]) -> None:
        """Learn from the groups that finished since the last update, by ascending index."""
        for outcome in outcomes:
            horizon = outcome.horizon
            if not outcome.given or outcome.given != self._given_turns(horizon):  # begun before the place was another one
                continue
            recent = self._recent.setdefault(horizon, deque(maxlen=self.config.window))
            recent.append(outcome.success)
            if len(recent) == self.config.window and fmean(recent) > self.config.threshold - 1e-9:
                self._left[horizon] = self._left_of(horizon) + self.config.step
                recent.clear()
                log.info("rollout.start: tasks of %d calls are begun after %d of them", horizon, self._given_turns(horizon))

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, as JSON; `load` is the inverse."""
        recent = {str(horizon): list(values) for horizon, values in self._recent.items()}
        return {"left": {str(horizon): left for horizon, left in self._left.items()}, "recent": recent}

    def load(self, state: dict[str, Any]) -> None:
        """Inverse of `state`."""
        self._left = {int(horizon): left for horizon, left in state["left"].items()}
        window = self.config.window
        self._recent = {int(horizon): deque(values, maxlen=window) for horizon, values in state["recent"].items()}

    def metrics(self) -> dict[str, float]:
        """For each horizon that moved, the calls that are left to the policy."""
        return {f"left/{horizon}": float(min(left, horizon)) for horizon, left in sorted(self._left.items())}

    def _left_of(self, horizon: int) -> int:
        return self._left.get(horizon, self.config.left)

    def _given_turns(self, horizon: int) -> int:
        return max(0, horizon - self._left_of(horizon))

    def _horizon(self, choice: TaskChoice) -> int | None:
        key = json.dumps(dict(choice.params), sort_keys=True, default=repr)
        if key not in self._built:
            if len(self._built) == MOST_BUILT:  # a sampler may choose from thousands of sets of parameters
                self._built.pop(next(iter(self._built))).close()
            self._built[key] = self.env.with_params(choice.params).build()
        env = self._built[key]
        return env.horizon(env.make_task(choice.seed, "train"))


def prefix_of(gold: Sequence[Message], calls: int) -> Iterator[Message]:
    """The first turns of a gold solution, up to the turn that makes call number `calls`; a turn that makes more calls than are
    left of these is left to the policy."""
    made = 0
    for turn in gold:
        made += len(turn.tool_calls)
        if made > calls or not calls:
            return
        yield turn
        if made == calls:
            return


def scripted_ids(renderer: Renderer, message: Message) -> list[list[int]]:
    """The ids of a scripted turn; of each of its calls in a turn of its own, if the template does not write them all (gpt-oss'
    drops all but the first)."""
    ids = renderer.assistant(message)
    if len(message.tool_calls) < 2 or len(renderer.parse(ids, "stop").tool_calls) == len(message.tool_calls):
        return [ids]
    first, *later = [replace(message, tool_calls=(call,)) for call in message.tool_calls]
    return [renderer.assistant(part) for part in (first, *(replace(part, content="", reasoning=None) for part in later))]


# Forks of a running episode, and at which of its turns it is forked (`rollout.branch`).
#
# Fork     an episode as it was before one of its turns: its environment, its conversation, its tokens
# Places   keeps the forks of an episode that may be needed while it is played, and at its end says where it branches


@dataclass(frozen=True, slots=True)
class Fork:
    """An episode of the group's member `member` as it was before it sampled turn `turn`.

    `env`: a fork of its environment. `ledgers`: each with the tokens that it had. `rewritten` and `suffix`: whether the next
    prompt begins another ledger, and the tokens that it adds. `used`: seconds of the episode's limit, by who used them.
    """

    member: int
    turn: int
    env: ToolEnv
    renderer: Renderer
    ledgers: Sequence[tuple[TokenLedger, int]]
    shown: list[Message]
    begun: int
    rewritten: bool
    suffix: list[int]
    rewrites: Sequence[dict[str, Json]]
    used: dict[Blame, float]

    def context(self) -> list[TokenLedger]:
        """The tokens so far as a branch has them: none of them counts as sampled."""
        return [ledger.fork(length) for ledger, length in self.ledgers]


class Playing(Protocol):
    """Facts about an episode that is being played."""

    ledgers: list[TokenLedger]
    record: Trajectory | None

    def fork_before(self, turn: int) -> Fork:
        """The episode as it is now, before `turn`. Raises EnvError."""
        ...


class Keeper(Protocol):
    """Observer that sees each turn of an episode before it is sampled."""

    async def before(self, turn: int, episode: Playing) -> None:
        """`turn` is sampled next. Raises EnvError if a fork is wanted and cannot be made."""
        ...


class Places:
    """Keeps forks of one episode while it is played: all that may still become a place to branch at, and no more than are needed
    where the best so far are known ("entropy", "failure"). Never of its first turn: a branch there is another episode.
    """

    def __init__(self, config: BranchConfig, branches: int) -> None:
        """`branches`: how many the episode is to have."""
        self._config, self._branches, self._most = config, branches, places(config, branches)
        self._fixed = config.turns[: self._most]
        self._kept: dict[int, tuple[float, Fork]] = {}
        self._first: int | None = None
        self._next: Fork | None = None

    async def before(self, turn: int, episode: Playing) -> None:
        if episode.record is not None:
            await self._settle(episode.record.turns, episode.ledgers)
        if self._first is None:
            self._first = turn
        elif not self._fixed or turn in self._fixed:
            self._next = episode.fork_before(turn)

    async def choose(self, trajectory: Trajectory) -> list[Fork | None]:
        """Turns at which branches leave the finished episode; None if nowhere, so that it begins at the beginning. All other
        forks are closed.

        Of fixed turns each branch has its own, whatever became of the others: whether a turn has a branch then depends on nothing
        that was sampled after it was reached.
        """
        await self._settle(trajectory.turns, trajectory.ledgers)
        turns = self._fixed or (self._spread() if self._config.at == "depth" else self._best())
        for turn in self._kept.keys() - set(turns):
            await self._drop(turn)
        found = [self._kept[turn][1] if turn in self._kept else None for turn in turns] or [None]
        return [found[place % len(found)] for place in range(self._branches)]

    async def close(self) -> None:
        """Close all that is still kept; idempotent."""
        for turn in list(self._kept):
            await self._drop(turn)
        if (last := self._next) is not None:
            self._next = None
            await close_fork(last.env)

    async def _settle(self, turns: Sequence[Turn], ledgers: Sequence[TokenLedger]) -> None:
        """The turn after the last fork is over: keep the fork if it is worth more than another."""
        fork, self._next = self._next, None
        if fork is None:
            return
        worth = self._worth(turns[fork.turn], ledgers) if fork.turn < len(turns) else None
        if worth is None:
            return await close_fork(fork.env)
        self._kept[fork.turn] = worth, fork
        if self._config.at != "depth" and len(self._kept) > self._most:
            await self._drop(self._best(len(self._kept))[-1])

    def _worth(self, turn: Turn, ledgers: Sequence[TokenLedger]) -> float | None:
        if self._config.at == "failure":
            return 0.0 if any(result.error is not None for result in turn.results) else None
        return surprisal(turn, ledgers) if self._config.at == "entropy" else 0.0

    def _best(self, most: int | None = None) -> list[int]:
        """Kept turns by what they are worth, the earlier of equals first."""
        return sorted(self._kept, key=lambda turn: (-self._kept[turn][0], turn))[: most or self._most]

    def _spread(self) -> list[int]:
        """Kept turns that cut the episode into parts as equal as may be."""
        turns = sorted(self._kept)
        most = min(self._most, len(turns))
        # Of n + 1 turns, of which the first has no fork, cut k times: before those at (n + 1) i / (k + 1).
        at = [round((len(turns) + 1) * i / (most + 1)) for i in range(1, most + 1)]
        return sorted({turns[min(max(place, 1), len(turns)) - 1] for place in at})

    async def _drop(self, turn: int) -> None:
        await close_fork(self._kept.pop(turn)[1].env)


def begin_where_it_goes_on(branch: Trajectory) -> None:
    """Of an ended branch, drop the ledgers before the one in which it first sampled: all in them is its parent's, and rows
    without a token to train would be computed for nothing."""
    before = next((number for number, ledger in enumerate(branch.ledgers) if ledger.sampled_tokens), len(branch.ledgers) - 1)
    branch.ledgers = branch.ledgers[max(before, 0) :]
    for turn in branch.turns[branch.branch_turn :]:
        turn.ledger = max(turn.ledger - before, -1)
    branch.rewrites = [{**made, "ledger": made["ledger"] - before} for made in branch.rewrites if made["ledger"] >= before]


def surprisal(turn: Turn, ledgers: Sequence[TokenLedger]) -> float | None:
    """The mean of -log pi over the tokens that were sampled in a turn, in nats a token: an estimate, by one draw
    each, of the mean entropy of the distributions that they were drawn from. None of a turn without tokens."""
    if not 0 <= turn.ledger < len(ledgers):
        return None
    ledger = ledgers[turn.ledger]
    found = ledger.logprobs[ledger.sampled & (ledger.turns == turn.index)]
    return -float(np.mean(found, dtype=np.float64)) if len(found) else None


async def close_fork(env: ToolEnv) -> None:
    """Tear down a fork that nobody plays. An error of its teardown is logged: the episodes keep their results."""
    try:
        await env.aclose()
    except Exception:
        log.exception("the teardown of a fork of environment %s failed", env.id)


def places(config: BranchConfig, branches: int) -> int:
    """At how many of its turns an episode with this many branches branches at most."""
    return -(-branches // config.width)

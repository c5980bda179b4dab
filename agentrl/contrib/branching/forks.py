"""Forks of a running episode: taken before its turns, kept at the places to branch at, gone on with by a branch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentrl.config.schema import BranchConfig
from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import Blame, StopReason, Trajectory, Turn
from agentrl.env import ToolEnv
from agentrl.rollout.episode import EpisodeHook, RunningEpisode
from agentrl.utils.errors import EnvError

log = logging.getLogger(__name__)

CONVERSATION = ("renderer", "shown", "begun", "fork", "suffix", "rewrites")
"""Attributes of a running episode that a branch takes over as they are."""


@dataclass(frozen=True, slots=True)
class Fork:
    """An episode of the group's member `member` as it was before it sampled turn `turn`.

    `env`: a fork of its environment. `ledgers`: each with the tokens that it had. `used`: seconds of the episode's limit, by who
    used them.
    """

    member: int
    turn: int
    env: ToolEnv
    ledgers: Sequence[tuple[TokenLedger, int]]
    used: dict[Blame, float]
    conversation: dict[str, Any]

    @classmethod
    def of(cls, episode: RunningEpisode, turn: int) -> Fork:
        """The episode as it is, before `turn`. Raises EnvError if its environment cannot be forked."""
        try:
            env = episode.env.fork()
        except Exception as fault:
            raise EnvError(f"no fork before turn {turn}: {type(fault).__name__}: {fault}") from fault
        conversation = {name: getattr(episode, name) for name in CONVERSATION} | {"rewrites": list(episode.rewrites)}
        ledgers = [(ledger, len(ledger)) for ledger in episode.ledgers]
        return cls(episode.spec.member, turn, env, ledgers, dict(episode.waits.clock.used), conversation)

    async def close(self) -> None:
        """Tear its environment down. An error of that is logged: the episodes keep their results."""
        try:
            await self.env.aclose()
        except Exception:
            log.exception("the teardown of a fork of environment %s failed", self.env.id)


class BranchHook(EpisodeHook):
    """A hook goes on from a fork, in an environment that was forked from the fork's."""

    def __init__(self, fork: Fork) -> None:
        self.fork = fork

    async def begin(self, episode: RunningEpisode) -> StopReason | None:
        """Take over the conversation of another episode: all that it sampled is context here."""
        fork, episode.record = self.fork, episode.env.trajectory
        episode.record.parent, episode.record.branch_turn = fork.member, fork.turn
        for turn in episode.record.turns:  # sampled by the parent: none of their tokens is this episode's
            turn.ledger = turn.end = -1
        # In place: who watches the episode has this list.
        episode.ledgers[:] = [ledger.fork(length) for ledger, length in fork.ledgers]
        for name, value in fork.conversation.items():
            setattr(episode, name, value)
        episode.rewrites = list(episode.rewrites)
        episode.waits.clock.used.update(fork.used)
        return None

    def complete(self, trajectory: Trajectory) -> None:
        """Drop the ledgers before the one in which the branch first sampled: they are its parent's, and rows without a token to
        train would be computed for nothing."""
        ledgers = trajectory.ledgers
        before = max(next((n for n, ledger in enumerate(ledgers) if ledger.sampled_tokens), len(ledgers) - 1), 0)
        trajectory.ledgers = ledgers[before:]
        for turn in trajectory.turns[trajectory.branch_turn :]:
            turn.ledger = max(turn.ledger - before, -1)
        trajectory.rewrites = [
            {**made, "ledger": made["ledger"] - before} for made in trajectory.rewrites if made["ledger"] >= before
        ]


class Places(EpisodeHook):
    """Places keeps forks of one episode while it is played: those that may still become a place to branch at, and no more than
    are needed where the best so far are known ("entropy", "failure"). Never of its first turn: a branch there is another episode.
    """

    def __init__(self, config: BranchConfig, branches: int) -> None:
        """`branches`: how many the episode is to have."""
        self._config, self._branches, self._most = config, branches, count_places(config, branches)
        self._fixed = config.turns[: self._most]
        self._kept: dict[int, tuple[float, Fork]] = {}
        self._first: int | None = None
        self._next: Fork | None = None

    async def before(self, turn: int, episode: RunningEpisode) -> None:
        assert episode.record is not None
        await self._settle(episode.record.turns, episode.ledgers)
        if self._first is None:
            self._first = turn
        elif not self._fixed or turn in self._fixed:
            self._next = Fork.of(episode, turn)

    async def choose(self, trajectory: Trajectory) -> list[Fork | None]:
        """Turns at which branches leave the finished episode; None if nowhere, so that it begins at the beginning. All other
        forks are closed.

        Of fixed turns each branch has its own, whatever became of the others: whether a turn has a branch then depends on nothing
        that was sampled after it was reached.
        """
        await self._settle(trajectory.turns, trajectory.ledgers)
        turns = self._fixed or (self._spread() if self._config.at == "depth" else self._best(self._most))
        for turn in self._kept.keys() - set(turns):
            await self._drop(turn)
        found = [self._kept[turn][1] if turn in self._kept else None for turn in turns] or [None]
        return [found[place % len(found)] for place in range(self._branches)]

    async def close(self) -> None:
        """Close all that is still kept; idempotent."""
        for turn in list(self._kept):
            await self._drop(turn)
        last, self._next = self._next, None
        if last is not None:
            await last.close()

    async def _settle(self, turns: Sequence[Turn], ledgers: Sequence[TokenLedger]) -> None:
        """The turn after the last fork is over: keep the fork if it is worth more than another."""
        fork, self._next = self._next, None
        if fork is None:
            return
        worth = self._worth(turns[fork.turn], ledgers) if fork.turn < len(turns) else None
        if worth is None:
            return await fork.close()
        self._kept[fork.turn] = worth, fork
        if self._config.at != "depth" and len(self._kept) > self._most:
            await self._drop(self._best(len(self._kept))[-1])

    def _worth(self, turn: Turn, ledgers: Sequence[TokenLedger]) -> float | None:
        if self._config.at == "failure":
            return 0.0 if any(result.error is not None for result in turn.results) else None
        return surprisal(turn, ledgers) if self._config.at == "entropy" else 0.0

    def _best(self, most: int) -> list[int]:
        """Kept turns by what they are worth, the earlier of equals first."""
        return sorted(self._kept, key=lambda turn: (-self._kept[turn][0], turn))[:most]

    def _spread(self) -> list[int]:
        """Kept turns that cut the episode into parts as equal as may be."""
        turns = sorted(self._kept)
        most = min(self._most, len(turns))
        # Of n + 1 turns, of which the first has no fork, cut k times: before those at (n + 1) i / (k + 1).
        at = [round((len(turns) + 1) * i / (most + 1)) for i in range(1, most + 1)]
        return sorted({turns[min(max(place, 1), len(turns)) - 1] for place in at})

    async def _drop(self, turn: int) -> None:
        await self._kept.pop(turn)[1].close()


def count_places(config: BranchConfig, branches: int) -> int:
    """At how many of its turns an episode with this many branches branches at most."""
    return -(-branches // config.width)


def surprisal(turn: Turn, ledgers: Sequence[TokenLedger]) -> float | None:
    """The mean of -log pi over the tokens that were sampled in a turn, in nats a token: an estimate, by one draw
    each, of the mean entropy of the distributions that they were drawn from. None of a turn without tokens."""
    if not 0 <= turn.ledger < len(ledgers):
        return None
    ledger = ledgers[turn.ledger]
    found = ledger.logprobs[ledger.sampled & (ledger.turns == turn.index)]
    return -float(np.mean(found, dtype=np.float64)) if len(found) else None

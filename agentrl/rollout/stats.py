"""Counters of rollouts between updates: the engine's, and those of episodes, groups and sampled tokens."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

from agentrl.config import RolloutConfig
from agentrl.data.trajectory import Group, StopReason, Trajectory
from agentrl.rollout.deadlines import Watch
from agentrl.rollout.engine import Engine, EngineStats
from agentrl.rollout.group_ledger import GroupState, alike, unscored_cause
from agentrl.rollout.player import fault_of
from agentrl.utils.errors import NothingScoredError, StalledError

log = logging.getLogger(__name__)

# The engine's counters


class EngineMeter:
    """Differences between two readings of an engine's counters."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._last = EngineStats()
        self._when: float | None = None

    async def read(self) -> dict[str, float | None]:
        """`throughput/sampled_tokens_per_s`: sampled tokens per second of wall time since the last reading (None at the first).
        `engine/cache_hit`: share of the prompt tokens since then that came from a prefix cache (None if there were no prompts).
        `engine/running`, `engine/waiting`: requests at this moment; `engine/kv_used` as in `EngineStats`, if it is known. The
        engine's own numbers (`EngineStats.extra`) under their names."""
        now, stats = time.monotonic(), await self._engine.stats()
        last, self._last = self._last, stats
        seconds = 0.0 if self._when is None else now - self._when
        self._when = now
        prompts = stats.prompt_tokens - last.prompt_tokens
        return {
            "throughput/sampled_tokens_per_s": (stats.sampled_tokens - last.sampled_tokens) / seconds if seconds else None,
            "engine/cache_hit": (stats.cached_tokens - last.cached_tokens) / prompts if prompts else None,
            "engine/running": stats.running,
            "engine/waiting": stats.waiting,
            **({} if stats.kv_used is None else {"engine/kv_used": stats.kv_used}),
            **{f"engine/{name}": value for name, value in stats.extra.items()},
        }


# Outcomes of episodes and groups

MAX_REPLACEMENTS_PER_GROUP = 8
"""If more than this many times an update's groups failed or went stale, the run stops with an error that says why."""

MIN_DEAD_GROUPS = 4
"""This many groups, and as many as an update has, without a single scored episode end a run that has scored none before."""

MOST_REFUSED = 32
"""If `rollout.accept` refused more than this many times an update's groups and accepted none, the run stops and says so."""

RETRIED = "retried"
_FASTER = "Raise rollout.turn_timeout, or give the engine less to do at once (rollout.max_episodes)"


class RolloutStats:
    """Counts episodes played, filtered, refused and dropped for the next update, and ends a run that gets nowhere.

    `episodes`, `turns` and `tokens` of all attempts so far, `cancelled`: members given up because their group had enough;
    `faults`: attempts that came to no score, by cause; `fault`: why the first of the episodes that were played to the end has
    none.

    Sampled tokens are counted as an attempt ends, of members and greedy episodes alike; of episodes that are cut off
    (`watch.cut`), those of the turns that were over. Those of an attempt that is made again, of a member that its group does not
    need and of a group that is dropped are thrown away.
    """

    def __init__(
        self, config: RolloutConfig, watch: Watch, accept: str | None = None, say: Callable[[str], None] = log.warning
    ) -> None:
        """`accept`: the name of the filter that groups pass, if there is one; `say`: gets warnings."""
        self._config, self._watch, self._accept, self._say = config, watch, accept, say
        self._most_dropped = MAX_REPLACEMENTS_PER_GROUP * config.groups
        self.episodes = self.turns = self.tokens = self.cancelled = 0
        self.faults: Counter[str] = Counter()
        self.fault: str | None = None
        self._first_fault = ""
        # Since the last update:
        self._filtered = self._refused = self._sampled = 0
        self._dropped: Counter[tuple[GroupState, str]] = Counter()
        self._faults: Counter[str] = Counter()
        self._played: Counter[str] = Counter()  # episodes, and those of them without a reward
        self._thrown: Counter[str] = Counter()
        # Over the run:
        self._kept: Counter[int] = Counter()  # tokens of groups that are running or complete, by index
        self._failing: Counter[str] = Counter()  # groups of an environment that failed since its last that did not
        self._reasons: dict[GroupState, str] = {}
        self._silent = 0  # attempts in a row that the engine gave no token
        self._any_scored = False  # ever
        self._dead: list[int] = []

    # -- what happens --------------------------------------------------------------------------------

    def attempt(self, index: int, trajectory: Trajectory, again: bool, runs: bool) -> None:
        """An attempt of group `index` has ended. `again`: another one follows in its place; `runs`: the group still does. An
        attempt may end in the moment between its group being given up and being stopped."""
        tokens = trajectory.sampled_tokens
        self.episodes, self.turns = self.episodes + 1, self.turns + len(trajectory.turns) - trajectory.branch_turn
        self.tokens, self._sampled = self.tokens + tokens, self._sampled + tokens
        if again or not runs:
            self._thrown[RETRIED if runs else GroupState.CANCELLED.value] += tokens
        else:
            self._kept[index] += tokens
        if trajectory.stop.infrastructure:
            self._count_unscored(trajectory)
        else:  # the engine is at work
            self._silent = 0

    def count_group(self, group: Group, failed: bool = False) -> None:
        """A group's members have ended: what others sampled for it is thrown away. `failed`: too few of them are scored."""
        lost = [t for t in group.trajectories if t.reward is None]
        self._played.update({"episodes_played": len(group.trajectories), "episodes_unscored": len(lost)})
        self._any_scored |= len(lost) < len(group.trajectories)
        if lost and self.fault is None:
            self.fault = fault_of(lost[0])
        tokens = 0
        for member in filter(None, (*group.trajectories, group.baseline)):
            tokens += member.sampled_tokens
            if member.reward is None and not member.stop.infrastructure:  # the others were counted attempt by attempt
                self._count_unscored(member)
        self._thrown[GroupState.CANCELLED.value] += self._kept[group.index] - tokens
        self._kept[group.index] = tokens
        if not failed:
            self._failing.pop(group.env, None)

    def filters(self, group: Group) -> bool:
        """Return True if a group is left out since all its members have the same reward. Past the limit such groups are
        trained, with advantages of 0: a policy that solves every task would otherwise never fill a batch."""
        most = math.ceil(self._config.max_filtered * self._config.groups - 1e-9)
        return self._config.filter_zero_variance and alike(group) and self._filtered < most

    def count_drop(self, index: int, env: str, state: GroupState, reason: str, version: int = 0, complete: int = 0) -> None:
        """A group will not be trained. One that is CANCELLED counts by its tokens alone. `version`, `complete`: of the update
        that is waited for, and the groups that are complete for it."""
        self._thrown[state.value] += self._kept.pop(index, 0)
        if state is GroupState.CANCELLED:
            return
        log.info("group %d %s: %s", index, state, reason)
        self._dropped[state, env] += 1
        self._filtered += state is GroupState.FILTERED
        self._refused += state is GroupState.REFUSED
        if state is GroupState.FAILED:
            self._failing[env] += 1
            if not self._any_scored:
                self._dead.append(index)
        self._reasons[state] = f"group {index}: {reason}"
        # Said when the filter has refused 8, 16, 32, ... times the groups of an update.
        times = self._refused / self._most_dropped
        if state is GroupState.REFUSED and times >= 1 and math.log2(times).is_integer():
            self._say(
                f"rollout.accept {self._accept!r} has refused {self._refused} groups for update {version}, "
                f"{complete} of {self._config.groups} are accepted"
            )

    def _count_unscored(self, trajectory: Trajectory) -> None:
        """An attempt at an episode came to no score."""
        cause = unscored_cause(trajectory)
        self._faults[cause] += 1
        self.faults[cause] += 1
        self._first_fault = self._first_fault or fault_of(trajectory)
        if trajectory.stop is StopReason.ENGINE_TIMEOUT:
            self._silent += 1
            if self._faults[cause] == 1:
                self._say(f"the engine is too slow: {fault_of(trajectory)}. {_FASTER}")

    # -- what is told --------------------------------------------------------------------------------

    def trouble(self) -> str:
        """The attempts at an episode that came to no score so far, and the first of them, in words; "" without any. May be
        called from any thread."""
        faults = dict(self.faults)  # a copy, as an attempt may end meanwhile
        return f"{sum(faults.values())} episodes came to no score; the first: {self._first_fault}" if faults else ""

    def take(self, groups: list[Group], several: bool) -> dict[str, float]:
        """The numbers of an update's row; what happens from now on counts for the next one. `several`: by environment too.
        `tokens_thrown/WHY`: WHY is the state in which a group was dropped, or `retried`."""
        cut, self._watch.cut = self._watch.cut, 0
        self._thrown[GroupState.CANCELLED.value] += cut
        row = {
            "groups_filtered": float(self._filtered),
            "groups_zero_variance": float(sum(map(alike, groups))),
            **{key: float(self._played[key]) for key in ("episodes_played", "episodes_unscored")},
            **({} if self._accept is None else {"groups_refused": float(self._refused)}),
            **({f"env/{env}/groups_{state}": float(n) for (state, env), n in self._dropped.items()} if several else {}),
            **{f"faults/{cause}": float(count) for cause, count in sorted(self._faults.items())},
            "tokens_sampled": float(self._sampled + cut),
            "tokens_thrown": float(self._thrown.total()),
            **{f"tokens_thrown/{why}": float(count) for why, count in sorted(self._thrown.items()) if count},
        }
        for group in groups:  # they are trained
            self._kept.pop(group.index, None)
        self._filtered = self._refused = self._sampled = 0
        for counts in (self._played, self._dropped, self._faults, self._thrown):
            counts.clear()
        return row

    def check(self, version: int, playing: Collection[int], complete: int, shares: Mapping[str, float]) -> None:
        """Raise StalledError if too many groups of an update were lost, or if no group of an environment succeeds any more while
        the others fill the updates, since it would be left out unnoticed; NothingScoredError, much sooner, if no episode was ever
        scored. `playing`: the groups that run or are complete; `complete`: how many are; `shares`: of several
        environments."""
        at_once = min(self._config.max_episodes, self._config.groups * self._config.group_size)
        if self._silent >= max(at_once, MIN_DEAD_GROUPS) * (self._config.retries + 1):  # all that run at once, in a row
            raise StalledError(
                f"update {version}: the engine is too slow: the last {self._silent} attempts at an episode were given up; "
                f"the first: {self._first_fault}. {_FASTER}"
            )
        for state, verb in ((GroupState.FAILED, "failed"), (GroupState.STALE, "went stale")):
            by_env = {env: count for (why, env), count in sorted(self._dropped.items()) if why is state}
            dropped, enough = sum(by_env.values()), max(MIN_DEAD_GROUPS, self._config.groups)
            dead = state is GroupState.FAILED and not self._any_scored and len(self._dead) >= enough
            # Not while an older one still plays: what fails at once ends before what is sound and slow.
            dead = dead and min(playing, default=math.inf) > sorted(self._dead)[enough - 1]
            if not dead and dropped <= self._most_dropped:
                continue
            of = ", ".join(f"{n} of {env}" for env, n in by_env.items())
            if dead:
                raise NothingScoredError(
                    f"none of the first {self._played['episodes_played']} episodes of {dropped} groups"
                    f"{f' ({of})' if shares else ''} could be scored; the first: "
                    f"{self.fault}. Nothing can be trained: fix that, and start or resume the run"
                )
            raise StalledError(
                f"update {version}: {dropped} groups {verb} (limit {self._most_dropped})"
                f"{f', of them {of}' if shares else ''}; the last: {self._reasons[state]}"
            )
        most = MOST_REFUSED * self._config.groups
        if self._accept is not None and self._refused > most and not complete:
            raise StalledError(
                f"update {version}: rollout.accept {self._accept!r} refused all of the last {self._refused} "
                f"groups (limit {most}); accept some of them, or leave it out"
            )
        for env, failed in self._failing.items():
            most = max(MAX_REPLACEMENTS_PER_GROUP, math.ceil(self._most_dropped * shares.get(env, 1.0)))
            if failed > most and shares.keys() - self._failing.keys():
                raise StalledError(
                    f"update {version}: the last {failed} groups of environment {env!r} failed (limit {most}), "
                    f"while others did not; the last failed: {self._reasons[GroupState.FAILED]}"
                )

    # -- checkpoints ---------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """State for a checkpoint; `load_json` is the inverse."""
        kept = {str(index): count for index, count in self._kept.items() if count}
        return {
            "cancelled": self.cancelled,
            "filtered": self._filtered,
            "played": dict(self._played),
            "refused": self._refused,
            "spent": {"sampled": self._sampled, "thrown": dict(self._thrown), "of": kept},
        }

    def load_json(self, state: Mapping[str, Any], version: int, complete: list[Group]) -> None:
        """`version`: the updates that the run has done; after one, some episode was scored. `complete`: groups that wait for an
        update. Others, which ran, are begun anew: their samples are lost."""
        self._filtered, self._refused = state.get("filtered", 0), state.get("refused", 0)  # missing in older checkpoints
        self._played, self.cancelled = Counter(state.get("played", {})), state.get("cancelled", 0)
        self._any_scored = version > 0 or self._played["episodes_played"] > self._played["episodes_unscored"]
        spent = state.get("spent", {})
        self._sampled, self._thrown = spent.get("sampled", 0), Counter(spent.get("thrown", {}))
        kept = {int(index): count for index, count in spent.get("of", {}).items()}
        self._kept = Counter({group.index: kept.pop(group.index, 0) for group in complete})
        self._thrown[GroupState.CANCELLED.value] += sum(kept.values())

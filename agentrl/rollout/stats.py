"""Counters of rollouts between updates: engine, episodes, groups and sampled tokens."""

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
from agentrl.rollout.group_ledger import GroupState, unscored_cause, zero_variance
from agentrl.rollout.player import fault_of
from agentrl.utils.errors import NothingScoredError, StalledError

log = logging.getLogger(__name__)

# The engine's counters


class EngineMeter:
    """Meter of an engine: metrics from the differences between two readings of its counters."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._last = EngineStats()
        self._when: float | None = None

    async def read(self) -> dict[str, float | None]:
        """Return the engine's metrics since the last reading.

        `throughput/sampled_tokens_per_s`: sampled tokens per second of wall time (None at the first reading). `engine/cache_hit`:
        share of prompt tokens served from a prefix cache (None without prompts). `engine/running`, `engine/waiting`: current
        requests. `engine/kv_used` as in `EngineStats`, if known. `EngineStats.extra` as `engine/NAME`."""
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
"""The run stops with an error if more than this many times the groups of an update failed or went stale."""

MIN_DEAD_GROUPS = 4
"""The run stops if its first groups, at least this many and at least an update's worth, have no scored episode."""

MOST_REFUSED = 32
"""The run stops with an error if `rollout.accept` refused more than this many times an update's groups and accepted none."""

RETRIED = "retried"
_FASTER = "Raise rollout.turn_timeout, or give the engine less to do at once (rollout.max_episodes)"


class RolloutStats:
    """Counts episodes, dropped groups and sampled tokens for the next update, and stops a run that makes no progress.

    `episodes`, `turns`, `tokens`: totals of all attempts so far. `cancelled`: members cancelled because their group had enough.
    `faults`: attempts without a score, by cause. `fault`: why the first unscored member of a finished group has no score.

    Sampled tokens are counted when an attempt ends, for members and greedy episodes; for cancelled episodes (`watch.cut`), only
    those of finished turns. Tokens of retried attempts, of surplus members and of dropped groups count as thrown away.
    """

    def __init__(
        self, config: RolloutConfig, watch: Watch, accept: str | None = None, say: Callable[[str], None] = log.warning
    ) -> None:
        """`accept`: name of the run's group filter, if any; `say` receives warnings."""
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
        self._played: Counter[str] = Counter()  # episodes, and episodes without a reward
        self._thrown: Counter[str] = Counter()
        # Over the run:
        self._kept: Counter[int] = Counter()  # tokens of groups that are running or complete, by index
        self._failing: Counter[str] = Counter()  # consecutive failed groups by environment
        self._reasons: dict[GroupState, str] = {}
        self._silent = 0  # consecutive attempts that timed out at the engine
        self._any_scored = False  # in the whole run
        self._dead: list[int] = []

    # -- events --------------------------------------------------------------------------------------

    def attempt(self, index: int, trajectory: Trajectory, again: bool, runs: bool) -> None:
        """Count an ended attempt of group `index`. `again`: it will be retried; `runs`: the group still runs (an attempt may end
        between the drop of its group and its cancellation)."""
        tokens = trajectory.sampled_tokens
        self.episodes, self.turns = self.episodes + 1, self.turns + len(trajectory.turns) - trajectory.branch_turn
        self.tokens, self._sampled = self.tokens + tokens, self._sampled + tokens
        if again or not runs:
            self._thrown[RETRIED if runs else GroupState.CANCELLED.value] += tokens
        else:
            self._kept[index] += tokens
        if trajectory.stop.infrastructure:
            self._count_unscored(trajectory)
        else:  # the engine responds
            self._silent = 0

    def count_group(self, group: Group, failed: bool = False) -> None:
        """Count a group whose members have ended; tokens of its surplus members are thrown away. `failed`: too few are scored."""
        lost = [t for t in group.trajectories if t.reward is None]
        self._played.update({"episodes_played": len(group.trajectories), "episodes_unscored": len(lost)})
        self._any_scored |= len(lost) < len(group.trajectories)
        if lost and self.fault is None:
            self.fault = fault_of(lost[0])
        tokens = 0
        for member in filter(None, (*group.trajectories, group.baseline)):
            tokens += member.sampled_tokens
            if member.reward is None and not member.stop.infrastructure:  # infrastructure faults are counted per attempt
                self._count_unscored(member)
        self._thrown[GroupState.CANCELLED.value] += self._kept[group.index] - tokens
        self._kept[group.index] = tokens
        if not failed:
            self._failing.pop(group.env, None)

    def filters(self, group: Group) -> bool:
        """Return True if a group is to be filtered because all its rewards are equal. Beyond `max_filtered` such groups are
        trained, with zero advantage: a policy that solves every task would otherwise never fill a batch."""
        most = math.ceil(self._config.max_filtered * self._config.groups - 1e-9)
        return self._config.filter_zero_variance and zero_variance(group) and self._filtered < most

    def count_drop(self, index: int, env: str, state: GroupState, reason: str, version: int = 0, complete: int = 0) -> None:
        """Count a dropped group; of a CANCELLED one, only its tokens. `version`: the update being collected; `complete`:
        number of groups complete for it."""
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
        # Warn when the filter has refused 8, 16, 32, ... times the groups of an update.
        times = self._refused / self._most_dropped
        if state is GroupState.REFUSED and times >= 1 and math.log2(times).is_integer():
            self._say(
                f"rollout.accept {self._accept!r} has refused {self._refused} groups for update {version}, "
                f"{complete} of {self._config.groups} are accepted"
            )

    def _count_unscored(self, trajectory: Trajectory) -> None:
        cause = unscored_cause(trajectory)
        self._faults[cause] += 1
        self.faults[cause] += 1
        self._first_fault = self._first_fault or fault_of(trajectory)
        if trajectory.stop is StopReason.ENGINE_TIMEOUT:
            self._silent += 1
            if self._faults[cause] == 1:
                self._say(f"the engine is too slow: {fault_of(trajectory)}. {_FASTER}")

    # -- reports -------------------------------------------------------------------------------------

    def trouble(self) -> str:
        """Describe the attempts without a score so far; "" without any. May be called from any thread."""
        faults = dict(self.faults)  # a copy, since an attempt may end during the sum
        return f"{sum(faults.values())} episodes came to no score; the first: {self._first_fault}" if faults else ""

    def take(self, groups: list[Group], several: bool) -> dict[str, float]:
        """Return the metrics of an update and reset its counters. `several`: also by environment. `tokens_thrown/WHY`: WHY is the
        state of the dropped group, or `retried`."""
        cut, self._watch.cut = self._watch.cut, 0
        self._thrown[GroupState.CANCELLED.value] += cut
        row = {
            "groups_filtered": float(self._filtered),
            "groups_zero_variance": float(sum(map(zero_variance, groups))),
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
        """Stop a run that makes no progress. Raises StalledError if the engine keeps timing out, if too many groups of an update
        were lost, or if the groups of one environment keep failing while others fill the updates, which would go unnoticed.
        Raises NothingScoredError, much sooner, if no episode was ever scored. `playing`: indices of running or complete groups;
        `complete`: number of complete groups; `shares`: those of several environments, else empty."""
        at_once = min(self._config.max_episodes, self._config.groups * self._config.group_size)
        if self._silent >= max(at_once, MIN_DEAD_GROUPS) * (1 + self._config.retries):  # in a row: as many as play at once
            raise StalledError(
                f"update {version}: the engine is too slow: the last {self._silent} attempts at an episode were given up; "
                f"the first: {self._first_fault}. {_FASTER}"
            )
        for state, verb in ((GroupState.FAILED, "failed"), (GroupState.STALE, "went stale")):
            by_env = {env: count for (why, env), count in sorted(self._dropped.items()) if why is state}
            dropped, enough = sum(by_env.values()), max(MIN_DEAD_GROUPS, self._config.groups)
            dead = state is GroupState.FAILED and not self._any_scored and len(self._dead) >= enough
            # Not while an older group is running: groups that fail early end before slow, healthy ones.
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
        """Return the counters for a checkpoint."""
        kept = {str(index): count for index, count in self._kept.items() if count}
        return {
            "cancelled": self.cancelled,
            "filtered": self._filtered,
            "played": dict(self._played),
            "refused": self._refused,
            "spent": {"sampled": self._sampled, "thrown": dict(self._thrown), "of": kept},
        }

    def load_json(self, state: Mapping[str, Any], version: int, complete: list[Group]) -> None:
        """Restore the counters of `to_json`. `version`: number of finished updates (if > 0, some episode was scored). `complete`:
        groups that wait for an update. Groups that were running start over, so their tokens count as thrown away."""
        self._filtered, self._refused = state["filtered"], state["refused"]
        self._played, self.cancelled = Counter(state["played"]), state["cancelled"]
        self._any_scored = version > 0 or self._played["episodes_played"] > self._played["episodes_unscored"]
        spent = state["spent"]
        self._sampled, self._thrown = spent["sampled"], Counter(spent["thrown"])
        kept = {int(index): count for index, count in spent["of"].items()}
        self._kept = Counter({group.index: kept.pop(group.index, 0) for group in complete})
        self._thrown[GroupState.CANCELLED.value] += sum(kept.values())

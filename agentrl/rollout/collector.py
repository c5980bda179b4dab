"""The collector: run groups of episodes under the group ledger and return the groups of each update.

User filters of finished groups (`rollout.accept`), running groups, and the collector."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from agentrl.config import Choice, RolloutConfig
from agentrl.config import envs as temperature
from agentrl.data.trajectory import Group, Trajectory
from agentrl.rollout.deadlines import Quiet, Watch
from agentrl.rollout.engine import derive
from agentrl.rollout.episode import EpisodeSpec, score_group
from agentrl.rollout.group_ledger import GroupLedger, GroupState, more
from agentrl.rollout.mixtures import MixedTasks
from agentrl.rollout.player import Job, Player, RunEnv, end_of, success_rate
from agentrl.rollout.samplers import TaskChoice
from agentrl.rollout.stats import RolloutStats
from agentrl.utils.errors import CallbackError, StalledError, raised_text
from agentrl.utils.event_loop import LONGEST, in_time
from agentrl.utils.registry import Registry

log = logging.getLogger(__name__)

# Filters of groups

FILTERS: Registry[Callable[..., bool | Awaitable[bool]]] = Registry(
    "rollout.accept", "FILTERS", "agentrl.rollout.collector", given=1
)


class Acceptance:
    """The filter of a run. It is asked once about each finished group that could be trained, in the driver; of equal groups it
    must say the same, since a resumed run plays and asks again."""

    def __init__(self, choice: Choice) -> None:
        """Raises ConfigError for an unknown name or argument."""
        self.name = choice.name
        self._ask = FILTERS.bind(choice.name, choice.args)

    async def __call__(self, group: Group) -> bool:
        """Raises CallbackError if it raises, or returns something else than True or False."""
        answer = await call_user_function(f"rollout.accept {self.name!r}", self._ask, group)
        if not isinstance(answer, bool | np.bool_):
            raise CallbackError(f"rollout.accept {self.name!r} returned {answer!r:.80}, expected True or False")
        return bool(answer)


async def call_user_function(what: str, function: Callable[..., Any], *args: Any) -> Any:
    """Result of a user's function, awaited if necessary. Raises CallbackError with `what` it is, if it raises.

    A plain function is called on the event loop: one that takes long holds up episodes (the log names it).
    """
    try:
        answer = function(*args)
        return await answer if inspect.isawaitable(answer) else answer
    except (Exception, SystemExit) as problem:
        raise CallbackError(f"{what} {raised_text(problem, function)}") from problem


# A running group

PlayMembers = Callable[["GroupRun", Sequence[int]], Awaitable[list[Trajectory]]]
"""Plays the members of a group with these numbers; returns them by number."""
MEMBERS: Registry[Callable[[Any], PlayMembers]] = Registry("rollout", "MEMBERS", "agentrl.rollout.collector")
"""Makers of other ways to play the members of groups than one by one, from the section of [rollout] with their name."""
GREEDY = -1
"""The member number of a group's greedy episode."""


@dataclass(slots=True)
class GroupRun:
    """The members of one group while they are played."""

    collector: Collector
    index: int
    choice: TaskChoice

    async def members(self) -> list[Trajectory]:
        """The finished members, by number; with oversampling the others are cancelled once there are enough."""
        numbers, size = self.collector._numbers, self.collector.config.group_size
        if self.collector.play is not None:
            return await self.collector.play(self, numbers)
        done, sound = dict[int, Trajectory](), 0  # `sound`: those that ended without a fault of the infrastructure
        async with asyncio.TaskGroup() as tasks:
            running = {tasks.create_task(self.member(member)): member for member in numbers}
            while running and sound < size:
                ended, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                # `ended` is a set: of members that end at the same moment the lower number comes first, and no more are
                # taken than needed, so that equal runs take equal members.
                for task in sorted(ended, key=running.__getitem__):
                    if sound < size:
                        done[running.pop(task)] = ended_one = task.result()
                        sound += not ended_one.stop.infrastructure
            for task in running:
                task.cancel()
        self.collector.stats.cancelled += len(running)
        return [done[member] for member in sorted(done)]

    async def member(self, member: int) -> Trajectory:
        """A member, played from the beginning, and again after a fault of the infrastructure."""
        for attempt in range(self.collector.config.retries + 1):
            job = self.job(member, attempt)
            # For the life of the environment, not of its requests alone: the limit also bounds its processes and files.
            async with self.collector.slots:
                [trajectory] = await self.collector.player.play(job, self.collector.watch)
            if self.count(trajectory, attempt):
                break
        return trajectory

    def job(self, member: int, attempt: int) -> Job:
        """The job of an attempt at a member."""
        collector, choice = self.collector, self.choice
        spec = EpisodeSpec(
            choice.seed,
            "train",
            # Named, not drawn from a generator: the same whatever starts first, and after a resume. A retry gets another
            # seed, since the same one might end in the same fault.
            derive(collector.seed, "episode", self.index, member, attempt),
            member,
            key=f"g{self.index}.m{member}.a{attempt}",
            given=choice.given,
        )
        heat = 0.0 if member == GREEDY else temperature.scheduled_temperature(collector.config, collector.ledger.version)
        return Job(choice.env, spec, choice.params, heat, trained=member != GREEDY)

    def count(self, trajectory: Trajectory, attempt: int) -> bool:
        """Count an attempt at an episode, and with the last one its member. Returns True for the last."""
        collector, failed, runs = self.collector, trajectory.stop.infrastructure, self.index in self.collector._tasks
        again = failed and attempt < collector.config.retries
        collector.stats.attempt(self.index, trajectory, again, runs)
        if failed:
            of = self.index, trajectory.member, attempt
            log.warning("group %d member %d attempt %d: %s: %s", *of, trajectory.stop, trajectory.error)
        if runs and not again and trajectory.member != GREEDY:
            collector._over[self.index] = collector._over.get(self.index, 0) + 1
        return not again


# Run groups of episodes under the group ledger and return the groups of each update.
#
# One code path for synchronous (`max_staleness = 0`), one-step-off and asynchronous training: above 0, between two `collect`
# calls, running groups continue and `exchange` starts new ones; with 0 `collect` alone does.


class Collector:
    """Keeps groups of episodes running and returns B complete groups per update."""

    def __init__(
        self,
        player: Player,
        envs: Sequence[RunEnv],
        tasks: MixedTasks,
        config: RolloutConfig,
        *,
        seed: int,
        greedy: Collection[str] = (),
        accept: Acceptance | None = None,
        on_group: Callable[[Group], Awaitable[None]] | None = None,
        say: Callable[[str], None] = log.warning,
    ) -> None:
        """`envs`: those that `tasks` names. `greedy`: in these environments each group also gets a greedy episode of its task,
        as `Group.baseline`. `on_group` hears of each group with enough scored members, and `accept` asked about those that
        could be trained; what they raise, `collect` raises. `say`: gets warnings."""
        self.player, self.tasks, self.config = player, tasks, config
        self.envs = {env.name: env for env in envs}
        self.watch = Watch(min(LONGEST, config.stall_timeout / 8))
        self.seed = seed
        self.ledger = GroupLedger(config.groups, config.max_staleness, more(config.groups, config.oversample))
        self.stats = RolloutStats(config, self.watch, None if accept is None else accept.name, say)
        self._greedy = frozenset(greedy)
        self._accept, self._on_group = accept, on_group
        self.slots = asyncio.Semaphore(config.max_episodes)
        self._numbers = range(config.group_size + more(config.group_size, config.oversample_members))
        self.play = None if config.branch is None else MEMBERS.entry("branch").make(config.branch)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._crashed: list[int] = []
        self._changed = asyncio.Event()
        self._over: dict[int, int] = {}  # members of running groups that have ended
        self._names: dict[int, str] = {}  # the environment of each group that is running or complete
        self._update_metrics: dict[str, float] = {}

    # -- the loop's side ---------------------------------------------------------------------------

    async def collect(self) -> list[Group]:
        """The groups of the next update. Raises StalledError, naming the missing episodes."""
        while True:
            if self._crashed:
                self._raise_crashed()
            # In this order: what is too old frees slots, admission fills them, and the selection sees both.
            for index in self.ledger.too_old():
                self._give_up(index, GroupState.STALE, "its tokens are older than max_staleness allows")
            self._admit()
            groups = self.ledger.ready()
            if groups is not None:
                for index in self.ledger.surplus(groups):
                    self._give_up(index, GroupState.CANCELLED)
                # Groups that are dropped from now on count for the next update.
                self._update_metrics = self.stats.take(groups, self.tasks.several)
                return groups
            shares = self.tasks.shares() if self.tasks.several else {}
            self.stats.check(self.ledger.version, self._names, self.ledger.waiting_count, shares)
            self._changed.clear()
            # As long as tokens or tool calls come back it is not a stall, however long the episodes are.
            quiet = Quiet(self.watch, "moves", self.config.stall_timeout)
            changed = asyncio.ensure_future(self._changed.wait())
            try:
                if not await in_time(changed, quiet.remaining):
                    running = ", ".join(sorted(task.get_name() for task in self._tasks.values())[:8])
                    raise StalledError(
                        f"no token, tool call or episode came back for {quiet.seconds:.1f} s (rollout.stall_timeout); update "
                        f"{self.ledger.version} waits for {running or 'nothing'}: {self.watch.waiting(8) or 'no episode runs'}; "
                        f"groups by state: {self.ledger.counts()}"
                    )
            finally:
                changed.cancel()

    def trained(self, groups: list[Group]) -> None:
        """Record an update; the caller publishes the new weights right after."""
        self.ledger.train(groups)
        for group in groups:
            self._names.pop(group.index, None)
        self.tasks.update(self.ledger.version)

    async def exchange(self, send: Callable[[int], Awaitable[None]]) -> None:
        """Publish the weights of the ledger's version to the engine with `send(version)`; then admit new groups."""
        await send(self.ledger.version)
        # With max_staleness = 0 groups start in `collect`, so that nothing runs beside an evaluation or a checkpoint.
        if self.config.max_staleness > 0:
            self._admit()

    async def rest(self) -> None:
        """Wait until cancelled groups have ended; the engine then has no request of this collector, until it admits more
        groups. Raises StalledError if they do not end."""
        late = await self._torn_down(self._ending)
        if late:
            raise StalledError(
                f"{late} did not end within {self.config.stall_timeout:g} s of being cancelled "
                "(rollout.stall_timeout), so the engine cannot sleep"
            )

    async def close(self) -> None:
        """Cancel what runs and wait until every environment is torn down, for `stall_timeout` at most."""
        for task in self._tasks.values():
            task.cancel()
        late = await self._torn_down([*self._tasks.values(), *self._ending])
        if late:
            log.warning("%s did not end within %g s of being cancelled", late, self.config.stall_timeout)
        self._tasks.clear()

    async def _torn_down(self, tasks: Collection[asyncio.Task[None]]) -> str:
        """Wait for cancelled groups; returns the names of those that do not end, or ""."""
        if not tasks:
            return ""
        _, late = await asyncio.wait(tasks, timeout=self.config.stall_timeout)
        return ", ".join(sorted(task.get_name() for task in late))

    def metrics(self) -> dict[str, float]:
        """Numbers for the metrics row of an update: groups filtered for it, groups in it without variance, the episodes that
        ended since the last update (`episodes_played`, and `episodes_unscored` of them; also of dropped groups), the tokens that
        were sampled and thrown away since, those of the task samplers and of the mixture, the members cancelled so far, and
        `faults/CAUSE`: attempts at an episode since the last update that came to no score, also of members that were tried again
        and of groups that were dropped. Of several environments also how many groups of each were dropped for it
        (`env/NAME/groups_failed` and so on)."""
        return {"members_cancelled": float(self.stats.cancelled), **self._update_metrics, **self.tasks.metrics()}

    def ahead(self) -> str:
        """Progress of the next update's episodes, in words. May be called from any thread."""
        size = self.config.group_size
        wanted = self.config.groups * size
        ended = self.ledger.waiting_count * size + sum(min(count, size) for count in list(self._over.values()))
        return f"{min(ended, wanted)}/{wanted} episodes"

    @property
    def version(self) -> int:
        """The number of updates done, which is the version of the weights."""
        return self.ledger.version

    def to_json(self) -> dict[str, Any]:
        """The rollouts' part of a checkpoint: the group ledger and the state of the task sampler."""
        return {**self.ledger.to_json(), "sampler": self.tasks.to_json(), **self.stats.to_json()}

    def load_json(self, state: Mapping[str, Any], groups: Iterable[Group] = ()) -> None:
        """Inverse of `to_json`; `groups` as in `GroupLedger.load_json`.

        Raises ConfigError if the checkpoint was written with another sampler.
        """
        self.ledger.load_json(state, groups)
        if "sampler" in state:  # missing in older checkpoints, from when the only sampler had no state
            self.tasks.load_json(state["sampler"])
        complete = self.ledger.complete_groups()
        self._names = {group.index: group.env for group in complete}
        self.stats.load_json(state, self.ledger.version, complete)

    # -- groups ------------------------------------------------------------------------------------

    def _admit(self) -> None:
        while (index := self.ledger.admit()) is not None:
            choice = self.tasks.draw(index)
            self._names[index] = choice.env
            of = f" ({choice.env})" if self.tasks.several else ""
            task = asyncio.create_task(self._run_group(index, choice), name=f"group {index}{of}")
            task.add_done_callback(partial(self._group_ended, index))
            self._tasks[index] = task

    def _group_ended(self, index: int, task: asyncio.Task[None]) -> None:
        if task in self._ending:  # it was given up
            self._ending.discard(task)
            if not task.cancelled() and task.exception() is not None:
                log.error("%s failed while it was being cancelled", task.get_name(), exc_info=task.exception())
        elif self._tasks.get(index) is task:  # one that ends well has taken itself out
            self._crashed.append(index)
        self._changed.set()

    def _give_up(self, index: int, state: GroupState, reason: str = "") -> None:
        """Drop a group, running or complete; a running one is cancelled, which frees its requests at the engine."""
        task = self._tasks.pop(index, None)
        self._over.pop(index, None)
        if task is not None:
            task.cancel()
            # Not awaited here, since a slow teardown would hold up the others; `rest` and `close` wait for it.
            self._ending.add(task)
        self.tasks.forget(index)
        self._drop(index, state, reason)

    async def _run_group(self, index: int, choice: TaskChoice) -> None:
        """Play a group; with too few scored members it is dropped, else shown, and filtered, refused, or complete."""
        group = await self._group(index, choice)
        self._over.pop(index, None)
        survivors, greedy = group.scored(), group.baseline
        # Without the greedy episode's reward there is no baseline, so the whole group is lost.
        lost = greedy is not None and greedy.reward is None
        lost = lost or len(survivors) < min(self.config.min_survivors, self.config.group_size)
        self.stats.count_group(group, lost)
        if lost:
            self._tasks.pop(index, None)
            faults = sorted({end_of(t) for t in [*group.trajectories, greedy] if t is not None and t.reward is None})
            self.tasks.forget(index)
            self._drop(index, GroupState.FAILED, "; ".join(faults) or "unscored by the reward spec")
            return
        if self._on_group is not None:
            await self._on_group(group)
        filtered = self.stats.filters(group)
        # Asked before the group leaves the running ones, so that `collect` raises what the filter raises.
        refused = not filtered and self._accept is not None and not await self._accept(group)
        self._tasks.pop(index, None)
        # Without branches, which depend on their episode: draws of the policy that do not depend on each other.
        roots = [member for member in survivors if member.parent is None]
        self.tasks.finish(index, success_rate(roots), sum(t.sampled_tokens for t in group.trajectories))
        if filtered:
            self._drop(index, GroupState.FILTERED, f"every member scored {survivors[0].reward}")
        elif refused and self._accept is not None:
            self._drop(index, GroupState.REFUSED, f"refused by {self._accept.name!r}")
        else:
            self.ledger.complete(group)

    async def _group(self, index: int, choice: TaskChoice) -> Group:
        run = GroupRun(self, index, choice)
        async with asyncio.TaskGroup() as tasks:
            members = tasks.create_task(run.members())
            greedy = tasks.create_task(run.member(GREEDY)) if choice.env in self._greedy else None
        group = Group(index, choice.seed, members.result(), None if greedy is None else greedy.result(), choice.env)
        if (scorer := self.envs[choice.env].scorer).compares:
            await score_group(group.trajectories, scorer)
        return group

    def _drop(self, index: int, state: GroupState, reason: str) -> None:
        self.ledger.drop(index, state)
        self.stats.count_drop(index, self._names.pop(index), state, reason, self.ledger.version, self.ledger.waiting_count)

    def _raise_crashed(self) -> None:
        while self._crashed:
            task = self._tasks.pop(self._crashed.pop(0), None)
            if task is not None and not task.cancelled():
                try:
                    task.result()
                except BaseExceptionGroup as several:
                    first: BaseException = several
                    while isinstance(first, BaseExceptionGroup):
                        first = first.exceptions[0]
                    raise first from several

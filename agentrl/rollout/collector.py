"""Collector: run groups of episodes under the group ledger and return the groups of each update.

User filters of finished groups (`rollout.accept`), running groups, and the collector itself."""

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
from agentrl.rollout.deadlines import SilenceTimer, Watch
from agentrl.rollout.engine import derive
from agentrl.rollout.episode import EpisodeSpec, score_group
from agentrl.rollout.group_ledger import GroupLedger, GroupState, extra_count
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
    """User filter of finished groups. The driver calls it once per group that could be trained; it must be deterministic, since
    a resumed run replays groups and filters them again."""

    def __init__(self, choice: Choice) -> None:
        """Raises ConfigError for an unknown name or argument."""
        self.name = choice.name
        self._ask = FILTERS.bind(choice.name, choice.args)

    async def __call__(self, group: Group) -> bool:
        """Raises CallbackError if the filter raises or returns anything but True or False."""
        answer = await call_user_function(f"rollout.accept {self.name!r}", self._ask, group)
        if not isinstance(answer, bool | np.bool_):
            raise CallbackError(f"rollout.accept {self.name!r} returned {answer!r:.80}, expected True or False")
        return bool(answer)


async def call_user_function(what: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a user's function, await the result if needed, and return it. Raises CallbackError, opened by `what`, if it raises.

    A plain function runs on the event loop: a slow one blocks all episodes (the log names it).
    """
    try:
        answer = function(*args)
        return await answer if inspect.isawaitable(answer) else answer
    except (Exception, SystemExit) as problem:
        raise CallbackError(f"{what} {raised_text(problem, function)}") from problem


# A running group

PlayMembers = Callable[["GroupRun", Sequence[int]], Awaitable[list[Trajectory]]]
"""Plays the group members with the given numbers and returns their trajectories in that order."""
MEMBERS: Registry[Callable[[Any], PlayMembers]] = Registry("rollout", "MEMBERS", "agentrl.rollout.collector")
"""Alternatives to playing each member from the start, each built from the section of [rollout] with its name."""
GREEDY = -1
"""Member number of a group's greedy episode."""


@dataclass(slots=True)
class GroupRun:
    """The members of one group while they are played."""

    collector: Collector
    index: int
    choice: TaskChoice

    async def members(self) -> list[Trajectory]:
        """Play the members and return them by number; with oversampling, cancel the rest once enough have finished."""
        numbers, size = self.collector._numbers, self.collector.config.group_size
        if self.collector.play is not None:
            return await self.collector.play(self, numbers)
        done, sound = dict[int, Trajectory](), 0  # `sound`: number of members without an infrastructure fault
        async with asyncio.TaskGroup() as tasks:
            running = {tasks.create_task(self.member(member)): member for member in numbers}
            while running and sound < size:
                ended, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                # `ended` is a set: take members that end together in order of their numbers, and only as many as needed,
                # so that repeated runs select the same members.
                for task in sorted(ended, key=running.__getitem__):
                    if sound < size:
                        done[running.pop(task)] = ended_one = task.result()
                        sound += not ended_one.stop.infrastructure
            for task in running:
                task.cancel()
        self.collector.stats.cancelled += len(running)
        return [done[member] for member in sorted(done)]

    async def member(self, member: int) -> Trajectory:
        """Play a member from the start, and retry it after an infrastructure fault."""
        for attempt in range(self.collector.config.retries + 1):
            job = self.job(member, attempt)
            # Held for the environment's whole life, not just its requests: the limit also bounds its processes and files.
            async with self.collector.slots:
                [trajectory] = await self.collector.player.play(job, self.collector.watch)
            if self.count(trajectory, attempt):
                break
        return trajectory

    def job(self, member: int, attempt: int) -> Job:
        """Build the job for one attempt at a member."""
        collector, choice = self.collector, self.choice
        spec = EpisodeSpec(
            choice.seed,
            "train",
            # Derived from names, not drawn from a generator: independent of the start order and of a resume. A retry gets
            # another seed, since the same one might end in the same fault.
            derive(collector.seed, "episode", self.index, member, attempt),
            member,
            key=f"g{self.index}.m{member}.a{attempt}",
            given=choice.given,
        )
        heat = 0.0 if member == GREEDY else temperature.scheduled_temperature(collector.config, collector.ledger.version)
        return Job(choice.env, spec, choice.params, heat, trained=member != GREEDY)

    def count(self, trajectory: Trajectory, attempt: int) -> bool:
        """Count an attempt at a member. Returns True if it is the last attempt."""
        collector, failed, runs = self.collector, trajectory.stop.infrastructure, self.index in self.collector._tasks
        again = failed and attempt < collector.config.retries
        collector.stats.attempt(self.index, trajectory, again, runs)
        if failed:
            of = self.index, trajectory.member, attempt
            log.warning("group %d member %d attempt %d: %s: %s", *of, trajectory.stop, trajectory.error)
        if runs and not again and trajectory.member != GREEDY:
            collector._over[self.index] = collector._over.get(self.index, 0) + 1
        return not again


# The collector has one code path for synchronous (`max_staleness = 0`), one-step-off and asynchronous training: above 0,
# running groups continue between two `collect` calls and `exchange` starts new ones; with 0, only `collect` starts groups.


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
        """`envs`: every environment that `tasks` names. `greedy`: environments in which each group also gets a greedy episode of
        its task, as `Group.baseline`. `on_group` is called with each group that has enough scored members, `accept` with each
        that could be trained; `collect` raises their errors. `say` receives warnings."""
        self.player, self.tasks, self.config = player, tasks, config
        self.envs = {env.name: env for env in envs}
        self.watch = Watch(min(LONGEST, config.stall_timeout / 8))
        self.seed = seed
        self.ledger = GroupLedger(config.groups, config.max_staleness, extra_count(config.groups, config.oversample))
        self.stats = RolloutStats(config, self.watch, None if accept is None else accept.name, say)
        self._greedy = frozenset(greedy)
        self._accept, self._on_group = accept, on_group
        self.slots = asyncio.Semaphore(config.max_episodes)
        self._numbers = range(config.group_size + extra_count(config.group_size, config.oversample_members))
        self.play = None if config.branch is None else MEMBERS.entry("branch").make(config.branch)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._crashed: list[int] = []
        self._changed = asyncio.Event()
        self._over: dict[int, int] = {}  # running group -> number of its members that have ended
        self._names: dict[int, str] = {}  # running or complete group -> its environment
        self._update_metrics: dict[str, float] = {}

    # -- interface of the training loop ------------------------------------------------------------

    async def collect(self) -> list[Group]:
        """Return the groups of the next update. Raises StalledError, which names the missing episodes."""
        while True:
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
            # In this order: dropping stale groups frees slots, admission fills them, and the selection sees both.
            for index in self.ledger.too_old():
                self._give_up(index, GroupState.STALE, "its tokens are older than max_staleness allows")
            self._admit()
            groups = self.ledger.ready()
            if groups is not None:
                for index in self.ledger.surplus(groups):
                    self._give_up(index, GroupState.CANCELLED)
                # Groups dropped after this point count towards the next update.
                self._update_metrics = self.stats.take(groups, self.tasks.several)
                return groups
            shares = self.tasks.shares() if self.tasks.several else {}
            self.stats.check(self.ledger.version, self._names, self.ledger.waiting_count, shares)
            self._changed.clear()
            # While tokens or tool calls come back it is not a stall, however long the episodes are.
            quiet = SilenceTimer(self.watch, "moves", self.config.stall_timeout)
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
        """Record an update; the caller publishes the new weights right afterwards."""
        self.ledger.train(groups)
        for group in groups:
            self._names.pop(group.index, None)
        self.tasks.update(self.ledger.version)

    async def exchange(self, send: Callable[[int], Awaitable[None]]) -> None:
        """Publish the current weights to the engine with `send(version)`, then admit new groups."""
        await send(self.ledger.version)
        # With max_staleness = 0 groups start in `collect`, so that none runs during an evaluation or a checkpoint.
        if self.config.max_staleness > 0:
            self._admit()

    async def rest(self) -> None:
        """Wait until cancelled groups have ended; the engine then has no request of this collector until it admits new groups.
        Raises StalledError if they do not end."""
        late = await self._torn_down(self._ending)
        if late:
            raise StalledError(
                f"{late} did not end within {self.config.stall_timeout:g} s of being cancelled "
                "(rollout.stall_timeout), so the engine cannot sleep"
            )

    async def close(self) -> None:
        """Cancel all groups and wait until their environments are torn down, for at most `stall_timeout` seconds."""
        for task in self._tasks.values():
            task.cancel()
        late = await self._torn_down([*self._tasks.values(), *self._ending])
        if late:
            log.warning("%s did not end within %g s of being cancelled", late, self.config.stall_timeout)
        self._tasks.clear()

    async def _torn_down(self, tasks: Collection[asyncio.Task[None]]) -> str:
        """Wait for cancelled groups. Returns the names of those that do not end in time, or ""."""
        if not tasks:
            return ""
        _, late = await asyncio.wait(tasks, timeout=self.config.stall_timeout)
        return ", ".join(sorted(task.get_name() for task in late))

    def metrics(self) -> dict[str, float]:
        """Metrics of an update, counted since the previous one unless stated otherwise.

        Filtered groups; groups of this update without variance; ended episodes, dropped groups included (`episodes_played`,
        `episodes_unscored`); sampled tokens that were discarded; metrics of the task samplers and of the mixture;
        `members_cancelled` (since the start); `faults/CAUSE`: attempts without a score, retried members and dropped groups
        included. With several environments also dropped groups by environment (`env/NAME/groups_failed` and so on)."""
        return {"members_cancelled": float(self.stats.cancelled), **self._update_metrics, **self.tasks.metrics()}

    def ahead(self) -> str:
        """Progress of the next update as text, such as `12/64 episodes`. May be called from any thread."""
        size = self.config.group_size
        wanted = self.config.groups * size
        ended = self.ledger.waiting_count * size + sum(min(count, size) for count in list(self._over.values()))
        return f"{min(ended, wanted)}/{wanted} episodes"

    @property
    def version(self) -> int:
        """Number of finished updates, which is the version of the weights."""
        return self.ledger.version

    def to_json(self) -> dict[str, Any]:
        """State for a checkpoint: group ledger, task samplers and counters."""
        return {**self.ledger.to_json(), "sampler": self.tasks.to_json(), **self.stats.to_json()}

    def load_json(self, state: Mapping[str, Any], groups: Iterable[Group] = ()) -> None:
        """Restore the state of `to_json`; `groups` as in `GroupLedger.load_json`.

        Raises ConfigError if the checkpoint was written with another sampler.
        """
        self.ledger.load_json(state, groups)
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
        elif self._tasks.get(index) is task:  # a group that succeeds has removed itself from `_tasks`
            self._crashed.append(index)
        self._changed.set()

    def _give_up(self, index: int, state: GroupState, reason: str = "") -> None:
        """Drop a running or complete group; a running one is cancelled, which frees its requests at the engine."""
        task = self._tasks.pop(index, None)
        self._over.pop(index, None)
        if task is not None:
            task.cancel()
            # Not awaited here, since a slow teardown would block the other groups; `rest` and `close` wait for it.
            self._ending.add(task)
        self.tasks.forget(index)
        self._drop(index, state, reason)

    async def _run_group(self, index: int, choice: TaskChoice) -> None:
        """Play a group, then fail it for too few scored members, filter it, refuse it, or complete it."""
        group = await self._group(index, choice)
        self._over.pop(index, None)
        survivors, greedy = group.scored(), group.baseline
        # A group whose greedy episode has no reward lacks its baseline and is lost.
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
        # Called while the group still counts as running, so that `collect` raises the filter's error.
        refused = not filtered and self._accept is not None and not await self._accept(group)
        self._tasks.pop(index, None)
        # Without branches: they depend on their parent episode, and the success rate needs independent samples.
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

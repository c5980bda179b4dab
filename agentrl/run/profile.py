"""`[profile]`: timelines of single steps, on the driver's clock: its spans, those of rollout workers, and the ranks' calls."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentrl.cluster.group import WorkerGroup
from agentrl.cluster.watched import RankCall, begin_watching, clock, drop_watching, end_watching, load_profiler
from agentrl.config import TrainConfig
from agentrl.errors import ConfigError
from agentrl.executors import in_thread
from agentrl.run.folder import RunFolder
from agentrl.run.timeline import Timeline
from agentrl.spans import TraceSpan, listen, machine, now, unfinished
from agentrl.train.learner import Learner

log = logging.getLogger(__name__)

FOLDER, PARTS = "profile", ".parts"
PINGS = 3


def check_profile(config: TrainConfig) -> None:
    """Raise ConfigError if a timeline is asked for of a step that the run has not.

    Reads: profile, steps.
    """
    late = [] if config.profile is None else [step for step in config.profile.steps if step > config.steps]
    if late:
        raise ConfigError(f"profile.steps = {config.profile and config.profile.steps}: the run has steps = {config.steps}")


def profile_of(
    config: TrainConfig, folder: RunFolder, learner: Learner, engine: str, warn: Callable[[str], None]
) -> Profile | None:
    """None without `[profile]`."""

    def groups() -> list[WorkerGroup[Any]]:
        found = (learner.actors, learner.critics, learner.references, learner.reward_models, learner.teachers)
        return [group for group in found if group is not None]

    if config.profile is None:
        return None
    if config.profile.torch and config.cluster.backend == "inline":
        load_profiler()  # now, and not on the event loop while episodes wait for it
    return Profile(config, folder.path / FOLDER, groups, engine, warn)


@dataclass(slots=True)
class Ranks:
    """What one process of the training roles noted. `ahead`: add it to its times to have the driver's."""

    calls: list[RankCall] = field(default_factory=list)
    ahead: int = 0


class Profile:
    """Listens before and during the steps of `profile.steps`, and writes a file for each."""

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        groups: Callable[[], Sequence[WorkerGroup[Any]]],
        engine: str,
        warn: Callable[[str], None],
    ) -> None:
        assert config.profile is not None
        self._config, self._cfg, self._folder = config, config.profile, folder
        self._groups, self._engine, self._warn = groups, engine, warn
        self._found: list[TraceSpan] = []
        self._leave: Callable[[], None] | None = None
        self._step, self._begun = 0, 0

    @property
    def listens(self) -> bool:
        """Whether spans are to be made."""
        return self._leave is not None

    async def begin(self, step: int) -> None:
        """Update number `step` begins."""
        # Episodes of a step may have begun as many steps before as their weights may be old.
        before = self._config.rollout.max_staleness
        wanted = any(one - before <= step <= one for one in self._cfg.steps)
        if wanted and self._leave is None:
            self._leave = listen(self._keep, all=True)
        elif not wanted:
            self.close()
        self._step = step if step in self._cfg.steps else 0
        if self._step:
            (self._folder / PARTS).mkdir(parents=True, exist_ok=True)
            ranks = sum(group.world_size for group in self._groups())
            args = (str(self._folder / PARTS), self._cfg.torch, self._cfg.max_events // ranks)
            for group in self._groups():
                if not await group.in_processes(begin_watching, *args):
                    begin_watching(*args)  # its roles are in this process
            self._begun = now()

    async def end(self) -> None:
        """Write the timeline, if the step that is over is to have one."""
        if not self._step:
            return
        ended = now()
        ranks = [Ranks(await in_thread("files", end_watching))]
        for group in self._groups():
            ranks += await _noted(group)
        spans = [one for one in self._found if one.end > self._begun]
        spans += [replace(one, end=ended, values={**one.values, "unfinished": True}) for one in unfinished()]
        self._found = []
        path = self._folder / f"step_{self._step:06d}.json.gz"
        try:
            await in_thread("files", self._write, path, spans, ranks, ended)
        except (OSError, ValueError) as problem:  # a run does not end because nobody can look at it
            log.exception("the timeline of step %d", self._step)
            self._warn(f"profile: the timeline of step {self._step} is not written: {problem}")
        self._step = 0

    def close(self) -> None:
        """Listen no more; a step that was left in the middle has no timeline."""
        if self._step:
            drop_watching()
            self._step = 0
        if self._leave is not None:
            self._leave()
            self._leave = None
        self._found = []

    def _keep(self, found: TraceSpan) -> None:
        if len(self._found) < 4 * self._cfg.max_events:
            self._found.append(found)

    def _write(self, path: Path, spans: list[TraceSpan], ranks: list[Ranks], ended: int) -> None:
        timeline = Timeline(self._begun, self._engine, self._cfg.max_events)
        for one in ranks:
            for call in one.calls:
                torch = None if call.file is None else json.loads(Path(call.file).read_text())
                timeline.rank(call, one.ahead, torch)
        for found in spans:
            timeline.span(found)
        timeline.write(path, {"run": self._config.name, "step": self._step, "seconds": (ended - self._begun) / 1e9})
        shutil.rmtree(self._folder / PARTS, ignore_errors=True)


async def _noted(group: WorkerGroup[Any]) -> list[Ranks]:
    """What each process of a group noted, by rank; none if its roles are in this one."""
    found = [Ranks(calls) for calls in await group.in_processes(end_watching)]
    best: list[tuple[int, int]] = [(1 << 62, 0)] * len(found)
    for _ in range(PINGS if found else 0):
        asked = now()
        times = await group.in_processes(clock)
        took = now() - asked
        for rank, (place, time) in enumerate(times):
            # The middle of question and answer, as NTP does; of this machine, the clock is the same.
            ahead = 0 if place == machine() else asked + took // 2 - time
            best[rank] = min(best[rank], (took, ahead))
    for one, (_, ahead) in zip(found, best, strict=True):
        one.ahead = ahead
    return found

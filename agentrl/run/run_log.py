"""Metrics of a run: each row goes to metrics.jsonl, the trackers and the display."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from agentrl.config.schema import KeepConfig, PrometheusConfig
from agentrl.rollout.evaluate import Evaluation, fault_of
from agentrl.run.display import Display, percent
from agentrl.run.folder import RunFolder
from agentrl.run.health import Health
from agentrl.run.rows import known
from agentrl.run.scrape import MetricsEndpoint
from agentrl.run.session import Session
from agentrl.run.token_file import token_lines
from agentrl.run.trackers import Status, Tracker
from agentrl.run.trackers.outlet import FLUSH_S, Outlet
from agentrl.run.trackers.sample import sampled_rows
from agentrl.run.writes import Writes
from agentrl.trajectory import Trajectory

if TYPE_CHECKING:
    from agentrl.train.visits import TrainedTokens


class RunLog:
    """Writes rows `{"step": updates done, "phase": ..., ...}`; values under `time/` are wall-clock seconds."""

    def __init__(
        self,
        folder: RunFolder,
        display: Display,
        trackers: Sequence[tuple[str, Callable[[], Tracker]]],
        resumed: bool = False,
        health: Health | None = None,
        prometheus: PrometheusConfig | None = None,
        keep: KeepConfig = KeepConfig(),
    ) -> None:
        """`trackers`: by name, each yet to be made. `resumed`: the folder and the trackers have rows of this run already.
        `health`: looks at every update and evaluation. `prometheus`: where it is served. `keep`: how many
        episodes stay."""
        self._keep = keep
        self.folder, self.display, self.health = folder, display, health
        self.writes = Writes()
        self.trackers: list[Outlet] = []
        self.endpoint = None if prometheus is None else MetricsEndpoint(prometheus, self.trackers)
        if self.endpoint is not None:
            display.say(f"metrics for Prometheus      {self.endpoint.url}")
        self.trackers += [Outlet(name, make, display.warn) for name, make in trackers]  # last: these are threads
        self._begun = resumed
        self._ending: tuple[Status, Mapping[str, Any]] = ("failed", {})

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.endpoint is not None:
            self.endpoint.close()
        for tracker in self.trackers:
            tracker.finish(*self._ending)
        until = time.monotonic() + FLUSH_S
        for tracker in self.trackers:
            tracker.join(max(until - time.monotonic(), 0.0))

    def row(self, phase: str, step: int, values: Mapping[str, Any]) -> None:
        """Record one row; a number that is not finite becomes null."""
        values = known(values)
        self.folder.append_metrics({"step": step, "phase": phase, **values})
        if self.health is not None and phase == "train":
            self.health.row({"step": step, **values})
        self._begun = True
        numbers = {key: value for key, value in values.items() if value is None or isinstance(value, (int, float))}
        for tracker in self.trackers:
            tracker.row(phase, step, numbers)
        if self.endpoint is not None:
            self.endpoint.row(phase, step, numbers)

    def live(self, session: Session | None) -> None:
        """The run's parts, for who asks between two rows; None: they are closed."""
        if self.endpoint is not None:
            self.endpoint.watch(session)

    def rewound(self, step: int) -> None:
        """The run goes on from `step` (-1: from its start, `folder.NOTHING`: from that of its warm
        start), and its folder was rewound to it."""
        for tracker in self.trackers if self._begun else []:
            tracker.rewind(step)

    def ended(self, status: Status, summary: Mapping[str, Any]) -> None:
        """How the run ended, for the trackers, which are closed with this log."""
        self._ending = (status, summary)
        for tracker in self.trackers if self.folder.curve.is_file() else []:
            tracker.picture("curve", self.folder.curve)

    async def trajectories(self, name: str, trajectories: Sequence[Trajectory], tokens: TrainedTokens | None = None) -> None:
        """Start writing `trajectories/<name>.jsonl` once the previous file is written; wait on `writes` for its end.
        `tokens`: what training made of theirs, for `tokens/<name>.jsonl`."""
        await self.writes.begin(self._write, name, trajectories, tokens)

    def _write(self, name: str, trajectories: Sequence[Trajectory], tokens: TrainedTokens | None) -> None:
        if tokens is not None:
            self.folder.write_tokens(name, token_lines(trajectories, tokens))
        self.folder.write_trajectories(name, trajectories)
        self.folder.rotate(self._keep, int(name.rpartition("_")[2]))

    async def evaluation(self, phase: str, step: int, result: Evaluation, values: Mapping[str, Any]) -> None:
        """Record a held-out evaluation: its row, its trajectories, and a line for the user."""
        self.row(phase, step, values)
        for tracker in self.trackers:
            tracker.episodes(phase, step, sampled_rows(result.trajectories))
        await self.trajectories(f"{phase}_{step:06d}", result.trajectories)
        self.display.evaluated(step, result.success)
        self.display.say(f"[{phase}] held-out success {percent(result.success)} over {result.scored} tasks{_unscored(result)}")
        if self.health is not None:
            self.health.evaluation(phase, result)
        for name, one in result.by_env.items():
            self.display.say(f"  {name:<24} {percent(one.success)} over {one.scored} tasks{_unscored(one)}")


def _unscored(result: Evaluation) -> str:
    """How many episodes came to no score, and why the first did not."""
    lost = next((t for t in result.trajectories if t.reward is None and t.success is None), None)
    if lost is None:
        return ""
    return f" ({result.unscored} unscored, the first: {fault_of(lost)})"

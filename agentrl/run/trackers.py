"""Trackers: destinations of a run's metrics besides metrics.jsonl.

The contract and its registry, the thread of a tracker, samples of episodes, then `tensorboard`."""

from __future__ import annotations

import json
import logging
import shlex
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal

from agentrl.config import Choice, TrainConfig
from agentrl.data.trajectory import Message, Trajectory
from agentrl.run.folder import RunFolder, is_voided
from agentrl.utils.errors import user_code
from agentrl.utils.redaction import resolve_references
from agentrl.utils.registry import Registry

if TYPE_CHECKING:
    from agentrl.run.assembly import RunStart

# The contract

Status = Literal["done", "failed", "interrupted"]
Cell = str | float | None


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The run that a tracker records. `config`: resolved; `resumed`: the run continues, and `folder` has its earlier files."""

    folder: RunFolder
    config: TrainConfig
    resumed: bool = False

    @property
    def name(self) -> str:
        return self.config.name


class Tracker(ABC):
    """Records one run; arguments after `run` come from the config. All methods run in one thread, in order.

    An error of a method is reported once, and the run continues.
    """

    @abstractmethod
    def __init__(self, run: TrackedRun) -> None:
        """Start a record, or continue the one that this run began earlier."""

    @classmethod
    def check(cls, args: Mapping[str, Any]) -> None:
        """Raise a UserError if the tracker cannot work, for example without a package or a login. Called before a run in the
        main thread; `args`: all arguments."""
        return None

    @abstractmethod
    def row(self, phase: str, step: int, values: Mapping[str, float | None]) -> None:
        """Record the numbers of a row after `step` updates; `phase`: "train", "eval", "before", ... None: unknown value."""

    def rewind(self, step: int) -> None:
        """Handle that the run continues from `step` (-1: from the start of training, -2: of the warm start). Rows of later
        steps and of the phase "after" come again (`is_voided`): remove them, or ignore the second ones (`GivenRows`)."""
        return None

    def episodes(self, phase: str, step: int, rows: Sequence[Mapping[str, Cell]]) -> None:
        """Record a sample of an evaluation's episodes: rows with the same keys."""
        return None

    def picture(self, name: str, path: Path) -> None:
        """Record a picture file of the run; it replaces an earlier one of the same name."""
        return None

    @abstractmethod
    def close(self, status: Status, summary: Mapping[str, Any]) -> None:
        """Finish after the last row; `status`: how the run ended, `summary`: content of summary.json."""

    def look(self) -> str | None:
        """Return the command or address that shows the record, if there is one."""
        return None


TRACKERS: Registry[Callable[..., Tracker]] = Registry("trackers", "TRACKERS", "agentrl.run.trackers", given=1)

LIVE_METRICS: Registry[Any] = Registry("prometheus", "LIVE_METRICS", "agentrl.run.trackers")
"""Servers of a run's metrics, made with their section and the run's outlets. They take rows as a tracker, and read the Session
given to `watch`; `check(section)` raises before a run."""

TRACING: Registry[Any] = Registry("traces", "TRACING", "agentrl.run.trackers")
SPANS = "steps"
"""Name in `TRACING` of the recorder of step spans, for [traces] and [profile]. It is made with the run, its engine's name and
training roles, and called at the begin and end of each update; `check(steps, traces, profile)` raises before a run."""


def check_trackers(start: RunStart) -> None:
    """Raise a UserError for an unknown tracker or argument, and if a tracker, the endpoint or traces cannot work."""
    config = start.config
    if config.traces is not None or config.profile is not None:
        TRACING.entry(SPANS).make.check(config.steps, config.traces, config.profile)
    if config.prometheus is not None:
        LIVE_METRICS.entry("prometheus").make.check(config.prometheus)
    for choice in config.trackers:
        args = TRACKERS.arguments(choice.name, resolve_references(choice.args, f"trackers.{choice.name}.args"))
        make = TRACKERS.entry(choice.name).make
        if isinstance(make, type) and issubclass(make, Tracker):
            with user_code(f"trackers {choice.name!r}: check", make):
                make.check(args)


def makers(choices: Sequence[Choice], run: TrackedRun) -> list[tuple[str, Callable[[], Tracker]]]:
    args = [resolve_references(choice.args, f"trackers.{choice.name}.args") for choice in choices]
    return [(choice.name, partial(TRACKERS.bind(choice.name, given), run)) for choice, given in zip(choices, args, strict=True)]


# The thread of a tracker

log = logging.getLogger(__name__)

QUEUE = 1024
"""Maximum number of queued calls; further calls are dropped and counted."""
LARGE = 32
"""Maximum queued calls at which episodes and pictures, which are large, are still accepted."""
FLUSH_S = 60.0
"""Seconds for a tracker to write its queued calls at the end of the run."""


class Outlet:
    """Thread and queue of a tracker. `say`: shows a message to the user, also from the tracker's thread.

    `lost`: number of rows, pictures and tables that were dropped. `look`: as `Tracker.look`, once the tracker is open.
    """

    def __init__(self, name: str, make: Callable[[], Tracker], say: Callable[[str], None], *, most: int = QUEUE) -> None:
        self.name, self._make, self._say = name, make, say
        self.lost = 0
        self.look: str | None = None
        self._reported: set[str] = set()
        self._most = most
        self._queue: SimpleQueue[tuple[str, tuple[Any, ...]] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._closing: tuple[Status, Mapping[str, Any]] | None = None
        self._thread = threading.Thread(target=self._serve, name=f"agentrl-tracker {name}", daemon=True)
        self._thread.start()

    # -- called by the run -------------------------------------------------------------------------

    def call(self, what: Literal["row", "rewind", "episodes", "picture"], *args: Any) -> None:
        """Queue a call of a tracker's method in its thread. Episodes and pictures, which are large, are dropped first."""
        waiting = self._queue.qsize()
        if waiting >= self._most or (what in ("episodes", "picture") and waiting > LARGE):
            self._lose("queue", f"it is too slow: {waiting} calls are waiting, and further ones are lost")
        else:
            self._queue.put((what, args))

    def finish(self, status: Status, summary: Mapping[str, Any]) -> None:
        """Let the tracker write its queued calls and close; `join` waits for it."""
        self._closing = (status, summary)
        self._queue.put(None)

    def join(self, limit: float = FLUSH_S) -> None:
        """Wait until the tracker is closed; give up after `limit` seconds."""
        self._thread.join(limit)
        if self._thread.is_alive():
            waiting = max(self._queue.qsize() - 1, 0)  # without the end marker
            with self._lock:
                self.lost += waiting
            self._say(f"tracker {self.name}: it did not end within {limit:g} s and was abandoned, with {waiting} calls unwritten")
        elif self.lost:
            self._say(f"tracker {self.name}: {self.lost} rows, tables or pictures were not written; metrics.jsonl has all rows")

    # -- in the tracker's thread -------------------------------------------------------------------

    def _serve(self) -> None:
        tracker: Tracker | None = None
        try:
            tracker = self._make()
            self.look = tracker.look()
        except BaseException as fault:  # of any kind, because a library may call sys.exit
            self._lose("open", "it cannot be opened, and the run continues without it: ", fault, count=0)
        while (call := self._queue.get()) is not None:
            if tracker is None:
                self._lose("open", "")
                continue
            try:
                getattr(tracker, call[0])(*call[1])
            except BaseException as fault:
                self._lose("write", "it failed, and the run continues: ", fault)
        if tracker is not None and self._closing is not None:
            try:
                tracker.close(*self._closing)
                self.look = tracker.look()
            except BaseException as fault:
                self._lose("close", "closing it failed: ", fault, count=0)

    def _lose(self, kind: str, text: str, fault: BaseException | None = None, *, count: int = 1) -> None:
        with self._lock:
            self.lost += count
            first = kind not in self._reported
            self._reported.add(kind)
        if fault is not None:
            text += f"{type(fault).__name__}: {' '.join(str(fault).split())[:300]}"
        if first:
            log.error("tracker %s: %s", self.name, text, exc_info=fault)
            self._say(f"tracker {self.name}: {text}")


# Samples of episodes

EPISODES = 16
"""Maximum number of episodes of an evaluation that trackers get."""
CHARACTERS = 4000
"""Maximum characters of a transcript in a table; a longer one loses its middle."""


def sampled_rows(trajectories: Sequence[Trajectory], most: int = EPISODES) -> list[dict[str, Cell]]:
    """Return rows of at most `most` episodes, evenly spaced, so that evaluations show the same tasks. Unknown values are None."""

    def line(message: Message) -> str:
        calls = [f"{call.name}({json.dumps(call.arguments)})" for call in message.tool_calls]
        return f"{message.role}: {' '.join([message.content, *calls]).strip()}"

    rows: list[dict[str, Cell]] = []
    step, half = max(len(trajectories) / most, 1.0), CHARACTERS // 2
    for one in (trajectories[int(place * step)] for place in range(min(most, len(trajectories)))):
        text = "\n".join(map(line, one.messages))
        rows.append(
            {
                "env": one.env,
                "task": one.task.id,
                "reward": one.reward,
                "success": None if one.success is None else float(one.success),
                "stop": one.stop.value,
                "turns": float(len(one.turns)),
                "tokens": float(one.sampled_tokens),
                "transcript": text if len(text) <= CHARACTERS else f"{text[:half]} [...] {text[-half:]}",
            }
        )
    return rows


# tensorboard


@TRACKERS.register("tensorboard")
class TensorBoard(Tracker):
    """Writes one scalar per number, named PHASE/KEY; sampled episodes as text, pictures as images."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._folder, self._writer = run.folder.tensorboard, SummaryWriter
        self._last = 0
        self._events = SummaryWriter(str(self._folder))

    def row(self, phase: str, step: int, values: Mapping[str, float | None]) -> None:
        for key, value in values.items():
            if value is not None:
                self._events.add_scalar(f"{phase}/{key}", value, step)
        self._last = step
        self._events.flush()

    def rewind(self, step: int) -> None:
        # Not with purge_step of SummaryWriter, which also hides later steps of other phases: a warm start may have hundreds of
        # steps, and is not repeated.
        from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._events.close()
        for file in sorted(self._folder.glob("events.out.tfevents.*")):
            # Rewrite the file without values that come again; leave a file without such values as it is.
            kept: list[bytes] = []
            lost = False
            for record in RawEventFileLoader(str(file)).Load():
                event = Event.FromString(record)
                void = any(is_voided(v.tag.partition("/")[0], event.step, step) for v in event.summary.value)
                lost |= void
                if not void:
                    kept.append(record)
            if lost:
                staging = file.with_name(f".{file.name}")
                with staging.open("wb") as out:
                    writer = RecordWriter(out)
                    for record in kept:
                        writer.write(record)
                staging.replace(file)
        self._events = self._writer(str(self._folder))

    def episodes(self, phase: str, step: int, rows: Sequence[Mapping[str, Cell]]) -> None:
        if not rows:
            return
        head = list(rows[0])
        lines = [head, ["---"] * len(head)]
        for row in rows:
            texts = ["" if v is None else f"{v:g}" if isinstance(v, float) else str(v) for v in (row[key] for key in head)]
            # A bar or a newline would end the cell of a Markdown table.
            lines.append([" ".join(text.replace("|", "\\|").split()) for text in texts])
        self._events.add_text(f"{phase}/episodes", "\n".join(f"| {' | '.join(line)} |" for line in lines), step)
        self._events.flush()

    def picture(self, name: str, path: Path) -> None:
        from matplotlib.image import imread

        self._events.add_image(name, imread(path)[:, :, :3], self._last, dataformats="HWC")
        self._events.flush()

    def close(self, status: Status, summary: Mapping[str, Any]) -> None:
        self._events.close()

    def look(self) -> str:
        return f"tensorboard --logdir {shlex.quote(str(self._folder))}"

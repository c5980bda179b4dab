"""Trackers: where the metrics of a run go in addition to metrics.jsonl.

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
from agentrl.run.folder import RunFolder
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
    """The run that a tracker is opened for. `config` is the resolved one; `resumed`: the run goes on from a checkpoint, and what
    it wrote before is in `folder`."""

    folder: RunFolder
    config: TrainConfig
    resumed: bool = False

    @property
    def name(self) -> str:
        """The run's name in the config."""
        return self.config.name


class Tracker(ABC):
    """Made for one run; its arguments after `run` are the config's. All methods are called in one thread, in order.

    The user hears once of a method's error, and the run goes on.
    """

    @abstractmethod
    def __init__(self, run: TrackedRun) -> None:
        """Start, or continue what this run has begun there before."""

    @classmethod
    def check(cls, args: Mapping[str, Any]) -> None:
        """Raise a UserError if this cannot work: a package or a login is missing. Called before a run, in its main thread; `args`
        are all arguments."""
        return None

    @abstractmethod
    def row(self, phase: str, step: int, values: Mapping[str, float | None]) -> None:
        """The numbers of one row, after `step` updates; `phase` is "train", "eval", "before", ... None: not known."""

    def rewind(self, step: int) -> None:
        """The run goes on from `step` (-1: from its start; -2: its warm start too comes
        again). Rows of later steps, and those of the phase "after", come again
        (`voided`): take them back, or take none of them twice (`given.GivenRows`)."""
        return None

    def episodes(self, phase: str, step: int, rows: Sequence[Mapping[str, Cell]]) -> None:
        """Some episodes of an evaluation: rows with the same keys."""
        return None

    def picture(self, name: str, path: Path) -> None:
        """A picture that the run has written; one of the same name takes the place of the one before."""
        return None

    @abstractmethod
    def close(self, status: Status, summary: Mapping[str, Any]) -> None:
        """Called after the last row: how the run ended, and summary.json."""

    def look(self) -> str | None:
        """The command or address that shows them, if there is one."""
        return None


TRACKERS: Registry[Callable[..., Tracker]] = Registry("trackers", "TRACKERS", "agentrl.run.trackers", given=1)


LIVE_METRICS: Registry[Any] = Registry("prometheus", "LIVE_METRICS", "agentrl.run.trackers")
"""What serves a run's metrics: made with its section and the run's outlets, it takes rows as a tracker does, and reads the
Session that `watch` gives it; `check(section)` refuses before a run."""


TRACING: Registry[Any] = Registry("traces", "TRACING", "agentrl.run.trackers")
SPANS = "steps"
"""Name in `TRACING` of what follows the spans of steps, for `[traces]` and `[profile]`: made with the run, its engine's name and
its training roles, it is called at each update's begin and end; `check(steps, traces, profile)` refuses before a run."""


def is_voided(phase: str, step: int, to: int) -> bool:
    """Return True if a row comes again if the run goes on from step `to`; none of a warm start does."""
    return to < -1 or (phase not in ("sft", "gate") and (step > to or phase == "after"))


def check_trackers(start: RunStart) -> None:
    """Raise a UserError for an unknown tracker or argument, and if one of them, an endpoint or traces cannot work."""
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
    """The trackers of a run by name, in order, each yet to be made."""

    args = [resolve_references(choice.args, f"trackers.{choice.name}.args") for choice in choices]
    return [(choice.name, partial(TRACKERS.bind(choice.name, own), run)) for choice, own in zip(choices, args, strict=True)]


# The thread of a tracker

log = logging.getLogger(__name__)

QUEUE = 1024
"""Calls that wait at most; more are lost, and counted."""
LARGE = 32
"""Calls that may wait for one more with episodes or a picture, which are large, to be taken."""
FLUSH_S = 60.0
"""Seconds that a tracker has, at the end of the run, to write what it was given."""


class Outlet:
    """Gives a tracker the run's rows. `say`: shows a message to the user; may be called in the tracker's thread.

    `lost`: rows, pictures and tables that did not arrive. `look`: how to see the others, once it is open.
    """

    def __init__(self, name: str, make: Callable[[], Tracker], say: Callable[[str], None], *, most: int = QUEUE) -> None:
        self.name, self._make, self._say = name, make, say
        self.lost = 0
        self.look: str | None = None
        self._told: set[str] = set()
        self._most = most
        self._queue: SimpleQueue[tuple[str, tuple[Any, ...]] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._closing: tuple[Status, Mapping[str, Any]] | None = None
        self._thread = threading.Thread(target=self._serve, name=f"agentrl-tracker {name}", daemon=True)
        self._thread.start()

    # -- the run's side ----------------------------------------------------------------------------

    def tell(self, what: Literal["row", "rewind", "episodes", "picture"], *args: Any) -> None:
        """Call this method of the tracker, in its thread. Episodes and pictures are large, and give way first."""
        waiting = self._queue.qsize()
        if waiting >= self._most or (what in ("episodes", "picture") and waiting > LARGE):
            self._lose("queue", f"it is too slow: {waiting} calls wait, and more are lost")
        else:
            self._queue.put((what, args))

    def finish(self, status: Status, summary: Mapping[str, Any]) -> None:
        """Nothing more comes: it writes what waits, and is closed. See `join`."""
        self._closing = (status, summary)
        self._queue.put(None)

    def join(self, limit: float = FLUSH_S) -> None:
        """Wait until it is closed; after `limit` seconds the rest is given up."""
        self._thread.join(limit)
        if self._thread.is_alive():
            waiting = max(self._queue.qsize() - 1, 0)  # without its end
            with self._lock:
                self.lost += waiting
            self._say(f"tracker {self.name}: it did not end within {limit:g} s and is given up, with {waiting} calls unwritten")
        elif self.lost:
            self._say(f"tracker {self.name}: {self.lost} rows, tables or pictures were not written; metrics.jsonl has all rows")

    # -- its thread --------------------------------------------------------------------------------

    def _serve(self) -> None:
        tracker: Tracker | None = None
        try:
            tracker = self._make()
            self.look = tracker.look()
        except BaseException as fault:  # of any kind: a library may exit
            self._lose("open", "it cannot be opened, and the run goes on without it: ", fault, count=0)
        while (call := self._queue.get()) is not None:
            if tracker is None:
                self._lose("open", "")
                continue
            try:
                getattr(tracker, call[0])(*call[1])
            except BaseException as fault:
                self._lose("write", "it failed, and the run goes on: ", fault)
        if tracker is not None and self._closing is not None:
            try:
                tracker.close(*self._closing)
                self.look = tracker.look()
            except BaseException as fault:
                self._lose("close", "its end failed: ", fault, count=0)

    def _lose(self, kind: str, text: str, fault: BaseException | None = None, *, count: int = 1) -> None:
        with self._lock:
            self.lost += count
            first = kind not in self._told
            self._told.add(kind)
        if fault is not None:
            text += f"{type(fault).__name__}: {' '.join(str(fault).split())[:300]}"
        if first:
            log.error("tracker %s: %s", self.name, text, exc_info=fault)
            self._say(f"tracker {self.name}: {text}")


# Samples of episodes

EPISODES = 16
"""Episodes of an evaluation that trackers get."""
CHARACTERS = 4000
"""The longest transcript in a table; of a longer one the middle is left out."""


def sampled_rows(trajectories: Sequence[Trajectory], most: int = EPISODES) -> list[dict[str, Cell]]:
    """At most `most` episodes, evenly spaced, so that evaluations of the same tasks show the same ones. Unknown values are
    None."""

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
    """One scalar per number, called PHASE/KEY; sampled episodes as text, pictures as images."""

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
        # Not by SummaryWriter's purge_step, which also hides what other phases have at later steps: a warm start may take
        # hundreds of them, and is not done again.
        from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._events.close()
        for file in sorted(self._folder.glob("events.out.tfevents.*")):
            # It is written again without the values that come again; with none, it stays as it is.
            kept: list[bytes] = []
            lost = False
            for record in RawEventFileLoader(str(file)).Load():
                event = Event.FromString(record)
                void = any(is_voided(v.tag.partition("/")[0], event.step, step) for v in event.summary.value)
                lost |= void
                if not void:
                    kept.append(record)
            if lost:
                aside = file.with_name(f".{file.name}")
                with aside.open("wb") as out:
                    writer = RecordWriter(out)
                    for record in kept:
                        writer.write(record)
                aside.replace(file)
        self._events = self._writer(str(self._folder))

    def episodes(self, phase: str, step: int, rows: Sequence[Mapping[str, Cell]]) -> None:
        if not rows:
            return
        head = list(rows[0])
        lines = [head, ["---"] * len(head)]
        for row in rows:
            texts = ["" if v is None else f"{v:g}" if isinstance(v, float) else str(v) for v in (row[key] for key in head)]
            # A cell of a Markdown table ends at a bar or a newline.
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

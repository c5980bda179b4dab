"""TensorBoard's event files, in the run folder."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.run.trackers import TRACKERS, Cell, Status, TrackedRun, Tracker, voided


@TRACKERS.register("tensorboard")
class TensorBoard(Tracker):
    """One scalar per number, called PHASE/KEY; sampled episodes as text, pictures as images."""

    def __init__(self, run: TrackedRun) -> None:
        self._folder = run.folder.tensorboard
        self._last = 0
        self._open()

    def _open(self) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

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
        self._events.close()
        for file in sorted(self._folder.glob("events.out.tfevents.*")):
            _take_back(file, step)
        self._open()

    def episodes(self, phase: str, step: int, rows: Sequence[Mapping[str, Cell]]) -> None:
        if not rows:
            return
        head = list(rows[0])
        lines = [head, ["---"] * len(head), *([_cell(row[key]) for key in head] for row in rows)]
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


def _cell(value: Cell) -> str:
    """As a cell of a Markdown table, which ends at a bar or a newline."""
    text = "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return " ".join(text.replace("|", "\\|").split())


def _take_back(file: Path, step: int) -> None:
    """Write the file again without the values that come again after a rewind to `step`; with none, it stays as it is."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    kept: list[bytes] = []
    lost = False
    for record in RawEventFileLoader(str(file)).Load():
        event = Event.FromString(record)
        void = [v.tag for v in event.summary.value if voided(v.tag.partition("/")[0], event.step, step)]
        lost |= bool(void)
        if not void:
            kept.append(record)
    if lost:
        aside = file.with_name(f".{file.name}")
        with aside.open("wb") as out:
            writer = RecordWriter(out)
            for record in kept:
                writer.write(record)
        aside.replace(file)

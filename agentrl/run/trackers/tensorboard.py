"""TensorBoard's event files, in the run folder."""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.run.folder import RunFolder
from agentrl.run.trackers import TRACKERS, Tracker


@TRACKERS.register("tensorboard")
class TensorBoard(Tracker):
    """One scalar per number, called PHASE/KEY."""

    def __init__(self, folder: RunFolder) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._folder = folder.tensorboard
        self._events = SummaryWriter(str(self._folder))

    def row(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._events.add_scalar(f"{phase}/{key}", value, step)
        self._events.flush()

    def close(self) -> None:
        self._events.close()

    def look(self) -> str:
        return f"tensorboard --logdir {self._folder}"
